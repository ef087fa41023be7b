#!/usr/bin/env bash
# Does an answer stay right? lm-eval asks a running server each question strictly and with MARS:
#
#   examples/evaluate/evaluate.sh http://localhost:8000                          # a task of 28 texts
#   examples/evaluate/evaluate.sh http://localhost:8000 gsm8k_cot --limit 200    # one of lm-eval's
#
# It needs `pip install '.[evaluate]'`, beside the server or elsewhere. The server may be strict unless a
# request asks (docs/serve.md), or have the bound of MAX_LOSS, 0.02. Take tasks that generate: multiple
# choice verifies no draft. pairs.py beside this file prints the table, and how large a loss it can show.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export PATH="$here/../../.venv/bin:$PATH"
url=${1:?the address of a server, such as http://localhost:8000} task=${2:-$here/first_sentence.yaml}
output=${OUTPUT:-build/evaluate}
model=$(curl --fail --silent --show-error "$url/v1/models" |
    python -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')

rm -rf "$output/strict" "$output/mars"
for rule in strict mars; do
    loss=$([ $rule = strict ] && echo 0 || echo "${MAX_LOSS:-0.02}")
    # One key makes the difference.
    lm_eval run --model local-chat-completions --apply_chat_template --tasks "$task" --log_samples \
        --model_args "model=$model,base_url=$url/v1/chat/completions,num_concurrent=4,tokenized_requests=False" \
        --gen_kwargs "{\"temperature\": 0, \"vllm_xargs\": {\"mars_max_loss\": $loss}}" \
        --output_path "$output/$rule" "${@:3}"
done
python "$here/pairs.py" "$output/strict" "$output/mars"
