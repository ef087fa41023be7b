"""Runs generated code in a process of its own: little time and memory, no network, no processes.

Confinement of careless code, not of hostile code: ask for code or SQL where that suffices.
The process has empty environment, directory and input, and what it prints is thrown away. It has
limits of CPU time, wall time, memory and file size; an audit hook that refuses sockets, processes
and foreign code; and, where Linux lets an ordinary user make one, a network namespace without any
network.
"""

import contextlib
import functools
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

CPU_SECONDS = 5
WALL_SECONDS = 15.0
MEMORY_BYTES = 512 * 2**20
FILE_BYTES = 2**20
REASON_CHARACTERS = 500

# Runs in the child: the limits first, then the program, then the proof that its end was reached.
_CHILD = """
import ctypes, os, resource, sys
token, program, cpu, memory, file_size = sys.stdin.read().split("\\0")
namespace = False
if sys.platform == "linux":
    # CLONE_NEWUSER | CLONE_NEWNET
    namespace = ctypes.CDLL(None, use_errno=True).unshare(0x10000000 | 0x40000000) == 0
for limit, value in (
    (resource.RLIMIT_CPU, cpu),
    (resource.RLIMIT_AS, memory),
    (resource.RLIMIT_FSIZE, file_size),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (int(value), int(value)))
refused = ("socket.", "subprocess.", "os.system", "os.fork", "os.posix_spawn", "os.exec",
           "os.spawn", "os.kill", "ctypes.")
def hook(event, arguments):
    if event.startswith(refused):
        raise PermissionError(f"{event} is not allowed to generated code")
sys.addaudithook(hook)
def run(write=os.write):
    exec(compile(program, "<answer>", "exec"), {"__name__": "answer"})
    write(2, f"{token} {namespace:d}".encode())
run()
"""


@dataclass(frozen=True)
class Ending:
    """How a program ended.

    Attributes:
        passed: whether it ran to its end without an exception.
        reason: the end of its error output, or what ended it; "" where it passed.
        own_network: whether it is known to have had a network namespace of its own.
    """

    passed: bool
    reason: str = ""
    own_network: bool = False


@functools.cache
def confinement() -> str:
    """Says in words how generated code is confined on this machine."""
    network = "a network namespace of its own and " if run_confined("pass").own_network else ""
    return (
        f"Generated code ran in a child process with {CPU_SECONDS} s of CPU time, "
        f"{WALL_SECONDS:g} s of wall time, {MEMORY_BYTES // 2**20} MiB of memory, {network}an "
        "audit hook that refuses sockets and processes."
    )


def run_confined(program: str) -> Ending:
    """Runs a Python program and says whether it reached its end."""
    # The token, unknown to the program, tells its end from an early exit(0).
    token = secrets.token_hex(8)
    limits = (CPU_SECONDS, MEMORY_BYTES, FILE_BYTES)
    sent = "\0".join([token, program.replace("\0", ""), *map(str, limits)])
    with (
        tempfile.TemporaryDirectory(prefix="vllm-mars-code-") as directory,
        # A file, whose size is limited; a pipe would take what a careless loop prints.
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd=directory,
            env={},
            start_new_session=True,
        ) as child,
    ):
        try:
            child.communicate(sent.encode(errors="replace"), WALL_SECONDS)
        except subprocess.TimeoutExpired:
            return Ending(False, f"it ran longer than {WALL_SECONDS:g} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    _, proof, after = text.partition(f"{token} ")
    if proof:
        return Ending(True, own_network=after.startswith("1"))
    if child.returncode < 0:
        return Ending(False, f"ended by {signal.Signals(-child.returncode).name}")
    tail = text.strip().splitlines()[-1:]
    return Ending(False, tail[0][-REASON_CHARACTERS:] if tail else "it ended before its test")
