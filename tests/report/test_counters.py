"""No count is lost or taken twice."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_mars.report.counters import INTERVAL, Counters

CPU = torch.device("cpu")
UNIT = 2.0**-16


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def test_counts_on_a_cpu_are_taken_at_most_once_per_interval(clock):
    counters = Counters(1, CPU, interval=1.0)
    taken = []
    for clock.now, flush in ((0.0, False), (0.9, False), (0.9, True), (1.5, False), (2.0, False)):
        counters.device_counts[-1] += 1
        delta = counters.take_delta(flush)
        taken.append(delta and delta[-1])
    assert taken == [1, None, 2, None, 2]


def test_ended_requests_are_counted_by_loss():
    counters = Counters(1, CPU)
    counters.add_ended(torch.tensor([0, 4096, 4097, 40 << 16, 4097]))
    counts = counters.device_counts.tolist()
    assert counts[counters.layout.ended] == [2, 2, *[0] * 8, 1]
    assert counts[counters.layout.ended_lost] == [4096, 8194, *[0] * 8, 40 << 16]
    assert sum(counts[: counters.layout.ended.start]) == 0


class Accelerator:
    """An accelerator's event and the host's buffer; a copy ends in `run` or `synchronize`."""

    def __init__(self, size):
        self.counts = torch.zeros(size, dtype=torch.int64)
        self.under_way = None

    def copy_(self, counts, non_blocking):
        assert non_blocking
        self.under_way = counts.clone()

    def record(self):
        pass

    def query(self):
        return self.under_way is None

    def synchronize(self):
        self.run()

    def run(self):
        if self.under_way is not None:
            self.counts, self.under_way = self.under_way, None

    def numpy(self):
        return self.counts.numpy()


@pytest.fixture
def accelerated(monkeypatch, clock):
    """Counters that copy through an `Accelerator`, and the accelerator."""
    counters = Counters(1, CPU, INTERVAL)
    device = Accelerator(counters.layout.size)
    monkeypatch.setattr(torch, "Event", lambda _: device)
    counters._on_host = False
    counters._host_counts = device
    return counters, device


def test_no_count_is_lost_or_doubled(accelerated, clock):
    generator = np.random.default_rng(7)
    counters, device = accelerated
    taken = np.zeros(counters.layout.size, dtype=np.int64)
    for _ in range(3000):
        clock.now += generator.exponential(0.4)
        counts = generator.integers(0, 3, counters.layout.size)
        counters.device_counts.add_(torch.from_numpy(counts))
        if generator.random() < 0.3:
            device.run()
        flush = generator.random() < 0.05
        delta = counters.take_delta(flush)
        if delta is not None:
            assert min(delta) >= 0
            taken += delta
        # A flush also waits for a copy in flight.
        assert not flush or taken.tolist() == counters.device_counts.tolist()
    taken += counters.take_delta(flush=True) or 0
    assert taken.tolist() == counters.device_counts.tolist()
