"""Runs files of checks in a process whose Triton is the interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run_checks(files: list[str], selection: str, at_least: int, *, with_vllm: bool = False) -> None:
    """Runs files of checks; fails unless all that are selected pass.

    Args:
        files: paths below `tests`.
        selection: pytest's `-m`.
        at_least: how many checks that must be.
        with_vllm: whether vLLM, too, takes its Triton kernels (`interpreted/sitecustomize.py`).
    """
    folders = [TESTS / "interpreted", TESTS] if with_vllm else [TESTS]
    child = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("--durations=10", "-m", selection),
            *(str(TESTS / file) for file in files),
        ],
        capture_output=True,
        text=True,
        timeout=1500,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "TRITON_INTERPRET": "1",
        },
    )
    # Shown with -s, and where a test fails.
    print(child.stdout)
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-2000:]
    passed = re.search(r"(\d+) passed", child.stdout)
    assert passed is not None
    assert int(passed[1]) >= at_least, child.stdout
