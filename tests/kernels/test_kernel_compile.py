"""The Triton kernels compile for each GPU target without a GPU, to what the table says."""

import json
import re
from pathlib import Path

import pytest
import triton

from benchmarks import kernel_resources
from benchmarks.kernel_resources import TARGETS, compile_variant, resources, variants

# The others are compiled at night.
BY_DAY = "sm_90"
TABLE = Path(__file__).parents[2] / "benchmarks/results/kernel-resources.json"
VARIANTS = variants()


@pytest.fixture(scope="module")
def committed():
    table = json.loads(TABLE.read_text())
    rows = {(row.pop("variant"), row.pop("target")): row for row in table["kernels"]}
    return table["triton"], rows


@pytest.mark.parametrize(
    "target",
    [pytest.param(name, marks=[] if name == BY_DAY else pytest.mark.nightly) for name in TARGETS],
)
@pytest.mark.parametrize("variant", VARIANTS, ids=[variant.name for variant in VARIANTS])
def test_compiled_code(variant, target, committed):
    compiled = compile_variant(variant, TARGETS[target])
    found = resources(variant, compiled)
    assert found["spills"] == 0
    if variant.name.startswith("top2") and "odd stride" not in variant.name:
        assert found["wide_loads"] > 0, "a row must be read in 16-byte loads"
        # 8 warps of 40 registers leave room for six programs on a multiprocessor.
        assert found["registers"] <= 40
    if "ptx" in compiled.asm and not variant.name.startswith("top2"):
        assert not re.search(r"\bfma\.rn", compiled.asm["ptx"]), "theta * z1 - gap must not fuse"
    version, rows = committed
    if version != triton.__version__:
        pytest.skip(
            f"the table is of triton {version}, this is {triton.__version__}; "
            "`python -m benchmarks.kernel_resources --output ...` makes it anew"
        )
    assert found == rows[variant.name, target], (
        f"{variant.name} on {target} compiles to something else than {TABLE.name} says; if that is "
        "wanted, make the table anew and say why in the commit"
    )


def test_the_table_has_no_other_rows(committed):
    _, rows = committed
    assert set(rows) == {(variant.name, target) for variant in VARIANTS for target in TARGETS}


def test_a_binary_without_a_loop_is_an_error():
    with pytest.raises(RuntimeError, match="no loop that loads"):
        kernel_resources.loop_body("/*0000*/ EXIT ;")
