"""Looks at the process table, for tests that nothing is left running."""

import contextlib
import os
import time

import psutil

MARK = "VLLM_MARS_TEST_MARK"


def marked(mark: str) -> list[int]:
    """Returns the processes that inherited the environment variable MARK with this value."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process.pid)
    return found


def wait_until(condition, timeout, what):
    """Polls until the condition holds; fails the test after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout} s"
        time.sleep(0.05)
