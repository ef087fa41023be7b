"""The command `vllm-mars`, with one module per subcommand."""

import argparse
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from vllm_mars import __version__
from vllm_mars.cli import doctor
from vllm_mars.cli import serve as vllm_cli
from vllm_mars.lab import demo as demo_command
from vllm_mars.lab import sweep_command, tune
from vllm_mars.models import packaged_model
from vllm_mars.requirements import require

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

# Module, description, and the extra that installs the packages in its `NEEDED`. A module also has
# `add_parser(commands)` and `run`, which takes the parsed arguments by name, lists as tuples.
COMMANDS: dict[str, tuple[ModuleType, str, str]] = {
    "serve": (vllm_cli, "serving", "cuda"),
    "model": (packaged_model, "making the packaged model", "demo"),
    "doctor": (doctor, "the doctor", "demo"),
    "demo": (demo_command, "the demo", "demo"),
    "sweep": (sweep_command, "a sweep", "experiments"),
    "tune": (tune, "tuning", "experiments"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, by default with the process's arguments.

    Returns:
        0 on success, 1 after an error with a message on standard error, 130 after Ctrl-C. Bad usage
        exits with 2, SIGTERM with 143; all processes that were started have ended before.
    """
    args = _parser().parse_args(argv)
    arguments: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if value is not None
    }
    module, description, extra = COMMANDS[arguments.pop("command")]
    # By default SIGTERM ends Python at once; an exception closes open resources first, like Ctrl-C.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        require(description, extra, module.NEEDED)
        status: int = module.run(**arguments)
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        signal.signal(signal.SIGTERM, previous)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-mars",
        description="Margin-aware verification for vLLM's speculative decoding.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"vllm-mars {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for module, _, _ in COMMANDS.values():
        module.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
