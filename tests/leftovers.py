"""What a run of the tests leaves behind: processes, ended ones nobody waited for, and files.

All that it starts inherits the variable RUN, and takes the run's own directory for temporary files.
"""

import os
import shutil
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

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


def children() -> list[str]:
    """Describes the children of this process, after some seconds' grace."""
    return _wait_for(lambda parent, _: parent == os.getpid())


def end() -> list[str]:
    """Describes what is left of the run's processes and files, then removes the files."""
    mark = f"{RUN}={os.environ[RUN]}".encode()
    found = _wait_for(lambda parent, environment: parent == os.getpid() or mark in environment)
    directory = Path(os.environ[RUN])
    found += [
        f"file {path}"
        for path in sorted(directory.iterdir())
        if not any(fnmatch(path.name, pattern) for pattern in OF_OTHERS)
    ]
    shutil.rmtree(directory, ignore_errors=True)
    return found


def _wait_for(is_ours) -> list[str]:
    deadline = time.monotonic() + GRACE_SECONDS
    while (found := _processes(is_ours)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _processes(is_ours) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name, rest = (entry / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            state, parent = rest.split()[:2]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (entry / "environ").read_bytes().split(b"\0") if state != "Z" else []
        except OSError:
            continue
        if int(entry.name) == os.getpid() or PYTHONS_OWN in command:
            continue
        if is_ours(int(parent), environment):
            what = "ended, but nobody waited for it" if state == "Z" else command[:150]
            found.append(f"process {entry.name} ({name}) of {parent}: {what}")
    return found
