"""Time of one greedy verification step on a GPU: this project's kernels, torch, vLLM's samplers.

`python -m benchmarks.kernel --output benchmarks/results/kernel-NAME.json`

All variants verify the same logits and drafts in one process, round by round, under CUDA-graph
replay and once more launched from Python, each call with a cold L2 cache. No variant is timed
before its token ids equal those of the torch backend. `--tune` times launch settings of the
reduction instead. `--dry-run` goes the same way with tiny shapes on a CPU, in Triton's interpreter;
`PYTHONPATH=tests/interpreted TRITON_INTERPRET=1` makes it interpret vLLM's Triton kernels too.

Exit status: 0; 1 where a variant gave wrong tokens; 2 without a GPU.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.columns import Columns, at
from benchmarks.markdown import described
from vllm_mars.local.provenance import describe_run
from vllm_mars.local.result_file import write_json

NO_GPU = "benchmarks.kernel needs a CUDA GPU; --dry-run runs tiny shapes in Triton's interpreter."

# (batch, K, vocabulary, dtype). The cells that the goals are about come first, in case the time
# runs out.
Cell = tuple[int, int, int, str]
SMALL: list[Cell] = list(itertools.product((1, 64), (5,), (151_936, 128_256), ("bf16", "fp32")))
GRID = (256, 64, 8, 1), (5, 8, 3), (151_936, 128_256, 32_000), ("bf16", "fp32")
FULL: list[Cell] = list(dict.fromkeys([*SMALL, *itertools.product(*GRID)]))
TUNED: list[Cell] = list(itertools.product((1, 8, 64, 256), (5,), (151_936,), ("bf16", "fp32")))
DRY: list[Cell] = [(1, 3, 5_000, "bf16"), (2, 3, 5_000, "fp32")]
TIMES: Columns = {
    "graph, us": at("graph/median", ".1f"),
    "eager, us": at("eager/median", ".1f"),
    "of the bandwidth": at("share_of_bandwidth", ".1%"),
}
VARIANTS: Columns = {
    **{"variant": at("name"), **TIMES},
    **{"graph, x mars": at("over/graph", ".2f"), "eager, x mars": at("over/eager", ".2f")},
    "": lambda of: of.get("skipped") or of.get("graph_error", ""),
}
SETTINGS: Columns = {
    **{"": at("rank"), "settings": at("name"), "programs": at("programs", ","), **TIMES},
    "note": lambda of: of.get("skipped") or "<- present" * of["is_present"],
}


def cell_of(text: str) -> Cell:
    """Reads a cell that is written as BATCH,K,VOCAB,DTYPE."""
    batch, k, vocab, dtype = text.split(",")
    if dtype not in ("bf16", "fp32"):
        raise ValueError(f"dtype {dtype!r} is not one of 'bf16', 'fp32'.")
    return int(batch), int(k), int(vocab), dtype


def outcomes(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals, each with what was measured for it and PASS, MISS or "not measured".

    Args:
        cells: results of `measure_cell`; those without CUDA graphs do not count.
    """
    graphed = {
        f"batch {cell['batch']}, K {cell['k']}, vocab {cell['vocab']}, {cell['dtype']}": cell
        for cell in cells
        if cell["variants"]["mars"]["graph"]
    }
    goals: list[dict[str, Any]] = []

    def add(goal: str, measured: dict[str, float], met: Callable[[float], bool]) -> None:
        result = "PASS" if all(map(met, measured.values())) else "MISS"
        goals.append(
            {"goal": goal, "result": result if measured else "not measured", "measured": measured}
        )

    add(
        "at least 90 % of the measured bandwidth where the logits have 100 MB or more",
        {
            name: cell["variants"]["mars"]["share_of_bandwidth"]
            for name, cell in graphed.items()
            if cell["logits_bytes"] >= 100e6
        },
        lambda share: share >= 0.9,
    )
    add(
        "at most 10 us at batch 1, K 5, vocab 151936, bf16, under graph replay",
        {
            name: cell["variants"]["mars"]["graph"]["median"]
            for name, cell in graphed.items()
            if name == "batch 1, K 5, vocab 151936, bf16"
        },
        lambda microseconds: microseconds <= 10,
    )
    for baseline in ("vLLM V1, strict", "vLLM V2, strict"):
        measured = {}
        for name, cell in graphed.items():
            # Like with like: both without a graph where the baseline has none.
            speedups = cell["speedup_of_mars_over"]
            mode = "graph" if baseline in speedups["graph"] else "eager"
            if name.startswith("batch 64, K 5, vocab 128256,") and baseline in speedups[mode]:
                measured[f"{name} ({mode})"] = speedups[mode][baseline]
        add(
            f"at least 3 x as fast as {baseline}, at batch 64, K 5, vocab 128256",
            measured,
            lambda speedup: speedup >= 3,
        )
    return goals


def cell_table(cell: dict[str, Any]) -> list[str]:
    """The lines of a table of a cell's variants."""
    over = cell["speedup_of_mars_over"]
    items = [
        {"name": name, "over": {mode: of.get(name) for mode, of in over.items()}, **result}
        for name, result in cell["variants"].items()
    ]
    return described(VARIANTS, items)


def tune_table(cell: dict[str, Any]) -> list[str]:
    """The lines of a table of a cell's best launch settings, and of the present ones."""
    rows = [
        {"rank": rank, "name": str(row["settings"]), **row}
        for rank, row in enumerate(cell["table"], 1)
    ]
    return described(
        SETTINGS, [row for row in rows if row["rank"] <= 5 or row.get("is_present", True)]
    )


def measure(args: argparse.Namespace) -> int:
    """Runs the cells in turn; returns the exit status."""
    import torch
    import triton

    from benchmarks import kernel_cells
    from benchmarks.kernel_timing import GpuClock, HostClock, measure_bandwidth
    from benchmarks.kernel_variants import THETA, MismatchError, Shape

    clock = HostClock() if args.dry_run else GpuClock()
    device = clock.describe()
    cells = args.cell or (TUNED if args.tune else FULL if args.grid == "full" else SMALL)
    if args.dry_run:
        cells = args.cell or DRY
    head = describe_run(None if args.dry_run else device["name"])
    head["versions"]["triton"] = triton.__version__
    rounds = 3 if args.dry_run else args.rounds
    result: dict[str, Any] = {
        "schema": "vllm-mars/kernel/1",
        **head,
        "device": device,
        "timing": device["timing"],
        "config": {"theta": THETA, "rounds": rounds, "dry_run": args.dry_run, "tune": args.tune},
        "bandwidth": measure_bandwidth(clock),
        "goals": [],
        "cells": [],
        "tune": [],
        "not_run": [],
    }
    bandwidth = result["bandwidth"]["best_gb_per_s"]
    print(f"{device['name']}: {bandwidth:.0f} GB/s; timing: {device['timing']}", flush=True)
    begin = time.perf_counter()

    def write() -> None:
        if args.output:
            write_json(args.output, result)

    for number, cell in enumerate(cells, start=1):
        shape = Shape(*cell)
        elapsed = time.perf_counter() - begin
        if elapsed > args.seconds:
            result["not_run"] = [Shape(*rest)._asdict() for rest in cells[number - 1 :]]
            print(f"{len(result['not_run'])} cells were not run: the time is up.")
            break
        print(f"[{number}/{len(cells)}, {elapsed:.0f} s] {shape}", flush=True)
        try:
            if args.tune:
                limit = 3 if args.dry_run else None
                tuned = kernel_cells.tune_cell(clock, shape, bandwidth, rounds, limit)
                result["tune"].append(tuned)
                print(*tune_table(tuned), sep="\n", flush=True)
            else:
                measured = kernel_cells.measure_cell(clock, shape, bandwidth, rounds)
                result["cells"].append(measured)
                print(*cell_table(measured), sep="\n", flush=True)
        except MismatchError as error:
            result["error"] = str(error)
            write()
            print(error, file=sys.stderr)
            return 1
        result["goals"] = outcomes(result["cells"])
        write()
        if not args.dry_run:
            torch.cuda.empty_cache()
    write()
    for goal in result["goals"]:
        values = ", ".join(f"{value:.3g} at {name}" for name, value in goal["measured"].items())
        print(f"{goal['result']}: {goal['goal']}{': ' * bool(values)}{values}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="JSON file; default: standard output only")
    parser.add_argument("--grid", choices=("small", "full"), default="full")
    parser.add_argument(
        "--cell", type=cell_of, action="append", help="BATCH,K,VOCAB,DTYPE in place of the grid"
    )
    parser.add_argument("--rounds", type=int, default=50, help="counted runs of each variant")
    parser.add_argument(
        "--seconds", type=float, default=360, help="no cell is begun after this time"
    )
    parser.add_argument("--tune", action="store_true", help="time launch settings instead")
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
