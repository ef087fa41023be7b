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
    """The rows by case; a process of its own, in which vLLM takes its Triton kernels."""
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.launches"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
    found = {row["case"]: row for row in map(json.loads, lines) if "case" in row}
    assert len(found) == 16
    return found


def test_nothing_waits_for_the_device(rows):
    assert {row["syncs"] for row in rows.values()} == {0}
    with Counted(), pytest.raises(NotImplementedError):
        torch.empty(1, device=META).cpu()


@pytest.mark.parametrize(
    "case",
    ["theta", "price", "recommended", "recommended, spans, own bounds"],
)
def test_greedy_steps(rows, case):
    row = rows[f"{case}, greedy"]
    assert row["launches"] == 3
    assert row["launches"] < row["vllm"]


def test_sampled_and_mixed_steps_cost_no_more_than_vllms_but_for_the_context(rows):
    for case, row in rows.items():
        more = row["launches"] - row["vllm"]
        name, kind = case.rsplit(", ", 1)
        if kind == "drawn drafts":
            # The prices, and the rows that are read for them.
            more -= 2
        if kind != "greedy":
            assert more <= int(name.startswith("recommended")), case


def test_mixed_steps_cost_at_most_a_greedy_and_a_sampled_one(rows):
    for case, row in rows.items():
        if case.endswith("mixed"):
            alone = [rows[case.replace("mixed", kind)] for kind in ("greedy", "sampled")]
            assert row["launches"] <= sum(one["launches"] for one in alone)
