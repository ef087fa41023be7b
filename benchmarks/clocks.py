"""Clocks of one call, for `kernel` and `launches`."""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

# The wait of the device while the host launches, in cycles: 2 ms at 2 GHz.
WAIT_CYCLES = 4_000_000
Name = TypeVar("Name")
Call = Callable[[], Any]


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
