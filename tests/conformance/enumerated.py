"""The distribution of what one request emits in a sampled step, by enumerating the rule.

Two draft positions and a bonus, five tokens. A draft token x ~ q is accepted with probability 1 if
it is relaxed, else min(1, p(x) / q(x)); after a rejection the token comes from max(p - q, 0),
normalised; a position counts only where all before it were accepted, the bonus only where both
were. A draft without probabilities is q = 1 at its token, so that the residual is p without it.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
from scipy import stats

import oracle

VOCAB = 5
STEPS = 2
# Per position: an argmax with a close runner-up; a clear one; none, and the bonus.
LOGITS = torch.tensor(
    [
        [1.9, 2.0, 1.2, 0.3, -1.0],
        [0.5, 0.2, 2.4, 2.2, 1.0],
        [0.0, 1.0, 0.5, 2.0, 1.5],
    ]
)
# What the draft draws from; the first position's is likely to draw the runner-up.
DRAFT = torch.tensor([[0.5, 0.1, 0.2, 0.15, 0.05], [0.1, 0.1, 0.3, 0.4, 0.1]], dtype=torch.float64)
# The draft without probabilities: a runner-up, then a token far from the argmax.
FIXED = (0, 4)
SIGNIFICANCE = 1e-4

Tokens = tuple[int, ...]


def logits_after(top_k: int | None) -> torch.Tensor:
    if top_k is None:
        return LOGITS
    smallest_kept = LOGITS.topk(top_k, dim=-1).values[:, -1:]
    return LOGITS.masked_fill(LOGITS < smallest_kept, -torch.inf)


def draws(with_draft_probs: bool) -> torch.Tensor:
    """q at each draft position, `[STEPS, VOCAB]`."""
    if with_draft_probs:
        return DRAFT
    return torch.nn.functional.one_hot(torch.tensor(FIXED), VOCAB).double()


def emitted(theta: float, with_draft_probs: bool, top_k: int | None) -> dict[Tokens, float]:
    """Probability of each sequence of tokens that the step can emit."""
    z = logits_after(top_k)
    p = z.double().softmax(-1)
    q = draws(with_draft_probs)

    def from_position(i: int) -> Iterator[tuple[Tokens, float]]:
        if i == STEPS:
            for token in range(VOCAB):
                yield (token,), float(p[i, token])
            return
        rejected = 0.0
        for x in range(VOCAB):
            if q[i, x] == 0:
                continue
            relaxed = oracle.is_relaxed(z[i].tolist(), x, theta, 0.0, frozenset())
            accepted = 1.0 if relaxed else min(1.0, float(p[i, x] / q[i, x]))
            rejected += float(q[i, x]) * (1 - accepted)
            for rest, share in from_position(i + 1):
                yield (x, *rest), float(q[i, x]) * accepted * share
        residual = (p[i] - q[i]).clamp(min=0)
        for token in range(VOCAB):
            yield (token,), rejected * float(residual[token] / residual.sum())

    # A rejection emits sequences that no acceptance does, so nothing is listed twice.
    return {tokens: share for tokens, share in from_position(0) if share > 0}


def first_token(distribution: dict[Tokens, float]) -> np.ndarray:
    shares = np.zeros(VOCAB)
    for tokens, share in distribution.items():
        shares[tokens[0]] += share
    return shares


def check(samples: list[Tokens], theta: float, with_draft_probs: bool, top_k: int | None) -> None:
    """Chi-squared tests of the whole sequences, and of the first token."""
    expected = emitted(theta, with_draft_probs, top_k)
    assert abs(sum(expected.values()) - 1) < 1e-9
    counts = Counter(samples)
    assert set(counts) <= set(expected), "something impossible was emitted"
    # Sequences too rare for the test are one class together.
    common = [tokens for tokens, share in expected.items() if share * len(samples) >= 5]
    observed = [counts[tokens] for tokens in common]
    wanted = [expected[tokens] * len(samples) for tokens in common]
    rest = len(samples) - sum(wanted)
    if rest >= 5:
        observed.append(len(samples) - sum(observed))
        wanted.append(rest)
    else:
        wanted = [value * sum(observed) / sum(wanted) for value in wanted]
    assert stats.chisquare(observed, wanted).pvalue > SIGNIFICANCE

    shares = first_token(expected)
    if theta == 1:
        target = logits_after(top_k)[0].double().softmax(-1).numpy()
        np.testing.assert_allclose(shares, target, atol=1e-9)
    first = np.bincount([tokens[0] for tokens in samples], minlength=VOCAB)
    possible = shares > 0
    assert first[~possible].sum() == 0
    if possible.sum() > 1:
        wanted = shares[possible] * len(samples)
        assert stats.chisquare(first[possible], wanted).pvalue > SIGNIFICANCE


def drafts(count: int, with_draft_probs: bool) -> torch.Tensor:
    """Draft tokens `[count, STEPS]`, drawn from q."""
    generator = torch.Generator().manual_seed(1)
    return torch.stack(
        [
            torch.multinomial(row, count, replacement=True, generator=generator)
            for row in draws(with_draft_probs)
        ],
        dim=1,
    )
