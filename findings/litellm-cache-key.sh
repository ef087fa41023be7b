#!/usr/bin/env bash
# LiteLLM's cache does not tell two requests apart that differ in a parameter of vLLM alone.
#
# Seen with: litellm 1.110.2.
# One would guess: an answer's key contains each parameter that LiteLLM sends to the server. It contains
# OpenAI's and some others, such as top_k, but not min_p, repetition_penalty, structured_outputs,
# vllm_xargs or extra_body. So a request for JSON gets the text that the same prompt got without a schema.
# litellm.enable_caching_on_provider_specific_optional_params adds them to the key.
# Output:
#   {'top_k': 1}: a new answer
#   {'min_p': 0.5}: the answer without it
#   {'repetition_penalty': 1.5}: the answer without it
#   {'structured_outputs': {'json': {'type': 'object'}}}: the answer without it
#   {'vllm_xargs': {'level': 1}}: the answer without it
#   {'extra_body': {'min_tokens': 9}}: the answer without it
set -euo pipefail
# litellm imports the other three to answer from its cache, but does not install them.
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" litellm==1.110.2 fastapi==0.165.0 orjson==3.13.0 soundfile==0.14.0

LITELLM_LOCAL_MODEL_COST_MAP=True python -W ignore - << 'EOF'
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import litellm

bodies = []


class Server(BaseHTTPRequestHandler):
    """Numbers its answers."""

    def do_POST(self):
        bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        message = {"role": "assistant", "content": f"answer {len(bodies)}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer | {"choices": [choice]}).encode())

    def log_message(self, *args):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
Thread(target=server.serve_forever, daemon=True).start()


def ask(prompt, parameters):
    completion = litellm.completion(
        "hosted_vllm/m",
        messages=[{"role": "user", "content": prompt}],
        api_base=f"http://127.0.0.1:{server.server_port}/v1",
        caching=True,
        **parameters,
    )
    return completion.choices[0].message.content


def same_answer(parameters):
    prompt = str(parameters)
    return ask(prompt, {}) == ask(prompt, parameters)


litellm.cache = litellm.Cache()
found = {}
for parameters in (
    {"top_k": 1},
    {"min_p": 0.5},
    {"repetition_penalty": 1.5},
    {"structured_outputs": {"json": {"type": "object"}}},
    {"vllm_xargs": {"level": 1}},
    {"extra_body": {"min_tokens": 9}},
):
    (name,) = parameters
    found[name] = same_answer(parameters)
    print(f"{parameters}: {'the answer without it' if found[name] else 'a new answer'}")
    ask(f"{parameters} first", parameters)
    sent = parameters.get("extra_body", parameters)
    assert sent.items() <= bodies[-1].items(), f"changed: {name} does not reach the server"
assert not found.pop("top_k") and all(found.values()), "changed: what the key contains"
litellm.enable_caching_on_provider_specific_optional_params = True
assert not same_answer({"vllm_xargs": {"level": 2}}), "changed: the option has no effect"
EOF
