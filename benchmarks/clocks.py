"""Clocks of one call, for `kernel` and `launches`."""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

# Cycles that the device waits while the host launches: 2 ms at 2 GHz.
WAIT_CYCLES = 4_000_000
Name = TypeVar("Name")
Call = Callable[[], Any]


class ThreadClock:
    """Times calls on a CPU by thread time, so that other processes do not count."""

    device, name = torch.device("cpu"), "cpu"

    def time(self, call: Call) -> tuple[float, float]:
        """Returns the microseconds of one call twice, as device and host time."""
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
        """Returns microseconds on the stream, with a cold cache, and on the host.

        The device waits until the host has launched everything, as after a model's forward pass.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(WAIT_CYCLES)  # type: ignore[no-untyped-call]
        # Reads, since lines that are written (`triton.testing.do_bench`) would be written back in
        # the timed call.
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
    """Times the calls in rotating order, so that drifts of the clock rate affect all of them."""
    names = list(calls)
    runs: dict[Name, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            elapsed = clock.time(calls[name])
            if number >= 0:
                runs[name].append(elapsed)
    return runs
