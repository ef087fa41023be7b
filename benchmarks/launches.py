"""Counts the launches of a step of Model Runner V2 and times its host side, without a GPU.

`python -m benchmarks.launches --output build/host.json`

Launches are counted on torch's meta device, which takes the accelerator's path. Each operation that
is not a view is one kernel or one copy. A step (`RunnerV2.step`) is vLLM's
`RejectionSampler.__call__` with everything that MARS wraps around it, including the speculator's
call. Each case prints a line of JSON with the launches, the launches that wait for the device,
which are an error, and those of vLLM's sampler for the same batch (method `standard` and, for
probabilistic drafts, `block`). -v adds names.

Host times are microseconds of this thread for the verification and for the whole step, of vLLM's
methods, MARS, and MARS with strict requests on a server that is strict by default; then the ratios
of MARS to vLLM's best lossless method. All variants run in turn, and the 20th percentile is
reported, which is least sensitive to other work on the machine. Tensors are on the CPU, and Triton
launches kernels compiled for a GPU with its own launcher (see `launcher`), so that only the
driver's part of a launch and CUDA's allocator are missing. --output writes these times to a file
for `make figures`.

Exit status: 0; 1 if something waits for the device; 2 without a C compiler.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
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
# fmt: off
VIEWS = {
    "view", "slice", "select", "unsqueeze", "squeeze", "expand", "detach", "alias", "t", "split",
    "transpose", "permute", "as_strided", "unbind", "lift_fresh", "_unsafe_view", "unfold",
    "empty", "empty_strided", "empty_like", "new_empty", "_reshape_alias",
}
# fmt: on
# Operations that copy a value to the host.
WAITS = {"_local_scalar_dense", "nonzero", "equal"}
CASES: dict[str, dict[str, Any]] = {
    "theta": {"theta": 0.9},
    "price": {"price": 0.3, "strict_opening": 0},
    "recommended": {"max_loss": 0.02},
    "recommended, spans, own bounds": {"max_loss": 0.02, "strict_spans": ((5, 6),)},
    "strict unless asked": {"max_loss": 0, "limit": 0.02},
}
TEMPERATURES = {
    "greedy": (0.0, 0.0),
    "sampled": (0.7, 0.7),
    "mixed": (0.0, 0.7),
    "drawn drafts": (0.7, 0.7),
}
# (temperature, probabilistic drafts) of timed steps.
TIMED = ((0.0, False), (1.0, False), (1.0, True))
BATCHES = (1, 8, 64)
VARIANTS = {"MARS": CASES["recommended"], "MARS, strict": CASES["strict unless asked"]}
_TIMES = [f"{name}, us" for name in ("vLLM, standard", "vLLM, block", *VARIANTS)]
# A page shows those with a format.
COLUMNS: list[list[Any]] = [
    ["step", ""],
    *([name, None if name == "MARS, strict, us" else ".0f"] for name in _TIMES),
]
COLUMNS += [[f"whole step: {name}", None] for name in _TIMES]
COLUMNS += [[f"{name} / vLLM", None] for name in VARIANTS]
COLUMNS += [[f"whole step: {name} / vLLM", ".2f"] for name in VARIANTS]


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the launches of torch and Triton on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launched: list[str] = []
        self.waited: list[str] = []
        self._is_on = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.split("::")[1]
        devices = _devices((args, kwargs))
        if "meta" in devices and name in WAITS:
            self.waited.append(name)
        result = function(*args, **(kwargs or {}))
        if "meta" in devices and "cpu" in _devices(result):
            self.waited.append(name)
        if "meta" in devices | _devices(result) and name not in VIEWS:
            self.launched.append(name)
        return result

    def note(self, name: str, args: tuple[Any, ...]) -> None:
        if self._is_on:
            if _devices(args) - {"meta"}:
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
        """Makes vLLM and Triton use the meta device."""
        from vllm.platforms import current_platform

        with (
            launcher.without_compiling(self.note),
            # Device of V2's buffers that the host writes and the device reads.
            mock.patch.object(current_platform, "device_type", "meta"),
        ):
            yield


@contextlib.contextmanager
def as_on_an_accelerator() -> Iterator[None]:
    """Makes vLLM and MARS take the path of an accelerator."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.buffer_utils import NonUvaBuffer

    from vllm_mars.report.counters import Counters

    with (
        # The buffer that the host writes is also the one that the device reads.
        mock.patch.object(NonUvaBuffer, "uva", lambda buffer, n=None: buffer._uva[:n]),
        # The counters' copy to the host, once a second: the meta device has no values.
        mock.patch.object(Counters, "take_delta", lambda counters, flush=False: None),
        # A CPU would use other operations.
        mock.patch.object(current_platform, "is_cpu", lambda: False),
    ):
        yield


def _devices(tree: Any) -> set[str]:
    return {leaf.device.type for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


def count(counted: Counted, step: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """Returns the launches of a warm step, and those that wait."""
    # Inference mode would show composite operations, such as a `to` that copies nothing.
    with torch.no_grad():
        step()
        counted.launched, counted.waited = [], []
        with counted:
            step()
    return [*counted.launched], [*counted.waited]


def _parameters(case: str, kind: str) -> list[Any]:
    from vllm import SamplingParams

    bounds = [{"mars_max_loss": 0.02}, {"mars_max_loss": 0.01}]
    extra = bounds if "own" in case else [None, None]
    choices = itertools.cycle(zip(TEMPERATURES[kind], extra, strict=True))
    return [
        SamplingParams(temperature=temperature, extra_args=extra_args)
        for temperature, extra_args in itertools.islice(choices, BATCH)
    ]


def methods_of(is_probabilistic: bool) -> tuple[str, ...]:
    """Returns vLLM's methods to compare with; the last is its best lossless one."""
    return ("standard", "block") if is_probabilistic else ("standard",)


def count_cases(counted: Counted) -> Iterator[dict[str, Any]]:
    """Yields a row of launches per case and kind of batch, then one with finished requests."""
    from benchmarks.step_v2 import RunnerV2, Shape, step_of
    from vllm_mars import MarsConfig

    def row(
        name: str, variants: dict[str, Any], step: Any, finished: Sequence[str] = ()
    ) -> dict[str, Any]:
        launches = {}
        for variant, by in variants.items():
            runner = RunnerV2(step, by)
            launches[variant] = count(counted, functools.partial(runner.step, finished))
        launched, waited = launches["launches"]
        counts = {variant: len(names) for variant, (names, _) in launches.items()}
        return {"case": name, **counts, "syncs": len(waited), "names": launched}

    for case, kind in itertools.product(CASES, TEMPERATURES):
        is_probabilistic = kind == "drawn drafts"
        step = step_of(Shape(0.7, is_probabilistic, BATCH, K, VOCAB), META, _parameters(case, kind))
        methods = {method: method for method in methods_of(is_probabilistic)}
        variants = {"launches": MarsConfig(**CASES[case]), **methods}
        yield row(f"{case}, {kind}", variants, step)
    step = step_of(Shape(0.7, False, BATCH, K, VOCAB), META)
    variants = {"launches": MarsConfig(**CASES["recommended"]), "standard": "standard"}
    yield row("two requests end and two come", variants, step, finished=("0", "1"))


def time_cases(rounds: int) -> Iterator[list[Any]]:
    from benchmarks.clocks import ThreadClock, time_in_turn
    from benchmarks.step_v2 import RunnerV2, Shape, step_of
    from vllm_mars import MarsConfig

    for kind, batch in itertools.product(TIMED, BATCHES):
        shape = Shape(*kind, batch, K, VOCAB)
        step = step_of(shape, ThreadClock.device)
        methods = methods_of(shape.is_probabilistic)
        variants: dict[str, Any] = {method: method for method in methods}
        variants |= {name: MarsConfig(**options) for name, options in VARIANTS.items()}
        calls: dict[tuple[str, bool], Any] = {}
        for name, by in variants.items():
            calls[name, False] = step.verification(by)
            calls[name, True] = RunnerV2(step, by).step
        runs: dict[tuple[str, bool], Any] = {}
        for is_step in (False, True):
            timed = {key: call for key, call in calls.items() if key[1] == is_step}
            # As vLLM's runner.
            with torch.inference_mode():
                runs |= time_in_turn(ThreadClock(), timed, rounds, warmup=20)
        times = {key: round(float(np.percentile(run, 20)), 1) for key, run in runs.items()}
        cells = [
            times.get((name, is_step))
            for is_step in (False, True)
            for name in ("standard", "block", *VARIANTS)
        ]
        ratios = [
            times[name, is_step] / times[methods[-1], is_step]
            for is_step in (False, True)
            for name in VARIANTS
        ]
        yield [str(shape), *cells, *(round(ratio, 3) for ratio in ratios)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-v", action="store_true", help="also print the names of launches")
    parser.add_argument("--rounds", type=int, default=1000, help="timed calls of each")
    parser.add_argument("--output", type=Path, help="JSON file of the times")
    args = parser.parse_args(arguments)
    if not launcher.has_compiler():
        print(launcher.NO_COMPILER, file=sys.stderr)
        return 2
    # Before anything imports vLLM: nothing is compiled, and a CPU build uses its Triton kernels.
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
    waits = 0
    counted = Counted()
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
            named = {name: cell for (name, _), cell in zip(COLUMNS, timed, strict=True) if cell}
            print(json.dumps(named), flush=True)
    if args.output:
        figures.write(args.output, result)
    return min(waits, 1)


if __name__ == "__main__":
    sys.exit(main())
