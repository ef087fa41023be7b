#!/usr/bin/env bash
# torch.topk(1) is not argmax if two values tie.
#
# Seen with: torch 2.13.0, on a CPU.
# One would guess: the largest value is one token, however it is asked for, and the two largest include
# it. argmax returns the first of equal values, topk(1) another one, and topk(2) two others. Logits in
# bfloat16 tie often, so a drafter that takes its first choice by topk and a verifier that takes it by
# argmax disagree although they hold the same logits.
# Output:
#   logits [0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
#   argmax 2, topk(1) [4], topk(2) [4, 7]
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" torch==2.13.0 numpy==2.3.5

python - << 'EOF'
import torch

logits = torch.tensor([0, 0, 1, 0, 1, 0, 0, 1], dtype=torch.bfloat16)
first = logits.argmax().item()
one, two = (logits.topk(k).indices.tolist() for k in (1, 2))
print(f"logits {logits.tolist()}")
print(f"argmax {first}, topk(1) {one}, topk(2) {two}")
assert one != [first] and first not in two, "changed: topk takes what argmax takes"
EOF
