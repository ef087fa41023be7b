#!/usr/bin/env bash
# Scores the answers of a running server with lm-eval, strictly and with MARS:
#
#   examples/evaluate/evaluate.sh http://localhost:8000                          # a task of 28 texts
#   examples/evaluate/evaluate.sh http://localhost:8000 gsm8k_cot --limit 200    # one of lm-eval's
#
# It needs `pip install '.[evaluate]'`, on any machine. It measures the server's setting, or the bound
# MAX_LOSS, and prints which (lossy.py); with theta there is no bound. TEMPERATURE is 0 by default, or 1
# with theta; SEEDS is "1 2 3" above 0. MAX_TOKENS replaces the task's limit, or lm-eval's of 256. The
# server's API key is taken from OPENAI_API_KEY. Use generation tasks, since multiple choice verifies no
# draft. Results are in OUTPUT, build/evaluate by default; those of an earlier run are never deleted.
# pairs.py prints the table and the smallest loss that it can show.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export PATH="$here/../../.venv/bin:$PATH"
url=${1:?the address of a server, such as http://localhost:8000} task=${2:-$here/first_sentence.yaml}
output=${OUTPUT:-build/evaluate}
for given in "${@:3}"; do
    # lm-eval would use the last one, and both rules would be the same.
    if [[ ${given//-/_} == __@(gen_kwargs|model|model_args|output_path)* ]]; then
        echo "error: $given is this script's own; set TEMPERATURE, SEEDS, MAX_TOKENS or OUTPUT instead." >&2
        exit 2
    fi
done
if [[ -e $output/strict || -e $output/mars ]]; then
    echo "error: OUTPUT=$output holds results of an earlier run; move them, or set OUTPUT to another folder." >&2
    exit 2
fi
rule_of_server=$(python "$here/../lossy.py" "$url")
temperature=${TEMPERATURE:-$([[ $rule_of_server == mars_theta* ]] && echo 1 || echo 0)}
seeds=${SEEDS:-$([[ $temperature =~ ^[0.]+$ ]] && echo 1 || echo 1 2 3)}
echo "Temperature $temperature, seeds: $seeds" >&2
# The key comes by stdin, since other users of the machine could read an argument.
model=$(curl --fail --silent --show-error --header @- "$url/v1/models" <<<"Authorization: Bearer ${OPENAI_API_KEY:-}" |
    python -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')

for seed in $seeds; do
    for rule in strict mars; do
        # The rules differ only in this key.
        body=$([ $rule = strict ] && echo '{"vllm_xargs": {"mars_max_loss": 0}}' || echo "${rule_of_server#* }")
        lm_eval run --model local-chat-completions --apply_chat_template --tasks "$task" --log_samples \
            --model_args "model=$model,base_url=$url/v1/chat/completions,num_concurrent=4,tokenized_requests=False,seed=$seed" \
            --gen_kwargs "{\"temperature\": $temperature, ${MAX_TOKENS:+\"max_gen_toks\": $MAX_TOKENS, }${body#\{}" \
            --output_path "$output/$rule/$seed" "${@:3}"
    done
done
python "$here/pairs.py" "$output/strict" "$output/mars"
