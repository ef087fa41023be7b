#!/usr/bin/env bash
# In one Triton kernel -7 // 4 is -2 if the number is a tl.constexpr, and -1 if it is an argument.
#
# Seen with: triton 3.9.0 in its interpreter, torch 2.13.0.
# One would guess: the operators of a kernel have one meaning, Python's or C's. Constants are divided
# while Python compiles the kernel and round down; values round towards zero, as in C, and % follows. So
# to make an argument a constant, which is meant to change speed alone, changes negative results.
# Output:
#   argument:     -7 // 4 = -1, -7 % 4 = -3
#   tl.constexpr: -7 // 4 = -2, -7 % 4 = 1
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" triton==3.9.0 torch==2.13.0 numpy==2.3.5

cat > kernels.py << 'EOF'
import torch
import triton
import triton.language as tl


@triton.jit
def divide(found_ptr, value, CONSTANT: tl.constexpr):
    tl.store(found_ptr, value // 4)
    tl.store(found_ptr + 1, value % 4)
    tl.store(found_ptr + 2, CONSTANT // 4)
    tl.store(found_ptr + 3, CONSTANT % 4)


found = torch.zeros(4, dtype=torch.int32)
divide[(1,)](found, -7, -7)
found = found.tolist()
for name, (quotient, rest) in {"argument:": found[:2], "tl.constexpr:": found[2:]}.items():
    print(f"{name:13} -7 // 4 = {quotient}, -7 % 4 = {rest}")
assert found == [-1, -3, -2, 1], "changed: how integers are divided"
EOF
TRITON_INTERPRET=1 python kernels.py
