"""The rule: hand-computed cases, properties, and the CPU reference against the oracle."""

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
    """Verifies one draft token; returns the emitted tokens and the numbers accepted and relaxed."""
    bonus_row = [float(token == BONUS) for token in range(len(row))]
    logits = torch.tensor([row, bonus_row], dtype=dtype)
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
    "tie at the top, theta 1":       ([2.0, 2.0, 0.5, 0.0], 1, {"theta": 1}, [0], 0),
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
    "infinite argmax"      :         ([1.9, INF, 0.5, 0.0], 0, {}, [1], 0),
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
def test_hand_computed_cases(name, dtype):
    row, draft, options, tokens, relaxed = CASES[name]
    assert verify_one(row, draft, dtype=dtype, **options) == (
        tokens,
        int(tokens[0] == draft),
        relaxed,
    )


# Reasons to block a position, and (lost nats, nats per token of the request, output tokens).
BLOCKED = st.sampled_from([0, 0, Verdict.SPAN, Verdict.REPEAT])
NATS = st.tuples(
    st.sampled_from([0.0, 0.25, 1.0, 1.5]), st.sampled_from([0.0, 0.01, 0.3]), st.integers(0, 40)
)
VALUES = {
    "theta": st.one_of(st.sampled_from([1.0, 0.9, 0.5, 0.01]), st.floats(0.0625, 1, width=16)),
    "price": st.one_of(st.sampled_from([0.0, 0.25, 1.0, 4.0]), st.floats(0, 8, width=32)),
}
LONGEST = 5
COUNTED = CounterLayout(LONGEST)


@st.composite
def batches(draw, dtypes=(torch.float32, torch.bfloat16, torch.float16)):
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
    # Favors the argmax, so that drafts get past the first position.
    for i, values in enumerate(rows):
        if draw(st.booleans()):
            drafts[i] = oracle.argmax(values)
    rule = draw(st.sampled_from([*VALUES]))
    has_bound = draw(st.booleans())
    few_tokens = st.frozensets(st.integers(0, vocab - 1), max_size=2)
    followers = few_tokens if rule == "price" else st.just(frozenset())
    tokens_left = st.just(9) | st.integers(0, LONGEST)
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
        "listed": draw(st.lists(followers, min_size=size, max_size=size)),
        "nats": draw(st.lists(NATS, min_size=count, max_size=count)) if has_bound else None,
        "ends": draw(st.lists(few_tokens, min_size=count, max_size=count)),
        "tokens_left": draw(st.lists(tokens_left, min_size=count, max_size=count)),
    }


def step_of(logits, drafts, records, slots, produced):
    """A step in which each request's draft rows precede its bonus row."""
    ends = np.cumsum([len(tokens) + 1 for tokens in drafts])
    rows = torch.zeros(sum(map(len, drafts)) + len(drafts), logits.shape[1], dtype=logits.dtype)
    inputs = [token for tokens in drafts for token in (-1, *tokens)]
    rows[~np.isin(np.arange(len(rows)), ends - 1)] = logits
    total = torch.zeros(len(records.lost), dtype=torch.int32)
    total[slots.long()] = torch.tensor(produced, dtype=torch.int32)
    inputs, ends = (torch.tensor(values, dtype=torch.int32) for values in (inputs, ends))
    prompt = torch.zeros_like(total)
    return VerifyInputs(rows, inputs, ends, records, slots, total, prompt, LONGEST)


def constraints_of(batch):
    """Constraints of each row, none for bonus rows; None without any."""
    if batch["blocked"] is None and not any(batch["listed"]):
        return None
    blocked = batch["blocked"] or [0] * len(batch["drafts"])
    columns = zip(blocked, batch["drafts"], batch["listed"], strict=True)
    rows = [(reason, draft in listed, listed) for reason, draft, listed in columns]
    ends = np.cumsum(batch["lengths"]).tolist()
    ranges = zip(ends, batch["lengths"], strict=True)
    by_request = ([*rows[end - length : end], (0, False, ())] for end, length in ranges)
    return CpuConstraints.of(itertools.chain(*by_request))


def step(batch):
    """The batch as a step, its draft rows, and the engine's parameters."""
    mask = torch.zeros(batch["vocab"], dtype=torch.bool)
    mask[list(batch["protected"])] = True
    logits = torch.tensor(batch["rows"], dtype=batch["dtype"]).reshape(-1, batch["vocab"])
    count, rule = len(batch["values"]), RULES[batch["rule"]]
    lost, rates, produced = zip(*(batch["nats"] or [(0.0, INF, 0)] * count), strict=True)
    # Slots are in reverse order of the requests.
    slots = torch.arange(count - 1, -1, -1, dtype=torch.int32)
    records = Records.new(count, slots.device)
    records.value[slots] = torch.tensor([encode_value(rule, value) for value in batch["values"]])
    records.rate[slots] = torch.tensor([loss_rate(rate) for rate in rates])
    records.lost[slots] = torch.tensor([floor_units(nats) for nats in lost])
    max_tokens = [n + 1 + left for n, left in zip(produced, batch["tokens_left"], strict=True)]
    records.max_tokens[slots] = torch.tensor(max_tokens)
    ends = torch.tensor([[*tokens, -1, -1][:2] for tokens in batch["ends"]])
    records.stop_ids[slots, :2] = ends
    begins = np.cumsum(batch["lengths"]) - batch["lengths"]
    drafts = [
        batch["drafts"][begin : begin + length]
        for begin, length in zip(begins.tolist(), batch["lengths"], strict=True)
    ]
    protected = Protected.of(mask, mask.device)
    inputs = step_of(logits, drafts, records, slots, produced)
    return inputs, logits, EngineParams(rule, protected)


def requests_of(batch, logits):
    """Yields each request's rows, extendable positions, and arguments of `oracle.verify`."""
    ends = np.cumsum(batch["lengths"]).tolist()
    for i, (length, end) in enumerate(zip(batch["lengths"], ends, strict=True)):
        positions = slice(end - length, end)
        value, nats = batch["values"][i], None
        if batch["nats"] is not None:
            lost, rate, produced = batch["nats"][i]
            nats = oracle.Nats(Fraction(rate), Fraction(lost), produced)
        arguments = {
            "drafts": batch["drafts"][positions],
            "theta": value if batch["rule"] == "theta" else 1.0,
            "protected": batch["protected"],
            "blocked": None if batch["blocked"] is None else batch["blocked"][positions],
            "listed": batch["listed"][positions],
            "nats": nats,
            "price": value if batch["rule"] == "price" else None,
            "ends": batch["ends"][i],
            "room": batch["tokens_left"][i],
        }
        extendable = oracle.num_extendable(
            arguments["drafts"], arguments["ends"], arguments["room"]
        )
        yield logits[positions].float().tolist(), extendable, arguments


@settings(max_examples=500, deadline=None)
@given(batch=batches())
def test_greedy_requests_equal_the_oracle(batch):
    inputs, logits, engine_params = step(batch)
    table = torch.full((len(batch["lengths"]), 2, LONGEST + 1), 7.0)
    step_counters = StepCounters(torch.zeros(COUNTED.size, dtype=torch.int64), table)
    before = inputs.records.lost.clone()
    bonus, constraints = torch.tensor(batch["bonus"]), constraints_of(batch)
    output = reference.verify(inputs, engine_params, constraints, step_counters, bonus=bonus)
    counts = np.zeros(COUNTED.size, dtype=np.int64)
    for i, (rows, extendable, arguments) in enumerate(requests_of(batch, logits)):
        expected = oracle.verify(rows, bonus=batch["bonus"][i], **arguments)
        row = output.output_token_ids[i].tolist()
        assert row == expected.tokens + [-1] * (len(row) - len(expected.tokens))
        assert int(output.num_accepted[i]) == expected.accepted
        assert int(output.num_relaxed[i]) == expected.relaxed
        assert int(output.lost[i]) == expected.loss * 2**16
        assert float(output.loss[i]) == float(np.float32(expected.loss))
        slot = inputs.slots[i]
        assert int(inputs.records.lost[slot] - before[slot]) == expected.loss * 2**16
        report = [NAN] * (LONGEST + 1)
        is_relaxable = arguments["theta"] < 1
        if batch["rule"] == "price":
            is_relaxable = price_units(batch["values"][i]) > 0
        last = min(expected.accepted, extendable)
        for offset, verdict in enumerate(expected.verdicts[: last + 1]):
            draft, is_relaxed = arguments["drafts"][offset], verdict == Verdict.RELAXED
            if is_relaxed:
                report[offset] = float(oracle.loss(rows[offset], draft))
            if draft >= 0:
                counts[COUNTED.verified][offset] += 1
                counts[COUNTED.relaxable] += is_relaxable
                counts[COUNTED.accepted][offset] += offset < expected.accepted
                counts[COUNTED.relaxed][offset] += is_relaxed
            if verdict in REFUSALS:
                counts[COUNTED.refused][REFUSALS.index(verdict)] += 1
        np.testing.assert_allclose(step_counters.table[i, 0].tolist(), report)
        counts[COUNTED.lost] += int(expected.loss * 2**16)
        counts[COUNTED.drift_up] += int(expected.loss * 2**16)
        counts[COUNTED.gained] += expected.relaxed * 2**16
    assert step_counters.counts.tolist() == counts.tolist()


class All(accept.CpuSamplingInputs):
    """Accepts every token of positive probability."""

    def accepts(self, _, probability):
        return probability > 0

    def sample_token(self, *_):
        return 0


def decided(inputs, engine_params, constraints):
    """Yields each request's decisions and extendable positions in a step of sampled requests."""
    temperature = [1.0] * len(inputs.slots)
    rows = read_rows(inputs, engine_params, constraints, temperature)
    sampling_inputs = All(torch.tensor(temperature), np.zeros(0))
    begins = [0, *inputs.cu_num_logits.tolist()]
    for req_idx, budget in enumerate(accept.loss_budgets(inputs)):
        begin, end = begins[req_idx], begins[req_idx + 1] - 1
        followers = constraints.followers[begin:end] if constraints else ()
        draft = accept.SampledDraft(
            inputs, engine_params, sampling_inputs, req_idx, begin, end, followers
        )
        draft.read(slice(None))
        probabilities = read_probabilities(rows, draft.begin, draft.z, draft.p, draft.preserved)
        extendable = num_extendable(probabilities, draft.begin, draft.end, budget)
        rule = engine_params.rule.plain
        yield rule.sampled(probabilities, draft.begin, draft.end, budget), extendable


@settings(max_examples=400, deadline=None)
@given(batch=batches(dtypes=[torch.float32]))
def test_sampled_requests_equal_the_oracle(batch):
    """Compares verdict, distribution, loss and gain of each position."""
    close, unit = functools.partial(pytest.approx, rel=1e-3, abs=1e-4), 2**-16
    inputs, logits, engine_params = step(batch)
    constraints = constraints_of(batch)
    before, expected_lost = inputs.records.lost.clone(), []
    decisions = decided(inputs, engine_params, constraints)
    requests = requests_of(batch, logits)
    for (positions, num_positions), request in zip(decisions, requests, strict=True):
        rows, extendable, arguments = request
        assert num_positions == extendable
        drafts, price, nats = (arguments[name] for name in ("drafts", "price", "nats"))
        protected = arguments["protected"] | arguments["ends"]
        preserved_at = [protected | listed for listed in arguments["listed"]]
        reasons = arguments["blocked"] or [0] * len(rows)
        for j, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            compared = {draft} if price is not None else {draft, oracle.argmax(row)}
            if not reasons[j] and compared & preserved_at[j]:
                reasons[j] = Verdict.PROTECTED if compared & protected else Verdict.REPEAT
        strict = list(map(bool, reasons))
        biases = oracle.tilts(rows, drafts, price or 0.0, strict, extendable, preserved_at)
        is_reached, lost, spent = True, 0, 0
        for j, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            decision, p, preserved = positions[j], oracle.softmax(row), preserved_at[j]
            lost += decision.loss * (is_reached and j <= extendable)
            if draft < 0 or not p[draft] > 0:
                # Left to be rejected.
                assert decision == RowDecision(Verdict.NONE)
                is_reached = False
                continue
            if price == 0:
                assert decision == RowDecision(Verdict.NONE)
            left = INF
            if nats is not None:
                left = max(oracle.earned(nats, j + 1) - nats.lost - Fraction(spent, 2**16), 0)
            verdict, bias = Verdict.NONE, min(biases[j], math.sqrt(8 * left))
            m = oracle.served(row, draft, bias, preserved)
            if price is None:
                if oracle.is_relaxed(row, draft, arguments["theta"], frozenset()):
                    too_much = math.ceil(-math.log(p[draft]) * 2**16) * 2**-16 > left
                    verdict = reasons[j] or (Verdict.LOSS if too_much else Verdict.RELAXED)
            elif reasons[j] and oracle.in_steps(price) and j < extendable:
                verdict = reasons[j]
            assert decision.verdict == verdict
            if verdict == Verdict.RELAXED:
                m = [float(token == draft) for token in range(len(row))]
            else:
                assert decision.bias == pytest.approx(bias, rel=1e-4, abs=1e-5)
                if decision.bias:
                    logs = math.log(m[draft] / p[draft])
                    # A float32 p(S) makes 1 - p(S) wrong by some units in the last place of 1.
                    others = sum(share for token, share in enumerate(p) if token not in preserved)
                    log_ratio = decision.bias - decision.log_z
                    assert log_ratio == pytest.approx(logs, rel=1e-3, abs=1e-4 + 2**-22 / others)
            assert decision.loss * unit == close(oracle.divergence(m, p))
            assert decision.loss * unit <= left
            assert decision.gained * unit == close(m[draft] - p[draft])
            assert decision.drift * unit == close(oracle.drift(m, p))
            spent += decision.loss
        expected_lost.append(lost)
    # Nothing counts after the answer's last token, or after the first rejection.
    reference.verify(
        inputs,
        engine_params,
        constraints,
        sampling_inputs=All(torch.ones(len(expected_lost)), np.zeros(0)),
        bonus=torch.zeros(len(expected_lost)),
    )
    assert (inputs.records.lost - before)[inputs.slots.long()].tolist() == expected_lost


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
    "a fully masked row":       ([[-INF, -INF]], [0], [0.0], [NAN]),
    "NaN":                      ([[NAN, 1.0], EVEN], [1, 0], [0.0, LN2], [NAN, 2 / 3]),
    "padding":                  ([EVEN, EVEN], [0, -1], [LN2, 0.0], [2 / 3, 0.5]),
    "certain to be followed":   ([EVEN, [0.0, -INF]], [0, 0], [2 * LN2, LN2], [4 / 5, 1.0]),
    "followed by half":         ([EVEN, EVEN], [0, 1], [math.log(3), LN2], [3 / 4, 2 / 3]),
}
# fmt: on


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_decisions_by_hand(name):
    rows, drafts, biases, accepted = SAMPLED[name]
    logits = torch.tensor(rows) if rows else torch.zeros(0, 2)
    records = Records.new(1, logits.device)
    records.value.fill_(encode_value(PRICE, LN2))
    records.rate.fill_(NO_BOUND)
    records.max_tokens.fill_(99)
    inputs = step_of(logits, [drafts], records, torch.zeros(1, dtype=torch.int32), [0])
    ((positions, _),) = decided(inputs, EngineParams(PRICE), None)
    assert [position.bias for position in positions] == pytest.approx(biases, abs=1e-4)
    p = [float(row.softmax(0)[max(x, 0)]) for row, x in zip(logits, drafts, strict=True)]
    ratios = [math.exp(position.bias - position.log_z) for position in positions]
    m = np.multiply(p, ratios).tolist()
    assert m == pytest.approx(accepted, abs=1e-4, nan_ok=True)


def test_buffers_of_an_engine_are_reused_outside_of_inference_mode(monkeypatch):
    monkeypatch.setattr(accept, "_BUFFERS", {})
    with torch.inference_mode():
        test_sampled_decisions_by_hand("K 1, p 1/2")
    test_sampled_decisions_by_hand("K 1, p 1/2")


# fmt: off
PRICED = {
    # name: (losses of the drafts; None is the argmax), price, accepted, loss
    "too expensive":               ([1.0], 0.5, 0, 0.0),
    "costs the price":         ([0.5], 0.5, 0, 0.0),
    "costs less":       ([0.25], 0.5, 1, 0.25),
    "paid by what follows":         ([1.0, None, None], 0.5, 3, 1.0),
    "not paid by what follows":     ([1.0, None], 0.5, 0, 0.0),
    "cheap, then expensive":         ([0.25, 2.0], 0.5, 1, 0.25),
    "expensive, cheap, free":            ([0.75, 0.25, None], 0.5, 3, 1.0),
    "strict ones are accepted":         ([None, None, 1.0], 0.5, 2, 0.0),
    "up to the best of two stops":  ([0.25, None, 3.0, None], 0.5, 2, 0.25),
    "price 0":                      ([0.25], 0.0, 0, 0.0),
}
# fmt: on


@pytest.mark.parametrize("name", PRICED)
def test_the_prefix_of_highest_value_is_accepted(name):
    losses, price, accepted, loss = PRICED[name]
    # Token 0 is the argmax; the draft is token 2, of the lowest rank, if something is lost.
    rows = [[5.0, 4.99, 5.0 - (drop or 3.0)] for drop in losses]
    output = verify_greedy(
        torch.tensor([*rows, rows[0]]),
        torch.tensor([0 if drop is None else 2 for drop in losses]),
        torch.tensor([len(losses)], dtype=torch.int32),
        price=price,
    )
    assert int(output.num_accepted) == accepted
    assert float(output.loss) == loss
