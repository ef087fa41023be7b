"""The GPU benchmark, without a GPU: its dry run and its check of the tokens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import kernel
from benchmarks.kernel import MismatchError
from benchmarks.kernel_step import HostClock, Shape, Step, ThreadClock

ROOT = Path(__file__).parents[2]


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


def test_other_tokens_than_vllms_are_an_error(monkeypatch):
    def verification(step, by):
        tokens = torch.tensor([[1, 2], [3, 4 if by == "standard" else 5]])
        return lambda: (None, tokens, torch.tensor([2, 2]))

    monkeypatch.setattr(Step, "verification", verification)
    with pytest.raises(
        MismatchError, match="temperature 1, .*: 1 of 2 .* vLLM, standard, .* first is request 1"
    ):
        kernel.measure_cell(HostClock(), Shape(1.0, False, 2, 1, 8), 1)


@pytest.mark.usefixtures("mended_kernels")
@pytest.mark.parametrize("is_drawn", [False, True])
def test_a_step_of_v1_runs_beside_vllms_and_beside_an_earlier_commit(is_drawn):
    before = {name: it for name, it in sys.modules.items() if name.startswith("vllm_mars")}
    shape = Shape(1.0, is_drawn, 2, 3, 100)
    with torch.inference_mode():
        row = kernel.measure_v1_cell(ThreadClock(), shape, 2, "HEAD")
    assert before.items() <= sys.modules.items()
    found = dict(zip([name for name, _ in kernel.v1_columns("HEAD")], row, strict=True))
    times = [value[0] for name, value in found.items() if name.endswith(", ms")]
    assert len(times) == 3 and min(times) > 0
    assert found["MARS / vLLM"][0] > 0
    assert all(value >= 1 for name, value in found.items() if name.endswith("per request"))
