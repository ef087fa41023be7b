"""The served distribution of sampled requests: it is optimal and reports its loss."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import optimize

import clip_cases
from clip_cases import clip_rows
from vllm_mars.kernels.served_dist import naive as served_dist

NONE = torch.tensor([], dtype=torch.int64)


def clip_one(target, draft, price, preserved=NONE):
    prices = torch.full((target.shape[0],), price)
    return clip_rows(target, draft, prices, preserved), prices


def objective(m, p, q, price):
    """The rule's objective; m and p must be positive."""
    return price * np.minimum(m, q).sum() - (m * np.log(m / p)).sum()


def best(p, q, price, preserved):
    """The maximum, found by a general solver.

    The variables m and s <= min(m, q) make the problem smooth.
    """
    size = len(p)
    bounds = [(p[x], p[x]) if x in preserved else (1e-9, 1) for x in range(size)]
    solution = optimize.minimize(
        lambda x: (x[:size] * np.log(x[:size] / p)).sum() - price * x[size:].sum(),
        np.concatenate([p, np.minimum(p, q)]),
        jac=lambda x: np.concatenate([np.log(x[:size] / p) + 1, np.full(size, -price)]),
        bounds=bounds + [(0, bound) for bound in q],
        constraints=[
            {"type": "eq", "fun": lambda x: x[:size].sum() - 1},
            {"type": "ineq", "fun": lambda x: x[:size] - x[size:]},
        ],
        options={"ftol": 1e-12, "maxiter": 500},
    )
    m = np.clip(solution.x[:size], 1e-12, None)
    return objective(m / m.sum(), p, q, price)


@pytest.mark.parametrize("price", [0.1, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("preserved", [[], [1, 4]])
def test_the_served_distribution_is_optimal(seed, price, preserved):
    target, draft = clip_cases.rows(1, 6, seed, spread=1.0 + seed / 2, off=1.5, masked=0)
    clipped, _ = clip_one(target, draft, price, torch.tensor(preserved, dtype=torch.int64))
    p, m, q = (x[0].double().numpy() for x in (target.softmax(-1), clipped.m, draft))
    reached = objective(m, p, q, price)
    assert reached >= objective(p, p, q, price) - 1e-6
    # min(m, q) has a corner at q, so the error of normalization counts `price` times.
    allowed = 1e-6 + 2 * price * served_dist.TOLERANCE
    assert reached == pytest.approx(best(p, q, price, preserved), abs=allowed)


# All tokens but one are preserved: m is p, and no w makes F(w) 1.
@example(465, 2, 7.0, 4.0, 60.0, clip_cases.PRESERVED)
@settings(deadline=None, max_examples=300)
@given(
    st.integers(0, 10_000),
    st.sampled_from([1, 2, 3, 8, 50]),
    st.floats(0.1, 20),
    st.floats(0, 8),
    st.one_of(st.sampled_from([0.0, 60.0, 1e4]), st.floats(1e-3, 30)),
    st.sampled_from([NONE, clip_cases.PRESERVED]),
)
def test_random_rows_keep_the_bounds_and_report_their_loss(
    seed, vocab, spread, off, price, preserved
):
    target, draft = clip_cases.rows(3, vocab, seed, spread, off)
    clipped, prices = clip_one(target, draft, price, preserved)
    clip_cases.check(clipped, target, prices, preserved)


def test_at_price_0_the_served_distribution_is_the_targets():
    target, draft = clip_cases.rows(3, 97)
    draft[1] = torch.nan
    clipped = clip_rows(target, draft, torch.tensor([0.0, 0.0, 0.5]), NONE)
    assert torch.equal(clipped.m[:2], target[:2].softmax(-1))
    assert not torch.equal(clipped.m[2], target[2].softmax(-1))
    assert clipped.losses[:2].tolist() == [0, 0]


def test_rows_of_one_token_and_of_nan():
    target, draft = clip_cases.nan_rows()
    clipped, _ = clip_one(target, draft, 1.0)
    assert torch.equal(clipped.m[:4].nan_to_num(5), target[:4].softmax(-1).nan_to_num(5))
    # With a NaN draft m is p.
    assert torch.allclose(clipped.m[4], target[4].softmax(-1))
    assert clipped.losses[:4].tolist() == [0] * 4
    assert clipped.losses[4] < 1e-6


@settings(deadline=None, max_examples=400)
@given(
    st.integers(0, 10_000),
    st.sampled_from([2, 3, 8, 50]),
    st.floats(0.1, 8),
    st.floats(1e-2, 8),
    st.sampled_from([NONE, clip_cases.PRESERVED]),
    st.randoms(use_true_random=False),
)
def test_the_closed_form_of_a_fixed_draft_equals_the_iteration(
    seed, vocab, spread, bias, preserved, random
):
    """A tiny q everywhere else lets the iteration treat every other token as proposable."""
    (row,), _ = clip_cases.rows(1, vocab, seed, spread)
    p, is_free = row.softmax(-1), torch.ones(vocab, dtype=torch.bool)
    is_free[preserved[preserved < vocab]] = False
    rest = float(p[is_free].double().sum())
    # A draft token with nearly all of the free mass leaves w undetermined.
    drafts = (is_free & (p > 1e-12) & (p < 0.98 * rest)).nonzero()[:, 0].tolist()
    if not drafts or rest < 10 * served_dist.LEAST_REST:
        return
    draft = random.choice(drafts)
    q = torch.full_like(p, 1e-30)
    q[draft] = 1
    iterated = clip_rows(row[None], q[None], torch.tensor([bias]), preserved)
    entropy = float(torch.special.entr(p[is_free].double()).sum())
    dist = served_dist.point_mass_dist(float(p[draft].double().log()), rest, entropy, bias, 1 << 40)
    ratios = [
        served_dist.log_ratio(dist, token == draft, not is_free[token]) for token in range(vocab)
    ]
    m, unit = p * torch.tensor(ratios).exp(), 2**-16
    torch.testing.assert_close(m, iterated.m[0], rtol=1e-3, atol=served_dist.TOLERANCE)
    for closed_form, expected in ((dist.loss, iterated.losses), (dist.drift, iterated.drift)):
        assert closed_form * unit == pytest.approx(float(expected[0]), rel=1e-3, abs=1e-4)
    assert dist.gained * unit == pytest.approx(float(m[draft] - p[draft]), abs=2 * unit)
    # Hoeffding's lemma
    assert dist.loss * unit <= rest * bias**2 / 8 + unit
