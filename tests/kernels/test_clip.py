"""The rule for drawn drafts: optimal, accounted, and what vLLM's rejection sampling then emits."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from vllm.v1.sample.rejection_sampler import rejection_sample

import clip_cases
from clip_cases import INF
from vllm_mars.kernels import clip
from vllm_mars.kernels.clip import clip_rows


def clip_one(target, draft, price):
    prices = torch.full((target.shape[0],), price)
    return clip_rows(target, draft, prices), prices


def objective(m, p, q, price):
    """What the rule maximises; m and p without zeros."""
    return price * np.minimum(m, q).sum() - (m * np.log(m / p)).sum()


def best(p, q, price):
    """The largest objective, by a solver that knows nothing of clipping.

    Its variables are m and s <= min(m, q), which makes it smooth.
    """
    size = len(p)
    found = optimize.minimize(
        lambda x: (x[:size] * np.log(x[:size] / p)).sum() - price * x[size:].sum(),
        np.concatenate([p, np.minimum(p, q)]),
        jac=lambda x: np.concatenate([np.log(x[:size] / p) + 1, np.full(size, -price)]),
        bounds=[(1e-9, 1)] * size + [(0, bound) for bound in q],
        constraints=[
            {"type": "eq", "fun": lambda x: x[:size].sum() - 1},
            {"type": "ineq", "fun": lambda x: x[:size] - x[size:]},
        ],
        options={"ftol": 1e-12, "maxiter": 500},
    )
    m = np.clip(found.x[:size], 1e-12, None)
    return objective(m / m.sum(), p, q, price)


@pytest.mark.parametrize("price", [0.1, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_does_better(seed, price):
    target, draft = clip_cases.rows(1, 6, seed, spread=1.0 + seed / 2, off=1.5, masked=0)
    clipped, _ = clip_one(target, draft, price)
    p, m, q = (x[0].double().numpy() for x in (target.softmax(-1), clipped.logits.exp(), draft))
    reached = objective(m, p, q, price)
    assert reached >= objective(p, p, q, price) - 1e-6
    # min(m, q) has a corner at q, so what m is divided by at last counts price times.
    allowed = 1e-6 + 2 * price * clip.TOLERANCE
    assert reached == pytest.approx(best(p, q, price), abs=allowed)
    rng = np.random.default_rng(seed)
    for size in (1e-3, 0.1, 1.0):
        for _ in range(200):
            other = m * np.exp(size * rng.standard_normal(m.shape))
            assert objective(other / other.sum(), p, q, price) <= reached + allowed


@settings(deadline=None, max_examples=300)
@given(
    st.integers(0, 10_000),
    st.sampled_from([1, 2, 3, 8, 50]),
    st.floats(0.1, 20),
    st.floats(0, 8),
    st.one_of(st.sampled_from([0.0, 60.0, 1e4]), st.floats(1e-3, 30)),
)
def test_what_always_holds(seed, vocab, spread, off, price):
    target, draft = clip_cases.rows(3, vocab, seed, spread, off)
    clipped, prices = clip_one(target, draft, price)
    clip_cases.check(clipped, target, draft, prices)


def test_without_a_price_the_row_is_the_targets():
    target, draft = clip_cases.rows(3, 97)
    draft[1] = torch.nan
    for logits in (target, torch.cat([target, target], 1)[:, 50:147]):
        clipped = clip_rows(logits, draft, torch.tensor([0.0, 0.0, 0.5]))
        assert torch.equal(clipped.logits[:2], logits[:2].float())
        assert not torch.equal(clipped.logits[2], logits[2].float())
        assert clipped.losses[:2].tolist() == clipped.gained[:2].tolist() == [0, 0]


def test_rows_of_one_token_and_of_no_numbers():
    target, draft = clip_cases.no_numbers()
    clipped, _ = clip_one(target, draft, 1.0)
    for row in (0, 2, 3):
        assert torch.equal(clipped.logits[row].nan_to_num(5), target[row].nan_to_num(5))
    assert clipped.logits[1].tolist() == [-INF, 0, -INF]
    # A draft that is no number: m is p.
    assert torch.allclose(clipped.logits[4], target[4].log_softmax(-1))
    assert clipped.losses[:4].tolist() == clipped.gained[:4].tolist() == [0] * 4
    assert clipped.losses[4] < 1e-6


def test_a_larger_price_accepts_more_and_loses_more():
    target, draft = clip_cases.rows(20, 300)
    # Beyond some price all of q is served that p allows; until then both grow.
    steps = [clip_one(target, draft, price)[0] for price in (0.1, 0.3, 1.0, 3.0, 10.0)]
    for less, more in itertools.pairwise(steps):
        assert (more.gained > less.gained - 1e-5).all()
        assert (more.losses > less.losses - 1e-6).all()
    assert (steps[2].losses > 1.5 * steps[0].losses).all()
    # In the end m is q, as far as p has any of it.
    target, draft = clip_cases.rows(1, 30, spread=1.0, masked=0)
    assert torch.allclose(clip_one(target, draft, 50.0)[0].logits.exp(), draft, atol=1e-5)


def test_rows_do_not_depend_on_each_other():
    target, draft = clip_cases.rows(5, 300)
    prices = torch.tensor([0.5, 0.0, 2.0, 0.1, 1.0])
    together = clip_rows(target, draft, prices)
    for row in range(5):
        one = slice(row, row + 1)
        alone = clip_rows(target[one], draft[one], prices[one])
        for a, b in zip(together, alone, strict=True):
            assert torch.equal(a[one], b)


@pytest.mark.usefixtures("mended_kernels")
@pytest.mark.parametrize("price", [0.0, 0.5, 1.5])
def test_vllm_then_emits_m(price):
    """vLLM's own rejection of q against the served row, and the weights of what it emits."""
    count, vocab = 40_000, 7
    target, draft = clip_cases.rows(1, vocab, seed=1, spread=1.5, off=1.5, masked=0.2)
    clipped, _ = clip_one(target, draft, price)
    torch.manual_seed(0)
    q = draft.expand(count, -1).contiguous()
    emitted = rejection_sample(
        draft[0].multinomial(count, replacement=True).int(),
        [1] * count,
        1,
        torch.arange(1, count + 1, dtype=torch.int32),
        q,
        clipped.logits.expand(count, -1).contiguous(),
        torch.zeros(count, 1, dtype=torch.int64),
        SimpleNamespace(
            all_greedy=False, all_random=True, temperature=torch.ones(count), generators={}
        ),
    )
    tokens = emitted[:, 0].long()
    m = clipped.logits[0].double().softmax(-1).numpy()
    counts = torch.bincount(tokens, minlength=vocab).numpy()
    possible = m > 0
    assert 0 < possible.sum() < vocab
    assert counts[~possible].sum() == 0
    assert stats.chisquare(counts[possible], count * m[possible]).pvalue > 1e-4
    accepted = float((emitted[:, 1] != -1).double().mean())
    chance = torch.from_numpy(m).minimum(draft[0].double()).sum()
    assert accepted == pytest.approx(float(chance), abs=0.01)
    if price:
        strict = target[0].double().softmax(-1).minimum(draft[0].double()).sum()
        assert float(clipped.gained) == pytest.approx(float(chance - strict), abs=1e-4)
        log_ratio = (clipped.logits - target + clipped.target_lse)[0, tokens]
        weights = log_ratio.neg().exp().double()
        assert abs(weights.mean() - 1) < 4 * weights.std() / math.sqrt(count)
        error = 4 * log_ratio.std() / math.sqrt(count)
        assert abs(log_ratio.mean() - clipped.losses[0]) < error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prices": torch.ones(2)}, r"prices has shape \[2\], but must be \[3\]"),
        ({"prices": torch.ones(3).double()}, r"prices is torch.float64, but must be torch.float32"),
        (
            {"draft_probs": torch.ones(3, 8)},
            r"draft_probs has shape \[3, 8\], but must be \[3, 9\]",
        ),
        (
            {"draft_probs": torch.ones(9, 3).T},
            r"draft_probs has stride 3 in its last dimension, not 1",
        ),
        ({"draft_probs": torch.ones(3, 9, device="meta")}, "draft_probs is on meta, not on cpu"),
    ],
)
def test_arguments(changes, message):
    given = {"draft_probs": torch.full((3, 9), 1 / 9), "prices": torch.ones(3), **changes}
    with pytest.raises(ValueError, match=message):
        clip_rows(torch.zeros(3, 9), **given)
