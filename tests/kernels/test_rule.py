"""The rule: hand-computed cases, properties, and every CPU form of it against the oracle."""

import functools
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from vllm_mars import verify_greedy
from vllm_mars.kernels import reference
from vllm_mars.kernels.accept import naive as accept
from vllm_mars.kernels.budget import NO_BOUND, floor_units, loss_rate, price_units
from vllm_mars.kernels.counters.table import CounterLayout
from vllm_mars.kernels.interface import (
    REFUSALS,
    CpuConstraints,
    EngineParams,
    Protected,
    Records,
    StepCounters,
    Verdict,
    VerifyInputs,
    encode_value,
)
from vllm_mars.kernels.row_stats.naive import num_extendable, read_probabilities, read_rows
from vllm_mars.kernels.rules import PRICE, RULES
from vllm_mars.kernels.served_dist.naive import RowDecision

NAN, INF = math.nan, math.inf
BONUS = 3


def verify_one(row, draft, protected=(), dtype=torch.float32, **value):
    """Verifies one draft token; returns the emitted tokens, and how many are accepted, relaxed."""
    behind = [float(token == BONUS) for token in range(len(row))]
    logits = torch.tensor([row, behind], dtype=dtype)
    mask = torch.zeros(len(row), dtype=torch.bool)
    mask[list(protected)] = True
    output = verify_greedy(
        logits,
        torch.tensor([draft], dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32),
        **(value or {"theta": 0.9}),
        protected=mask if protected else None,
    )
    tokens = [token for token in output.output_token_ids[0].tolist() if token != -1]
    return tokens, int(output.num_accepted), int(output.num_relaxed)


# fmt: off
CASES = {
    # name: (row, draft, options, emitted tokens, relaxed)
    "argmax is accepted":            ([1.0, 2.0, 0.5, 0.0], 1, {}, [1, BONUS], 0),
    "runner-up, small margin":       ([1.9, 2.0, 0.5, 0.0], 0, {}, [0, BONUS], 1),
    "runner-up, margin at theta":    ([9.0, 10.0, 0.5, 0.0], 0, {}, [1], 0),
    "runner-up, large margin":       ([1.0, 2.0, 0.5, 0.0], 0, {}, [1], 0),
    "third, however near":           ([1.99, 2.0, 1.98, 0.0], 2, {}, [1], 0),
    "tied runners-up, either":       ([1.9, 2.0, 1.9, 0.0], 2, {}, [2, BONUS], 1),
    "tie at the top, lower id":      ([2.0, 2.0, 0.5, 0.0], 0, {}, [0, BONUS], 0),
    "tie at the top, higher id":     ([2.0, 2.0, 0.5, 0.0], 1, {}, [1, BONUS], 1),
    "tie at the top, theta 1":       ([2.0, 2.0, 0.5, 0.0], 1, {"theta": 1.0}, [0], 0),
    "three-way tie, last":           ([2.0, 2.0, 2.0, 0.0], 2, {}, [2, BONUS], 1),
    "theta 1 is strict":             ([1.9999, 2.0, 0.5, 0.0], 0, {"theta": 1.0}, [1], 0),
    "theta near 0":                  ([0.01, 2.0, 0.0, 0.0], 0, {"theta": 0.001}, [0, BONUS], 1),
    "z1 = 0":                        ([-0.1, 0.0, -1.0, -2.0], 0, {"theta": 0.01}, [1], 0),
    "negative logits, ratio":        ([-1.1, -1.0, -3.0, -4.0], 0, {"theta": 0.5}, [1], 0),
    "runner-up masked":              ([-INF, 2.0, -INF, -INF], 0, {"theta": 0.01}, [1], 0),
    "NaN elsewhere":                 ([1.9, 2.0, NAN, 0.0], 0, {}, [2], 0),
    "NaN at the draft token":        ([1.9, 2.0, NAN, 0.0], 2, {}, [2, BONUS], 0),
    "padding":                       ([1.9, 2.0, 0.5, 0.0], -1, {}, [1], 0),
    "id outside the vocabulary":     ([1.9, 2.0, 0.5, 0.0], 4, {}, [1], 0),
    "draft token protected":         ([1.9, 2.0, 0.5, 0.0], 0, {"protected": [0]}, [1], 0),
    "argmax protected":              ([1.9, 2.0, 0.5, 0.0], 0, {"protected": [1]}, [1], 0),
    "protected argmax drafted":      ([1.9, 2.0, 0.5, 0.0], 1, {"protected": [1]}, [1, BONUS], 0),
    "another token protected":       ([1.9, 2.0, 0.5, 0.0], 0, {"protected": [2]}, [0, BONUS], 1),
    "infinite first choice":         ([1.9, INF, 0.5, 0.0], 0, {}, [1], 0),
}
# fmt: on


# Margins below the resolution of 16 bits.
NEEDS_FLOAT32 = ("theta 1 is strict", "third, however near")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for name in CASES
        if dtype == torch.float32 or name not in NEEDS_FLOAT32
    ],
)
def test_hand_computed(name, dtype):
    row, draft, options, tokens, relaxed = CASES[name]
    assert verify_one(row, draft, dtype=dtype, **options) == (
        tokens,
        int(tokens[0] == draft),
        relaxed,
    )


# What a caller may block a position with, and (lost nats, its own nats per token, produced tokens).
BLOCKED = st.sampled_from([0, 0, Verdict.SPAN, Verdict.REPEAT])
NATS = st.tuples(
    st.sampled_from([0.0, 0.25, 1.0, 1.5]), st.sampled_from([0.0, 0.01, 0.3]), st.integers(0, 40)
)
PRICES = st.one_of(st.sampled_from([0.0, 0.25, 1.0, 4.0]), st.floats(0, 8, width=32))
VALUES = {
    "theta": st.one_of(st.sampled_from([1.0, 0.9, 0.5, 0.01]), st.floats(0.0625, 1, width=16)),
    "price": PRICES,
}
LONGEST = 5
COUNTED = CounterLayout(LONGEST)


@st.composite
def batches(draw, rules=tuple(VALUES), dtypes=(torch.float32, torch.bfloat16, torch.float16)):
    """A ragged batch over few distinct logits, so that ties, masks and small margins are common."""
    vocab = draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(0, LONGEST), min_size=1, max_size=4))
    logit = st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, 1.9, 2.0, 10.0, -1.0, -INF]),
        st.floats(-4, 12, width=16),
        st.sampled_from([NAN, INF]) if draw(st.booleans()) else st.just(2.5),
    )
    row = st.lists(logit, min_size=vocab, max_size=vocab)
    size, count = sum(lengths), len(lengths)
    rows = draw(st.lists(row, min_size=size, max_size=size))
    drafts = draw(st.lists(st.integers(-1, vocab - 1), min_size=size, max_size=size))
    # Bias towards the argmax and its rivals, so that drafts get past the first position.
    for i, values in enumerate(rows):
        if draw(st.booleans()):
            drafts[i] = oracle.argmax(values)
    rule = draw(st.sampled_from(rules))
    has_bound = draw(st.booleans())
    few, room = st.frozensets(st.integers(0, vocab - 1), max_size=2), st.integers(0, LONGEST)
    return {
        "vocab": vocab,
        "lengths": lengths,
        "rows": rows,
        "drafts": drafts,
        "rule": rule,
        "values": draw(st.lists(VALUES[rule], min_size=count, max_size=count)),
        "bonus": draw(st.lists(st.integers(0, vocab - 1), min_size=count, max_size=count)),
        "protected": draw(st.frozensets(st.integers(0, vocab - 1), max_size=3)),
        "dtype": draw(st.sampled_from(dtypes)),
        "blocked": draw(st.none() | st.lists(BLOCKED, min_size=size, max_size=size)),
        # By a price.
        "listed": draw(
            st.lists(few if rule == "price" else st.just(frozenset()), min_size=size, max_size=size)
        ),
        "nats": draw(st.lists(NATS, min_size=count, max_size=count)) if has_bound else None,
        "ends": draw(st.lists(few, min_size=count, max_size=count)),
        "rooms": draw(st.lists(st.just(9) | room, min_size=count, max_size=count)),
    }


def step_of(logits, drafts, records, slots, produced, longest):
    """A step with the rows of each request, and behind them one more."""
    ends = np.cumsum([len(own) + 1 for own in drafts])
    rows = torch.zeros(sum(map(len, drafts)) + len(drafts), logits.shape[1], dtype=logits.dtype)
    inputs = [token for own in drafts for token in (-1, *own)]
    rows[~np.isin(np.arange(len(rows)), ends - 1)] = logits
    total = torch.zeros(len(records.lost), dtype=torch.int32)
    total[slots.long()] = torch.tensor(produced, dtype=torch.int32)
    of_step = torch.tensor(inputs, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)
    return VerifyInputs(rows, *of_step, records, slots, total, torch.zeros_like(total), longest)


def guard_of(batch):
    """What the text asks of each row, the last of each request's asks nothing; or None."""
    if batch["blocked"] is None and not any(batch["listed"]):
        return None
    blocked = batch["blocked"] or [0] * len(batch["drafts"])
    own = zip(blocked, batch["drafts"], batch["listed"], strict=True)
    rows = [(reason, draft in listed, listed) for reason, draft, listed in own]
    ends = np.cumsum(batch["lengths"]).tolist()
    parts = zip(ends, batch["lengths"], strict=True)
    each = ([*rows[end - length : end], (0, False, ())] for end, length in parts)
    return CpuConstraints.of(itertools.chain(*each))


def step(batch):
    """The batch as a step, its drafts' rows alone, and its rule."""
    mask = torch.zeros(batch["vocab"], dtype=torch.bool)
    mask[list(batch["protected"])] = True
    logits = torch.tensor(batch["rows"], dtype=batch["dtype"]).reshape(-1, batch["vocab"])
    count, rule = len(batch["values"]), RULES[batch["rule"]]
    lost, rates, produced = zip(*(batch["nats"] or [(0.0, INF, 0)] * count), strict=True)
    # Slots in another order than the requests.
    slots = torch.arange(count - 1, -1, -1, dtype=torch.int32)
    records = Records.new(count, slots.device)
    records.value[slots] = torch.tensor([encode_value(rule, value) for value in batch["values"]])
    records.rate[slots] = torch.tensor([loss_rate(rate) for rate in rates])
    records.lost[slots] = torch.tensor([floor_units(nats) for nats in lost])
    most = [n + 1 + room for n, room in zip(produced, batch["rooms"], strict=True)]
    records.max_tokens[slots] = torch.tensor(most)
    ends = torch.tensor([[*own, -1, -1][:2] for own in batch["ends"]])
    records.stop_ids[slots, :2] = ends
    lengths = np.cumsum(batch["lengths"]) - batch["lengths"]
    drafts = [
        batch["drafts"][begin : begin + length]
        for begin, length in zip(lengths.tolist(), batch["lengths"], strict=True)
    ]
    protected = Protected.of(mask, mask.device)
    given = step_of(logits, drafts, records, slots, produced, LONGEST)
    return given, logits, EngineParams(rule, protected)


def requests_of(batch, logits):
    """Of each request its place, its rows, and what the oracle needs to know of it."""
    ends = np.cumsum(batch["lengths"]).tolist()
    for i, (length, end) in enumerate(zip(batch["lengths"], ends, strict=True)):
        own = slice(end - length, end)
        value, nats = batch["values"][i], None
        if batch["nats"] is not None:
            lost, rate, produced = batch["nats"][i]
            nats = oracle.Nats(Fraction(rate), Fraction(lost), produced)
        what = {
            "drafts": batch["drafts"][own],
            "theta": value if batch["rule"] == "theta" else 1.0,
            "protected": batch["protected"],
            "blocked": None if batch["blocked"] is None else batch["blocked"][own],
            "listed": batch["listed"][own],
            "nats": nats,
            "price": value if batch["rule"] == "price" else None,
            "ends": batch["ends"][i],
            "room": batch["rooms"][i],
        }
        yield i, logits[own].float().tolist(), what


def an_account(batch):
    counts = torch.zeros(COUNTED.size, dtype=torch.int64)
    table = torch.full((len(batch["lengths"]), 2, LONGEST + 1), 7.0)
    return StepCounters(counts, table)


@settings(max_examples=500, deadline=None)
@given(batch=batches())
def test_greedy_requests_are_verified_as_the_oracle_says(batch):
    own_step, logits, rule = step(batch)
    step_counters = an_account(batch)
    before = own_step.records.lost.clone()
    bonus, constraints = torch.tensor(batch["bonus"]), guard_of(batch)
    output = reference.verify(own_step, rule, constraints, step_counters, bonus=bonus)
    counts = np.zeros(COUNTED.size, dtype=np.int64)
    for i, rows, what in requests_of(batch, logits):
        expected = oracle.verify(rows, bonus=batch["bonus"][i], **what)
        row = output.output_token_ids[i].tolist()
        assert row == expected.tokens + [-1] * (len(row) - len(expected.tokens))
        assert int(output.num_accepted[i]) == expected.accepted
        assert int(output.num_relaxed[i]) == expected.relaxed
        assert int(output.lost[i]) == expected.loss * 2**16
        assert float(output.loss[i]) == float(np.float32(expected.loss))
        slot = own_step.slots[i]
        assert int(own_step.records.lost[slot] - before[slot]) == expected.loss * 2**16
        told = [NAN] * (LONGEST + 1)
        is_relaxable = what["theta"] < 1
        if batch["rule"] == "price":
            is_relaxable = price_units(batch["values"][i]) > 0
        gainful = oracle.num_extendable(what["drafts"], what["ends"], what["room"])
        last = min(expected.accepted, gainful)
        for offset, verdict in enumerate(expected.verdicts[: last + 1]):
            draft, is_relaxed = what["drafts"][offset], verdict == Verdict.RELAXED
            if is_relaxed:
                told[offset] = float(oracle.loss(rows[offset], draft))
            if draft >= 0:
                counts[COUNTED.verified][offset] += 1
                counts[COUNTED.relaxable] += is_relaxable
                counts[COUNTED.accepted][offset] += offset < expected.accepted
                counts[COUNTED.relaxed][offset] += is_relaxed
            if verdict in REFUSALS:
                counts[COUNTED.refused][REFUSALS.index(verdict)] += 1
        np.testing.assert_allclose(step_counters.table[i, 0].tolist(), told)
        counts[COUNTED.lost] += int(expected.loss * 2**16)
        counts[COUNTED.drift_up] += int(expected.loss * 2**16)
        counts[COUNTED.gained] += expected.relaxed * 2**16
    assert step_counters.counts.tolist() == counts.tolist()


class All(accept.CpuSamplingInputs):
    """Accepts what can be accepted."""

    def accepts(self, _, probability):
        return probability > 0

    def sample_token(self, *_):
        return 0


def decided(own_step, engine_params, constraints):
    """What is decided of each request of a step in which all sample, and what it may lose."""
    temperature = [1.0] * len(own_step.slots)
    rows = read_rows(own_step, engine_params, constraints, temperature)
    sampling_inputs = All(torch.tensor(temperature), np.zeros(0))
    begins = [0, *own_step.cu_num_logits.tolist()]
    for place, allowed in enumerate(accept.loss_budgets(own_step)):
        begin, end = begins[place], begins[place + 1] - 1
        followers = constraints.followers[begin:end] if constraints else ()
        own = accept.SampledDraft(
            own_step, engine_params, sampling_inputs, place, begin, end, followers
        )
        own.read(slice(None))
        read = read_probabilities(rows, own.begin, own.z, own.p, own.preserved)
        gainful = num_extendable(read, own.begin, own.end, allowed)
        yield engine_params.rule.plain.sampled(read, own.begin, own.end, allowed), gainful


@settings(max_examples=400, deadline=None)
@given(batch=batches(dtypes=[torch.float32]))
def test_requests_that_sample_are_served_what_the_formulas_say(batch):
    """Verdict, distribution, loss and gain of each position."""
    own_step, logits, rule = step(batch)
    constraints = guard_of(batch)
    before, wanted = own_step.records.lost.clone(), []
    found_of = decided(own_step, rule, constraints)
    asked = requests_of(batch, logits)
    for (positions, gainful), (_, rows, what) in zip(found_of, asked, strict=True):
        price, nats, spent = what["price"], what["nats"], 0
        protected = what["protected"] | what["ends"]
        kept_at = [protected | listed for listed in what["listed"]]
        assert gainful == oracle.num_extendable(what["drafts"], what["ends"], what["room"])
        looks_at = [
            {x} if price is not None else {x, oracle.argmax(row)}
            for row, x in zip(rows, what["drafts"], strict=True)
        ]
        blocked = what["blocked"] or [0] * len(rows)
        reasons = [
            b or (Verdict.PROTECTED if own & protected else Verdict.REPEAT * bool(own & kept))
            for b, own, kept in zip(blocked, looks_at, kept_at, strict=True)
        ]
        strict = list(map(bool, reasons))
        biases = oracle.tilts(rows, what["drafts"], price or 0.0, strict, gainful, kept_at)
        is_reached, lost = True, 0
        for j, (row, draft) in enumerate(zip(rows, what["drafts"], strict=True)):
            found, p, kept = positions[j], oracle.softmax(row), kept_at[j]
            lost += found.loss * (is_reached and j <= gainful)
            if draft < 0 or not p[draft] > 0:
                # Left as it is, to be rejected.
                assert found == RowDecision(Verdict.NONE)
                is_reached = False
                continue
            left = INF
            if nats is not None:
                left = max(oracle.earned(nats, j + 1) - nats.lost - Fraction(spent, 2**16), 0)
            verdict, bias = Verdict.NONE, min(biases[j], math.sqrt(8 * left))
            m = oracle.served(row, draft, bias, kept)
            if price is None:
                if oracle.is_relaxed(row, draft, what["theta"], frozenset()):
                    too_much = math.ceil(-math.log(p[draft]) * 2**16) * 2**-16 > left
                    verdict = reasons[j] or (Verdict.LOSS if too_much else Verdict.RELAXED)
            elif reasons[j] and oracle.in_steps(price) and j < gainful:
                verdict = reasons[j]
            assert found.verdict == verdict
            if verdict == Verdict.RELAXED:
                m = [float(token == draft) for token in range(len(row))]
            else:
                assert found.bias == pytest.approx(bias, rel=1e-4, abs=1e-5)
                if found.bias:
                    logs = math.log(m[draft] / p[draft])
                    # 1 - p(S) of a float32 p(S) is off by some units in the last place of 1.
                    others = sum(of for token, of in enumerate(p) if token not in kept)
                    close = pytest.approx(logs, rel=1e-3, abs=1e-4 + 2**-22 / others)
                    assert found.bias - found.log_z == close
            assert found.loss * 2**-16 == pytest.approx(oracle.divergence(m, p), rel=1e-3, abs=1e-4)
            assert found.loss * 2**-16 <= left
            assert found.gained * 2**-16 == pytest.approx(m[draft] - p[draft], rel=1e-3, abs=1e-4)
            assert found.drift * 2**-16 == pytest.approx(oracle.drift(m, p), rel=1e-3, abs=1e-4)
            spent += found.loss
        wanted.append(lost)
    # Behind the answer's last token, and the first that is rejected, nothing counts.
    reference.verify(
        *(own_step, rule, constraints),
        sampling_inputs=All(torch.ones(len(wanted)), np.zeros(0)),
        bonus=torch.zeros(len(wanted)),
    )
    assert (own_step.records.lost - before)[own_step.slots.long()].tolist() == wanted


# fmt: off
LN2 = math.log(2)
EVEN = [0.0, 0.0]
SAMPLED = {
    # name: (rows, drafts, bias at each position, probability of acceptance) at a price of log 2
    "K 1, p 1/2":               ([EVEN], [0], [LN2], [2 / 3]),
    "no draft":                 ([], [], [], []),
    "p 1":                      ([[1.0, -INF]], [0], [LN2], [1.0]),
    "p 0":                      ([[1.0, -INF]], [1], [0.0], [0.0]),
    "one token left by a mask": ([[-INF, -INF, 3.0]], [2], [LN2], [1.0]),
    "a row masked throughout":  ([[-INF, -INF]], [0], [0.0], [NAN]),
    "NaN":                      ([[NAN, 1.0], EVEN], [1, 0], [0.0, LN2], [NAN, 2 / 3]),
    "padding":                  ([EVEN, EVEN], [0, -1], [LN2, 0.0], [2 / 3, 0.5]),
    "sure to be followed":      ([EVEN, [0.0, -INF]], [0, 0], [2 * LN2, LN2], [4 / 5, 1.0]),
    "followed by half":         ([EVEN, EVEN], [0, 1], [math.log(3), LN2], [3 / 4, 2 / 3]),
}
# fmt: on


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_by_hand(name):
    rows, drafts, biases, accepted = SAMPLED[name]
    logits = torch.tensor(rows) if rows else torch.zeros(0, 2)
    records = Records.new(1, logits.device)
    records.value.fill_(encode_value(PRICE, LN2))
    records.rate.fill_(NO_BOUND)
    records.max_tokens.fill_(99)
    own = step_of(logits, [drafts], records, torch.zeros(1, dtype=torch.int32), [0], len(rows))
    ((positions, _),) = decided(own, EngineParams(PRICE), None)
    assert [position.bias for position in positions] == pytest.approx(biases, abs=1e-4)
    p = [float(row.softmax(0)[max(x, 0)]) for row, x in zip(logits, drafts, strict=True)]
    m = [x * math.exp(of.bias - of.log_z) for x, of in zip(p, positions, strict=True)]
    assert m == pytest.approx(accepted, abs=1e-4, nan_ok=True)


def test_rows_that_an_engine_wrote_to_are_written_to_outside_of_inference_mode(monkeypatch):
    monkeypatch.setattr(accept, "_BUFFERS", {})
    with torch.inference_mode():
        test_sampled_by_hand("K 1, p 1/2")
    test_sampled_by_hand("K 1, p 1/2")


@settings(max_examples=100, deadline=None)
@given(batches(rules=["price"], dtypes=[torch.float32]))
def test_without_a_price_nothing_is_added(batch):
    """Exactly, so that the output is vLLM's and nothing is lost."""
    batch |= {"values": [0.0] * len(batch["lengths"])}
    own_step, _, rule = step(batch)
    for positions, _ in decided(own_step, rule, guard_of(batch)):
        assert all(position == RowDecision(Verdict.NONE) for position in positions)


def run(batch, rule, value):
    """Verifies through the public function."""
    own_step, _, limits = step(batch)
    behind = torch.nn.functional.one_hot(torch.tensor(batch["bonus"]), batch["vocab"])
    logits = own_step.logits.clone()
    logits[own_step.cu_num_logits - 1] = behind.to(logits.dtype)
    drafts = torch.tensor(batch["drafts"], dtype=torch.int32)
    return verify_greedy(
        *(logits, drafts, torch.tensor(np.cumsum(batch["lengths"]), dtype=torch.int32)),
        **{rule: value},
        protected=limits.protected.mask,
        max_draft_len=LONGEST,
    )


@settings(max_examples=200, deadline=None)
@given(batches(), st.data())
def test_acceptance_grows_from_strict_to_loose(batch, data):
    rule = batch["rule"]
    tight, loose = sorted(
        (data.draw(VALUES[rule]) for _ in range(2)),
        key=functools.partial(encode_value, RULES[rule]),
    )
    strict = run(batch, "theta", 1.0)
    assert not strict.num_relaxed.any()
    accepted = [run(batch, rule, value).num_accepted for value in (tight, loose)]
    assert (strict.num_accepted <= accepted[0]).all() and (accepted[0] <= accepted[1]).all()
    same = run(batch, rule, RULES[rule].strict)
    assert torch.equal(same.output_token_ids, strict.output_token_ids)


# fmt: off
PRICED = {
    # name: (losses of the drafts; None is the first choice), price, accepted, loss
    "too dear alone":               ([1.0], 0.5, 0, 0.0),
    "as dear as it brings":         ([0.5], 0.5, 0, 0.0),
    "cheaper than it brings":       ([0.25], 0.5, 1, 0.25),
    "paid by what follows":         ([1.0, None, None], 0.5, 3, 1.0),
    "not paid by what follows":     ([1.0, None], 0.5, 0, 0.0),
    "cheap, then too dear":         ([0.25, 2.0], 0.5, 1, 0.25),
    "dear, cheap, free":            ([0.75, 0.25, None], 0.5, 3, 1.0),
    "strict ones are kept":         ([None, None, 1.0], 0.5, 2, 0.0),
    "up to the best of two stops":  ([0.25, None, 3.0, None], 0.5, 2, 0.25),
    "price 0":                      ([0.25], 0.0, 0, 0.0),
}
# fmt: on


@pytest.mark.parametrize("name", PRICED)
def test_a_prefix_is_taken_where_it_pays(name):
    losses, price, accepted, loss = PRICED[name]
    # Token 0 is the first choice; token 2, of the lowest rank, is drafted where something is lost.
    rows = [[5.0, 4.99, 5.0 - (drop or 3.0)] for drop in losses]
    output = verify_greedy(
        torch.tensor([*rows, rows[0]]),
        torch.tensor([0 if drop is None else 2 for drop in losses]),
        torch.tensor([len(losses)], dtype=torch.int32),
        price=price,
    )
    assert int(output.num_accepted) == accepted
    assert float(output.loss) == loss
