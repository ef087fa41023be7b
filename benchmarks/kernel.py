"""Time of one greedy verification step on a GPU: this project's kernels and vLLM's sampler.

`python -m benchmarks.kernel --output build/kernel.json`

All variants verify the same logits and drafts in one process, in turn, under CUDA-graph replay and
once more launched from Python, each call with a cold L2 cache. No variant is timed before its
tokens are right. `--dry-run` goes the same way with tiny shapes on a CPU, in Triton's interpreter;
`PYTHONPATH=tests/interpreted TRITON_INTERPRET=1` makes it interpret vLLM's Triton kernels too.

Exit status: 0; 1 where a variant gave wrong tokens; 2 without a GPU.
"""

import argparse
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.kernel_step import HostClock, Shape

NO_GPU = "benchmarks.kernel needs a CUDA GPU; --dry-run runs tiny shapes in Triton's interpreter."
# (batch, K, vocabulary, dtype); in case the time runs out, one request and 64 come first.
GRID = list(itertools.product((1, 64, 8, 256), (5,), (151_936, 128_256, 32_000), ("bf16", "fp32")))
MODES = ("graph", "eager")
DRY = [(1, 3, 1_000, "bf16"), (2, 3, 1_000, "fp32")]


def measure_cell(
    clock: "HostClock", shape: "Shape", bandwidth: float, rounds: int
) -> dict[str, Any]:
    """All variants of one shape; `bandwidth` is the memory's, in GB/s.

    Raises:
        MismatchError: a variant gave other tokens than the reference.
    """
    import torch

    from benchmarks import kernel_step
    from benchmarks.kernel_step import MismatchError, Step, mars, summary, time_in_turn

    make: dict[str, Callable[[Step], kernel_step.Variant]] = {
        "MARS, theta 0.9": functools.partial(mars, theta=0.9),
        "MARS, theta 1": functools.partial(mars, theta=1.0),
        "vLLM V2, strict": kernel_step.vllm_v2,
    }
    step = Step(shape, clock.device)
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    found: dict[str, dict[str, Any]] = {name: {} for name in make}
    for name, make_variant in make.items():
        try:
            variant = make_variant(step)
            variant.check(f"{name}, {shape}", variant.run)
            calls[name, "eager"] = variant.run
            replay = clock.capture(variant.run)
            variant.check(f"{name} (graph), {shape}", replay)
            calls[name, "graph"] = replay
        except Exception as error:
            # vLLM may not run here, and no CPU has graphs; wrong tokens end the run.
            ran = (name, "eager") in calls
            if isinstance(error, MismatchError) or not (ran or name.startswith("vLLM")):
                raise
            # What ends a capture only says that something failed before.
            cause = error.__context__ or error
            found[name]["error"] = f"{type(cause).__name__}: {cause}".splitlines()[0]
    element = torch.zeros(1, device=clock.device)
    # The least that this way of timing shows.
    calls["empty kernel", "eager"] = lambda: element.add_(1)
    for (name, mode), runs in time_in_turn(clock, calls, rounds).items():
        found.setdefault(name, {})[mode] = {**summary(runs), "runs": runs}
    for name, of in found.items():
        if name != "empty kernel" and (best := of.get("graph") or of.get("eager")):
            of["share_of_bandwidth"] = shape.logits_bytes / best["median"] / 1e3 / bandwidth
    return {**shape._asdict(), "logits_bytes": shape.logits_bytes, "variants": found}


def lines(cell: dict[str, Any]) -> list[str]:
    """A cell for the terminal: microseconds, share of the bandwidth, and what could not run."""
    found = []
    for name, of in cell["variants"].items():
        times = [f"{of[mode]['median']:9.1f}" if mode in of else " " * 9 for mode in MODES]
        share = f"{of['share_of_bandwidth']:7.1%}" if "share_of_bandwidth" in of else " " * 7
        found.append(f"  {name:<22}{''.join(times)}{share}  {of.get('error', '')}".rstrip())
    return found


def measure(args: argparse.Namespace) -> int:
    """Runs the cells in turn; returns the exit status."""
    import triton

    from benchmarks.kernel_step import GpuClock, HostClock, MismatchError, Shape
    from vllm_mars.local.provenance import describe_run
    from vllm_mars.local.result_file import write_json

    clock = HostClock() if args.dry_run else GpuClock()
    cells = DRY if args.dry_run else GRID
    bandwidth = clock.bandwidth()
    head = describe_run(None if args.dry_run else clock.name)
    head["versions"]["triton"] = triton.__version__
    result: dict[str, Any] = {"schema": "vllm-mars/kernel/2", **head}
    result |= {"dry_run": args.dry_run, "gb_per_s": bandwidth}
    rounds = 2 if args.dry_run else args.rounds
    result |= {"rounds": rounds, "cells": [], "not_run": []}
    print(f"{clock.name}, {bandwidth:.0f} GB/s; us under a graph and without, share of these GB/s")
    begin, status = time.perf_counter(), 0
    for number, cell in enumerate(cells):
        if time.perf_counter() - begin > args.seconds:
            result["not_run"] = cells[number:]
            print(f"{len(cells) - number} cells were not run: the time is up.")
            break
        try:
            measured = measure_cell(clock, Shape(*cell), bandwidth, rounds)
        except MismatchError as error:
            result["error"], status = str(error), 1
            print(error, file=sys.stderr)
            break
        result["cells"].append(measured)
        print(Shape(*cell), *lines(measured), sep="\n", flush=True)
        if args.output:
            write_json(args.output, result)
    if args.output:
        write_json(args.output, result)
    return status


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="JSON file; default: standard output only")
    parser.add_argument("--rounds", type=int, default=50, help="counted runs of each variant")
    parser.add_argument("--seconds", type=float, default=360, help="no cell is begun after these")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    args = parser.parse_args(arguments)
    if args.dry_run:
        # Triton reads it when it is imported, which nothing has done so far.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    with torch.inference_mode():
        return measure(args)


if __name__ == "__main__":
    sys.exit(main())
