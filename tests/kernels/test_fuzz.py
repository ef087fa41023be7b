"""A short run of the fuzzer, at night on every target, and proof that it finds what is wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fuzz
import oracle

SCRIPT = Path(__file__).parents[1] / "fuzz.py"


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=550,
        env={**os.environ},
    )


def test_no_difference():
    """Some calls; those in the interpreter are among its checks."""
    with torch.inference_mode():
        for number in range(400):
            assert fuzz.check_v1(np.random.default_rng([7, number])) is None


@pytest.mark.nightly
def test_no_difference_on_any_target(tmp_path):
    output = tmp_path / "fuzz.json"
    # By number, not by time: on a busy machine a call in the interpreter may take 20 seconds.
    child = run("--minutes", "60", "--most", "60", "--seed", "7", "--output", str(output))
    assert child.returncode == 0, child.stdout + child.stderr
    calls = dict(re.findall(r"^(\w+): (\d+) calls, seed 7, no difference$", child.stdout, re.M))
    assert calls == dict.fromkeys(fuzz.CHECKS, "60")
    assert output.exists()


def test_a_call_can_be_run_again():
    child = run("--target", "v1", "--seed", "7", "--only", "5")
    assert child.stdout == "v1: 1 calls, seed 7, no difference\n"


def test_a_wrong_rule_is_found(monkeypatch):
    """With another rule in the oracle, relaxed tokens differ before long."""
    monkeypatch.setattr(oracle, "is_relaxed", lambda *row: False)
    found = [fuzz.check_v1(np.random.default_rng([0, 0, number])) for number in range(200)]
    messages = [message for message in found if message is not None]
    assert messages
    assert "the oracle" in messages[0]
