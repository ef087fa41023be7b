"""The distribution of what one request emits in a sampled step, by enumerating its steps.

Two draft positions and a bonus, five tokens. A draft token x ~ q is accepted with probability
min(1, m(x) / q(x)); after a rejection the token comes from max(m - q, 0), normalised; a position
counts only where all before it were accepted, the bonus only where both were. A draft that is not
drawn is q = 1 at its token. What m is, the rule says: `served`, from its formulas.
"""

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
from scipy import optimize, stats

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
# The draft that is not drawn: a runner-up, then a token far from the argmax.
FIXED = (0, 4)
SIGNIFICANCE = 1e-4

Tokens = tuple[int, ...]


def logits_after(top_k: int | None) -> torch.Tensor:
    if top_k is None:
        return LOGITS
    smallest_kept = LOGITS.topk(top_k, dim=-1).values[:, -1:]
    return LOGITS.masked_fill(LOGITS < smallest_kept, -torch.inf)


def draws(is_drawn: bool) -> torch.Tensor:
    """q at each draft position, `[STEPS, VOCAB]`."""
    if is_drawn:
        return DRAFT
    return torch.nn.functional.one_hot(torch.tensor(FIXED), VOCAB).double()


def clipped(p: np.ndarray, q: np.ndarray, price: float) -> np.ndarray:
    """m = clip(q, w p, w p e^price), with w such that it sums to 1."""

    def served(log_w: float) -> np.ndarray:
        w = math.exp(log_w)
        return np.clip(q, w * p, w * p * math.exp(price)) * (p > 0)

    m = served(optimize.brentq(lambda w: served(w).sum() - 1, -2 * price - 1e-9, 1e-9))
    return m / m.sum()


def served(
    draft: list[int], is_drawn: bool, top_k: int | None, rule: str, value: float, strict: set[int]
) -> list[np.ndarray]:
    """m at each position of a draft."""
    z = logits_after(top_k)
    p = list(z.double().softmax(-1).numpy())
    if rule == "price" and is_drawn:
        q = draws(True).numpy()
        return [p[i] if i in strict else clipped(p[i], q[i], value) for i in range(STEPS)]
    if rule == "price":
        rows = z[:STEPS].tolist()
        biases = oracle.tilts(rows, draft, value, [i in strict for i in range(STEPS)], STEPS)
        return [np.array(oracle.served(*given)) for given in zip(rows, draft, biases, strict=True)]
    rows = []
    for i, x in enumerate(draft):
        if i not in strict and oracle.is_relaxed(z[i].tolist(), x, value, frozenset()):
            rows.append(np.eye(VOCAB)[x])
        else:
            rows.append(p[i])
    return rows


def emitted(
    is_drawn: bool,
    top_k: int | None,
    rule: str,
    value: float,
    strict: set[int] = frozenset(),  # type: ignore[assignment]
) -> dict[Tokens, tuple[float, float]]:
    """Of each sequence that the step can emit its probability and the sum of log m - log p."""
    p = logits_after(top_k).double().softmax(-1).numpy()
    q = draws(is_drawn).numpy()
    found: dict[Tokens, tuple[float, float]] = {}

    def add(tokens: Tokens, share: float, ratio: float) -> None:
        if share > 0:
            before, _ = found.get(tokens, (0.0, 0.0))
            found[tokens] = before + share, ratio

    def paths(draft: list[int], share: float) -> Iterator[tuple[list[int], float]]:
        i = len(draft)
        if i == STEPS:
            yield draft, share
            return
        for x in range(VOCAB):
            if q[i, x] > 0:
                yield from paths([*draft, x], share * q[i, x])

    for draft, share in paths([], 1.0):
        m = served(draft, is_drawn, top_k, rule, value, strict)
        ratio = 0.0
        for i, x in enumerate(draft):
            accepted = min(1.0, m[i][x] / q[i, x])
            residual = np.maximum(m[i] - q[i], 0)
            for y in range(VOCAB):
                if residual[y] > 0 and accepted < 1:
                    own = ratio + math.log(m[i][y] / p[i, y])
                    add((*draft[:i], y), share * (1 - accepted) * residual[y] / residual.sum(), own)
            share *= accepted
            if share == 0:
                break
            ratio += math.log(m[i][x] / p[i, x])
        for y in range(VOCAB):
            add((*draft, y), share * p[STEPS, y], ratio)
    return found


def check(
    samples: list[Tokens],
    ratios: list[float],
    expected: dict[Tokens, tuple[float, float]],
) -> None:
    """A chi-squared test of the sequences; the log-ratios equal the formula's."""
    assert abs(sum(share for share, _ in expected.values()) - 1) < 1e-9
    counts = Counter(samples)
    assert set(counts) <= set(expected), "something impossible was emitted"
    for tokens, ratio in dict(zip(samples, ratios, strict=True)).items():
        assert math.isclose(ratio, expected[tokens][1], abs_tol=2e-5)
    # Sequences too rare for the test are one class together.
    common = [tokens for tokens, (share, _) in expected.items() if share * len(samples) >= 5]
    observed = [counts[tokens] for tokens in common]
    wanted = [expected[tokens][0] * len(samples) for tokens in common]
    rest = len(samples) - sum(wanted)
    if rest >= 5:
        observed.append(len(samples) - sum(observed))
        wanted.append(rest)
    else:
        wanted = [value * sum(observed) / sum(wanted) for value in wanted]
    if len(wanted) > 1:
        assert stats.chisquare(observed, wanted).pvalue > SIGNIFICANCE


def drafts(count: int, is_drawn: bool) -> torch.Tensor:
    """Draft tokens `[count, STEPS]`, drawn from q."""
    generator = torch.Generator().manual_seed(1)
    return torch.stack(
        [
            torch.multinomial(row, count, replacement=True, generator=generator)
            for row in draws(is_drawn)
        ],
        dim=1,
    )
