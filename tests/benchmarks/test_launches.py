"""What a step of the sampler launches, counted on torch's meta device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.launches import META, Counted

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows():
    """The rows by case, those of megabytes by drafts.

    In a process of its own vLLM takes its Triton kernels.
    """
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.launches"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
    found = {row.get("case") or row["megabytes"]: row for row in map(json.loads, lines)}
    assert len(found) == 18
    return found


@pytest.fixture(scope="module")
def cases(rows):
    """The rows of what is launched."""
    return {case: row for case, row in rows.items() if "case" in row}


def test_nothing_waits_for_the_device(cases):
    assert {row["syncs"] for row in cases.values()} == {0}
    with Counted(), pytest.raises(NotImplementedError):
        torch.empty(1, device=META).cpu()


@pytest.mark.parametrize(
    "case",
    ["theta", "price", "recommended", "recommended, spans, own bounds"],
)
def test_greedy_steps(cases, case):
    row = cases[f"{case}, greedy"]
    assert row["launches"] == 3
    assert row["launches"] < row["standard"]


def test_other_steps_launch_no_more_than_vllms(cases):
    for case, row in cases.items():
        if not case.endswith("greedy"):
            assert row["launches"] <= row.get("block", row["standard"]), case


@pytest.mark.parametrize("drafts", ["fixed", "probabilistic"])
def test_blocks_read_no_more_than_vllms_do(rows, drafts):
    assert rows[drafts]["MARS"]["all"] <= rows[drafts]["MARS at most"]


def test_mixed_steps_cost_at_most_a_greedy_and_a_sampled_one(cases):
    for case, row in cases.items():
        if case.endswith("mixed"):
            alone = [cases[case.replace("mixed", kind)] for kind in ("greedy", "sampled")]
            assert row["launches"] <= sum(one["launches"] for one in alone)
