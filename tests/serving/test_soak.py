"""A short soak: mixed load on a real server, no request left, SIGTERM under load ends all of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import soak

SCRIPT = Path(__file__).parents[1] / "soak.py"


@pytest.mark.nightly
@pytest.mark.engine
def test_a_short_soak(packaged_model, tmp_path):
    output = tmp_path / "soak.json"
    child = subprocess.run(
        [
            *(sys.executable, str(SCRIPT), "--model", str(packaged_model)),
            *("--minutes", "0.75", "--output", str(output)),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ},
    )
    assert child.returncode == 0, child.stdout + child.stderr
    seen = json.loads(output.read_text())
    assert sum(seen["requests"].values()) >= 6
    assert seen["seconds_after_sigterm"] < soak.DRAIN_SECONDS + 2 * soak.GRACE_SECONDS
