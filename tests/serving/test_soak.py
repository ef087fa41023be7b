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
            *("--minutes", "0.75", "--clients", "6", "--output", str(output)),
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


class Server:
    """A server whose counters are these, one reading after the other."""

    pid = os.getpid()

    def __init__(self, *readings):
        self.readings = iter(readings)

    def metrics(self):
        return next(self.readings)


def test_a_counter_that_falls_is_found():
    watch = soak.Watch(Server({"a_total": 2.0, "gauge": 5.0}, {"a_total": 1.0, "gauge": 1.0}))
    watch.read()
    with pytest.raises(soak.SoakError, match="counters have fallen: {'a_total'"):
        watch.read()


def test_memory_that_grows_is_found():
    watch = soak.Watch(Server())
    watch.memory = [50, 100, 100, 100, 100, 105, 110, 110]
    assert watch.growth() == pytest.approx(0.1)


def test_a_request_that_is_left_is_found(monkeypatch):
    monkeypatch.setattr(soak, "IDLE_SECONDS", 0.0)
    left = {"vllm:num_requests_running": 1.0, "vllm:num_requests_waiting": 0.0}
    with pytest.raises(soak.SoakError, match="requests are left"):
        soak.wait_until_idle(Server(left))
