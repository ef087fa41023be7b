"""All that waits for a GPU, in ten minutes: tests, the kernel's goals, real servers.

    make gpu ARGS="--model MODEL --draft DRAFT"               # all parts but tune, into build/gpu
    python -m benchmarks.gpu --parts tests kernel tune        # these alone

    tests      tests/gpu
    kernel     benchmarks.kernel, its goals judged
    tune       the same with --tune, for the choices that docs/kernel.md leaves open; on request
    packaged   a sweep of the packaged model with its head: strict, price 0, the recommended price
    named      the same of --model with --draft; options that are not known here are the sweep's

Each part has its share of --minutes and keeps what it has written by then: NAME.log and its result
file. gpu.json sums up, with the rows for docs/validated.md. What another commit, version or machine
left in the directory moves to one beside it. --dry-run goes the same way on a CPU.

Exit status: 0; 1 where a part failed or most answers of a strict rule are not those of vLLM's own
verification; 2 without a GPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.validated import objections, rules, table
from vllm_mars.local.draft_head import PACKAGED_HEAD
from vllm_mars.local.drafts import NGRAM, RECOMMENDED
from vllm_mars.local.prompts import PACKAGED
from vllm_mars.local.provenance import describe_run
from vllm_mars.local.result_file import write_json
from vllm_mars.local.server import end, tail

# Of ten, without "tune"; a model that takes minutes to load needs more.
MINUTES = {"tests": 1.5, "kernel": 1.5, "tune": 1.0, "packaged": 3.5, "named": 3.5}
# In which a sweep ends its servers, and in which anything else ends.
SWEEP_GRACE_SECONDS, GRACE_SECONDS = 20.0, 5.0
NO_TESTS_RAN = 5
SWEEPS = ("packaged", "named")
# Parts that were run one by one stand in one file where these are the same.
SAME = ("git_commit", "versions", "hardware", "dry_run")
NO_GPU = (
    "benchmarks.gpu needs a GPU, and torch {} sees none. A build for CPUs never does: remove "
    ".venv, and then `make gpu BUILD=cuda` installs the other one. --dry-run goes the same way on "
    "a CPU."
)


def commands(args: argparse.Namespace, options: list[str]) -> dict[str, list[str]]:
    """What Python runs for each part that is asked for; `options` are the named sweep's."""
    dry = ["--dry-run"] if args.dry_run else []
    found = {"tests": ["-m", "pytest", "tests/gpu", f"--junitxml={args.output}/tests.xml"]}
    for name, more in (("kernel", []), ("tune", ["--tune"])):
        # It begins no cell after this time.
        more.append(f"--seconds={0.6 * share(args, name):.0f}")
        more.append(f"--output={args.output}/{name}.json")
        found[name] = ["-m", "benchmarks.kernel", "--grid=small", *dry, *more]
    prompts, tokens, load = (2, 8, 2) if args.dry_run else (16, 64, 16)
    sweep = [
        *("-m", "vllm_mars.cli", "sweep", "--retry-failed", "--baseline", "standard"),
        *("--method", "autoregressive", "standard"),
        *("--price", "0", str(RECOMMENDED["mars_price"])),
        *("--prompts", os.path.relpath(PACKAGED), f"--num-prompts={prompts}"),
        *(f"--max-tokens={tokens}", "--concurrency", "1", str(load)),
    ]
    # The packaged model's files are in float32, for a CPU.
    dtype = [] if args.dry_run else ["--server-arg=--dtype=bfloat16"]
    found["packaged"] = [*sweep, "--draft", os.path.relpath(PACKAGED_HEAD), *dtype]
    if args.model:
        found["named"] = [*sweep, "--model", args.model, "--draft", args.draft, *options]
    for name in found.keys() & set(SWEEPS):
        found[name].append(f"--output={args.output}/{name}.jsonl")
    return {name: command for name, command in found.items() if name in asked(args)}


def asked(args: argparse.Namespace) -> list[str]:
    """The parts that run."""
    every = [name for name in MINUTES if name != "tune" and (args.model or name != "named")]
    return args.parts or every


def share(args: argparse.Namespace, name: str) -> float:
    """Seconds of a part, of those that run."""
    return float(60 * args.minutes * MINUTES[name] / sum(MINUTES[part] for part in asked(args)))


def run_part(command: list[str], seconds: float, grace: float, log: Path) -> dict[str, Any]:
    """Runs a part, and ends it with what it started, within `grace`, where it takes longer."""
    begin, status = time.monotonic(), None
    with log.open("wb") as file:
        python = [sys.executable, *command]
        process = subprocess.Popen(python, stdout=file, stderr=subprocess.STDOUT)
        try:
            status = process.wait(max(1.0, seconds - grace))
        except subprocess.TimeoutExpired:
            print("    its share of --minutes is over", flush=True)
        finally:
            end(process, grace)
    return {"exit_status": status, "seconds": round(time.monotonic() - begin, 1)}


def run(args: argparse.Namespace, options: list[str], gpu: str | None) -> int:
    """Runs the parts in turn and sums up after each; returns the exit status."""
    result: dict[str, Any] = {"schema": "vllm-mars/gpu/1", **describe_run(gpu)}
    result |= {"dry_run": args.dry_run, "parts": {}, "goals": [], "rules": []}
    good = (0, NO_TESTS_RAN) if args.dry_run else (0,)
    summary, kernel = args.output / "gpu.json", args.output / "kernel.json"
    if summary.exists():
        before = json.loads(summary.read_text())
        if all(before.get(name) == result[name] for name in SAME):
            result["parts"] = before["parts"]
        else:
            aside = f"{args.output}-{before['created'].replace(':', '-')}"
            args.output.rename(aside)
            print(f"what was measured elsewhere or before is in {aside}")
    args.output.mkdir(parents=True, exist_ok=True)
    # Also where the first part is interrupted, its file says what it is of.
    write_json(summary, result)
    for name, command in commands(args, options).items():
        log = args.output / f"{name}.log"
        print(f"{name}: at most {share(args, name):.0f} s, {log}", flush=True)
        # That of an earlier run; a sweep's goes on.
        (args.output / f"{name}.json").unlink(missing_ok=True)
        if name == "named":
            set_failed_aside(args.output / "named.jsonl", Path(args.model).name)
        grace = SWEEP_GRACE_SECONDS if name in SWEEPS else GRACE_SECONDS
        part = result["parts"][name] = run_part(command, share(args, name), grace, log)
        if part["exit_status"] not in good:
            print(tail(log, 8))
        result["goals"] = json.loads(kernel.read_text())["goals"] if kernel.exists() else []
        sweeps = [args.output / f"{one}.jsonl" for one in SWEEPS]
        result["rules"] = [rule for path in sweeps if path.exists() for rule in rules(path)]
        write_json(summary, result)
    for goal in result["goals"]:
        print(f"{goal['result']}: {goal['goal']}")
    found = objections(result["rules"])
    print(*found, *table([result]), f"wrote {summary}", sep="\n")
    return int(bool(found) or any(p["exit_status"] not in good for p in result["parts"].values()))


def set_failed_aside(sweep: Path, model: str) -> None:
    """Moves a sweep's file to FILE.old where another model, such as a wrong name, has failed."""
    if sweep.exists() and objections(it for it in rules(sweep) if it["model"] != model):
        sweep.replace(f"{sweep}.old")


def main(arguments: list[str] | None = None) -> int:
    """Reads the arguments, looks for the GPU and runs; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=MINUTES, help="default: all but tune")
    parser.add_argument("--model", help="of the part `named`: directory or name")
    parser.add_argument("--draft", default=NGRAM, help="its draft; default ngram")
    parser.add_argument("--output", type=Path, default=Path("build/gpu"), help="a directory")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts together")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU")
    args, options = parser.parse_known_args(arguments)
    if args.model is None and (options or "named" in (args.parts or ())):
        parser.error(f"--model is missing, for the part `named` {' '.join(options)}".rstrip())
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        print(NO_GPU.format(torch.__version__), file=sys.stderr)
        return 2
    gpu = None if args.dry_run else torch.cuda.get_device_name()
    # Python would end at once, and leave the part that runs behind.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run(args, options, gpu)
    finally:
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    sys.exit(main())
