"""Random steps of a shape, and clocks, for `kernel` and `launches`."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from benchmarks.step_v2 import MAX_MODEL_LEN, Request, Step, Verify

# Of each request: its prompt, output tokens, and how many kinds of these there are, so that the
# guard against repetition finds some again.
PROMPT, ANSWER, KINDS = [5, 7], 512, 1_000
# The wait of the device while the host launches, in cycles: 2 ms at 2 GHz.
WAIT_CYCLES = 4_000_000
Name = TypeVar("Name")
Call = Callable[[], Any]


class Shape(NamedTuple):
    """A batch whose requests have `k` draft tokens each, and bfloat16 logits."""

    temperature: float
    is_drawn: bool
    batch: int
    k: int
    vocab: int

    def __str__(self) -> str:
        drafts = "probabilistic" if self.is_drawn else "fixed"
        return f"temperature {self.temperature:g}, {drafts} drafts, batch {self.batch}"


def step_of(shape: Shape, device: torch.device, params: Sequence[Any] | None = None) -> Step:
    """The inputs of one step, random and the same at each call.

    The draft's logits are near the target's. A draft token is drawn from them where drafts are
    drawn, else the target's first choice with probability 0.6, or its second or third.

    Args:
        params: a `SamplingParams` for each request; default: the shape's temperature.
    """
    from vllm import SamplingParams

    torch.manual_seed(0)
    temperature, is_drawn, batch, k, vocab = shape
    random = functools.partial(torch.rand, device=device)
    normal = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    logits, draft_logits = normal(batch * (k + 1), vocab) * 3, None
    of_drafts = logits.view(batch, k + 1, vocab)[:, :-1]
    if is_drawn:
        draft_logits = of_drafts + normal(batch, k, vocab) / 2
        noise = -random(batch, k, vocab).log().neg().log()
        drafts = (draft_logits / (temperature or 1) + noise).argmax(-1)
    else:
        rank = random(batch, k)
        rank = (rank > 0.6).long() + (rank > 0.85)
        drafts = of_drafts.topk(3).indices.gather(2, rank[..., None]).squeeze(2)
    # The meta device has no values.
    ids = [[0] * k] * batch if device.type == "meta" else drafts.tolist()
    answers = np.random.default_rng(0).integers(0, min(KINDS, vocab), (batch, ANSWER))
    # Without a seed of its own a request gets a random one.
    given = params or [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=MAX_MODEL_LEN)
        for seed in range(batch)
    ]
    requests = [
        Request(own, draft, PROMPT + answer, len(PROMPT), len(PROMPT))
        for own, draft, answer in zip(given, ids, answers.tolist(), strict=True)
    ]
    return Step(requests, logits, draft_logits, k)


def is_repeated(step: Step) -> bool:
    """Whether strict requests get the tokens of vLLM's `strict_method`.

    Not those of vLLM 0.32 by blocks: it compares with the same random numbers again in the next
    step, which MARS does not.
    """
    from vllm_mars.releases import draws_anew

    is_greedy = all(not request.sampling.temperature for request in step.requests)
    return is_greedy or step.strict_method == "standard" or draws_anew()


def tokens_of(verify: Verify) -> torch.Tensor:
    """The tokens of one call, `[batch, k + 1]` with -1 behind the last of a request."""
    _, tokens, count = verify()
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    return tokens.masked_fill(steps >= count[:, None], -1)


class ThreadClock:
    """Times calls on a CPU by what their one thread runs, so that others do not count."""

    device, name = torch.device("cpu"), "cpu"

    def time(self, call: Call) -> tuple[float, float]:
        """Microseconds of one call, twice."""
        begin = time.thread_time()
        call()
        elapsed = (time.thread_time() - begin) * 1e6
        return elapsed, elapsed


class GpuClock:
    """Times calls on the stream of one GPU, each after a read of 4 times the L2 cache."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self.name = properties.name
        self._more_than_l2 = torch.zeros(properties.L2_cache_size, device=self.device)
        self._sink = torch.empty((), device=self.device)

    def time(self, call: Call) -> tuple[float, float]:
        """Microseconds on the stream, with a cold cache, and those that the host needs.

        The device waits until the host has launched all, as behind a model's forward pass.
        `triton.testing.do_bench` empties the cache by writes, which leaves lines that the cache
        must write back while the call is timed; this reads.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(WAIT_CYCLES)  # type: ignore[no-untyped-call]
        torch.sum(self._more_than_l2, 0, out=self._sink)
        begin.record()
        before = time.perf_counter()
        call()
        host = (time.perf_counter() - before) * 1e6
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3, host


def time_in_turn(
    clock: ThreadClock | GpuClock, calls: Mapping[Name, Call], rounds: int, warmup: int = 3
) -> dict[Name, list[tuple[float, float]]]:
    """Times the calls in turn, each round in another order; microseconds as the clock has them.

    A drift of the clock rate meets all of them, and none always follows the same other one.
    """
    names = list(calls)
    runs: dict[Name, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            elapsed = clock.time(calls[name])
            if number >= 0:
                runs[name].append(elapsed)
    return runs
