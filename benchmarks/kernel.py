"""Time of the verification of one step, by vLLM and by MARS.

`python -m benchmarks.kernel --output build/kernel.json` on a GPU

All variants verify the same logits and drafts in one process, in turn, as Model Runner V2 calls
them, each call with a cold L2 cache: microseconds on the device, and those that the host needs to
launch it. Requests have answered 512 tokens, and those of lossy variants have no strict opening, so
that the rule is applied. No variant is timed before MARS at price 0 gives vLLM's tokens: those of
its method `block` where drafts are probabilistic and requests sample (not of vLLM 0.32, see
`step_v2.is_repeated`), else of `standard`. `--dry-run` goes the same way with tiny
shapes on a CPU, in Triton's interpreter, for which it wants `PYTHONPATH=tests/interpreted
TRITON_INTERPRET=1`.

Exit status: 0; 1 where tokens were wrong; 2 without a GPU.
"""

import argparse
import itertools
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.clocks import GpuClock, ThreadClock
    from benchmarks.step_v2 import Shape

NO_GPU = "benchmarks.kernel needs a CUDA GPU; --dry-run runs tiny shapes in Triton's interpreter."
# Temperature and whether drafts are drawn; 0.7 makes vLLM copy the rows into float32.
KINDS = ((0.0, False), (1.0, False), (1.0, True), (0.7, False), (0.7, True))
# (temperature, drawn, batch, K, vocabulary)
VOCAB = 128_256
GRID = [
    (*kind, batch, 4, vocab)
    for vocab, batch, kind in itertools.product((VOCAB, 49_152), (64, 1, 16), KINDS)
]
DRY = [(*kind, 2, 3, 1_000) for kind in KINDS]
# vLLM's rejection sample method, or options of MARS.
VARIANTS: dict[str, str | dict[str, Any]] = {
    "vLLM, standard": "standard",
    "vLLM, block": "block",
    "MARS, price 0": {"price": 0.0},
    # As most requests of a server that is strict unless a request asks.
    "MARS, strict unless asked": {"max_loss": 0.0, "limit": 0.02},
    "MARS, theta 0.9": {"theta": 0.9, "strict_opening": 0},
    "MARS, price 0.3": {"price": 0.3, "strict_opening": 0},
    "MARS, max_loss 0.02": {"max_loss": 0.02, "strict_opening": 0},
}
# Of a file of figures: medians with the 20th and the 80th percentile. An empty kernel takes the
# least that this way of timing shows.
COLUMNS = [
    ("step", ""),
    *((f"{name}, us", ".0f") for name in VARIANTS),
    ("empty kernel, us", None),
    *((f"{name}, us of the host", None) for name in (*VARIANTS, "empty kernel")),
    *((f"{name}, tokens per request", None) for name in VARIANTS),
]


def measure_cell(clock: "ThreadClock | GpuClock", shape: "Shape", rounds: int) -> list[Any]:
    """All variants of one shape: a row for `COLUMNS`.

    Raises:
        MismatchError: MARS at price 0 gave other tokens than vLLM.
    """
    import numpy as np
    import torch

    from benchmarks.clocks import time_in_turn
    from benchmarks.step_v2 import is_repeated, step_of, tokens_of
    from vllm_mars import MarsConfig

    step = step_of(shape, clock.device)
    # A server refuses theta beside drawn drafts; without them `block` is not what MARS is held to.
    left_out = "MARS, theta 0.9" if shape.is_probabilistic else "vLLM, block"
    variants = {
        name: by if isinstance(by, str) else MarsConfig(**by)
        for name, by in VARIANTS.items()
        if name != left_out
    }
    calls: dict[str, Any] = {name: step.verification(it) for name, it in variants.items()}
    tokens = {name: tokens_of(call) for name, call in calls.items()}
    own, strict = f"vLLM, {step.strict_method}", tokens["MARS, price 0"]
    wrong = []
    if is_repeated(step):
        if own not in tokens:
            tokens[own] = tokens_of(step.verification(step.strict_method))
        wrong = (tokens[own] != strict).any(1).nonzero().flatten().tolist()
    if wrong:
        raise MismatchError(
            f"{shape}: {len(wrong)} of {shape.batch} requests differ from {own}, at price 0, the "
            f"first is request {wrong[0]}."
        )
    element = torch.zeros(1, device=clock.device)
    calls["empty kernel"] = lambda: element.add_(1)
    runs = time_in_turn(clock, calls, rounds)
    times = {name: np.percentile(of, (50, 20, 80), axis=0).round(1).T for name, of in runs.items()}
    counts = {name: float((found >= 0).sum()) / shape.batch for name, found in tokens.items()}
    timed = [*VARIANTS, "empty kernel"]
    of_both = [
        times[name][place].tolist() if name in times else None for place in (0, 1) for name in timed
    ]
    return [named(shape), *of_both, *map(counts.get, VARIANTS)]


def named(shape: "Shape") -> str:
    """The step of a row."""
    return str(shape) if shape.vocab == VOCAB else f"{shape.vocab:,} tokens, {shape}"


class MismatchError(Exception):
    """MARS at price 0 gave other tokens than vLLM."""


def measure(args: argparse.Namespace) -> int:
    """Runs the cells in turn; returns the exit status."""
    import triton

    from benchmarks import figures
    from benchmarks.clocks import GpuClock, ThreadClock
    from benchmarks.step_v2 import Shape
    from vllm_mars.servers.provenance import describe_run

    clock = ThreadClock() if args.dry_run else GpuClock()
    grid = DRY if args.dry_run else GRID
    cells = [it for it in grid if args.only in named(Shape(*it))]
    head = describe_run(None if clock.name == "cpu" else clock.name)
    head["versions"]["triton"] = triton.__version__
    rounds = 2 if args.dry_run else args.rounds
    run = {**head, "raw": "this file", "dry_run": args.dry_run, "rounds": rounds}
    result: dict[str, Any] = {"columns": COLUMNS, "rows": []}
    result |= {"runs": [run], "not_run": []}
    print(clock.name, *figures.table_of(COLUMNS, []), sep="\n", flush=True)
    begin, status = time.perf_counter(), 0
    for number, cell in enumerate(cells):
        if time.perf_counter() - begin > args.seconds:
            result["not_run"] = cells[number:]
            print(f"{len(cells) - number} cells were not run: the time is up.")
            break
        try:
            measured = measure_cell(clock, Shape(*cell), rounds)
        except MismatchError as error:
            result["error"], status = str(error), 1
            print(error, file=sys.stderr)
            break
        result["rows"].append(measured)
        *_, line = figures.table_of(COLUMNS, [measured])
        print(line, flush=True)
        if args.output:
            figures.write(args.output, result)
    if args.output:
        figures.write(args.output, result)
    return status


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="JSON file; default: standard output only")
    parser.add_argument("--only", default="", help='cells with this in their name: "batch 64"')
    parser.add_argument("--rounds", type=int, default=50, help="counted runs of each variant")
    parser.add_argument("--seconds", type=float, default=360, help="no cell is begun after these")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    args = parser.parse_args(arguments)
    if args.dry_run:
        # Triton reads it when it is imported, which nothing has done so far.
        os.environ["TRITON_INTERPRET"] = "1"
        # vLLM's stand-ins for pinned memory and streams.
        import vllm.v1.worker.cpu.shm  # noqa: F401
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    with torch.inference_mode():
        return measure(args)


if __name__ == "__main__":
    sys.exit(main())
