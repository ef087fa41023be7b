#!/usr/bin/env bash
# Two teams share a server that is lossy on request (docs/serving.md). After `make demo`:
#
#   CHAT_KEY=... BILLING_KEY=... examples/gateway/run.sh
#
# Then http://localhost:4000/v1 takes both keys: chat's answers may lose 0.02 nats per token, and those
# of billing are strict, whatever options a request has. Only the gateway knows the server's key.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH="$PWD/.venv/bin:$PATH"
port=${PORT:-4000} server_port=${SERVER_PORT:-8000}
export CHAT_KEY BILLING_KEY VLLM_URL=http://127.0.0.1:$server_port/v1
key() { python -c 'import secrets; print("sk-" + secrets.token_hex())'; }
VLLM_API_KEY=$(key) LITELLM_MASTER_KEY=$(key)
export VLLM_API_KEY LITELLM_MASTER_KEY
# GiB, on a CPU.
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-2}
trap 'kill $(jobs -p); wait' EXIT

# On a GPU: `vllm serve MODEL` with its head, without the options of the last line.
vllm-mars serve "$(vllm-mars model)" --served-model-name model \
    --host 127.0.0.1 --port "$server_port" --max-model-len 2048 \
    --speculative-config '{
        "method": "eagle3", "model": "vllm_mars/models/heads/smollm2-135m-eagle3",
        "num_speculative_tokens": 4,
        "rejection_sample_method": "mars", "mars_max_loss": 0, "mars_limit": 0.02}' \
    --enforce-eager --dtype float32 &
# Without a network LiteLLM would try three times to fetch prices.
export LITELLM_LOCAL_MODEL_COST_MAP=True
# In another environment, because LiteLLM's proxy needs older packages than vLLM.
uvx --python "$(command -v python)" --from 'litellm[proxy]==1.108.7' \
    litellm --config examples/gateway/litellm.yaml --host 127.0.0.1 --port "$port" &
wait -n
