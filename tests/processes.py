"""Child processes of tests, and checks that none is left running."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil

MARK = "VLLM_MARS_TEST_MARK"


def marked(mark: str) -> list[int]:
    """Returns the processes that inherited the environment variable MARK with this value."""
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                pids.append(process.pid)
    return pids


def start(*arguments: object, mark: str = "", cwd=None, **env: str) -> subprocess.Popen:
    """Starts Python with a captured output; SIGINT interrupts it."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, MARK: mark, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background makes its children ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_until(condition, timeout, what):
    """Polls until the condition holds; fails the test after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout} s"
        time.sleep(0.05)
