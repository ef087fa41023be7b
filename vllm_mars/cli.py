"""The command `vllm-mars`."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_mars import __version__
from vllm_mars.experiments.calibrate import command as calibrate_command
from vllm_mars.experiments.report import command as report_command
from vllm_mars.experiments.sweep import command as sweep_command

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments; those of the process by default.

    Returns:
        0, 1 after an error with a message on standard error, 130 after Ctrl-C. Wrong usage exits
        with 2, SIGTERM with 143, both after everything that was started has ended.
    """
    args = _parser().parse_args(argv)
    # Python ends at once on SIGTERM; as an exception it closes what is open, like Ctrl-C.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        if args.command == "model":
            return _model(args)
        if args.command == "top":
            return _top(args)
        if args.command == "calibrate":
            return calibrate_command.run(args)
        if args.command == "report":
            return report_command.run(args)
        if args.command == "sweep":
            return sweep_command.run(args)
        return _demo(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        signal.signal(signal.SIGTERM, previous)


def _model(args: argparse.Namespace) -> int:
    from vllm_mars.local.packaged_model import ensure_model

    print(ensure_model(args.cache_dir, gguf=args.gguf, verify=args.verify))
    return 0


def _demo(args: argparse.Namespace) -> int:
    _require_packages("the demo", "openai", "prometheus_client", "rich")
    from vllm_mars.demo.run import DemoOptions, run_demo

    options = {
        name: value for name, value in vars(args).items() if name != "command" and value is not None
    }
    options["server_args"] = tuple(options.get("server_args", ()))
    run_demo(DemoOptions(**options))
    return 0


def _top(args: argparse.Namespace) -> int:
    _require_packages("top", "prometheus_client", "rich")
    from vllm_mars.top import run_top

    run_top(args.url, args.interval, args.once)
    return 0


def _require_packages(what: str, *names: str) -> None:
    import importlib.util

    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f"{what} needs {', '.join(missing)}; pip install 'vllm-mars[demo]'.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-mars",
        description="Margin-aware verification for vLLM's speculative decoding.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"vllm-mars {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    model = commands.add_parser(
        "model",
        help="make the packaged model (SmolLM2-135M-Instruct) and print its directory",
        description="Makes SmolLM2-135M-Instruct into a directory that vLLM loads, once, and "
        "prints the directory, alone, on standard output.",
    )
    model.add_argument("--cache-dir", type=Path, metavar="DIR", help="default: the user's cache")
    model.add_argument("--gguf", type=Path, metavar="FILE", help="the GGUF file, without a network")
    model.add_argument(
        "--verify", action="store_true", help="check every checksum; make it again if one is wrong"
    )

    top = commands.add_parser(
        "top",
        help="watch a running server's speculation and relaxed tokens",
        description="Shows, from a running server's /metrics, tokens per second, acceptance "
        "length, relaxed tokens and the ratio of the two largest logits. Ctrl-C ends it.",
    )
    top.add_argument("url", metavar="URL", help="the server, such as http://localhost:8000")
    top.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="between readings; default 2"
    )
    top.add_argument("--once", action="store_true", help="print the figures once and exit")

    demo = commands.add_parser(
        "demo",
        help="compare autoregressive, strict and margin-aware decoding on real vLLM servers",
        description="Serves a model three times, asks each server the same prompts one at a time "
        "and compares speed, acceptance and answers. Options that are not given: %(prog)s "
        "takes the packaged model and prompts, theta 0.9, and the model's EAGLE-3 head where there "
        "is one, else ngram drafts of 4 tokens.",
    )
    demo.add_argument("--model", metavar="MODEL", help="default: the packaged model")
    demo.add_argument("--draft", metavar="ngram|MODEL", help="ngram, or a draft model or head")
    demo.add_argument("--theta", type=float, help="mars_theta, in (0, 1]; default 0.9")
    demo.add_argument(
        "--num-speculative-tokens", type=int, metavar="K", help="default: the head's, else 4"
    )
    demo.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSON lines with 'prompt' or 'turns'"
    )
    demo.add_argument("--max-tokens", type=int, metavar="N", help="longest answer; default 128")
    demo.add_argument("--repeats", type=int, metavar="N", help="timed passes; default 1")
    demo.add_argument(
        "--output", type=Path, metavar="FILE", help="default build/demo.json; logs go beside it"
    )
    demo.add_argument(
        "--startup-timeout", type=float, metavar="SECONDS", help="per server; default 600"
    )
    demo.add_argument(
        "--server-arg",
        dest="server_args",
        action="append",
        metavar="ARG",
        help="one more argument of `vllm serve`, as --server-arg=--max-model-len=1024; repeatable",
    )
    calibrate_command.add_parser(commands)
    report_command.add_parser(commands)
    sweep_command.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
