"""The command `vllm-mars`: a table of commands, each with a module of its own."""

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

# Each module has `add_parser(commands)`, the packages it needs, `NEEDED`, and `run`, which takes by
# name what the command line gives, lists as tuples; beside it the command in words and the extra
# that brings these packages.
COMMANDS: dict[str, tuple[ModuleType, str, str]] = {
    "serve": (vllm_cli, "serving", "cuda"),
    "model": (packaged_model, "making the packaged model", "demo"),
    "doctor": (doctor, "the doctor", "demo"),
    "demo": (demo_command, "the demo", "demo"),
    "sweep": (sweep_command, "a sweep", "experiments"),
    "tune": (tune, "tuning", "experiments"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line: these arguments, or those of the process.

    Returns:
        0, 1 after an error with a message on standard error, 130 after Ctrl-C. Wrong usage exits
        with 2, SIGTERM with 143, both after everything that was started has ended.
    """
    args = _parser().parse_args(argv)
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if value is not None
    }
    module, what, extra = COMMANDS[given.pop("command")]
    # Python ends at once on SIGTERM; as an exception it closes what is open, like Ctrl-C.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        require(what, extra, module.NEEDED)
        status: int = module.run(**given)
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
