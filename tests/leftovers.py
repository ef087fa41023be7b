"""What a run of the tests leaves behind: processes, ended ones nobody waited for, and files.

All that it starts inherits the variable RUN, and takes the run's own directory for temporary files.
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
# Ends with the process that it belongs to.
PYTHONS_OWN = "multiprocessing.resource_tracker"
# Files that libraries keep, and what an engine without `vllm serve` leaves: its sockets (a UUID)
# and where its ranks meet. All go with the directory.
OF_OTHERS = ("torchinductor_*", "uv-*", "vllm_dist_*", "????????-????-????-????-????????????")


def begin() -> None:
    """Marks this process's children to come and gives them a directory for temporary files."""
    # pytest's own stay where they are looked for after a failure.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    # A short name: the paths of sockets have 107 characters at most.
    directory = tempfile.mkdtemp(prefix="mars-")
    os.environ[RUN] = os.environ["TMPDIR"] = tempfile.tempdir = directory


def end() -> list[str]:
    """Describes what is left of the run's processes and files, then removes the files."""
    directory = Path(os.environ[RUN])
    found = children(or_marked=True) + [
        f"file {path}"
        for path in sorted(directory.iterdir())
        if not any(fnmatch(path.name, pattern) for pattern in OF_OTHERS)
    ]
    shutil.rmtree(directory, ignore_errors=True)
    return found


def children(or_marked: bool = False) -> list[str]:
    """Describes this process's children, or all of the run, after some seconds' grace."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (found := list(_processes(or_marked))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


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
