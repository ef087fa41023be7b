"""What is counted in shadow mode, and that no count is lost or taken twice."""

import numpy as np
import pytest
import torch

import oracle
import steps_v1
from vllm_mars.config import MarsConfig
from vllm_mars.kernels.terms import Verdict
from vllm_mars.runner.counters import INTERVAL, REASONS, CounterLayout, Counters

CPU = torch.device("cpu")
UNIT = 2.0**-16


def test_layout_covers_the_vector_once():
    layout = CounterLayout(3, (0.8, 0.9))
    names = ("verified", "accepted", "relaxed", "lost", "gained", "refused", "shadowed")
    slices = [getattr(layout, name) for name in names]
    entries = [index for entry in slices for index in range(entry.start, entry.stop)]
    assert entries == list(range(layout.size))
    assert [entry.stop - entry.start for entry in slices] == [3, 3, 3, 1, 1, 5, 6]
    assert REASONS == ("protected", "span", "structured", "loss", "repeat")


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


def test_taken_on_a_cpu_at_once():
    counters = Counters(CounterLayout(1), CPU)
    with torch.inference_mode():
        counters.device_counts[0] += 2
    assert counters.take_delta() == [2] + [0] * (counters.layout.size - 1)
    assert counters.take_delta() is None
    with torch.inference_mode():
        counters.device_counts[-1] += 1
    assert counters.take_delta() == [0] * (counters.layout.size - 1) + [1]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_the_interval_holds_on_a_cpu_too():
    clock = Clock()
    counters = Counters(CounterLayout(1), CPU, interval=1.0, clock=clock)
    counters.device_counts[0] += 1
    assert counters.take_delta()[0] == 1
    counters.device_counts[0] += 1
    clock.now = 0.9
    assert counters.take_delta() is None
    assert counters.take_delta(flush=True)[0] == 1
    counters.device_counts[0] += 1
    clock.now = 1.5
    assert counters.take_delta() is None
    clock.now = 2.0
    assert counters.take_delta()[0] == 1


class Stream:
    """Stands in for an accelerator: copies are done when it is told so, or waited for."""

    def __init__(self):
        self.queue = []
        self.done = 0
        self.waits = 0

    def run(self, until=None):
        self.done = max(self.done, len(self.queue) if until is None else until)
        for work in self.queue[: self.done]:
            work()
        self.queue[: self.done] = [lambda: None] * self.done


class Event:
    def __init__(self, stream):
        self.stream = stream

    def record(self):
        self.place = len(self.stream.queue)

    def query(self):
        return self.stream.done >= self.place

    def synchronize(self):
        self.stream.waits += 1
        self.stream.run(self.place)


class Host:
    """Counts on the host, which a copy reaches when the stream comes to it."""

    def __init__(self, stream, size):
        self.stream = stream
        self.counts = torch.zeros(size, dtype=torch.int64)

    def copy_(self, counts, non_blocking):
        assert non_blocking
        now = counts.clone()
        self.stream.queue.append(lambda: self.counts.copy_(now))

    def numpy(self):
        return self.counts.numpy()


@pytest.fixture
def accelerated(monkeypatch):
    """Counters whose copies wait in a `Stream`, the stream, and their clock."""
    stream, clock = Stream(), Clock()
    monkeypatch.setattr(torch, "Event", lambda device: Event(stream))
    counters = Counters(CounterLayout(1), CPU, INTERVAL, clock)
    counters._on_host = False
    counters._host_counts = Host(stream, counters.layout.size)
    return counters, stream, clock


def test_a_copy_is_returned_by_a_later_call_without_a_wait(accelerated):
    counters, stream, clock = accelerated
    counters.device_counts[0] += 1
    assert counters.take_delta() is None
    counters.device_counts[0] += 5
    clock.now = 10.0
    assert counters.take_delta() is None
    assert len(stream.queue) == 1, "one copy at a time"
    stream.run()
    assert counters.take_delta()[0] == 1
    assert counters.take_delta() is None
    stream.run()
    assert counters.take_delta()[0] == 5
    assert counters.take_delta() is None
    assert len(stream.queue) == 2, "one copy an interval"
    assert stream.waits == 0


def test_a_flush_takes_all_behind_a_copy_that_is_under_way(accelerated):
    counters, stream, clock = accelerated
    counters.device_counts[0] += 1
    assert counters.take_delta() is None
    counters.device_counts[0] += 2
    assert counters.take_delta(flush=True)[0] == 3
    assert stream.waits == 1
    assert counters.take_delta(flush=True) is None


def test_no_count_is_lost_or_doubled(accelerated):
    generator = np.random.default_rng(7)
    counters, stream, clock = accelerated
    taken = np.zeros(counters.layout.size, dtype=np.int64)
    for _ in range(3000):
        clock.now += generator.exponential(0.4)
        counters.device_counts.add_(
            torch.from_numpy(generator.integers(0, 3, counters.layout.size))
        )
        if generator.random() < 0.3:
            stream.run()
        increase = counters.take_delta(flush=generator.random() < 0.05)
        if increase is not None:
            assert min(increase) >= 0
            taken += increase
    taken += counters.take_delta(flush=True) or 0
    assert taken.tolist() == counters.device_counts.tolist()
