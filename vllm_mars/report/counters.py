"""What the samplers count: one vector of integers per engine, kept on the device.

The vector only grows. The worker takes its increase off now and then, without waiting for the
device, and sends it along with a step's output (`vllm_mars.report.worker`).
"""

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch

from vllm_mars.kernels.budget import UNIT
from vllm_mars.kernels.counters.table import BUCKETS, CounterLayout

# Seconds between two copies from an accelerator.
INTERVAL = 1.0


class Counters:
    """The vector of one engine on its device, and what has been taken from it.

    Args:
        num_speculative_tokens: K, the longest draft of the engine.
        device: where it is counted.
        interval: seconds between two copies to the host, >= 0; by default `INTERVAL` on an
            accelerator and 0 on a CPU, where nothing is copied.
        clock: gives the time in seconds.

    Attributes:
        layout: which entry is what.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        device: torch.device,
        interval: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout = layout = CounterLayout(num_speculative_tokens)
        self.device = device
        self._on_host = device.type == "cpu"
        if interval is None:
            interval = 0.0 if self._on_host else INTERVAL
        self._interval = interval
        self._clock = clock
        self._next_copy = clock()
        self._taken = np.zeros(layout.size, dtype=np.int64)
        # Recorded behind the copy that is under way.
        self._copied: Any = None

    # Built on first use: what is allocated while the model is loaded can be memory that vLLM's
    # sleep mode throws away.
    @cached_property
    def device_counts(self) -> torch.Tensor:
        """int64 `[layout.size]`, to be added into; it never shrinks and never moves."""
        return torch.zeros(self.layout.size, dtype=torch.int64, device=self.device)

    @cached_property
    def bounds(self) -> torch.Tensor:
        """int64, the most that a request of each bucket lost, in units of 2**-LOSS_BITS nats."""
        return torch.tensor([int(most / UNIT) for most in BUCKETS], device=self.device)

    @cached_property
    def _one(self) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int64, device=self.device)

    def add_ended(self, lost: torch.Tensor) -> None:
        """Counts requests that have ended; nothing is waited for.

        Args:
            lost: int64 `[n]`, what each lost, in units of 2**-LOSS_BITS nats.
        """
        buckets = torch.bucketize(lost, self.bounds)
        self.device_counts[self.layout.ended].index_add_(0, buckets, self._one.expand_as(lost))
        self.device_counts[self.layout.ended_lost].index_add_(0, buckets, lost)

    @cached_property
    def _host_counts(self) -> torch.Tensor:
        return torch.zeros(self.layout.size, dtype=torch.int64, pin_memory=True)

    def take_delta(self, flush: bool = False) -> list[int] | None:
        """The increase since the last one that was returned, if it is at hand.

        On an accelerator a call starts a copy to the host, at most every `interval` seconds, and
        a later one returns its result; in between, and while the copy runs, there is none. What
        is not returned now is part of a later increase.

        Args:
            flush: whether to copy now and wait for it; only for when nothing is left to do.

        Returns:
            An entry per counter, or None if nothing has been counted or the copy is not there.
        """
        if self._copied is None or flush:
            now = self._clock()
            if not flush and now < self._next_copy:
                return None
            self._next_copy = now + self._interval
            if self._on_host:
                return self._increase(self.device_counts)
            self._host_counts.copy_(self.device_counts, non_blocking=True)
            self._copied = torch.Event(self.device)
            self._copied.record()
        if flush:
            self._copied.synchronize()
        elif not self._copied.query():
            return None
        self._copied = None
        return self._increase(self._host_counts)

    def _increase(self, counts: torch.Tensor) -> list[int] | None:
        # What is gained can fall for a while, and Prometheus takes no decrease: what is missing is
        # held back until it has risen again.
        increase = np.maximum(counts.numpy() - self._taken, 0)
        self._taken += increase
        entries: list[int] = increase.tolist()
        return entries if any(entries) else None
