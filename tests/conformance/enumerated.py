"""Enumerates all that a sampled step can emit, with a probe on both sides of each threshold.

A token x of a fixed draft is accepted with probability m(x), and a rejection samples from m without
x. Of a probabilistic draft, `block_verify` says how many tokens are accepted; after i of them
max(p_i m - q, 0) is sampled. For each draft path, requests with random numbers just below such a
probability must accept, and with numbers just above must reject. Noise that makes the keys of all
tokens equal, but one larger by EPSILON of m, must yield that token.

`served` computes m from the rule's formulas in double precision. For probabilistic drafts it sees
only the tokens before a position.

The probes give the exact distribution of the output, in particular the probability of each sequence
of tokens, which must be the product of m, and all that the step must report.
"""

import functools
import itertools
import math
from collections import defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, special
from vllm import SamplingParams

import oracle
from vllm_mars import MarsConfig
from vllm_mars.kernels.budget import NO_LIMIT, loss_rate, max_lost, price_units
from vllm_mars.options.config import price_of_bound

# Relative distance of probes from thresholds, and tolerance of expectations.
EPSILON = 1e-5
# Nats of an integer unit.
UNIT = 2.0**-16
Tokens = tuple[int, ...]
# A position: target logits, p, q, the tokens that are preserved, and whether the position is
# strict.
Row = namedtuple("Row", "logits p q preserved is_strict")


def _softmax(logits: np.ndarray, before: Tokens) -> np.ndarray:
    return special.softmax(logits)


@dataclass(frozen=True)
class Case:
    """A sampled request in the middle of its answer, and the server's options.

    Attributes:
        every: verifies one fixed draft in this many.
        answer, tokens_left: output tokens so far, and the number that may follow.
        ends: end-of-sequence token, then stop tokens.
        low, masked: tokens far below the argmax, and tokens that the target cannot emit.
        undrafted: tokens that the draft cannot propose.
        draft_dist: q from the draft's logits and the step's tokens before it; None for the softmax.
        cuts: shortens drafts, as adaptive verification does.
    """

    is_probabilistic: bool
    price: float | None = 1.0
    theta: float | None = None
    max_loss: float | None = None
    opening: int = 0
    seed: int = 0
    steps: int = 2
    vocab: int = 5
    every: int = 3
    answer: Tokens = (0,)
    ends: Tokens = ()
    protected: Tokens = ()
    low: Tokens = ()
    masked: Tokens = ()
    undrafted: Tokens = ()
    draft_dist: Callable[[np.ndarray, Tokens], np.ndarray] | None = None
    cuts: bool = False
    tokens_left: int = 40
    lost: int = 0

    @property
    def config(self) -> MarsConfig:
        rule = {"price": self.price, "theta": self.theta}
        return MarsConfig(**rule, max_loss=self.max_loss, strict_opening=self.opening)

    def params(self, seed: int = 0) -> SamplingParams:
        max_tokens, stops = len(self.answer) + self.tokens_left, list(self.ends[1:])
        params = SamplingParams(
            temperature=1, seed=seed, max_tokens=max_tokens, stop_token_ids=stops
        )
        params.update_from_generation_config({}, self.ends[0] if self.ends else None)
        return params

    @property
    def extendable(self) -> int:
        """Positions after which another token may follow."""
        return max(min(self.steps, self.tokens_left - 1), 0)

    @functools.cache  # noqa: B019
    def row(self, before: Tokens) -> Row:
        """The row after these tokens of the step."""
        rng = np.random.default_rng([self.seed, len(before), *before])
        logits, noise = rng.normal([[2], [0]], [[1.2], [0.8]], (2, self.vocab))
        logits[[*self.low]] = np.delete(logits, self.low).max() - 5
        draft_logits = (0.5 * logits + noise).astype(np.float32)
        q = (self.draft_dist or _softmax)(draft_logits, before)
        q[[*self.undrafted]] = 0
        q /= q.sum()
        logits[[*self.masked]] = -np.inf
        logits, answer = logits.astype(np.float32), (*self.answer, *before)
        preserved = {*self.ends, *self.protected}
        if self.theta is None:
            # Tokens that have followed the last token before.
            pairs = itertools.pairwise(answer)
            preserved |= {follower for token, follower in pairs if token == answer[-1]}
        is_preserved = np.isin(range(self.vocab), [*preserved])
        if self.is_probabilistic:
            is_preserved |= q == 0
        is_strict = len(before) >= self.extendable or len(answer) < self.opening
        p = special.softmax(logits.astype(float))
        return Row(logits, p, q.astype(float), is_preserved, is_strict)

    def rows(self, path: Tokens) -> list[Row]:
        """Rows of a draft and its bonus token."""
        return [self.row(path[:i]) for i in range(len(path) + 1)]

    def is_cut(self, before: Tokens) -> bool:
        """Whether a draft is cut after these tokens, which does not depend on the next one."""
        rng = np.random.default_rng([self.seed, len(before), *before, 1])
        return self.cuts and bool(before) and bool(rng.random() < 0.4)

    def verified(self, path: Tokens) -> Tokens:
        """The draft up to its cut."""
        return next((path[:i] for i in range(len(path)) if self.is_cut(path[:i])), path)

    def budget(self, position: int) -> int:
        """Units that the step may lose up to a position."""
        if self.max_loss is None:
            return NO_LIMIT
        tokens = len(self.answer) + position + 1
        return max(max_lost(loss_rate(self.max_loss), tokens) - self.lost, 0)


_ALL = {"price": None, "max_loss": 0.1, "answer": (1, 2, 3, 4, 1, 2), "opening": 7}
# "likely ends" are near the argmax; the end of "later end" can only come from the draft.
FEATURES: dict[str, dict[str, Any]] = {
    "price": {"masked": (3,)},
    "no price": {"price": 0.0},
    "forbidden": {"price": 0.0, "masked": (3, 1)},
    "large price": {"price": 2.0},
    "theta": {"price": None, "theta": 0.7, "max_loss": None},
    "bound": {"price": 3.0, "max_loss": 0.01, "lost": 62_500},
    "only a bound": {"price": None, "max_loss": 0.05, "lost": 1 << 17},
    "opening": {"opening": 2},
    "two tokens left": {"tokens_left": 2},
    "a follower": {"answer": (1, 2, 3, 4, 1, 2)},
    "followers": {"answer": (1, 2, 1, 3, 1, 2, 1)},
    "itself a follower": {"answer": (1, 1, 1)},
    "followers that end": {"answer": (1, 2, 1, 3, 1), "ends": (2,), "protected": (3,)},
    "all follow": {"answer": (1, 0, 1, 1, 2, 1, 3, 1, 4, 1)},
    "ends": {"ends": (4, 3), "low": (3, 4)},
    "likely ends": {"ends": (4, 3)},
    "later end": {"ends": (4,), "masked": (4,), "max_loss": 0.001, "lost": 6553},
    "protected": {"protected": (2,)},
    "all": {**_ALL, "ends": (4, 1), "protected": (0,), "low": (4, 0), "tokens_left": 3},
    "outside the draft's vocabulary": {"masked": (3,), "undrafted": (3, 1)},
    "most are outside": {"undrafted": (0, 1, 2, 3), "price": 2.0},
    "outside, protected, masked": {"undrafted": (1, 2), "masked": (2,), "protected": (1, 0)},
    # With a bound that binds.
    "cut": {"cuts": True, "steps": 3, "vocab": 4, "price": 2.0, "max_loss": 0.01, "lost": 62_500},
    "cut, ends": {"cuts": True, "steps": 3, "vocab": 4, "ends": (3,), "protected": (1,)},
    "after the end": {"ends": (0,)},
    "no tokens left": {"tokens_left": 0},
}

# Sampling parameters of drafts: repetition, frequency and presence penalty, top-k, top-p.
PARAMETERS = {
    "top-p": (1.0, 0.0, 0.0, 0, 0.7),
    "top-k": (1.0, 0.0, 0.0, 3, 1.0),
    "penalties": (1.5, 0.6, 0.3, 0, 1.0),
    "all parameters": (1.3, 0.0, 0.4, 4, 0.8),
}


def case_of(seed: int, *names: str, is_probabilistic: bool, **changes: Any) -> Case:
    """A case of these features, with a random price and bound otherwise."""
    if is_probabilistic and "theta" in names:
        pytest.skip("refused at start")
    rng = np.random.default_rng(seed)
    options = {"price": int(rng.integers(16, 96)) / 64, "lost": int(rng.integers(1 << 16))}
    features = itertools.chain(*(FEATURES[name].items() for name in names))
    options |= {"max_loss": rng.choice([None, 0.01, 0.2]), **dict(features), **changes}
    return Case(is_probabilistic, seed=seed, **options)


def cap(units: int) -> float:
    """The largest price whose loss, at most price**2 / 8, is within the units."""
    return math.sqrt(8 * max(units, 0) * UNIT) * (1 - 2**-20)


@functools.cache
def clipped(case: Case, before: Tokens, price: float) -> np.ndarray:
    """m = clip(q, w p, w p e^price) outside the preserved tokens, normalized by w."""
    row = case.row(before)

    def clip(log_w: float) -> np.ndarray:
        lower = math.exp(log_w) * row.p
        return np.where(row.preserved, row.p, np.clip(row.q, lower, lower * math.exp(price)))

    return clip(optimize.brentq(lambda log_w: clip(log_w).sum() - 1, -price - 1e-9, 1e-9))


def tilted(p: np.ndarray, x: int, bias: float, preserved: np.ndarray) -> tuple[np.ndarray, float]:
    """m with the bias on token x, and the value V of the position."""
    rest = p[~preserved].sum()
    z = 1 + p[x] / rest * math.expm1(bias)
    m = np.where(preserved, p, p / z)
    m[x] *= math.exp(bias)
    return m, rest * math.log(z)


def served(case: Case, path: Tokens) -> list[np.ndarray]:
    """m at each position of a draft; none if rounding decides the next position's budget."""
    rows, price = case.rows(path)[:-1], case.price
    if price is None and case.max_loss is not None:
        price = price_units(price_of_bound(case.max_loss, 1.0, case.is_probabilistic)) * UNIT
    if case.is_probabilistic:
        price = min(price, cap(case.budget(0) // max(case.extendable, 1)))
        strict = [not price or row.is_strict for row in rows]
        return [
            row.p if is_strict else clipped(case, path[:i], price)
            for i, (row, is_strict) in enumerate(zip(rows, strict, strict=True))
        ]
    draft = list(zip(path, rows, strict=True))
    if case.theta is not None:
        protected, one_hot = frozenset({*case.ends, *case.protected}), np.eye(case.vocab)
        return [
            one_hot[x]
            if oracle.is_relaxed(row.logits.tolist(), x, case.theta, protected)
            and not row.is_strict
            else row.p
            for x, row in draft
        ]
    biases, ahead = [0.0] * len(path), 0.0
    for i, (x, row) in reversed(list(enumerate(draft[: case.extendable]))):
        bias = price + ahead
        if row.is_strict or row.preserved[x]:
            ahead = 0.0 if x in case.ends else row.p[x] * bias
        else:
            biases[i], ahead = bias, tilted(row.p, x, bias, row.preserved)[1]
    dists, lost = [], 0
    for i, (x, row) in enumerate(draft):
        bias = min(biases[i], cap(case.budget(i) - lost))
        dists.append(tilted(row.p, x, bias, row.preserved)[0] if bias else row.p)
        units = special.rel_entr(dists[i], row.p).sum() / UNIT
        if case.max_loss is not None and 0 < abs(units - round(units)) < 0.02:
            return []
        lost += math.ceil(units)
    return dists


# A request's draft, its random numbers (uniform by position; noise by token, where a key is weight
# / noise), and the expected result up to the answer's end: tokens, number of accepted drafts,
# probability, log m - log p of each token, and KL(m || p) of each position.
NAMES = "path uniform noise tokens accepted weight ratios losses"
Probe = namedtuple("Probe", NAMES, defaults=((), 0, 0.0, (), ()))


def noises(m: np.ndarray, q: np.ndarray | float) -> list[tuple[int, list[float]]]:
    """Tokens of positive weight in max(m - q, 0), each with noise that samples it."""
    weights = np.maximum(m - q, 0)
    # Any positive weight of a token that cannot come would win.
    slack = np.where(m > q * (1 - EPSILON), EPSILON * m, 0) + 1e-30
    noise = (weights + slack * (1 - 2 * np.eye(len(m)))).tolist()
    return [(y, noise[y]) for y in np.flatnonzero(weights > 4 * EPSILON * m).tolist()]


def blocks(path: Tokens, rows: list[Row], ms: list[np.ndarray]) -> tuple[list[float], ...]:
    """p_0 .. p_n, h_1 .. h_n, and the residuals after 0 .. n - 1 tokens."""
    p = [1.0]
    for x, row, m in zip(path, rows, ms, strict=False):
        p.append(min(p[-1] * m[x] / row.q[x], 1.0))
    residuals = [np.maximum(a * m - row.q, 0) for a, row, m in zip(p, rows, ms, strict=False)]
    sums = [residual.sum() for residual in residuals[1:]]
    h = [s / (s + 1 - a) if s + 1 - a > 0 else 1.0 for a, s in zip(p[1:], sums, strict=False)]
    return p, [*h, p[-1]], residuals


def end_of(case: Case, path: Tokens) -> int:
    """Tokens of a draft up to the answer's end, or more than its length."""
    ends = [i + 1 for i, x in enumerate(path) if x in case.ends or i + 1 == case.tokens_left]
    return ends[0] if ends else len(path) + 1


def reports_of(case: Case, tokens: Tokens, ms: list[np.ndarray]) -> tuple[Tokens, Tokens]:
    """log m - log p of each token, 0 for a bonus token, and KL(m || p) of each position."""
    rows = [case.row(tokens[:i]) for i in range(len(tokens))]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = [np.log(m[x] / r.p[x]) for x, r, m in zip(tokens, rows, ms, strict=False)]
        losses = [special.rel_entr(m, r.p).sum() for r, m in zip(rows, ms, strict=False)]
    return (*ratios, *[0.0] * (len(tokens) - len(ratios))), tuple(losses)


def probabilistic_probes(case: Case, path: Tokens) -> list[Probe]:
    """Probes for all outcomes of a probabilistic draft, with one of its bonus tokens."""
    rows, ms = case.rows(path), served(case, path)
    p, h, residuals = blocks(path, rows, ms)
    result, end, steps = [], end_of(case, path), len(path)
    for num_accepted in range(steps + 1):
        share = math.prod(r.q[x] for r, x in zip(rows, path, strict=False))
        uniform = [0.5] * steps
        for i in range(max(num_accepted - 1, 0), steps):
            accepts = i < num_accepted
            share *= h[i] if accepts else 1 - h[i]
            # A small residual makes float32 less accurate.
            slack = EPSILON * (1 if i + 1 == steps else 1 + 1 / max(residuals[i + 1].sum(), 1e-9))
            uniform[i] = h[i] * (1 - slack) if accepts else max(h[i] * (1 + slack), 1e-12)
        if share < 1e-12 or not all(0 < u < 1 for u in uniform):
            continue
        # The token after the answer's end does not count.
        draws, weights = [(0, [1.0] * case.vocab)], np.ones(case.vocab)
        if num_accepted == steps < end:
            draws = noises(rows[-1].p, 0.0)
            draws = [draws[sum(path) % len(draws)]]
        elif num_accepted < end:
            draws = noises(p[num_accepted] * ms[num_accepted], rows[num_accepted].q)
            weights = residuals[num_accepted] / residuals[num_accepted].sum()
        for y, noise in draws:
            tokens = (*path[:num_accepted], y)[:end]
            reports, weight = reports_of(case, tokens, ms), share * weights[y]
            result.append(
                Probe(path, uniform, noise, tokens, min(num_accepted, end), weight, *reports)
            )
    return result


def probes(case: Case, path: Tokens) -> list[Probe]:
    """Probes for all outcomes of a draft, with one of its bonus tokens."""
    uniform, equal = [0.5] * len(path), [1.0] * case.vocab
    if case.tokens_left <= 0 or case.answer[-1] in case.ends:
        # The answer ended before this step.
        return [Probe(path, uniform, equal)]
    if case.is_probabilistic:
        return probabilistic_probes(case, path)
    rows, ms = case.rows(path), served(case, path)
    result, share, end = [], 1.0, end_of(case, path)
    for i, (x, m) in enumerate(zip(path, ms, strict=False)):
        if m[x] * (1 + EPSILON) < 1:
            above = [*uniform[:i], max(m[x] * (1 + EPSILON), 1e-12), *uniform[i + 1 :]]
            rest = np.maximum(m - np.eye(case.vocab)[x], 0)
            for y, noise in noises(m, np.eye(case.vocab)[x]):
                tokens, weight = (*path[:i], y), share * (1 - m[x]) * rest[y] / rest.sum()
                reports = reports_of(case, tokens, ms)
                result.append(Probe(path, above, noise, tokens, i, weight, *reports))
        share *= m[x]
        if not share:
            return result
        uniform[i] = m[x] * (1 - EPSILON)
        if i + 1 == end:
            tokens = path[:end]
            reports = reports_of(case, tokens, ms)
            return [*result, Probe(path, uniform, equal, tokens, end, share, *reports)]
    if ms:
        draws = noises(rows[-1].p, 0.0)
        y, noise = draws[sum(path) % len(draws)]
        reports = reports_of(case, (*path, y), ms)
        result.append(Probe(path, uniform, noise, (*path, y), len(path), share, *reports))
    return result


class Batch:
    """The probes of a case as the requests of one step, in tensors `[batch, ...]`."""

    def __init__(self, case: Case) -> None:
        drafts = itertools.product(range(case.vocab), repeat=case.steps)
        paths = list(dict.fromkeys(map(case.verified, drafts)))
        if case.is_probabilistic:
            # A draft has no tokens that it cannot propose.
            paths = [
                path for path in paths if all(case.row(path[:i]).q[x] for i, x in enumerate(path))
            ]
        else:
            paths = paths[case.seed % case.every :: case.every]
        self.case, self.probes = case, [probe for path in paths for probe in probes(case, path)]
        self.paths = [list(probe.path) for probe in self.probes]
        lengths = torch.tensor([len(path) for path in self.paths])
        self.is_draft = torch.arange(case.steps) < lengths[:, None]
        rows = [case.rows(probe.path) for probe in self.probes]
        self.logits = torch.tensor(np.array([row.logits for path in rows for row in path]))
        self.q = self._padded([row.q for path in rows for row in path[:-1]], case.vocab).float()
        self.uniform = self._padded([u for probe in self.probes for u in probe.uniform])
        self.noise = torch.tensor([probe.noise for probe in self.probes])

    def _padded(self, values: list[Any], *size: int) -> torch.Tensor:
        """Values of draft tokens by request and position; NaN past a draft's end."""
        padded = torch.full((*self.is_draft.shape, *size), math.nan, dtype=torch.double)
        padded[self.is_draft] = torch.tensor(np.array(values)).double().reshape(-1, *size)
        return padded

    def check(self, reports: Any, emitted: list[list[int]], lost: torch.Tensor) -> None:
        """Checks each probe's output, and the reports against the distribution of the output.

        `reports` must be of this batch only; `lost` is in units, by request.
        """
        case, wrong, units = self.case, [], lost.numpy()
        table = reports.requested_tables[0].table[:, 0].double().numpy()
        for probe, tokens, ratios, lost_units in zip(
            self.probes, emitted, table, units, strict=True
        ):
            reported_ratios, loss = ratios[: len(probe.tokens)], sum(probe.losses) / UNIT
            is_right = tuple(tokens[: len(reported_ratios)]) == probe.tokens
            is_right &= np.allclose(reported_ratios, probe.ratios, rtol=0, atol=2 * EPSILON)
            if not is_right or not -0.1 <= lost_units - loss <= len(probe.losses) + 0.1:
                expected = f"{probe.tokens}, {np.array(probe.ratios)}, {loss:.1f}"
                wrong.append(
                    f"{probe.path}: {tokens}, {reported_ratios}, {lost_units}, not {expected}"
                )
        assert not wrong, "\n".join([f"{len(wrong)} of {len(table)}, {case}", *wrong[:9]])
        visited, accepted = np.array([(len(p.losses), p.accepted) for p in self.probes]).T
        counts, layout = reports.counters.device_counts, reports.counters.layout
        assert counts[layout.lost] == units.sum()
        for counted, entry in ((visited, layout.verified), (accepted, layout.accepted)):
            expected = [(counted > i).sum() for i in range(case.steps)]
            assert counts[entry].tolist()[: case.steps] == expected
        if not any(visited):
            return
        # By the tokens before a reached position, and by the draft if it is fixed.
        masses = defaultdict(lambda: np.zeros(case.vocab))
        reported = defaultdict(lambda: np.zeros(case.vocab))
        weights = np.array([probe.weight for probe in self.probes])
        sums = [r[: len(p.tokens)].sum() for p, r in zip(self.probes, table, strict=True)]
        for probe, reported_ratios in zip(self.probes, table, strict=True):
            for i in range(len(probe.losses)):
                before, token = probe.tokens[:i], probe.tokens[i]
                entry = before, None if case.is_probabilistic else probe.path
                masses[entry][token] += probe.weight
                reported[entry][token] = case.row(before).p[token] * np.exp(reported_ratios[i])
        for entry, mass in masses.items():
            np.testing.assert_allclose(mass / mass.sum(), reported[entry], rtol=0, atol=EPSILON)
        if case.is_probabilistic:
            self._check_joint_distribution(weights)
        weights /= weights.sum()
        # Theta accepts tokens with certainty, so weights do not correct it.
        assert case.theta is not None or abs(weights @ np.exp(np.negative(sums)) - 1) < EPSILON
        assert -EPSILON < weights @ (units * UNIT - sums) < case.steps * UNIT + EPSILON

    def _check_joint_distribution(self, weights: np.ndarray) -> None:
        """Compares the joint distribution of the tokens, and the acceptance length."""
        case, masses = self.case, defaultdict(float)
        for probe, weight in zip(self.probes, weights, strict=True):
            masses[probe.tokens[: len(probe.path)]] += weight
        by_blocks = by_position = 0.0
        for path in itertools.product(range(case.vocab), repeat=case.steps):
            rows, draft, end = case.rows(path), case.verified(path), end_of(case, path)
            ms = served(case, draft)
            # Tokens after the draft are the target's.
            followers = [row.p for row in rows[len(draft) : -1]]
            factors = [m[x] for m, x in zip([*ms, *followers], path, strict=True)][:end]
            masses_by_end = [
                masses[path[:i]] * math.prod(factors[i:]) for i in range(len(factors) + 1)
            ]
            assert abs(sum(masses_by_end) - math.prod(factors)) < EPSILON, (
                path,
                masses_by_end,
                factors,
            )
            q = [row.q[x] for row, x in zip(rows, path, strict=False)]
            if not all(q):
                continue
            p = blocks(draft, rows[: len(draft) + 1], ms)[0][1:]
            by_blocks += math.prod(q) * sum(p[:end])
            ratios = [min(m / q, 1) for m, q, _ in zip(factors, q, draft, strict=False)]
            by_position += math.prod(q) * np.cumprod(ratios).sum()
        accepted = weights @ [probe.accepted for probe in self.probes]
        assert abs(accepted - by_blocks) < case.steps * EPSILON
        # With a price, the mass that m lacks of q may all be masked, which leaves no gain.
        min_gain = EPSILON if case.price == 0 and case.steps > 1 else -EPSILON
        assert by_blocks - by_position > min_gain
