"""Runs the checks of the V2 sampler in a process whose Triton is the interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
INTERPRETED = HERE.parent / "interpreted"


def run_checks(checks: str, at_least: int) -> None:
    """Runs one file of checks; fails unless all of at least so many pass."""
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / checks)],
        capture_output=True,
        text=True,
        timeout=500,
        env={
            **os.environ,
            "PYTHONPATH": f"{INTERPRETED}{os.pathsep}{HERE.parent}",
            "TRITON_INTERPRET": "1",
        },
    )
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-2000:]
    passed = re.search(r"(\d+) passed", child.stdout)
    assert passed is not None
    assert int(passed[1]) >= at_least, child.stdout


def test_sampler_v2():
    run_checks("check_sampler_v2.py", 79)
