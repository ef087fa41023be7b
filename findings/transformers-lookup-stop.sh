#!/usr/bin/env bash
# The speculative decoding of transformers generates past a stop string.
#
# Seen with: transformers 5.19.0, torch 2.13.0, on a CPU.
# One would guess: greedy speculative decoding gives the same text as decoding without it. generate looks
# for stop strings at the end of the text after each step, and a step of prompt lookup adds several tokens.
# An end-of-sequence token among them ends the text, but a stop string among them is not seen. With an
# assistant model the same happens to a StoppingCriteria that looks at the last token.
# Output:
#   no drafts                   defg
#   stop string, prompt lookup  defghijklmnopabcdefghijk
#   criterion, assistant model  defghijklmnopabcdefghijk
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" transformers==5.19.0 torch==2.13.0 numpy==2.3.5

python -W ignore - << 'EOF'
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

transformers.logging.set_verbosity_error()
letters, size = "abcdefghijklmnop", 16
tokens = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="a"))
tokens.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
tokens.decoder = decoders.Fuse()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens)
config = transformers.LlamaConfig(
    vocab_size=size,
    hidden_size=size,
    num_hidden_layers=1,
    num_attention_heads=1,
    eos_token_id=None,
)
# After each letter comes the next one, and "a" after the last.
model = transformers.LlamaForCausalLM(config).eval()
for weight in model.model.layers.parameters():
    weight.data.zero_()
model.model.embed_tokens.weight.data = torch.eye(size)
model.lm_head.weight.data = torch.eye(size).roll(1, 0)
prompt = tokenizer(letters + "abc", return_tensors="pt").input_ids


def answer(**options):
    output = model.generate(prompt, do_sample=False, max_new_tokens=24, **options)
    return tokenizer.decode(output[0, prompt.shape[1] :])


stop = {"stop_strings": "g", "tokenizer": tokenizer}
ends = {"stopping_criteria": [lambda ids, scores, **_: ids[:, -1] == letters.index("g")]}
found = {
    "no drafts": answer(**stop),
    "stop string, prompt lookup": answer(**stop, prompt_lookup_num_tokens=10),
    "criterion, assistant model": answer(**ends, assistant_model=model),
}
for name, text in found.items():
    print(f"{name:27} {text}")
assert [len(text) for text in found.values()] == [4, 24, 24], "changed: the text stops at g"
EOF
