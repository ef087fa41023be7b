"""What is counted in shadow mode, and that no count is lost or taken twice."""

import numpy as np
import pytest
import torch

import oracle
import steps_v1
from vllm_mars.config import MarsConfig
from vllm_mars.kernels.terms import Verdict
from vllm_mars.runner.counters import INTERVAL, CounterLayout, Counters

CPU = torch.device("cpu")
UNIT = 2.0**-16


def chances(rows, drafts, rule, value, is_greedy, protected):
    """How probable it is that each draft token is accepted, if those before it are."""
    theta, gap = (value if rule == name else strict for name, strict in (("theta", 1), ("gap", 0)))
    price = value if rule == "price" else None
    if is_greedy:
        verdicts = oracle.judge(rows, drafts, theta, gap, protected, price=price)
        return [float(verdict in (Verdict.FIRST, Verdict.RELAXED)) for verdict in verdicts]
    is_strict = [
        bool({draft, oracle.argmax(row)} & protected)
        for row, draft in zip(rows, drafts, strict=True)
    ]
    found = []
    biases = oracle.tilts(rows, drafts, price or 0.0, is_strict)
    for row, draft, bias in zip(rows, drafts, biases, strict=True):
        if price is None and oracle.is_relaxed(row, draft, theta, gap, protected):
            found.append(1.0)
        else:
            found.append(oracle.served(row, draft, bias)[draft] if draft >= 0 else 0.0)
    return found


@pytest.mark.usefixtures("mended_kernels")
@pytest.mark.parametrize("temperatures", [[0.0] * 4, [1.0] * 4, [0.0, 1.0, 0.0, 1.0]])
@pytest.mark.parametrize(
    ("rule", "values"), [("theta", (0.5, 0.9)), ("gap", (0.3, 2.0)), ("price", (0.3, 1.0, 4.0))]
)
def test_shadow_counts_what_each_value_would_accept(rule, values, temperatures):
    """Before any draw, and the output is strict."""
    config = MarsConfig(**{rule: values[0]}, shadow=values, repeat_guard=0)
    protected = frozenset({3, 50})
    sampler = steps_v1.mars_sampler(config, protected)
    layout = sampler.verification.counters.layout
    expected = np.zeros((len(values), 5))
    for seed in range(6):
        metadata, logits = steps_v1.step(seed)
        drafts = steps_v1.drafts_of(metadata)
        given = steps_v1.sampling(temperatures, seeds=[1, 2, 3, 4], drafts=drafts)
        sampler(metadata, None, logits.clone(), given)
        rows = logits[metadata.target_logits_indices].split(steps_v1.LENGTHS)
        for own, draft, temperature in zip(rows, drafts, temperatures, strict=True):
            for index, value in enumerate(values):
                each = chances(own.tolist(), draft, rule, value, temperature == 0, protected)
                expected[index, : len(draft)] += np.cumprod(each)
    counts = sampler.verification.counters.device_counts
    found = counts[layout.shadowed].reshape(len(values), 5) * UNIT
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert not counts[layout.relaxed].any() and not counts[layout.gained].any()
    assert len({tuple(row) for row in expected.round(3).tolist()}) == len(values), "they differ"


def test_a_step_without_drafts_counts_nothing():
    sampler = steps_v1.mars_sampler(MarsConfig(theta=0.5))
    metadata = steps_v1.metadata_of([[], []])
    sampler(metadata, None, torch.randn(2, 9), steps_v1.sampling([0.0, 0.0]))
    assert sampler.verification.counters.take_delta() is None


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_taken_on_a_cpu_at_once_but_no_more_than_once_an_interval():
    clock = Clock()
    counters = Counters(CounterLayout(1), CPU, interval=1.0, clock=clock)
    taken = []
    for clock.now, flush in ((0.0, False), (0.9, False), (0.9, True), (1.5, False), (2.0, False)):
        counters.device_counts[-1] += 1
        delta = counters.take_delta(flush)
        taken.append(delta and delta[-1])
    assert taken == [1, None, 2, None, 2]


class Accelerator:
    """Stands in for an accelerator's event and the host's memory: copies are done when it is told.

    Or when they are waited for.
    """

    def __init__(self, size):
        self.counts = torch.zeros(size, dtype=torch.int64)
        self.under_way = None
        self.copies = self.waits = 0

    def copy_(self, counts, non_blocking):
        assert non_blocking
        self.under_way = counts.clone()
        self.copies += 1

    def record(self):
        pass

    def query(self):
        return self.under_way is None

    def synchronize(self):
        self.waits += 1
        self.run()

    def run(self):
        if self.under_way is not None:
            self.counts, self.under_way = self.under_way, None

    def numpy(self):
        return self.counts.numpy()


@pytest.fixture
def accelerated(monkeypatch):
    """Counters whose copies wait in an `Accelerator`, that, and their clock."""
    clock = Clock()
    counters = Counters(CounterLayout(1), CPU, INTERVAL, clock)
    device = Accelerator(counters.layout.size)
    monkeypatch.setattr(torch, "Event", lambda _: device)
    counters._on_host = False
    counters._host_counts = device
    return counters, device, clock


def test_a_copy_is_returned_by_a_later_call_without_a_wait(accelerated):
    counters, device, clock = accelerated
    counters.device_counts[0] += 1
    assert counters.take_delta() is None
    counters.device_counts[0] += 5
    clock.now = 10.0
    assert counters.take_delta() is None
    assert device.copies == 1, "one copy at a time"
    device.run()
    assert counters.take_delta()[0] == 1
    assert counters.take_delta() is None
    device.run()
    assert counters.take_delta()[0] == 5
    assert counters.take_delta() is None
    assert device.copies == 2, "one copy an interval"
    assert device.waits == 0


def test_no_count_is_lost_or_doubled(accelerated):
    generator = np.random.default_rng(7)
    counters, device, clock = accelerated
    taken = np.zeros(counters.layout.size, dtype=np.int64)
    for _ in range(3000):
        clock.now += generator.exponential(0.4)
        counts = generator.integers(0, 3, counters.layout.size)
        counters.device_counts.add_(torch.from_numpy(counts))
        if generator.random() < 0.3:
            device.run()
        flush = generator.random() < 0.05
        increase = counters.take_delta(flush)
        if increase is not None:
            assert min(increase) >= 0
            taken += increase
        # Behind a copy that is under way, too.
        assert not flush or taken.tolist() == counters.device_counts.tolist()
    taken += counters.take_delta(flush=True) or 0
    assert taken.tolist() == counters.device_counts.tolist()
