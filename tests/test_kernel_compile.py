"""The Triton kernels compile for each GPU target without a GPU: wide loads, no spills."""

import re
import subprocess
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm_mars.kernels import greedy

CUDA = [GPUTarget("cuda", capability, 32) for capability in (80, 90, 100)]
HIP = GPUTarget("hip", "gfx942", 64)
TARGETS = [pytest.param(target, id=f"{target.backend}-{target.arch}") for target in [*CUDA, HIP]]
DTYPES = ["fp32", "bf16", "fp16"]

# Serving's pointers are 16-byte aligned and its vocabularies multiples of 16; other strides compile
# to narrower loads, and what those give is checked in the interpreter.
DIVISIBLE = [["tt.divisibility", 16]]


def compile_kernel(kernel, types, constants, target, warps):
    """Compiles one specialisation; pointers, row stride and vocabulary are divisible by 16."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    divisible = {
        (names.index(name),): DIVISIBLE
        for name, kind in types.items()
        if kind.startswith("*") or name in ("logits_stride", "vocab")
    }
    constants = {name: constants.get(name) for name in names if signature[name] == "constexpr"}
    source = ASTSource(kernel, signature, constants, divisible)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options)


def compile_top2(dtype, target, has_target_rows=True):
    split, block, warps = greedy.launch_settings(128_256, 64)
    types = {
        "best_ptr": "*i64",
        "second_ptr": "*fp32",
        "logits_ptr": f"*{dtype}",
        "logits_stride": "i32",
        "bonus_rows_ptr": "*i32",
        "num_draft": "i32",
        "vocab": "i32",
    }
    if has_target_rows:
        types["target_rows_ptr"] = "*i32"
    constants = {"SPLIT": split, "BLOCK": block, "HAS_TARGET_ROWS": has_target_rows}
    return compile_kernel(greedy.top2_kernel, types, constants, target, warps)


def resources(compiled, tmp_path):
    """Registers and spilled bytes of a CUDA kernel, as the bundled cuobjdump reports them."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    report = subprocess.run(
        [str(tool), "-res-usage", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    registers = int(re.search(r"REG:(\d+)", report)[1])
    return registers, int(re.search(r"LOCAL:(\d+)", report)[1])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_read_in_wide_loads_without_spills(dtype, target, tmp_path):
    compiled = compile_top2(dtype, target)
    if target.backend == "hip":
        assert re.search(r"(global|buffer)_load_dwordx4", compiled.asm["amdgcn"])
        assert ".vgpr_spill_count: 0" in compiled.asm["amdgcn"]
        return
    assert re.search(r"ld\.global[\w.:]*\.v4\.b32", compiled.asm["ptx"])
    registers, spilled = resources(compiled, tmp_path)
    assert spilled == 0
    # 8 warps of 128 registers leave room for two programs on a multiprocessor.
    assert registers <= 128


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bonus", ["no", "ids", "rows"])
@pytest.mark.parametrize("per_request", [False, True])
def test_acceptance_compiles(target, bonus, per_request, tmp_path):
    threshold = "*fp32" if per_request else "fp32"
    types = {
        "output_token_ids_ptr": "*i32",
        "num_accepted_ptr": "*i32",
        "num_relaxed_ptr": "*i32",
        "best_ptr": "*i64",
        "second_ptr": "*fp32",
        "logits_ptr": "*bf16",
        "logits_stride": "i32",
        "draft_token_ids_ptr": "*i32",
        "protected_ptr": "*i1",
        "target_rows_ptr": "*i32",
        "cu_num_draft_tokens_ptr": "*i32",
        "theta": threshold,
        "gap": threshold,
        "num_draft": "i32",
        "max_draft_len": "i32",
        "vocab": "i32",
        "num_splits": "i32",
    }
    if bonus == "ids":
        types["bonus_token_ids_ptr"] = "*i64"
    constants = {
        "SPLITS": 8,
        "POSITIONS": 8,
        "HAS_TARGET_ROWS": True,
        "HAS_PROTECTED": True,
        "BONUS": bonus,
        "THETA_PER_REQUEST": per_request,
        "GAP_PER_REQUEST": per_request,
    }
    compiled = compile_kernel(greedy.accept_kernel, types, constants, target, 4)
    if target.backend == "cuda":
        assert resources(compiled, tmp_path)[1] == 0
        assert not re.search(r"\bfma\.rn", compiled.asm["ptx"]), "theta * z1 - gap must not fuse"


@pytest.mark.parametrize("target", TARGETS)
def test_mark_compiles(target):
    types = {
        "relaxed_ptr": "*i1",
        "best_ptr": "*i64",
        "second_ptr": "*fp32",
        "logits_ptr": "*fp32",
        "logits_stride": "i32",
        "draft_token_ids_ptr": "*i32",
        "protected_ptr": "*i1",
        "cu_num_draft_tokens_ptr": "*i32",
        "theta": "fp32",
        "gap": "fp32",
        "vocab": "i32",
        "num_splits": "i32",
    }
    constants = {
        "SPLITS": 8,
        "POSITIONS": 16,
        "HAS_TARGET_ROWS": False,
        "HAS_PROTECTED": True,
        "THETA_PER_REQUEST": False,
        "GAP_PER_REQUEST": False,
    }
    assert compile_kernel(greedy.mark_kernel, types, constants, target, 4).asm
