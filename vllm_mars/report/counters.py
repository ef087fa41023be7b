"""Counters of the samplers: one vector of integers per engine, on the device.

The worker takes its increase from time to time, without waiting for the device, and sends it with a
step's output (`vllm_mars.report.worker`).
"""

import time
from functools import cached_property
from typing import Any

import numpy as np
import torch

from vllm_mars.kernels.budget import UNIT
from vllm_mars.kernels.counters.table import BUCKETS, CounterLayout

# Seconds between two copies from an accelerator.
INTERVAL = 1.0


class Counters:
    """Counter vector of an engine, and the part that has been reported.

    Args:
        interval: seconds between copies to the host, >= 0; None for 0 on a CPU, else `INTERVAL`.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        device: torch.device,
        interval: float | None = None,
    ) -> None:
        self.layout = layout = CounterLayout(num_speculative_tokens)
        self.device = device
        self._on_host = device.type == "cpu"
        if interval is None:
            interval = 0.0 if self._on_host else INTERVAL
        self._interval = interval
        self._next_copy = time.monotonic()
        self._taken = np.zeros(layout.size, dtype=np.int64)
        # Event after the copy in flight.
        self._copied: Any = None

    # Allocated on first use, because vLLM's sleep mode can discard memory that was allocated while
    # the model was loaded.
    @cached_property
    def device_counts(self) -> torch.Tensor:
        """int64 `[layout.size]`, added to in place; it is never reset or reallocated."""
        return torch.zeros(self.layout.size, dtype=torch.int64, device=self.device)

    @cached_property
    def bounds(self) -> torch.Tensor:
        """int64, the largest loss of a request in each bucket, in units of 2**-LOSS_BITS nats."""
        return torch.tensor([int(most / UNIT) for most in BUCKETS], device=self.device)

    def add_ended(self, lost: torch.Tensor) -> None:
        """Counts ended requests by their loss, int64 `[n]` in units of 2**-LOSS_BITS nats."""
        buckets = torch.bucketize(lost, self.bounds)
        self.device_counts[self.layout.ended].index_add_(0, buckets, torch.ones_like(lost))
        self.device_counts[self.layout.ended_lost].index_add_(0, buckets, lost)

    @cached_property
    def _host_counts(self) -> torch.Tensor:
        return torch.zeros(self.layout.size, dtype=torch.int64, pin_memory=True)

    def take_delta(self, flush: bool = False) -> list[int] | None:
        """Returns the increase since the last one returned; None if it is zero or not available.

        On an accelerator a call starts a copy, at most every `interval` seconds, and a later call
        returns its result. `flush` copies now and waits: only for when no request is left.
        """
        if self._copied is None or flush:
            now = time.monotonic()
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
        # The gain can fall for a while, but a Prometheus counter cannot: only increases above the
        # previous maximum are reported.
        increase = np.maximum(counts.numpy() - self._taken, 0)
        self._taken += increase
        entries: list[int] = increase.tolist()
        return entries if any(entries) else None
