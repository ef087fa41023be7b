#!/usr/bin/env bash
# Triton's interpreter truncates float32 to bfloat16; a compiled kernel rounds to the nearest.
#
# Seen with: triton 3.9.0, in its interpreter and compiled for an H100 without one; torch 2.13.0.
# One would guess: the interpreter, made to debug a kernel without a GPU, rounds as a GPU does. It drops
# the low 16 bits, so no bfloat16 that a kernel writes is above the float32 in magnitude. In a conversion
# to float8e5 it rounds, but loses the carry into an odd exponent, so 1.9 becomes 1. float16 is right.
# Output:
#   bfloat16 of 1.999: interpreter 1.9921875, torch 2.0, on a GPU cvt.rn.bf16.f32
#   float8e5 of 1.9: interpreter 1.0, torch 2.0, on a GPU cvt.rn.satfinite.e5m2x2.f32
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" triton==3.9.0 torch==2.13.0 numpy==2.3.5

cat > kernels.py << 'EOF'
import triton
import triton.language as tl


@triton.jit
def convert(x_ptr, y_ptr, TYPE: tl.constexpr):
    tl.store(y_ptr, tl.load(x_ptr).to(TYPE).to(tl.float32))
EOF
cat > interpreted.py << 'EOF'
import sys

import torch
import triton.language as tl

from kernels import convert

for value, name in zip(sys.argv[1::2], sys.argv[2::2]):
    rounded = torch.empty(1)
    convert[(1,)](torch.tensor([float(value)]), rounded, getattr(tl, name))
    print(rounded.item())
EOF
cat > compiled.py << 'EOF'
import re
import sys

import torch
import triton
import triton.language as tl
from kernels import convert
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

found = []
signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "TYPE": "constexpr"}
for value, name, dtype, interpreted in [
    (1.999, "bfloat16", torch.bfloat16, float(sys.argv[1])),
    (1.9, "float8e5", torch.float8_e5m2, float(sys.argv[2])),
]:
    source = ASTSource(convert, signature=signature, constexprs={"TYPE": getattr(tl, name)})
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    # The first conversion; "rn" is to the nearest.
    instruction = re.search(r"cvt\.\S+", code).group()
    rounded = torch.tensor(value).to(dtype).item()
    found.append((interpreted, rounded, instruction.split(".")[1]))
    print(f"{name} of {value}: interpreter {interpreted}, torch {rounded}, on a GPU {instruction}")
assert found == [(1.9921875, 2.0, "rn"), (1.0, 2.0, "rn")], "changed: how floats are rounded"
EOF
interpreted=$(TRITON_INTERPRET=1 python interpreted.py 1.999 bfloat16 1.9 float8e5)
# shellcheck disable=SC2086
python -W ignore compiled.py $interpreted
