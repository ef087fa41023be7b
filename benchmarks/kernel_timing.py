"""Clocks for benchmarks: the host's, or CUDA events around a call with a cold L2 cache."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

Call = Callable[[], Any]
Name = TypeVar("Name")


class HostClock:
    """Times calls on a CPU; where it interprets kernels, in a dry run, the numbers mean nothing."""

    device = torch.device("cpu")
    # Of the buffers with which bandwidth is measured.
    copy_bytes = 2**20

    def describe(self) -> dict[str, Any]:
        """The device and how it is timed, for the result file."""
        return {"name": "cpu", "sms": 4, "l2_bytes": 0, "timing": "not meaningful"}

    def capture(self, call: Call) -> Call:
        """A replay of a call as a CUDA graph; it returns the outputs that it writes again."""
        raise RuntimeError("a CPU has no CUDA graphs")

    def time(self, call: Call) -> float:
        """Microseconds of one call."""
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6


class GpuClock(HostClock):
    """Times calls on the stream of one GPU, each with a cold L2 cache."""

    # Far more than the cache, and long against a launch.
    copy_bytes = 2**31

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._properties = torch.cuda.get_device_properties(self.device)
        self._more_than_l2 = torch.zeros(self._properties.L2_cache_size, device=self.device)
        self._sink = torch.empty((), device=self.device)

    def describe(self) -> dict[str, Any]:
        """The device and how it is timed."""
        return {
            "name": self._properties.name,
            "sms": self._properties.multi_processor_count,
            "l2_bytes": self._properties.L2_cache_size,
            "memory_bytes": self._properties.total_memory,
            "cuda": torch.version.cuda,
            "timing": "CUDA events around one call; before each, 4 times the L2 cache is read",
        }

    def capture(self, call: Call) -> Call:
        """Captures a call that has run before."""
        graph = torch.cuda.CUDAGraph()
        # A failed capture can leave its own stream the current one; this puts ours back.
        with torch.cuda.stream(torch.cuda.current_stream()):
            with torch.cuda.graph(graph):
                outputs = call()

        def replay() -> Any:
            graph.replay()
            return outputs

        return replay

    def time(self, call: Call) -> float:
        """Microseconds on the stream, behind a read that makes the cache cold.

        A write would leave lines that the cache must write back while the call is timed. The host
        queues a graph while the read goes on, so a graph never waits for the host. A call of many
        launches does, and that time counts.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.sum(self._more_than_l2, 0, out=self._sink)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3


def time_in_turn(
    clock: HostClock, calls: dict[Name, Call], rounds: int, warmup: int = 3
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


def summary(runs: list[float]) -> dict[str, Any]:
    """Median, 20th and 80th percentile in microseconds, with the raw runs."""
    p20, median, p80 = np.percentile(runs, (20, 50, 80)).round(3).tolist()
    return {"median": median, "p20": p20, "p80": p80, "runs": runs}


def measure_bandwidth(clock: HostClock) -> dict[str, Any]:
    """Bandwidth of the device's memory in GB/s, by two reductions and a copy.

    The best of them is what kernels are held against: torch's reductions alone can fall short of
    what the memory gives.
    """
    source = torch.rand(clock.copy_bytes // 4, device=clock.device)
    target = torch.empty_like(source)
    calls: dict[str, Call] = {
        "sum": source.sum,
        "max": source.amax,
        "copy": lambda: target.copy_(source),
    }
    # A reduction reads the buffer once, a copy reads it and writes another.
    moved = {"sum": source.nbytes, "max": source.nbytes, "copy": 2 * source.nbytes}
    results = {name: summary(runs) for name, runs in time_in_turn(clock, calls, rounds=20).items()}
    rates = {name: moved[name] / results[name]["median"] / 1e3 for name in calls}
    return {
        "best_gb_per_s": max(rates.values()),
        "buffer_bytes": source.nbytes,
        **{name: {"gb_per_s": rates[name], "us": results[name]} for name in calls},
    }
