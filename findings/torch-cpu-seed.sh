#!/usr/bin/env bash
# On a CPU a torch.Generator takes the low 32 bits of its seed and drops the rest.
#
# Seen with: torch 2.13.0.
# One would guess: manual_seed takes 64 bits, and initial_seed() returns all of them, so seeds that
# differ give other numbers, as they do on a GPU. They do not: seeds that differ by a multiple of 2**32
# give the same numbers. Two requests to vLLM on a CPU with such seeds get the same random numbers.
# Output:
#   seed          1: initial_seed          1, numbers [0.7576, 0.2793, 0.4031]
#   seed 4294967297: initial_seed 4294967297, numbers [0.7576, 0.2793, 0.4031]
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" torch==2.13.0 numpy==2.3.5

python - << 'EOF'
import torch

found = []
for seed in (1, 2**32 + 1):
    generator = torch.Generator().manual_seed(seed)
    found.append(torch.rand(3, generator=generator))
    numbers = [round(x, 4) for x in found[-1].tolist()]
    print(f"seed {seed:10}: initial_seed {generator.initial_seed():10}, numbers {numbers}")
assert torch.equal(*found), "changed: the high bits of a seed count"
EOF
