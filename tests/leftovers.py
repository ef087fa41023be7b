"""Processes, zombies and temporary files that a run of the tests leaves.

Child processes inherit the variable RUN and use the run's directory for temporary files.
"""

import contextlib
import os
import shutil
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

import psutil

RUN = "VLLM_MARS_TEST_RUN"
GRACE_SECONDS = 5
# Ends with its parent process.
PYTHONS_OWN = "multiprocessing.resource_tracker"
# Caches of libraries, and files of engines without `vllm serve`: sockets (a UUID) and the ranks'
# meeting point. They are removed with the directory.
OF_OTHERS = ("torchinductor_*", "uv-*", "vllm_dist_*", "????????-????-????-????-????????????")


def begin() -> None:
    """Marks later child processes and gives them a directory for temporary files."""
    # pytest's temporary files must remain after a failure.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    # A short name, because paths of sockets have at most 107 characters.
    directory = tempfile.mkdtemp(prefix="mars-")
    os.environ[RUN] = os.environ["TMPDIR"] = tempfile.tempdir = directory


def end() -> list[str]:
    """Describes the run's remaining processes and files, then removes the files."""
    directory = Path(os.environ[RUN])
    left = children(or_marked=True) + [
        f"file {path}"
        for path in sorted(directory.iterdir())
        if not any(fnmatch(path.name, pattern) for pattern in OF_OTHERS)
    ]
    shutil.rmtree(directory, ignore_errors=True)
    return left


def children(or_marked: bool = False) -> list[str]:
    """Describes this process's children, or all processes of the run, after a grace period."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := list(_processes(or_marked))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _processes(or_marked: bool):
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ended = process.status() == psutil.STATUS_ZOMBIE
            is_ours = process.ppid() == os.getpid()
            if or_marked and not is_ended and process.pid != os.getpid():
                is_ours |= process.environ().get(RUN) == os.environ[RUN]
            command = "ended, but nobody waited for it"
            if is_ours and not is_ended:
                command = " ".join(process.cmdline())[:150]
            if is_ours and PYTHONS_OWN not in command:
                yield f"process {process.pid} ({process.name()}) of {process.ppid()}: {command}"
