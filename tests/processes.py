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


def kill(mark: str) -> None:
    """Kills these processes and those below them, and waits until they are gone.

    Ray's agents are found below their raylet alone: they write their titles over the environment
    in which they were marked.
    """
    found = set()
    for pid in marked(mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found |= {process, *process.children(recursive=True)}
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_until(lambda: not marked(mark) and not any(map(_runs, found)), 30, f"{mark!r} ends")


def _runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, timeout, what):
    """Polls until the condition holds; fails the test after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout} s"
        time.sleep(0.05)
