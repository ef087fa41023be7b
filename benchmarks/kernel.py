"""Times the verification of one step by vLLM and by MARS.

`python -m benchmarks.kernel --output build/kernel.json` on a GPU

All variants verify the same logits and drafts in one process, in turn, as Model Runner V2 calls
them, with a cold L2 cache. Times are microseconds on the device and of the host's launches.
Requests have 512 output tokens and lossy variants no strict opening, so that the rule applies.
Before timing, MARS at price 0 must emit the tokens of vLLM's method `block` if drafts are
probabilistic and requests are sampled (except in vLLM 0.32, see `step_v2.is_repeated`), else those
of `standard`. `--dry-run` uses tiny shapes on a CPU, in Triton's interpreter, and needs
`PYTHONPATH=tests/interpreted TRITON_INTERPRET=1`.

Exit status: 0; 1 if tokens were wrong; 2 without a GPU.
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
# (temperature, probabilistic drafts); at 0.7 vLLM copies the rows into float32.
KINDS = ((0.0, False), (1.0, False), (1.0, True), (0.7, False), (0.7, True))
# (temperature, probabilistic drafts, batch, K, vocabulary)
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
    # Most requests of a server that is strict by default.
    "MARS, strict unless asked": {"max_loss": 0.0, "limit": 0.02},
    "MARS, theta 0.9": {"theta": 0.9, "strict_opening": 0},
    "MARS, price 0.3": {"price": 0.3, "strict_opening": 0},
    "MARS, max_loss 0.02": {"max_loss": 0.02, "strict_opening": 0},
}
# Times are medians with the 20th and 80th percentiles. The empty kernel shows the smallest time
# that this method can measure.
COLUMNS = [
    ("step", ""),
    *((f"{name}, us", ".0f") for name in VARIANTS),
    ("empty kernel, us", None),
    *((f"{name}, us of the host", None) for name in (*VARIANTS, "empty kernel")),
    *((f"{name}, tokens per request", None) for name in VARIANTS),
]


def measure_cell(clock: "ThreadClock | GpuClock", shape: "Shape", rounds: int) -> list[Any]:
    """Measures all variants of a shape and returns a row of `COLUMNS`; may raise MismatchError."""
    import numpy as np
    import torch

    from benchmarks.clocks import time_in_turn
    from benchmarks.step_v2 import is_repeated, step_of, tokens_of
    from vllm_mars import MarsConfig

    step = step_of(shape, clock.device)
    # A server refuses theta with probabilistic drafts; for fixed drafts the baseline is `standard`.
    left_out = "MARS, theta 0.9" if shape.is_probabilistic else "vLLM, block"
    variants = {
        name: method if isinstance(method, str) else MarsConfig(**method)
        for name, method in VARIANTS.items()
        if name != left_out
    }
    calls: dict[str, Any] = {name: step.verification(by) for name, by in variants.items()}
    tokens = {name: tokens_of(call) for name, call in calls.items()}
    vllm = f"vLLM, {step.strict_method}"
    wrong = []
    if is_repeated(step):
        if vllm not in tokens:
            tokens[vllm] = tokens_of(step.verification(step.strict_method))
        wrong = (tokens[vllm] != tokens["MARS, price 0"]).any(1).nonzero().flatten().tolist()
    if wrong:
        raise MismatchError(
            f"{shape}: {len(wrong)} of {shape.batch} requests differ from {vllm}, at price 0, the "
            f"first is request {wrong[0]}."
        )
    element = torch.zeros(1, device=clock.device)
    calls["empty kernel"] = lambda: element.add_(1)
    runs = time_in_turn(clock, calls, rounds)
    # [device and host, percentiles]
    times = {
        name: np.percentile(samples, (50, 20, 80), axis=0).round(1).T
        for name, samples in runs.items()
    }
    counts = {name: float((ids >= 0).sum()) / shape.batch for name, ids in tokens.items()}
    timed = [*VARIANTS, "empty kernel"]
    cells = [
        times[name][clock_index].tolist() if name in times else None
        for clock_index in (0, 1)
        for name in timed
    ]
    return [named(shape), *cells, *map(counts.get, VARIANTS)]


def named(shape: "Shape") -> str:
    return str(shape) if shape.vocab == VOCAB else f"{shape.vocab:,} tokens, {shape}"


class MismatchError(Exception):
    """MARS at price 0 emitted other tokens than vLLM."""


def measure(args: argparse.Namespace) -> int:
    import triton

    from benchmarks import figures
    from benchmarks.clocks import GpuClock, ThreadClock
    from benchmarks.step_v2 import Shape
    from vllm_mars.servers.provenance import describe_run

    clock = ThreadClock() if args.dry_run else GpuClock()
    grid = DRY if args.dry_run else GRID
    cells = [cell for cell in grid if args.only in named(Shape(*cell))]
    head = describe_run(None if clock.name == "cpu" else clock.name)
    head["versions"]["triton"] = triton.__version__
    rounds = 2 if args.dry_run else args.rounds
    run = {**head, "raw": "this file", "dry_run": args.dry_run, "rounds": rounds}
    result: dict[str, Any] = {"columns": COLUMNS, "rows": []}
    result |= {"runs": [run], "not_run": []}
    print(clock.name, *figures.table_of(COLUMNS, []), sep="\n", flush=True)
    begin = time.perf_counter()
    status = 0
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="JSON file; default: standard output only")
    parser.add_argument("--only", default="", help='cells with this in their name: "batch 64"')
    parser.add_argument("--rounds", type=int, default=50, help="counted runs of each variant")
    parser.add_argument("--seconds", type=float, default=360, help="no cell is begun after these")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    args = parser.parse_args(arguments)
    if args.dry_run:
        # Before anything imports Triton.
        os.environ["TRITON_INTERPRET"] = "1"
        # vLLM's CPU versions of pinned memory and streams.
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
