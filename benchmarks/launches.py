"""What one step of the samplers launches, counted without a GPU: `python -m benchmarks.launches`.

The tensors are on torch's meta device, which takes the accelerator's path. Each operation that is
no view is one kernel or one copy; Triton's launches are recorded instead of run. Of Model Runner V2
it is the verification alone. A line of JSON for each case also tells what waits for the device,
which is an error, what vLLM's own sampler launches for the same batch (by its method `standard`, of
probabilistic drafts by `block`, too), and the microseconds that the host takes for each where
Triton's launches do nothing. With -v come the names.
Two more lines tell how many megabytes of bfloat16 logits a sampled step of 64 requests reads, by
vLLM's methods and by MARS, kernel by kernel. MARS may read what it reads position by position, and
what `block` reads beyond `standard`.
"""

import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends import backends
from triton.runtime import JITFunction

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
}
TEMPERATURES = {
    **{"greedy": (0.0, 0.0), "sampled": (0.7, 0.7), "mixed": (0.0, 0.7)},
    "drawn drafts": (0.7, 0.7),
}


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what torch and Triton launch on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launched: list[str] = []
        self.waited: list[str] = []

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

    def launch(self, kernel: Any, *args: Any, **kwargs: Any) -> None:
        """In the place of `JITFunction.run`."""
        if _devices((args, kwargs)) - {"meta"}:
            raise RuntimeError(f"{kernel.fn.__name__} is given tensors on more than one device.")
        self.launched.append(kernel.fn.__name__)


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


def host_times(*steps: Callable[[], Any]) -> list[float]:
    """Microseconds of the host for each step, the median of 200 in turn."""
    from benchmarks.kernel_step import HostClock, time_in_turn

    with mock.patch.object(JITFunction, "run", lambda *_, **__: None), torch.no_grad():
        runs = time_in_turn(HostClock(), dict(enumerate(steps)), rounds=200)
    return [round(statistics.median(host for _, host in runs[n])) for n in range(len(steps))]


def _parameters(case: str, kind: str) -> list[Any]:
    from vllm import SamplingParams

    own = [{"mars_max_loss": 0.02}, {"mars_max_loss": 0.01}] if "own" in case else [None, None]
    choices = itertools.cycle(zip(TEMPERATURES[kind], own, strict=True))
    return [
        SamplingParams(temperature=temperature, extra_args=extra_args)
        for temperature, extra_args in itertools.islice(choices, BATCH)
    ]


def methods_of(kind: str) -> tuple[str, ...]:
    """The rejection sample methods of vLLM that a kind of batch is compared with."""
    return ("standard", "block") if kind == "drawn drafts" else ("standard",)


def step_of(by: Any, case: str, kind: str) -> Callable[[], Any]:
    """The verification of a step of Model Runner V2, by options or by a method of vLLM."""
    from benchmarks.kernel_step import Shape, Step

    step = Step(Shape(0.7, kind == "drawn drafts", BATCH, K, VOCAB), META)
    return step.verification(by, _parameters("" if isinstance(by, str) else case, kind))


def megabytes(counted: Counted, is_drawn: bool) -> dict[str, Any]:
    """What a step reads of the logits, by who verifies and by kernel, and what MARS may read."""
    from benchmarks.kernel_step import Shape, Step
    from vllm_mars import MarsConfig

    shape = Shape(1.0, is_drawn, 64, K, 128_256)
    step, row = Step(shape, META), 2 * shape.vocab / 1e6
    found: dict[str, Any] = {}
    for name, by in {
        **{"vLLM, standard": "standard", "vLLM, block": "block"},
        "MARS": MarsConfig(max_loss=0.02),
    }.items():
        launched, _ = count(counted, step.verification(by))
        read = {of: rows * row for of, rows in shape.rows_read().items() if of in launched}
        found[name] = {"all": round(sum(read.values()), 1)}
        found[name] |= {of: round(each, 1) for of, each in read.items()}
    beyond = found["vLLM, block"]["all"] - found["vLLM, standard"]["all"]
    by_position = found["MARS"]["all"] - found["MARS"].get("mass_kernel", 0.0)
    return {**found, "MARS at most": round(by_position + beyond, 1)}


def count_all() -> Iterator[dict[str, Any]]:
    """A row for each case and kind of batch, and two of megabytes."""
    from vllm.platforms import current_platform

    from benchmarks.kernel_step import vllm_config
    from vllm_mars import MarsConfig

    vllm_config()
    counted = Counted()
    with (
        mock.patch.object(
            JITFunction, "run", lambda *args, **given: counted.launch(*args, **given)
        ),
        # Where vLLM's V2 puts what the host writes and the device reads.
        mock.patch.object(current_platform, "device_type", "meta"),
        # A CPU has operations of its own.
        mock.patch.object(current_platform, "is_cpu", lambda: False),
    ):
        for case, kind in itertools.product(CASES, TEMPERATURES):
            methods = methods_of(kind)
            of_vllm = [step_of(method, case, kind) for method in methods]
            steps = [*of_vllm, step_of(MarsConfig(**CASES[case]), case, kind)]
            *others, (launched, waited) = (count(counted, step) for step in steps)
            row = {"case": f"{case}, {kind}", "launches": len(launched), "syncs": len(waited)}
            row |= {method: len(it) for method, (it, _) in zip(methods, others, strict=True)}
            names = *(f"{method}_host_us" for method in methods), "host_us"
            yield {**row, **dict(zip(names, host_times(*steps), strict=True)), "names": launched}
        for is_drawn in (False, True):
            drafts = "probabilistic" if is_drawn else "fixed"
            yield {"megabytes": drafts, **megabytes(counted, is_drawn)}


def main() -> int:
    """Prints the rows; returns the exit status."""
    # Before anything imports vLLM: nothing is compiled, and a CPU build takes its Triton kernels.
    os.environ |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    is_active = SimpleNamespace(is_active=lambda: True)
    backends.setdefault("cpu", SimpleNamespace(driver=is_active, compiler=None))
    waits = 0
    for row in count_all():
        names = row.pop("names", ())
        print(json.dumps(row), *names if "-v" in sys.argv[1:] else (), flush=True)
        waits += row.get("syncs", 0)
    return min(waits, 1)


if __name__ == "__main__":
    sys.exit(main())
