"""The GPU benchmark without a GPU: its refusal and its check of the tokens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import kernel
from benchmarks.clocks import ThreadClock
from benchmarks.kernel import MismatchError
from benchmarks.step_v2 import Shape, Step


def test_without_a_gpu_it_says_so_and_ends_with_2():
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernel"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
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
        kernel.measure_cell(ThreadClock(), Shape(1.0, False, 2, 1, 8), 1)
