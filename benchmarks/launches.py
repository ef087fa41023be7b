"""What a step of Model Runner V2 launches and takes on the host, without a GPU.

`python -m benchmarks.launches --output build/host.json`

What is counted is on torch's meta device, which takes the accelerator's path. Each operation that
is no view is one kernel or one copy. A step is that of
`RunnerV2`: vLLM's `RejectionSampler.__call__` and what MARS wraps around it, the speculator's call
among it. A line of JSON for each case tells what is launched, what of it waits for the device,
which is an error, and what vLLM's own sampler launches for the same batch (by its method
`standard`, of probabilistic drafts by `block`, too). With -v come the names.

Then come host times: microseconds of this thread for the verification and for the whole step, by
vLLM's methods, by MARS, and by MARS with requests that ask for nothing on a server that is strict
unless one does; then both of MARS over vLLM's best method without loss. All run in turn; what
counts is the 20th percentile, which other work on the machine moves least. Here the tensors are a
CPU's, and Triton compiles for a GPU and launches by its own launcher (`launcher`), so that all is
real but the driver's part of a launch, and CUDA's allocator. --output writes these to a file for
`make figures`.

Exit status: 0; 1 where something waits for the device; 2 without a C compiler.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends import backends

from benchmarks import launcher

META = torch.device("meta")
K, BATCH, VOCAB = 4, 8, 32_000
VIEWS = {
    *("view", "slice", "select", "unsqueeze", "squeeze", "expand", "detach", "alias", "t", "split"),
    *("transpose", "permute", "as_strided", "unbind", "lift_fresh", "_unsafe_view", "unfold"),
    *("empty", "empty_strided", "empty_like", "new_empty", "_reshape_alias"),
}
# They tell the host a value.
WAITS = {"_local_scalar_dense", "nonzero", "equal"}
CASES: dict[str, dict[str, Any]] = {
    "theta": {"theta": 0.9},
    "price": {"price": 0.3, "strict_opening": 0},
    "recommended": {"max_loss": 0.02},
    "recommended, spans, own bounds": {"max_loss": 0.02, "strict_spans": ((5, 6),)},
    "strict unless asked": {"max_loss": 0, "limit": 0.02},
}
TEMPERATURES = {
    **{"greedy": (0.0, 0.0), "sampled": (0.7, 0.7), "mixed": (0.0, 0.7)},
    "drawn drafts": (0.7, 0.7),
}
# What is timed: temperature and whether drafts are drawn.
TIMED = ((0.0, False), (1.0, False), (1.0, True))
BATCHES = (1, 8, 64)
VARIANTS = {"MARS": CASES["recommended"], "MARS, strict": CASES["strict unless asked"]}
_TIMES = [f"{name}, us" for name in ("vLLM, standard", "vLLM, block", *VARIANTS)]
COLUMNS: list[list[Any]] = [["step", ""], *([name, ".0f"] for name in _TIMES)]
COLUMNS += [[f"whole step: {name}", None] for name in _TIMES]
COLUMNS += [[f"{kind}{name} / vLLM", ".2f"] for kind in ("", "whole step: ") for name in VARIANTS]


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what torch and Triton launch on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launched: list[str] = []
        self.waited: list[str] = []
        self._is_on = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, given = function._schema.name.split("::")[1], _devices((args, kwargs))
        if "meta" in given and name in WAITS:
            self.waited.append(name)
        result = function(*args, **(kwargs or {}))
        if "meta" in given and "cpu" in _devices(result):
            self.waited.append(name)
        if "meta" in given | _devices(result) and name not in VIEWS:
            self.launched.append(name)
        return result

    def note(self, name: str, given: tuple[Any, ...]) -> None:
        """Notes a launch of Triton's."""
        if self._is_on:
            if _devices(given) - {"meta"}:
                raise RuntimeError(f"{name} is given tensors on more than one device.")
            self.launched.append(name)

    def __enter__(self) -> Any:
        self._is_on = True
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._is_on = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def without_a_gpu(self) -> Iterator[None]:
        """vLLM and Triton inside work on the meta device."""
        from vllm.platforms import current_platform

        with (
            launcher.without_compiling(self.note),
            # Where vLLM's V2 puts what the host writes and the device reads.
            mock.patch.object(current_platform, "device_type", "meta"),
        ):
            yield


@contextlib.contextmanager
def as_on_an_accelerator() -> Iterator[None]:
    """vLLM and MARS inside take the path of an accelerator."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.buffer_utils import NonUvaBuffer

    from vllm_mars.report.counters import Counters

    with (
        # What the host writes and the device reads, in place.
        mock.patch.object(NonUvaBuffer, "uva", lambda buffer, n=None: buffer._uva[:n]),
        # What leaves once a second: there is no host to copy it to.
        mock.patch.object(Counters, "take_delta", lambda counters, flush=False: None),
        # A CPU has operations of its own.
        mock.patch.object(current_platform, "is_cpu", lambda: False),
    ):
        yield


def _devices(tree: Any) -> set[str]:
    return {leaf.device.type for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


def count(counted: Counted, step: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """What a step launches once it is warm, and what of it waits."""
    # Inference mode would show what composes others, such as a `to` that copies nothing.
    with torch.no_grad():
        step()
        counted.launched, counted.waited = [], []
        with counted:
            step()
    return [*counted.launched], [*counted.waited]


def _parameters(case: str, kind: str) -> list[Any]:
    from vllm import SamplingParams

    own = [{"mars_max_loss": 0.02}, {"mars_max_loss": 0.01}] if "own" in case else [None, None]
    choices = itertools.cycle(zip(TEMPERATURES[kind], own, strict=True))
    return [
        SamplingParams(temperature=temperature, extra_args=extra_args)
        for temperature, extra_args in itertools.islice(choices, BATCH)
    ]


def methods_of(is_probabilistic: bool) -> tuple[str, ...]:
    """The methods of vLLM that a step is compared with, last the best of them without loss."""
    return ("standard", "block") if is_probabilistic else ("standard",)


def count_cases(counted: Counted) -> Iterator[dict[str, Any]]:
    """What a step launches, a row for each case and kind of batch; then where requests leave."""
    from benchmarks.step_v2 import RunnerV2, Shape, step_of
    from vllm_mars import MarsConfig

    def row(name: str, bys: dict[str, Any], step: Any, *given: Any) -> dict[str, Any]:
        found = {}
        for of, by in bys.items():
            runner = RunnerV2(step, by)
            found[of] = count(counted, functools.partial(runner.step, *given))
        launched, waited = found["launches"]
        counts = {of: len(it) for of, (it, _) in found.items()}
        return {"case": name, **counts, "syncs": len(waited), "names": launched}

    for case, kind in itertools.product(CASES, TEMPERATURES):
        is_probabilistic = kind == "drawn drafts"
        step = step_of(Shape(0.7, is_probabilistic, BATCH, K, VOCAB), META, _parameters(case, kind))
        methods = {method: method for method in methods_of(is_probabilistic)}
        bys = {"launches": MarsConfig(**CASES[case]), **methods}
        yield row(f"{case}, {kind}", bys, step)
    step = step_of(Shape(0.7, False, BATCH, K, VOCAB), META)
    bys = {"launches": MarsConfig(**CASES["recommended"]), "standard": "standard"}
    yield row("two requests end and two come", bys, step, ("0", "1"))


def time_cases(rounds: int) -> Iterator[list[Any]]:
    """Rows of `COLUMNS`."""
    from benchmarks.clocks import ThreadClock, time_in_turn
    from benchmarks.step_v2 import RunnerV2, Shape, step_of
    from vllm_mars import MarsConfig

    for kind, batch in itertools.product(TIMED, BATCHES):
        shape = Shape(*kind, batch, K, VOCAB)
        step, methods = step_of(shape, ThreadClock.device), methods_of(shape.is_probabilistic)
        bys: dict[str, Any] = {method: method for method in methods}
        bys |= {name: MarsConfig(**options) for name, options in VARIANTS.items()}
        calls: dict[tuple[str, bool], Any] = {}
        for name, by in bys.items():
            calls[name, False] = step.verification(by)
            calls[name, True] = RunnerV2(step, by).step
        runs: dict[tuple[str, bool], Any] = {}
        for is_step in (False, True):
            of_kind = {call: it for call, it in calls.items() if call[1] == is_step}
            # As vLLM's runner.
            with torch.inference_mode():
                runs |= time_in_turn(ThreadClock(), of_kind, rounds, warmup=20)
        times = {call: round(float(np.percentile(of, 20)), 1) for call, of in runs.items()}
        of_each = [
            times.get((name, is_step))
            for is_step in (False, True)
            for name in ("standard", "block", *VARIANTS)
        ]
        over = [
            times[name, is_step] / times[methods[-1], is_step]
            for is_step in (False, True)
            for name in VARIANTS
        ]
        yield [str(shape), *of_each, *(round(ratio, 3) for ratio in over)]


def main(arguments: list[str] | None = None) -> int:
    """Prints the rows; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-v", action="store_true", help="names of what is launched, too")
    parser.add_argument("--rounds", type=int, default=1000, help="calls of each that are timed")
    parser.add_argument("--output", type=Path, help="JSON file of the times")
    args = parser.parse_args(arguments)
    if not launcher.has_compiler():
        print(launcher.NO_COMPILER, file=sys.stderr)
        return 2
    # Before anything imports vLLM: nothing is compiled, and a CPU build takes its Triton kernels.
    os.environ |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    backends.setdefault(
        "cpu",
        SimpleNamespace(
            driver=SimpleNamespace(is_active=lambda: True),
            compiler=SimpleNamespace(supports_target=lambda target: False),
        ),
    )
    from benchmarks import figures
    from benchmarks.step_v2 import vllm_config
    from vllm_mars.servers.provenance import describe_run

    vllm_config()
    waits, counted = 0, Counted()
    head = describe_run(None)
    head["versions"]["triton"] = triton.__version__
    run = {**head, "raw": "this file", "rounds": args.rounds}
    result: dict[str, Any] = {"columns": COLUMNS, "rows": [], "runs": [run]}
    with as_on_an_accelerator(), counted.without_a_gpu():
        for row in count_cases(counted):
            names = row.pop("names")
            print(json.dumps(row), *names if args.v else (), flush=True)
            waits += row["syncs"]
    with as_on_an_accelerator(), launcher.without_a_driver():
        for timed in time_cases(args.rounds):
            result["rows"].append(timed)
            named = {name: it for (name, _), it in zip(COLUMNS, timed, strict=True) if it}
            print(json.dumps(named), flush=True)
    if args.output:
        figures.write(args.output, result)
    return min(waits, 1)


if __name__ == "__main__":
    sys.exit(main())
