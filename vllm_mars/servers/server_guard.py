"""Runs one command and ends its whole process tree when the standard input closes.

`VllmServer` starts this file as a script and keeps the write end of its standard input. The kernel
closes that end however the owner goes (return, exception, signal, SIGKILL), so no server outlives
the program that started it. A parent-death signal would not do: it fires when the *thread* that
started the child ends, reaches only the direct child, and exists on Linux only.

The guard leads the session and process group of the command. On Linux it also adopts every process
that the command orphans, so "no child left" means that the whole tree is gone.

vLLM leaves socket files, and others, in the temporary directory. The guard gives the command a
temporary directory of its own and removes it at the end.

    python -I -S server_guard.py GRACE_SECONDS COMMAND [ARGUMENT ...]
"""

import ctypes
import getpass
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

POLL_SECONDS = 0.1
PR_SET_CHILD_SUBREAPER = 36


def reap() -> bool:
    """Collects ended children and returns whether any child is left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def end_group(grace_seconds: float, directory: str) -> None:
    """Asks the process group to end, waits, then kills what is left, this process included.

    The directory is removed when the group has ended, or before it is killed.
    """
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while (left := reap()) and time.monotonic() <= deadline:
        time.sleep(POLL_SECONDS)
    shutil.rmtree(directory, ignore_errors=True)
    if left:
        # A vLLM whose clients hold their connections waits for them without end.
        print(f"Not ended {grace_seconds:g} s after SIGTERM: killed.", flush=True)
        os.killpg(0, signal.SIGKILL)


def user_name() -> str:
    """The user's name, as torch tells users apart: in a container there may be none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid_{os.getuid()}"


def main() -> int:
    """Runs the command; returns its exit status, 128 + a signal's number, or 0 if asked to end."""
    grace_seconds, command = float(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Not SIG_IGN: an ignored signal stays ignored in the command, a handled one does not.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    temporary = tempfile.gettempdir()
    # A short name: the path of a socket has 104 to 108 characters at most.
    directory = tempfile.mkdtemp(prefix="mars-")
    environment = {
        # What was compiled is of use to the next server, so it stays where torch keeps it.
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(temporary, f"torchinductor_{user_name()}"),
        **os.environ,
        "TMPDIR": directory,
    }
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
    while (code := child.poll()) is None:
        readable, _, _ = select.select([0], [], [], POLL_SECONDS)
        if readable and not os.read(0, 1):
            break
    end_group(grace_seconds, directory)
    return 0 if code is None else code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
