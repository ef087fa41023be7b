"""The rule: hand-computed cases, properties, and every CPU form of it against the oracle."""

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
from vllm_mars.kernels.terms import (
    Drafts,
    LossBudget,
    Margin,
    RelaxedBudget,
    Verdict,
    loss_rate,
    loss_units,
    most_lost,
)
from vllm_mars.verify import judge_drafts, verify_drafts

NAN, INF = math.nan, math.inf
BONUS = 3


def verify_one(row, draft, theta=0.9, gap=0.0, protected=(), dtype=torch.float32):
    """Verifies one draft token; returns the emitted tokens, and how many are accepted, relaxed."""
    logits = torch.tensor([row], dtype=dtype)
    mask = torch.zeros(len(row), dtype=torch.bool)
    mask[list(protected)] = True
    output = verify_greedy(
        logits,
        torch.tensor([draft], dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([BONUS]),
        theta,
        gap=gap,
        protected=mask if protected else None,
        backend="torch",
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
    "negative logits, gap":          ([-1.1, -1.0, -3.0, -4.0], 0, {"theta": 1.0, "gap": 0.2},
                                      [0, BONUS], 1),
    "gap exactly reached":           ([1.5, 2.0, 0.0, 0.0], 0, {"theta": 1.0, "gap": 0.5}, [1], 0),
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


def test_top_two_are_accepted_outright_in_sampling():
    logits = torch.tensor([[1.9, 2.0, 0.5], [1.9, 2.0, 0.5], [1.9, 2.0, 0.5], [1.0, 2.0, 0.5]])
    drafts = torch.tensor([0, 1, 2, 1])
    step = Drafts(logits, drafts, torch.tensor([4], dtype=torch.int32))
    judged = judge_drafts(step, Margin(0.9))
    assert judged.verdicts.tolist() == [1, 1, 0, 0]


# What a caller may block a position with, and (relaxed, produced) tokens of a request so far, and
# (lost nats, its own nats per token, produced tokens).
BLOCKED = st.sampled_from([0, 0, Verdict.SPAN, Verdict.STRUCTURED])
BUDGET = st.integers(0, 40).flatmap(lambda n: st.tuples(st.integers(0, n // 4), st.just(n)))
NATS = st.tuples(
    st.sampled_from([0.0, 0.25, 1.0, 1.5]), st.sampled_from([0.0, 0.01, 0.3]), st.integers(0, 40)
)
PRICE = st.one_of(st.sampled_from([0.0, 0.25, 1.0, 4.0]), st.floats(0, 8, width=32))


@st.composite
def batches(draw):
    """A ragged batch over few distinct logits, so that ties, masks and small margins are common."""
    vocab = draw(st.integers(2, 9))
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    logit = st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, 1.9, 2.0, 10.0, -1.0, -INF]),
        st.floats(-4, 12, width=16),
        st.sampled_from([NAN, INF]) if draw(st.booleans()) else st.just(2.5),
    )
    row = st.lists(logit, min_size=vocab, max_size=vocab)
    size = sum(lengths)
    rows = draw(st.lists(row, min_size=size, max_size=size))
    drafts = draw(st.lists(st.integers(-1, vocab - 1), min_size=size, max_size=size))
    # Bias towards the argmax and its rivals, so that drafts get past the first position.
    for i, values in enumerate(rows):
        if draw(st.booleans()):
            drafts[i] = oracle.argmax(values)
    theta = st.one_of(st.sampled_from([1.0, 0.9, 0.5, 0.01]), st.floats(0.0625, 1, width=16))
    gap = st.sampled_from([0.0, 0.0, 0.25, 3.0])
    count = len(lengths)
    price = draw(st.none() | st.lists(PRICE, min_size=count, max_size=count))
    if price is not None:
        theta, gap = st.just(1.0), st.just(0.0)
    return {
        "vocab": vocab,
        "lengths": lengths,
        "rows": rows,
        "drafts": drafts,
        "bonus": draw(st.lists(st.integers(0, vocab - 1), min_size=count, max_size=count)),
        "theta": draw(st.lists(theta, min_size=count, max_size=count)),
        "gap": draw(st.lists(gap, min_size=count, max_size=count)),
        "protected": draw(st.frozensets(st.integers(0, vocab - 1), max_size=3)),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        "blocked": draw(st.none() | st.lists(BLOCKED, min_size=size, max_size=size)),
        "budget": draw(st.none() | st.lists(BUDGET, min_size=count, max_size=count)),
        "share": draw(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.7, 1.0])),
        "nats": draw(st.none() | st.lists(NATS, min_size=count, max_size=count)),
        "burst": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "price": price,
    }


def limits(batch):
    """The batch's price, and what else it allows, as tensors."""
    blocked, budget, nats = batch["blocked"], batch["budget"], batch["nats"]
    if budget is not None:
        relaxed, produced = torch.tensor(budget, dtype=torch.int32).unbind(1)
        budget = RelaxedBudget(batch["share"], relaxed.contiguous(), produced.contiguous())
    return {
        "blocked": None if blocked is None else torch.tensor(blocked, dtype=torch.int8),
        "budget": budget,
        "loss_budget": None if nats is None else loss_budget(nats, batch["burst"]),
        "price": None if batch["price"] is None else torch.tensor(batch["price"]),
    }


def loss_budget(nats, burst):
    """Per request where they differ, else one rate for all."""
    lost, rates, produced = zip(*nats, strict=True)
    rate = torch.tensor([loss_rate(nats_per_token) for nats_per_token in rates])
    return LossBudget(
        loss_rate(rates[0]) if len(set(rates)) == 1 else rate,
        loss_units(burst),
        torch.tensor([loss_units(nats) for nats in lost]),
        torch.tensor(produced, dtype=torch.int32),
    )


def oracle_limits(batch, request):
    """The same of one request, for the oracle."""
    start = sum(batch["lengths"][:request])
    end = start + batch["lengths"][request]
    budget = batch["budget"]
    if budget is not None:
        # The share as it is meant, not as a float.
        share = Fraction(batch["share"]).limit_denominator(10)
        budget = oracle.Budget(share, *budget[request])
    nats = batch["nats"]
    if nats is not None:
        lost, rate, produced = nats[request]
        nats = oracle.Nats(Fraction(rate), Fraction(batch["burst"]), Fraction(lost), produced)
    return {
        "blocked": None if batch["blocked"] is None else batch["blocked"][start:end],
        "budget": budget,
        "nats": nats,
        "price": None if batch["price"] is None else batch["price"][request],
    }


def step(batch, theta=None, gap=None):
    """The batch as its drafts and its margin."""
    mask = torch.zeros(batch["vocab"], dtype=torch.bool)
    mask[list(batch["protected"])] = True
    logits = torch.tensor(batch["rows"], dtype=batch["dtype"]).reshape(-1, batch["vocab"])
    drafts = Drafts(
        # A row of another value keeps the reduction over rows defined when there is no draft.
        torch.cat([logits, torch.zeros(1, batch["vocab"], dtype=batch["dtype"])]),
        torch.tensor(batch["drafts"], dtype=torch.int32),
        torch.tensor(np.cumsum(batch["lengths"]), dtype=torch.int32),
        bonus_token_ids=torch.tensor(batch["bonus"]),
        max_draft_len=max(batch["lengths"]),
    )
    theta = torch.tensor(batch["theta"]) if theta is None else theta
    gap = torch.tensor(batch["gap"]) if gap is None else gap
    return drafts, Margin(theta, gap, mask)


def run(batch, theta=None, gap=None, price=0.0):
    """Verifies through the public function."""
    drafts, margin = step(batch, theta, gap)
    return verify_greedy(
        *(drafts.logits, drafts.draft_token_ids, drafts.cu_num_draft_tokens),
        *(drafts.bonus_token_ids, margin.theta),
        gap=margin.gap,
        protected=margin.protected,
        max_draft_len=drafts.max_draft_len,
        price=price,
    )


def requests_of(batch, logits):
    start = 0
    for i, length in enumerate(batch["lengths"]):
        end = start + length
        yield i, logits[start:end].float().tolist(), batch["drafts"][start:end]
        start = end


@pytest.mark.parametrize("verify", [verify_drafts, reference.verify_greedy])
@settings(max_examples=400, deadline=None)
@given(batch=batches(), dry_run=st.booleans())
def test_backend_equals_oracle(verify, batch, dry_run):
    drafts, margin = step(batch)
    logits = drafts.logits[:-1]
    output = verify(drafts, margin._replace(**limits(batch)), with_verdicts=True, dry_run=dry_run)
    verdicts = []
    for i, rows, drafts in requests_of(batch, logits):
        expected = oracle.verify(
            rows,
            drafts,
            batch["bonus"][i],
            batch["theta"][i],
            batch["gap"][i],
            batch["protected"],
            dry_run=dry_run,
            **oracle_limits(batch, i),
        )
        verdicts += expected.verdicts
        row = output.output_token_ids[i].tolist()
        assert row == expected.tokens + [-1] * (len(row) - len(expected.tokens))
        assert int(output.num_accepted[i]) == expected.accepted
        assert int(output.num_relaxed[i]) == expected.relaxed
        assert int(output.lost[i]) == expected.loss * 2**16
        assert float(output.loss[i]) == float(np.float32(expected.loss))
    assert output.verdicts.tolist() == verdicts
    check_values(batch, logits, output, everywhere=dry_run)


def check_values(batch, logits, output, everywhere):
    """The top 2 of each position that was looked at, both NaN where the row holds one."""
    start = 0
    for i, rows, _ in requests_of(batch, logits):
        looked_at = len(rows) if everywhere else int(output.num_accepted[i]) + 1
        for row, values in zip(rows[:looked_at], output.top2_values[start:].tolist(), strict=False):
            expected = sorted(row, reverse=True)[:2] if not any(map(math.isnan, row)) else [NAN] * 2
            if len(row) > 1:
                np.testing.assert_array_equal(values, expected)
        start += len(rows)


def test_a_bound_is_rounded_down():
    """25 tokens at 0.01 nats allow one step less than 0.25, in the oracle too."""
    steps = most_lost(loss_rate(0.01), 0, 25)
    assert steps == loss_units(0.25) - 1
    nats = oracle.Nats(Fraction(0.01), Fraction(0), Fraction(0), 20)
    assert oracle.earned(nats, 5) == Fraction(steps, 2**16)


@pytest.mark.parametrize("judge", [judge_drafts, reference.judge_positions])
@settings(max_examples=300, deadline=None)
@given(batch=batches())
def test_judge_positions_equals_oracle(judge, batch):
    if not batch["drafts"]:
        return
    drafts, margin = step(batch)
    logits = drafts.logits[:-1]
    judged = judge(drafts, margin._replace(**limits(batch)), with_top2_values=True)
    expected = []
    for i, rows, drafts in requests_of(batch, logits):
        expected += oracle.judge(
            rows,
            drafts,
            batch["theta"][i],
            batch["gap"][i],
            batch["protected"],
            **oracle_limits(batch, i),
        )
    assert judged.verdicts.tolist() == expected
    losses = map(oracle.loss, logits.tolist(), batch["drafts"])
    assert judged.losses.tolist() == [loss * 2**16 for loss in losses]
    torch.testing.assert_close(judged.top2_values, reference.top2(logits)[0], equal_nan=True)


@settings(max_examples=100, deadline=None)
@given(batches(), st.floats(0.0625, 1, width=16), st.floats(0.0625, 1, width=16))
def test_acceptance_grows_as_theta_falls(batch, one, other):
    low, high = sorted((one, other))
    looser = run(batch, theta=low, gap=0.0)
    tighter = run(batch, theta=high, gap=0.0)
    strict = run(batch, theta=1.0, gap=0.0)
    assert (looser.num_accepted >= tighter.num_accepted).all()
    assert (tighter.num_accepted >= strict.num_accepted).all()
    assert not strict.num_relaxed.any()


@settings(max_examples=200, deadline=None)
@given(batches(), PRICE, PRICE)
def test_acceptance_grows_with_the_price(batch, one, other):
    low, high = sorted((one, other))
    strict, free = run(batch, theta=1.0, gap=0.0), run(batch, 1.0, 0.0, price=0.0)
    dear, cheap = run(batch, 1.0, 0.0, price=high), run(batch, 1.0, 0.0, price=low)
    assert (dear.num_accepted >= cheap.num_accepted).all()
    assert (cheap.num_accepted >= strict.num_accepted).all()
    assert torch.equal(free.output_token_ids, strict.output_token_ids)


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
        torch.tensor(rows),
        torch.tensor([0 if drop is None else 2 for drop in losses]),
        torch.tensor([len(losses)], dtype=torch.int32),
        None,
        1.0,
        price=price,
    )
    assert int(output.num_accepted) == accepted
    assert float(output.loss) == loss


@settings(max_examples=100, deadline=None)
@given(batches())
def test_nothing_follows_the_first_rejection(batch):
    output = run(batch)
    for i, length in enumerate(batch["lengths"]):
        accepted = int(output.num_accepted[i])
        assert (output.output_token_ids[i, accepted + 1 :] == -1).all()
        assert (output.output_token_ids[i, : min(accepted + 1, length + 1)] != -1).all()


@settings(max_examples=100, deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_batch_order_does_not_matter(batch, random):
    order = list(range(len(batch["lengths"])))
    random.shuffle(order)
    starts = [0, *np.cumsum(batch["lengths"]).tolist()]
    shuffled = {
        **batch,
        **{key: [batch[key][i] for i in order] for key in ("lengths", "bonus", "theta", "gap")},
        **{
            key: [x for i in order for x in batch[key][starts[i] : starts[i + 1]]]
            for key in ("rows", "drafts")
        },
    }
    output = run(batch)
    reordered = run(shuffled)
    assert torch.equal(output.output_token_ids[order], reordered.output_token_ids)
    assert torch.equal(output.num_relaxed[order], reordered.num_relaxed)


def test_rows_and_bonus_come_through_the_indices():
    """Drafts of two requests with bonus rows between them, as vLLM lays its logits out."""
    logits = torch.tensor(
        [[0.0, 5.0, 4.9], [9.0, 0.0, 0.0], [5.0, 0.0, 4.8], [0.0, 0.0, 7.0]], dtype=torch.bfloat16
    )
    output = verify_greedy(
        logits,
        torch.tensor([2, 2], dtype=torch.int32),
        torch.tensor([1, 2], dtype=torch.int32),
        None,
        0.9,
        target_rows=torch.tensor([0, 2]),
        bonus_rows=torch.tensor([1, 3]),
        max_draft_len=3,
    )
    assert output.output_token_ids.tolist() == [[2, 0, -1, -1], [2, 2, -1, -1]]
    assert output.num_relaxed.tolist() == [1, 1]


def test_without_bonus_an_accepted_draft_ends_the_output():
    output = verify_greedy(
        torch.tensor([[0.0, 5.0]]),
        torch.tensor([1]),
        torch.tensor([1], dtype=torch.int32),
        None,
        1.0,
    )
    assert output.output_token_ids.tolist() == [[1, -1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top2_values_and_ids(dtype):
    rows = [[2.0, 3.0, 3.0, 1.0], [-INF, -INF, 4.0, -INF], [1.0, NAN, 2.0, NAN], [-INF] * 4]
    logits = torch.tensor(rows, dtype=dtype)
    output = verify_greedy(
        logits,
        torch.zeros(4, dtype=torch.int32),
        torch.tensor([4], dtype=torch.int32),
        None,
        0.9,
        with_verdicts=True,
        dry_run=True,
    )
    values, ids = reference.top2(logits)
    assert ids.tolist() == [[1, 2], [2, 0], [1, -1], [0, 1]]
    expected = torch.tensor([[3.0, 3.0], [4.0, -INF], [NAN, NAN], [-INF, -INF]])
    for found in (values, output.top2_values):
        torch.testing.assert_close(found, expected, equal_nan=True)
