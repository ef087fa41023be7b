"""One greedy verification step, what verifies it, and clocks, for `kernel.py`."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from triton.testing import do_bench

from vllm_mars import verify_greedy

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Name = TypeVar("Name")
Call = Callable[[], Any]


class Shape(NamedTuple):
    """One cell of the grid; each request has `k` draft tokens."""

    batch: int
    k: int
    vocab: int
    dtype: str

    def __str__(self) -> str:
        return f"batch {self.batch}, K {self.k}, vocab {self.vocab:,}, {self.dtype}"

    @property
    def logits_bytes(self) -> int:
        """What any verification must read once: a row for each draft token, and the bonus rows."""
        return self.batch * (self.k + 1) * self.vocab * DTYPES[self.dtype].itemsize


class Step:
    """The inputs of one step, random and the same at each call.

    A request's rows are its draft rows and then its bonus row.

    Attributes:
        logits: `[batch * (k + 1), vocab]`.
        drafts: `[batch * k]` int32; the target's first choice with probability 0.6, else its
            second or third.
        protected: `[vocab]` bool, one token in 97.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        batch, k, vocab, dtype = shape
        shape_of_logits = batch * (k + 1), vocab
        logits = torch.empty(shape_of_logits, device=device).normal_(0, 3, generator=generator)
        rank = torch.rand(batch * k, device=device, generator=generator)
        rank = (rank > 0.6).long() + (rank > 0.85)
        self.shape = shape
        self.logits = logits.to(DTYPES[dtype])
        best = self.logits.topk(3).indices.view(batch, k + 1, 3)[:, :-1].flatten(0, 1)
        self.drafts = best.gather(1, rank[:, None]).squeeze(1).int()
        self.ends = torch.arange(1, batch + 1, device=device, dtype=torch.int32) * k
        self.protected = torch.arange(vocab, device=device) % 97 == 0

    def verify(self, backend: Any, **rule: float) -> torch.Tensor:
        """Output tokens of `verify_greedy` by a rule, such as `theta=0.9`."""
        options: dict[str, Any] = {**rule, "protected": self.protected, "backend": backend}
        steps = self.logits, self.drafts, self.ends
        output = verify_greedy(*steps, max_draft_len=self.shape.k, **options)
        tokens: torch.Tensor = output.output_token_ids
        return tokens


class Variant(NamedTuple):
    """What to time, what makes of its outputs `[batch, k + 1]` tokens, and which are right."""

    run: Callable[[], tuple[torch.Tensor, ...]]
    tokens: Callable[..., torch.Tensor]
    expected: torch.Tensor

    def check(self, name: str, call: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        """Compares the tokens of a call, after the outputs of one before were poisoned.

        Raises:
            MismatchError: they are wrong.
        """
        for output in call():
            output.fill_(-7)
        tokens = self.tokens(*call()).int()
        wrong = (tokens != self.expected.int()).any(1).nonzero().flatten().tolist()
        if wrong:
            raise MismatchError(
                f"{name}: {len(wrong)} of {len(tokens)} requests differ from the reference, the "
                f"first is request {wrong[0]}."
            )


class MismatchError(Exception):
    """A variant gave other tokens than the reference."""


def mars(step: Step, **rule: float) -> Variant:
    """`verify_greedy` of the Triton kernels.

    The tensors of one value per request that a server keeps are made anew at each call, and count.
    """
    return Variant(
        lambda: (step.verify("triton", **rule),),
        lambda tokens: tokens,
        step.verify("torch", **rule),
    )


def vllm_v2(step: Step) -> Variant:
    """`rejection_sample` of vLLM's Model Runner V2, which gets raw logits; all requests greedy."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    batch, k, _, _ = step.shape
    device = step.logits.device
    requests = torch.arange(batch, device=device, dtype=torch.int32)
    offsets = torch.arange(k + 1, device=device, dtype=torch.int32)
    inputs = step.drafts.new_zeros(batch, k + 1)
    # A row's draft token is the model's input at the next row.
    inputs[:, 1:] = step.drafts.view(batch, k)
    run = functools.partial(
        rejection_sample,
        step.logits,
        None,
        inputs.flatten(),
        torch.arange(batch + 1, device=device, dtype=torch.int32) * (k + 1),
        offsets.long().repeat(batch),
        requests,
        requests.repeat_interleave(k + 1),
        offsets.repeat(batch),
        torch.zeros(batch, device=device),
        torch.zeros(batch, device=device, dtype=torch.int64),
        k,
    )
    return Variant(
        run,
        lambda tokens, count: tokens.masked_fill(offsets >= count[:, None], -1),
        step.verify("torch", theta=1.0),
    )


class HostClock:
    """Times calls on a CPU."""

    device, name = torch.device("cpu"), "cpu"

    def capture(self, call: Call) -> Call:
        """A replay of a call as a CUDA graph; it returns the outputs that it writes again."""
        raise RuntimeError("a CPU has no CUDA graphs")

    def time(self, call: Call) -> float:
        """Microseconds of one call."""
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6

    def bandwidth(self) -> float:
        """GB/s of the memory; not measured here."""
        return 1.0


class GpuClock(HostClock):
    """Times calls on the stream of one GPU, each after a read of 4 times the L2 cache."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self.name = properties.name
        self._more_than_l2 = torch.zeros(properties.L2_cache_size, device=self.device)
        self._sink = torch.empty((), device=self.device)

    def capture(self, call: Call) -> Call:
        """Captures a call that has run before."""
        graph = torch.cuda.CUDAGraph()
        # A failed capture can leave its own stream the current one; this puts ours back.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            outputs = call()

        def replay() -> Any:
            graph.replay()
            return outputs

        return replay

    def time(self, call: Call) -> float:
        """Microseconds on the stream, behind a read that makes the cache cold.

        `triton.testing.do_bench` writes instead, which leaves lines that the cache must write back
        while the call is timed. The host queues a graph while the read goes on.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.sum(self._more_than_l2, 0, out=self._sink)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def bandwidth(self) -> float:
        """The better of reading 2 GB and of copying them, which reads and writes."""
        source = torch.rand(2**29, device=self.device)
        target = torch.empty_like(source)
        read, copied = (
            do_bench(call, return_mode="median")
            for call in (source.sum, lambda: target.copy_(source))
        )
        return float(max(source.nbytes / read, 2 * source.nbytes / copied) / 1e6)


def time_in_turn(
    clock: HostClock, calls: Mapping[Name, Call], rounds: int, warmup: int = 3
) -> dict[Name, list[float]]:
    """Times the calls in turn, each round in another order, and returns microseconds.

    A drift of the clock rate meets all of them, and none always follows the same other one.
    """
    names = list(calls)
    runs: dict[Name, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            elapsed = clock.time(calls[name])
            if number >= 0:
                runs[name].append(round(elapsed, 3))
    return runs


def summary(runs: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile."""
    p20, median, p80 = np.percentile(runs, (20, 50, 80)).round(3).tolist()
    return {"median": median, "p20": p20, "p80": p80}
