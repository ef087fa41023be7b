"""Runs the kernel checks in a process whose Triton is the interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).parent / "interpreted" / "check_greedy.py"


def test_triton_equals_reference_under_the_interpreter():
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-2000:]
    passed = re.search(r"(\d+) passed", child.stdout)
    assert passed is not None
    assert int(passed[1]) >= 17, child.stdout
