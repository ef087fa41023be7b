#!/usr/bin/env bash
# tl.sum of a float16 or bfloat16 block adds in 16 bits; tl.max of the same block works in float32.
#
# Seen with: triton 3.9.0, compiled for an H100 without one.
# One would guess: a sum accumulates in float32, as torch.sum does and as the float32 that tl.max
# computes in suggests, and small integers are even widened to int32. It adds in the block's own type,
# so 128 times 1024 in float16 overflows to infinity, and a bfloat16 sum loses its small terms. Cast the
# block before the sum.
# Output:
#   sum of fp16: arith.addf ... : f16
#   max of fp16: arith.maxnumf ... : f32
#   sum of bf16: arith.addf ... : bf16
#   max of bf16: arith.maxnumf ... : f32
#   sum of i8: arith.addi ... : i32
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" triton==3.9.0

cat > kernels.py << 'EOF'
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def total(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.store(y_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK))))


@triton.jit
def largest(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.store(y_ptr, tl.max(tl.load(x_ptr + tl.arange(0, BLOCK))))


found = []
for dtype, name, kernel in [
    ("fp16", "sum", total),
    ("fp16", "max", largest),
    ("bf16", "sum", total),
    ("bf16", "max", largest),
    ("i8", "sum", total),
]:
    signature = {"x_ptr": f"*{dtype}", "y_ptr": "*fp32", "BLOCK": "constexpr"}
    source = ASTSource(kernel, signature=signature, constexprs={"BLOCK": 128})
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    # What the reduction does to two elements.
    (operation, result) = re.search(r"(arith\.(?:add|max)\w+) %\S+ %\S+ : (\w+)", code).groups()
    found.append(result)
    print(f"{name} of {dtype}: {operation} ... : {result}")
assert found == ["f16", "f32", "bf16", "f32", "i32"], "changed: the types of reductions"
EOF
python -W ignore kernels.py
