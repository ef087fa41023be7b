#!/usr/bin/env bash
# With top_p the prompt lookup of transformers never drafts an arbitrary part of the vocabulary.
#
# Seen with: transformers 5.19.0, torch 2.13.0, on a CPU.
# One would guess: top_p matters at verification, where the model's probabilities are known, and a draft of
# which the model is sure is accepted. But prompt lookup drafts no token that the request's logits
# processors remove from equal logits, which is meant for forbidden tokens. Of equal logits top_p keeps
# about that share, and the order of a sort decides which. With top_p=0.8 a fifth of the vocabulary is
# missing from all drafts, and each draft ends before the first such token. Answers stay right, but the
# speed is lost, even if top_p comes from the model's generation_config.json.
# Output, of a model that is sure to repeat its prompt of 100 different tokens:
#   top_p 1: 10 steps
#   top_p 0.9: 19 steps
#   top_p 0.8: 29 steps
#   top_p 0.5: 55 steps
#   top_p 0.2: 82 steps
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" transformers==5.19.0 torch==2.13.0 numpy==2.3.5

python -W ignore - << 'EOF'
import torch
import transformers

transformers.logging.set_verbosity_error()
size = 100
config = transformers.LlamaConfig(
    vocab_size=size,
    hidden_size=size,
    num_hidden_layers=1,
    num_attention_heads=1,
    eos_token_id=None,
)
# The logit of the token that follows in the prompt is 50, and all others are 0.
model = transformers.LlamaForCausalLM(config).eval()
for weight in model.model.layers.parameters():
    weight.data.zero_()
model.model.embed_tokens.weight.data = torch.eye(size)
model.lm_head.weight.data = 5 * torch.eye(size).roll(1, 0)
steps = []
model.register_forward_hook(lambda *_: steps.append(1))
prompt = torch.arange(size)[None]
lookup = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 1}
found = {}
for top_p in (1, 0.9, 0.8, 0.5, 0.2):
    steps.clear()
    sampling = {"do_sample": True, "top_k": 0, "top_p": top_p}
    output = model.generate(prompt, max_new_tokens=size, **sampling, **lookup)
    assert torch.equal(output, prompt.repeat(1, 2)), "the answer is not the prompt"
    found[top_p] = len(steps)
    print(f"top_p {top_p}: {len(steps)} steps")
assert found[0.2] > found[0.5] > 2 * found[1], "changed: top_p leaves the drafts as they are"
EOF
