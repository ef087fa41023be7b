"""What is counted, against a slow loop, and that no count is lost or taken twice."""

import math

import numpy as np
import pytest
import torch

from vllm_mars.config import MarsConfig
from vllm_mars.kernels.terms import Drafts, Judgement, Margin, Verdict
from vllm_mars.runner.counters import (
    RATIO_EDGES,
    RATIO_UNIT,
    REASONS,
    REFUSALS,
    CounterLayout,
    Counters,
    count_positions,
    count_shadow,
)
from vllm_mars.runner.margin import MarginRule
from vllm_mars.verify import judge_drafts, verify_drafts

CPU = torch.device("cpu")
LONGEST = 5


def test_layout_covers_the_vector_once():
    layout = CounterLayout(3)
    names = ("verified", "accepted", "relaxed", "low_margin", "ratio", "ratio_sum")
    names += ("lost", "refused")
    slices = [getattr(layout, name) for name in names]
    entries = [index for entry in slices for index in range(entry.start, entry.stop)]
    assert entries == list(range(layout.size))
    assert [entry.stop - entry.start for entry in slices] == [3, 3, 3, 3, 16, 1, 1, 6]
    assert REASONS == ("protected", "span", "budget", "structured", "loss", "repeat")
    assert [entry.stop - entry.start for entry in (layout.refused, layout.shadow)] == [6, 0]
    shadow = CounterLayout(3, (0.8, 0.9)).shadow
    assert (shadow.start, shadow.stop) == (layout.size, layout.size + 6)


def slow_counts(layout, case):
    """The same in a loop over requests and positions, in float32 as the samplers compare."""
    counts = [0] * layout.size
    begin = 0
    for request, end in enumerate(case["cu_num_draft_tokens"].tolist()):
        for position, row in enumerate(range(begin, end)):
            accepted = case["num_accepted"][request].item()
            if position < accepted:
                counts[layout.accepted.start + position] += 1
                is_relaxed = case["verdicts"][row].item() == Verdict.RELAXED
                counts[layout.relaxed.start + position] += is_relaxed
                counts[layout.lost.start] += is_relaxed * case["losses"][row].item()
            if position > accepted or case["draft_token_ids"][row] < 0:
                continue
            counts[layout.verified.start + position] += 1
            first, second = map(np.float32, case["top2_values"][row].tolist())
            theta, gap = (np.float32(case[name][request].item()) for name in ("theta", "gap"))
            counts[layout.low_margin.start + position] += bool(second > theta * first - gap)
            if (verdict := case["verdicts"][row].item()) in REFUSALS:
                counts[layout.refused.start + REFUSALS.index(verdict)] += 1
            if not first > 0 or math.isnan(second / first):
                continue
            ratio = second / first
            bucket = sum(ratio > np.float32(edge) for edge in RATIO_EDGES)
            counts[layout.ratio.start + bucket] += 1
            clamped = float(min(max(ratio, np.float32(0)), np.float32(1)))
            units = math.floor(clamped / RATIO_UNIT + 0.5)
            counts[layout.ratio_sum.start] += units
        begin = end
    return counts


def random_case(generator, batch):
    """Requests with 0 to `LONGEST` drafts, and logits with ties, zeros, infinities and NaN."""

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    lengths = torch.randint(0, LONGEST + 1, (batch,), generator=generator)
    num_draft = int(lengths.sum())
    largest = torch.randn(num_draft, generator=generator) * 8 + 6
    top2 = torch.stack([largest, largest - largest.abs() * rand(num_draft) * 1.2], dim=1)
    top2[rand(num_draft) < 0.1, 1] = -math.inf
    top2[rand(num_draft) < 0.05] = math.nan
    top2[rand(num_draft) < 0.05] = 0
    tie = rand(num_draft) < 0.1
    top2[tie, 1] = top2[tie, 0]
    exact = rand(num_draft) < 0.1
    top2[exact] = torch.tensor([10.0, 9.0])
    return {
        "top2_values": top2,
        "verdicts": torch.randint(0, 8, (num_draft,), generator=generator, dtype=torch.int8),
        "num_accepted": (rand(batch) * (lengths + 1)).int().minimum(lengths),
        "cu_num_draft_tokens": lengths.cumsum(0).int(),
        "theta": rand(batch) * 0.5 + 0.5,
        "gap": torch.where(rand(batch) < 0.3, rand(batch), 0.0),
        "draft_token_ids": torch.where(rand(num_draft) < 0.1, -1, 7).int(),
        "losses": (rand(num_draft) * 2**20).int(),
    }


def step(case, device=CPU):
    """A case as the arguments of the counting functions: drafts, judgement, accepted, margin."""
    case = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in case.items()
    }
    unread = torch.empty(0, 0, device=device)
    return (
        Drafts(unread, case["draft_token_ids"], case["cu_num_draft_tokens"]),
        Judgement(case["verdicts"], case["top2_values"], case["losses"]),
        case["num_accepted"],
        Margin(case["theta"], case["gap"]),
    )


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_counts_are_those_of_a_slow_loop(batch):
    generator = torch.Generator().manual_seed(batch)
    layout = CounterLayout(LONGEST)
    counters = Counters(layout, CPU)
    expected = np.zeros(layout.size, dtype=np.int64)
    for _ in range(40):
        case = random_case(generator, batch)
        count_positions(counters, *step(case))
        expected += slow_counts(layout, case)
    assert counters.device_counts.tolist() == expected.tolist()
    assert all(expected[layout.refused]) and any(expected[layout.relaxed])


@pytest.mark.parametrize(("theta", "gap"), [(1.0, 0.0), (0.9, 0.0), (1.0, 0.5)])
def test_thresholds_of_the_whole_batch(theta, gap):
    case = random_case(torch.Generator().manual_seed(3), 8)
    each = {"theta": torch.full((8,), theta), "gap": torch.full((8,), gap)}
    layout = CounterLayout(LONGEST)
    one, own = Counters(layout, CPU), Counters(layout, CPU)
    count_positions(one, *step({**case, "theta": theta, "gap": gap}))
    count_positions(own, *step({**case, **each}))
    assert one.device_counts.tolist() == own.device_counts.tolist()
    assert (sum(one.device_counts[layout.low_margin]) == 0) == ((theta, gap) == (1, 0))


def one_position(first, second, dry_run=False, **changes):
    """The counts of a single draft token that is rejected."""
    counters = Counters(CounterLayout(1), CPU)
    given = {
        "top2_values": torch.tensor([[first, second]]),
        "verdicts": torch.tensor([0], dtype=torch.int8),
        "losses": torch.tensor([3], dtype=torch.int32),
        "draft_token_ids": torch.tensor([7]),
        "num_accepted": torch.tensor([0]),
        "cu_num_draft_tokens": torch.tensor([1], dtype=torch.int32),
        "theta": 0.9,
        "gap": 0.0,
    }
    count_positions(counters, *step({**given, **changes}), dry_run=dry_run)
    return counters


@pytest.mark.parametrize(
    ("first", "second", "bucket", "total"),
    [
        (10.0, 9.0, RATIO_EDGES.index(0.9), 0.9),
        (10.0, 9.001, RATIO_EDGES.index(0.92), 0.9001),
        (4.0, 4.0, RATIO_EDGES.index(1.0), 1.0),
        (4.0, 0.0, 0, 0.0),
        (4.0, -4.0, 0, 0.0),
        (4.0, -math.inf, 0, 0.0),
        (math.inf, 1.0, 0, 0.0),
        (0.0, 0.0, None, 0.0),
        (-1.0, -2.0, None, 0.0),
        (math.nan, 1.0, None, 0.0),
        (math.inf, math.inf, None, 0.0),
    ],
)
def test_histogram(first, second, bucket, total):
    """An edge belongs to the bucket below it; ratios under 0 count as 0 in the sum."""
    counters = one_position(first, second)
    counts = counters.device_counts.tolist()
    histogram = counts[counters.layout.ratio]
    assert histogram == [int(index == bucket) for index in range(len(histogram))]
    assert counts[counters.layout.ratio_sum.start] * RATIO_UNIT == pytest.approx(total, abs=1e-4)
    assert counts[counters.layout.verified] == [1]


def test_nothing_is_behind_the_first_rejection():
    counters = Counters(CounterLayout(4), CPU)
    count_positions(
        counters,
        Drafts(
            torch.empty(0, 0),
            torch.tensor([5, 5, 5, 5]),
            torch.tensor([4], dtype=torch.int32),
        ),
        Judgement(
            torch.tensor([Verdict.RELAXED, Verdict.SPAN, Verdict.SPAN, Verdict.RELAXED]).char(),
            torch.tensor([[10.0, 9.5]] * 4),
            torch.tensor([5, 7, 11, 13], dtype=torch.int32),
        ),
        torch.tensor([1]),
        Margin(0.9),
    )
    counts, layout = counters.device_counts.tolist(), counters.layout
    assert counts[layout.verified] == counts[layout.low_margin] == [1, 1, 0, 0]
    assert counts[layout.accepted] == counts[layout.relaxed] == [1, 0, 0, 0]
    assert counts[layout.lost] == [5]
    assert counts[layout.refused] == [0, 1, 0, 0, 0, 0]


def test_a_dry_run_relaxes_and_refuses_nothing():
    counters = one_position(
        10.0, 9.5, verdicts=torch.tensor([Verdict.SPAN], dtype=torch.int8), dry_run=True
    )
    counts, layout = counters.device_counts.tolist(), counters.layout
    assert counts[layout.low_margin] == [1]
    assert counts[layout.lost] == [0]
    assert not any(counts[layout.refused])


def slow_shadow(layout, case):
    """What each theta accepts, request by request: the longest prefix of acceptable positions."""
    counts = np.zeros((len(layout.shadowed), LONGEST), dtype=np.int64)
    begin = 0
    for request, end in enumerate(case["cu_num_draft_tokens"].tolist()):
        for index, theta in enumerate(layout.shadowed):
            for position, row in enumerate(range(begin, end)):
                first, second = map(np.float32, case["top2_values"][row].tolist())
                verdict = case["verdicts"][row].item()
                is_low = second > np.float32(theta) * first and first > 0
                if case["draft_token_ids"][row] < 0 or not (
                    position < case["num_accepted"][request].item()
                    or verdict == Verdict.FIRST
                    or (verdict == Verdict.RELAXED and is_low)
                ):
                    break
                counts[index, position] += 1
        begin = end
    return counts


def test_shadow_counts_are_those_of_a_slow_loop():
    generator = torch.Generator().manual_seed(9)
    layout = CounterLayout(LONGEST, (0.5, 0.8, 0.95))
    counters = Counters(layout, CPU)
    expected = np.zeros((3, LONGEST), dtype=np.int64)
    for _ in range(40):
        case = random_case(generator, 8)
        count_shadow(counters, *step(case)[:3])
        expected += slow_shadow(layout, case)
    assert counters.device_counts[layout.shadow].tolist() == expected.flatten().tolist()
    assert expected[0].sum() > expected[2].sum() > 0, "the looser theta accepts more"


GREEDY_OF_EIGHT = {
    "verified": torch.ones(8, dtype=torch.bool),
    "judged": torch.zeros(8, dtype=torch.bool),
    "both": torch.arange(8) % 2 == 0,
}


@pytest.mark.parametrize("is_greedy", GREEDY_OF_EIGHT.values(), ids=GREEDY_OF_EIGHT)
@pytest.mark.parametrize(
    ("name", "values"), [("theta", (0.5, 0.9)), ("gap", (0.3, 2.0)), ("price", (0.3, 1.0, 4.0))]
)
def test_shadow_counts_are_what_verification_accepts(name, values, is_greedy):
    """Of requests that were verified, or judged position by position, at each threshold."""
    generator = torch.Generator().manual_seed(4)
    config = MarsConfig(**{name: values[0]}, shadow=values)
    rule = MarginRule(config, [0])
    rule.counters = Counters(CounterLayout(LONGEST, config.shadow, name), CPU)
    protected = torch.arange(64) == 0
    expected = torch.zeros(len(values), LONGEST, dtype=torch.long)
    for _ in range(20):
        lengths = torch.randint(0, LONGEST + 1, (8,), generator=generator)
        num_draft = int(lengths.sum())
        logits = 3 * torch.randn(num_draft, 64, generator=generator)
        ranks = (torch.rand(num_draft, generator=generator) ** 2 * 4).long()
        ids = logits.argsort(1, descending=True).gather(1, ranks[:, None]).squeeze(1)
        ids[torch.rand(num_draft, generator=generator) < 0.05] = -1
        drafts = Drafts(logits, ids, lengths.cumsum(0).int(), max_draft_len=LONGEST)
        margin = Margin.of(name, config.value)
        request, position = drafts.locate()
        drawn = (torch.rand(8, generator=generator) * (lengths + 1)).int()
        strict = verify_drafts(drafts, Margin(1.0))
        num_accepted = torch.where(is_greedy, strict.num_accepted, drawn)
        if is_greedy.all():
            assert torch.equal(rule.verify(drafts, margin).num_accepted, num_accepted)
        else:
            with rule.relaxed_made_certain(drafts, margin, is_greedy) as judgement:
                pass
            rule.record(drafts, margin, judgement, num_accepted, {}, is_greedy=is_greedy)
        for index, value in enumerate(values):
            own = Margin.of(name, value, protected=protected)
            relaxed = judge_drafts(drafts, own).verdicts == Verdict.RELAXED
            passed = (relaxed | (position < num_accepted[request])) & (ids >= 0)
            table = torch.zeros(8, LONGEST + 1, dtype=torch.long)
            table[request, position] = passed.long()
            verified = verify_drafts(drafts, own).num_accepted
            accepted = torch.where(is_greedy, verified, table.cumprod(1).sum(1))
            expected[index] += (torch.arange(LONGEST) < accepted[:, None]).sum(0)
    counts = rule.counters.device_counts
    assert counts[rule.counters.layout.shadow].tolist() == expected.flatten().tolist()
    assert not counts[rule.counters.layout.relaxed].any()
    assert len({tuple(row) for row in expected.tolist()}) == len(values), "they differ"


def test_a_step_without_drafts_counts_nothing():
    counters = one_position(
        1.0,
        0.5,
        top2_values=torch.empty(0, 2),
        verdicts=torch.empty(0, dtype=torch.int8),
        losses=torch.empty(0, dtype=torch.int32),
        draft_token_ids=torch.empty(0, dtype=torch.int32),
        cu_num_draft_tokens=torch.zeros(1, dtype=torch.int32),
    )
    assert not counters.device_counts.any()
    assert counters.take_delta() is None


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
