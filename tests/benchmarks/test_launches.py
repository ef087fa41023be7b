"""Launches of a runner's step, counted on torch's meta device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import launches
from benchmarks.figures import table_of
from benchmarks.launches import META, Counted

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The lines and the file of one run, in a new process in which vLLM uses its Triton kernels."""
    path = tmp_path_factory.mktemp("launches") / "host.json"
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.launches", "--rounds", "2", "--output", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    return lines, json.loads(path.read_text())


@pytest.fixture(scope="module")
def cases(output):
    """The rows of launches by case."""
    rows = {row["case"]: row for row in output[0] if "case" in row}
    assert len(rows) == 21
    return rows


def test_without_a_compiler_it_says_so_and_ends_with_2(monkeypatch, capsys):
    monkeypatch.setenv("CC", "no such compiler")
    assert launches.main([]) == 2
    assert "needs a C compiler to build Triton's launcher" in capsys.readouterr().err


def test_nothing_waits_for_the_device(cases):
    assert {row["syncs"] for row in cases.values()} == {0}
    with Counted(), pytest.raises(NotImplementedError):
        torch.empty(1, device=META).cpu()


@pytest.mark.parametrize(
    "case",
    ["theta", "price", "recommended", "recommended, spans, own bounds", "strict unless asked"],
)
def test_greedy_steps(cases, case):
    row = cases[f"{case}, greedy"]
    assert row["launches"] < row["standard"]


def test_other_steps_launch_no_more_than_vllms(cases):
    """They are called as vLLM's runner does, so a needless grammar would be counted."""
    for case, row in cases.items():
        if case.endswith(("sampled", "mixed")):
            assert row["launches"] <= row["standard"], case
        if case.endswith("drawn drafts"):
            assert row["launches"] <= row["block"], case


def test_requests_that_leave_and_come(cases):
    """One launch for all that end; a copy and a launch for all that come."""
    row = cases["two requests end and two come"]
    assert row["launches"] - row["standard"] <= 3


def test_mixed_steps_cost_at_most_a_greedy_and_a_sampled_one(cases):
    for case, row in cases.items():
        if case.endswith("mixed"):
            both = [cases[case.replace("mixed", kind)] for kind in ("greedy", "sampled")]
            assert row["launches"] <= sum(one["launches"] for one in both)


def test_the_file_of_host_times_makes_a_table(output):
    lines, file = output
    assert len(file["rows"]) == 9
    for row in file["rows"]:
        times = dict(zip([name for name, *_ in file["columns"]], row, strict=True))
        assert ("probabilistic" in times["step"]) == (times["vLLM, block, us"] is not None)
        # With so few rounds a whole step may seem shorter than its verification.
        for name in ("vLLM, standard, us", "MARS, us", "MARS, strict, us"):
            assert 0 < times[name] and 0 < times[f"whole step: {name}"]
        best = "vLLM, block, us" if "probabilistic" in times["step"] else "vLLM, standard, us"
        for name in ("MARS", "MARS, strict"):
            ratio = times[f"{name}, us"] / times[best]
            assert times[f"{name} / vLLM"] == pytest.approx(ratio, abs=1e-3)
    assert len([*table_of(file["columns"], file["rows"])]) == 2 + 9
    assert sum("step" in line for line in lines) == 9
