"""Promises of a run of the tests: groups share a worker, and nothing is left."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_a_group_stays_on_one_worker(request):
    """With --dist loadgroup, pytest-xdist adds the group to a test's id."""
    is_grouped = getattr(request.config.option, "loadgroup", False)
    assert request.node.nodeid.endswith("@test_run") == is_grouped


LEAVES = """
import os, subprocess, tempfile
from pathlib import Path

def test_leaves_something():
    subprocess.Popen(["sleep", "300"])
    # Not Popen, which would wait for it.
    ended = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)
    Path(tempfile.gettempdir(), "left.txt").touch()
"""


@pytest.mark.parametrize(
    ("source", "status"), [("def test_is_clean():\n    pass\n", 0), (LEAVES, 1)]
)
def test_a_run_that_leaves_something_fails(tmp_path, source, status):
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(source)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == status, run.stdout + run.stderr
    assert "1 passed" in run.stdout
    report = run.stdout.partition("left behind by this run")[2]
    if status == 0:
        assert not report
        return
    (left,) = re.findall(r"process (\d+) \(sleep\) of \d+: sleep 300", report)
    os.kill(int(left), signal.SIGKILL)
    assert re.search(r"process \d+ \(true\) of \d+: ended, but nobody waited for it", report)
    (file,) = re.findall(r"file (/.+/left.txt)", report)
    assert not Path(file).parent.exists()
