#!/usr/bin/env bash
# The stream() helper of openai-python drops fields that vLLM adds, and sums numbers of a delta.
#
# Seen with: openai 3.57.0, given answers with the fields and in the chunks of vLLM 0.32.
# One would guess: the completion that stream() builds from the chunks has the fields that create() returns.
# It has only those of the first chunk, which carries the prompt's tokens. token_ids, stop_reason and metrics
# come later and are dropped without a word. In a delta numbers are added, so true and true become 2.
# Output:
#   create(): {'prompt_token_ids': [3, 4], 'token_ids': [5, 6], 'stop_reason': 6, 'metrics': {'time': 1}}
#   stream(): {'prompt_token_ids': [3, 4]}
#   twice {'safe': True, 'score': 0.5} in a delta: {'safe': 2, 'score': 1.0}
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" openai==3.57.0

python - << 'EOF'
import json

import httpx2
import openai

extra = {"safe": True, "score": 0.5}
end = {"finish_reason": "stop", "stop_reason": 6}
whole = {"index": 0, "message": {"role": "assistant", "content": "ab"}, "token_ids": [5, 6], **end}
prompt, metrics = {"prompt_token_ids": [3, 4]}, {"metrics": {"time": 1}}
chunks = [
    prompt | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "a", **extra}, "token_ids": [5]}]},
    {"choices": [{"index": 0, "delta": {"content": "b", **extra}, "token_ids": [6], **end}]},
    metrics | {"choices": []},
]


def answer(request):
    head = {"id": "1", "created": 1, "model": "m", "object": "chat.completion"}
    if not json.loads(request.content).get("stream"):
        return httpx2.Response(200, json=head | prompt | metrics | {"choices": [whole]})
    head["object"] += ".chunk"
    events = [json.dumps(head | chunk) for chunk in chunks] + ["[DONE]"]
    return httpx2.Response(200, text="".join(f"data: {event}\n\n" for event in events))


def fields(completion):
    found = completion.to_dict() | completion.choices[0].to_dict()
    return {name: found[name] for name in [*prompt, "token_ids", "stop_reason", *metrics] if name in found}


client = openai.OpenAI(api_key="-", http_client=httpx2.Client(transport=httpx2.MockTransport(answer)))
request = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
created = client.chat.completions.create(**request)
with client.chat.completions.stream(**request) as stream:
    streamed = stream.get_final_completion()
merged = {name: streamed.choices[0].message.to_dict()[name] for name in extra}
print(f"create(): {fields(created)}")
print(f"stream(): {fields(streamed)}")
print(f"twice {extra} in a delta: {merged}")
assert len(fields(created)) == 4 and fields(streamed) == prompt, "changed: the fields of stream()"
assert merged["safe"] == 2, "changed: numbers of a delta are not added"
EOF
