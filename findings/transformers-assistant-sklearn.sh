#!/usr/bin/env bash
# Whether scikit-learn is installed decides how much an assistant model of transformers drafts.
#
# Seen with: transformers 5.19.0, scikit-learn 1.9.1, torch 2.13.0, on a CPU.
# One would guess: the models, the parameters and the seed determine speculative decoding. An assistant
# stops drafting at a token that is less likely than a threshold, 0.4 at first. transformers fits the
# threshold to the tokens accepted so far if it can import scikit-learn, which it does not require but
# lm-eval installs. Without it the threshold stays. So an unrelated package changes the speed and the
# answer of a seed.
# Output:
#   with scikit-learn: 86 draft tokens, answer 11 9 18 27 0 25 31 13 1 26 21 15 3 9 7 22 ...
#   again:             86 draft tokens, answer 11 9 18 27 0 25 31 13 1 26 21 15 3 9 7 22 ...
#   without it:        24 draft tokens, answer 11 9 18 27 0 25 31 13 1 26 21 15 3 9 20 9 ...
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" transformers==5.19.0 torch==2.13.0 numpy==2.3.5 scikit-learn==1.9.1

cat > generate.py << 'EOF'
import json

import torch
import transformers

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    tie_word_embeddings=True,
    initializer_range=0.2,
    eos_token_id=None,
    pad_token_id=0,
)
target, assistant = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
# The assistant is the target with some noise.
with torch.no_grad():
    for weights, original in zip(assistant.parameters(), target.parameters()):
        weights.copy_(original + 0.05 * torch.randn_like(weights))
drafts = []
assistant.register_forward_hook(lambda *_: drafts.append(1))
torch.manual_seed(0)
answer = target.generate(
    torch.tensor([[1, 2, 3]]), assistant_model=assistant, do_sample=True, max_new_tokens=40
)
print(json.dumps([len(drafts), answer[0, 3:].tolist()]))
EOF
with=$(python -W ignore generate.py)
again=$(python -W ignore generate.py)
rm -r venv/lib/python3*/site-packages/{sklearn,scikit_learn-*}
without=$(python -W ignore generate.py)
python - "$with" "$again" "$without" << 'EOF'
import json
import sys

found = [json.loads(argument) for argument in sys.argv[1:]]
for name, (drafts, answer) in zip(("with scikit-learn", "again", "without it"), found):
    print(f"{name + ':':18} {drafts} draft tokens, answer {' '.join(map(str, answer[:16]))} ...")
assert found[0] == found[1], "the same seed gives another answer"
assert all(a != b for a, b in zip(found[0], found[2])), "changed: scikit-learn has no effect"
EOF
