"""Runs the kernel checks in a process whose Triton is the interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).parents[1] / "interpreted"


@pytest.mark.parametrize(
    ("checks", "at_least"),
    [("check_greedy.py", 18), ("check_warmup.py", 9), ("check_counting.py", 5)],
)
@pytest.mark.timeout(1200)
def test_under_the_interpreter(checks, at_least):
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS / checks)],
        capture_output=True,
        text=True,
        timeout=1100,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(CHECKS.parent)},
    )
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-2000:]
    passed = re.search(r"(\d+) passed", child.stdout)
    assert passed is not None
    assert int(passed[1]) >= at_least, child.stdout
