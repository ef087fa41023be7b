"""What a step of each sampler launches, counted on torch's meta device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.launches import META, Counted
from vllm_mars.kernels.top2 import top2_kernel

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows():
    """The rows by runner and case; a process of its own, in which vLLM takes its Triton kernels."""
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.launches"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
    found = {(row["runner"], row["case"]): row for row in map(json.loads, lines)}
    assert len(found) == 24
    return found


def test_nothing_waits_for_the_device(rows):
    assert {row["syncs"] for row in rows.values()} == {0}


@pytest.mark.parametrize("wait", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu])
def test_what_waits_is_an_error(wait):
    with Counted(), pytest.raises((NotImplementedError, RuntimeError)):
        wait(torch.empty(1, device=META))


def test_devices_must_not_mix():
    with pytest.raises(RuntimeError, match="more than one device"):
        Counted().launch(top2_kernel, torch.empty(1, device=META), torch.empty(1))


@pytest.mark.parametrize(
    ("runner", "case", "most"),
    [
        ("v1", "theta", 2),
        ("v1", "price", 2),
        ("v1", "recommended", 4),
        ("v1", "recommended, spans, own bounds", 4),
        ("v2", "theta", 2),
        ("v2", "price", 2),
        ("v2", "recommended", 3),
        ("v2", "recommended, spans, own bounds", 3),
    ],
)
def test_greedy_steps(rows, runner, case, most):
    row = rows[runner, f"{case}, greedy"]
    assert row["launches"] == most
    assert row["launches"] < row["vllm"]


def test_sampled_and_mixed_steps_cost_at_most_four_more_than_vllms(rows):
    more = {
        key: row["launches"] - row["vllm"]
        for key, row in rows.items()
        if not key[1].endswith("greedy")
    }
    assert more["v1", "price, sampled"] == 1
    assert more["v2", "price, sampled"] == 3
    assert all(value <= 4 for value in more.values())


def test_mixed_steps_cost_at_most_a_greedy_and_a_sampled_one(rows):
    for (runner, case), row in rows.items():
        if runner == "v2" and case.endswith("mixed"):
            alone = [rows[runner, case.replace("mixed", kind)] for kind in ("greedy", "sampled")]
            assert row["launches"] <= sum(one["launches"] for one in alone)
