"""The Triton kernels compile for each GPU target without a GPU, and to lean code."""

import re

import pytest
import torch

from benchmarks import kernel_resources
from benchmarks.kernel_resources import (
    TARGETS,
    compile_launch,
    compile_variant,
    resources,
    variants,
)
from vllm_mars.kernels import top2
from vllm_mars.kernels.terms import Drafts

# The others are compiled at night.
BY_DAY = "sm_90"


@pytest.mark.parametrize(
    "target",
    [pytest.param(name, marks=[] if name == BY_DAY else pytest.mark.nightly) for name in TARGETS],
)
@pytest.mark.parametrize("variant", variants())
def test_compiled_code(variant, target):
    compiled = compile_variant(variant, target)
    found = resources(compiled)
    assert found["spills"] == 0
    if variant.startswith("top2") and "odd stride" not in variant:
        assert found["wide_loads"] > 0, "a row must be read in 16-byte loads"
        # 8 warps of 40 registers leave room for six programs on a multiprocessor; on a CDNA 3 unit
        # 64 are the most with which it holds as many waves as it can.
        assert found["registers"] <= (64 if target.startswith("gfx") else 40)
    if "ptx" in compiled.asm and not variant.startswith("top2"):
        assert not re.search(r"\bfma\.rn", compiled.asm["ptx"]), "theta * z1 - gap must not fuse"


def test_rows_without_bonus_rows_compile():
    """As Model Runner V2 launches it, and both runners for sampled requests."""
    drafts = Drafts(torch.empty(3, 4096), *(torch.zeros(2, dtype=torch.int32),) * 2)
    compile_launch(lambda: top2.reduce_rows(drafts, True), "top2_kernel", BY_DAY)


def test_a_binary_without_a_loop_is_an_error():
    with pytest.raises(RuntimeError, match="no loop that loads"):
        kernel_resources.loop_body("/*0000*/ EXIT ;")
