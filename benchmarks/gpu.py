"""All that waits for a GPU, in one command: its tests, the kernel's speed, and real servers.

    make gpu ARGS="--model MODEL --draft DRAFT"        # into build/gpu
    python -m benchmarks.gpu --parts tests kernel      # these alone

    tests     pytest tests/gpu
    kernel    benchmarks.kernel
    sweep     vllm-mars sweep: vLLM's strict verification, MARS at price 0 and at the recommended
              setting, 1 and 16 requests at a time; options that are not of this command are the
              sweep's

Each part has its share of --minutes and its own file: tests.xml, kernel.json, sweep.jsonl. A sweep
goes on where it was. --dry-run goes the same way on a CPU.

Exit status: 0; 1 where a part failed or ran out of time; 2 without a GPU.
"""

import argparse
import signal
import subprocess
import sys
from pathlib import Path

from vllm_mars.local.draft_head import PACKAGED_HEAD
from vllm_mars.local.drafts import NGRAM
from vllm_mars.local.prompts import PACKAGED
from vllm_mars.local.server import end

# Of ten; a model that takes minutes to load needs more.
MINUTES = {"tests": 3.0, "kernel": 1.5, "sweep": 5.5}
# In which a sweep ends its servers.
GRACE_SECONDS = 20.0
NO_TESTS_RAN = 5
NO_GPU = (
    "benchmarks.gpu needs a GPU, and torch {} sees none. A build for CPUs never does: remove "
    ".venv, and then `make gpu BUILD=cuda` installs the other one. --dry-run goes the same way on "
    "a CPU."
)


def commands(args: argparse.Namespace, options: list[str]) -> dict[str, list[str]]:
    """What Python runs for each part; `options` are the sweep's."""
    prompts, tokens, load = (2, 8, 2) if args.dry_run else (16, 64, 16)
    sweep = [
        *("-m", "vllm_mars.cli", "sweep", "--retry-failed", f"--output={args.output}/sweep.jsonl"),
        *("--method", "autoregressive", "standard", "strict", "mars", "--baseline", "standard"),
        *("--concurrency", "1", str(load)),
        *("--prompts", str(PACKAGED), f"--num-prompts={prompts}", f"--max-tokens={tokens}"),
    ]
    if args.model:
        sweep += ["--model", args.model, "--draft", args.draft]
    else:
        sweep += ["--draft", str(PACKAGED_HEAD)]
        # The packaged model's files are in float32, for a CPU.
        sweep += [] if args.dry_run else ["--server-arg=--dtype=bfloat16"]
    # The kernel begins no cell after this time.
    kernel = [
        f"--seconds={0.6 * seconds(args, 'kernel'):.0f}",
        f"--output={args.output}/kernel.json",
    ]
    kernel += ["--dry-run"] if args.dry_run else []
    return {
        "tests": ["-m", "pytest", "tests/gpu", f"--junitxml={args.output}/tests.xml"],
        "kernel": ["-m", "benchmarks.kernel", *kernel],
        "sweep": [*sweep, *options],
    }


def seconds(args: argparse.Namespace, part: str) -> float:
    """A part's share of the time of those that run."""
    return float(60 * args.minutes * MINUTES[part] / sum(MINUTES[name] for name in args.parts))


def run_part(command: list[str], limit: float) -> int | None:
    """Runs a part; returns its exit status, None where it was ended after so many seconds."""
    process = subprocess.Popen([sys.executable, *command])
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process, GRACE_SECONDS)


def main(arguments: list[str] | None = None) -> int:
    """Reads the arguments, looks for the GPU and runs; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=MINUTES, default=list(MINUTES))
    parser.add_argument("--model", help="directory or name; default: the packaged model")
    parser.add_argument("--draft", default=NGRAM, help="of --model; default ngram")
    parser.add_argument("--output", type=Path, default=Path("build/gpu"), help="a directory")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts together")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU")
    args, options = parser.parse_known_args(arguments)
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        print(NO_GPU.format(torch.__version__), file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    # Python would end at once, and leave the part that runs behind.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        statuses = {}
        for part, command in commands(args, options).items():
            if part in args.parts:
                print(f"{part}: at most {seconds(args, part):.0f} s", flush=True)
                statuses[part] = run_part(command, seconds(args, part))
    finally:
        signal.signal(signal.SIGTERM, previous)
    good = (0, NO_TESTS_RAN) if args.dry_run else (0,)
    for part, status in statuses.items():
        reason = "out of time" if status is None else f"exit status {status}"
        print(f"{part}: {'done' if status in good else reason}")
    return int(any(status not in good for status in statuses.values()))


if __name__ == "__main__":
    sys.exit(main())
