"""Looks at the process table, for tests that nothing is left running."""

import contextlib
import os
import time
from pathlib import Path

import psutil

MARK = "VLLM_MARS_TEST_MARK"


def marked(mark: str) -> list[int]:
    """Returns the processes that inherited the environment variable MARK with this value."""
    found = []
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if state != "Z" and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
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
    wait_until(
        lambda: not marked(mark) and not any(map(_runs, found)),
        *(30, f"all processes of {mark!r} end"),
    )


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
