"""All that a sampled step can emit, without sampling: each draw is probed from both sides.

A draft token x that is not drawn is accepted with probability m(x), and what comes in its place is
drawn from m without x. Of a drawn draft as many tokens stay as `blocks` says, and what comes behind
i of these is drawn from max(p_i m - q, 0). So with each drafted path, a request for each probe,
random numbers just below such a probability must accept; those just above must not, and noise that
makes the keys of all tokens equal, but one greater by EPSILON of m, must yield that one. What m is,
`served` says from the rule's formulas, in double precision. For drawn drafts it sees only the
tokens before a position, and is held against all that may follow.

From the probes follows the exact distribution of what is emitted, and what the step must report:
above all the probability of each sequence of tokens, which must be the product of m.
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
from vllm_mars.kernels.ledger.naive import NO_LIMIT, loss_rate, most_lost, price_units
from vllm_mars.options.config import price_of_bound

# How far from their values probabilities are probed, and how exact expectations are.
EPSILON = 1e-5
# Nats.
UNIT = 2.0**-16
Tokens = tuple[int, ...]
# A position: the target's logits, p, the draft's distribution, which tokens keep p, and whether all
# must.
Row = namedtuple("Row", "logits p q kept is_strict")


def _softmax(logits: np.ndarray, before: Tokens) -> np.ndarray:
    return special.softmax(logits)


@dataclass(frozen=True)
class Case:
    """A request that samples, in the middle of its answer, and the server's options.

    Attributes:
        every: of drafts that are not drawn, each verified for itself, each so many.
        answer, room: output tokens so far, and how many may still come.
        ends: its end of sequence, then its stop tokens.
        low, masked: tokens far below the first choice, and those that the target cannot emit.
        undrafted: tokens that the draft cannot propose.
        drawn_from: gives what a draft token is drawn from, of its logits and the step's tokens
            before it; None for their softmax.
        cuts: whether drafts are cut short, as by adaptive verification.
    """

    is_drawn: bool
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
    drawn_from: Callable[[np.ndarray, Tokens], np.ndarray] | None = None
    cuts: bool = False
    room: int = 40
    lost: int = 0

    @property
    def config(self) -> MarsConfig:
        rule = {"price": self.price, "theta": self.theta}
        return MarsConfig(**rule, max_loss=self.max_loss, strict_opening=self.opening)

    def params(self, seed: int = 0) -> SamplingParams:
        most, stops = len(self.answer) + self.room, list(self.ends[1:])
        params = SamplingParams(temperature=1, seed=seed, max_tokens=most, stop_token_ids=stops)
        params.update_from_generation_config({}, self.ends[0] if self.ends else None)
        return params

    @property
    def useful(self) -> int:
        """Positions that a further token of the answer can follow."""
        return max(min(self.steps, self.room - 1), 0)

    @functools.cache  # noqa: B019
    def row(self, before: Tokens) -> Row:
        """The row behind these tokens of the step."""
        rng = np.random.default_rng([self.seed, len(before), *before])
        logits, noise = rng.normal([[2], [0]], [[1.2], [0.8]], (2, self.vocab))
        logits[[*self.low]] = np.delete(logits, self.low).max() - 5
        draft_logits = (0.5 * logits + noise).astype(np.float32)
        q = (self.drawn_from or _softmax)(draft_logits, before)
        q[[*self.undrafted]] = 0
        q /= q.sum()
        logits[[*self.masked]] = -np.inf
        logits, answer = logits.astype(np.float32), (*self.answer, *before)
        kept = {*self.ends, *self.protected}
        if self.theta is None:
            # What followed the last token before.
            pairs = itertools.pairwise(answer)
            kept |= {follower for token, follower in pairs if token == answer[-1]}
        is_kept = np.isin(range(self.vocab), [*kept])
        if self.is_drawn:
            is_kept |= q == 0
        is_strict = len(before) >= self.useful or len(answer) < self.opening
        p = special.softmax(logits.astype(float))
        return Row(logits, p, q.astype(float), is_kept, is_strict)

    def rows(self, path: Tokens) -> list[Row]:
        """Of a draft, and of its bonus."""
        return [self.row(path[:i]) for i in range(len(path) + 1)]

    def is_cut(self, before: Tokens) -> bool:
        """Whether a draft ends behind these tokens, which is known before the next one is drawn."""
        rng = np.random.default_rng([self.seed, len(before), *before, 1])
        return self.cuts and bool(before) and bool(rng.random() < 0.4)

    def verified(self, path: Tokens) -> Tokens:
        """What is left of a draft."""
        return next((path[:i] for i in range(len(path)) if self.is_cut(path[:i])), path)

    def left(self, place: int) -> int:
        """What the step's tokens up to this place may lose, in units."""
        if self.max_loss is None:
            return NO_LIMIT
        tokens = len(self.answer) + place + 1
        return max(most_lost(loss_rate(self.max_loss), tokens) - self.lost, 0)


_ALL = {"price": None, "max_loss": 0.1, "answer": (1, 2, 3, 4, 1, 2), "opening": 7}
# "likely" ends are near the first choice; of "later end" only the draft of one matters.
FEATURES: dict[str, dict[str, Any]] = {
    "price": {"masked": (3,)},
    "no price": {"price": 0.0},
    "forbidden": {"price": 0.0, "masked": (3, 1)},
    "large price": {"price": 2.0},
    "theta": {"price": None, "theta": 0.7, "max_loss": None},
    "bound": {"price": 3.0, "max_loss": 0.01, "lost": 62_500},
    "bound alone": {"price": None, "max_loss": 0.05, "lost": 1 << 17},
    "opening": {"opening": 2},
    "room": {"room": 2},
    "a follower": {"answer": (1, 2, 3, 4, 1, 2)},
    "followers": {"answer": (1, 2, 1, 3, 1, 2, 1)},
    "itself a follower": {"answer": (1, 1, 1)},
    "followers that end": {"answer": (1, 2, 1, 3, 1), "ends": (2,), "protected": (3,)},
    "all follow": {"answer": (1, 0, 1, 1, 2, 1, 3, 1, 4, 1)},
    "ends": {"ends": (4, 3), "low": (3, 4)},
    "likely ends": {"ends": (4, 3)},
    "later end": {"ends": (4,), "masked": (4,), "max_loss": 0.001, "lost": 6553},
    "protected": {"protected": (2,)},
    "all": {**_ALL, "ends": (4, 1), "protected": (0,), "low": (4, 0), "room": 3},
    "outside the draft's vocabulary": {"masked": (3,), "undrafted": (3, 1)},
    "most are outside": {"undrafted": (0, 1, 2, 3), "price": 2.0},
    "outside, kept, masked": {"undrafted": (1, 2), "masked": (2,), "protected": (1, 0)},
    # With a bound that binds.
    "cut": {"cuts": True, "steps": 3, "vocab": 4, "price": 2.0, "max_loss": 0.01, "lost": 62_500},
    "cut, ends": {"cuts": True, "steps": 3, "vocab": 4, "ends": (3,), "protected": (1,)},
    "behind the end": {"ends": (0,)},
    "behind the room": {"room": 0},
}

# What drafts are drawn under: repetition, frequency and presence penalty, top-k, top-p.
PARAMETERS = {
    "top-p": (1.0, 0.0, 0.0, 0, 0.7),
    "top-k": (1.0, 0.0, 0.0, 3, 1.0),
    "penalties": (1.5, 0.6, 0.3, 0, 1.0),
    "all parameters": (1.3, 0.0, 0.4, 4, 0.8),
}


def case_of(seed: int, *names: str, is_drawn: bool, **given: Any) -> Case:
    """A case of these features, else at a random price and with a random bound."""
    if is_drawn and "theta" in names:
        pytest.skip("refused at start")
    rng = np.random.default_rng(seed)
    options = {"price": int(rng.integers(16, 96)) / 64, "lost": int(rng.integers(1 << 16))}
    features = itertools.chain(*(FEATURES[name].items() for name in names))
    options |= {"max_loss": rng.choice([None, 0.01, 0.2]), **dict(features), **given}
    return Case(is_drawn, seed=seed, **options)


def cap(units: int) -> float:
    """The largest price whose loss, at most price**2 / 8, fits."""
    return math.sqrt(8 * max(units, 0) * UNIT) * (1 - 2**-20)


@functools.cache
def clipped(case: Case, before: Tokens, price: float) -> np.ndarray:
    """m = clip(q, w p, w p e^price) outside the kept tokens, with w such that all sums to 1."""
    row = case.row(before)

    def clip(log_w: float) -> np.ndarray:
        least = math.exp(log_w) * row.p
        return np.where(row.kept, row.p, np.clip(row.q, least, least * math.exp(price)))

    return clip(optimize.brentq(lambda log_w: clip(log_w).sum() - 1, -price - 1e-9, 1e-9))


def tilted(p: np.ndarray, x: int, bias: float, kept: np.ndarray) -> tuple[np.ndarray, float]:
    """m with the bias on token x, and V."""
    rest = p[~kept].sum()
    z = 1 + p[x] / rest * math.expm1(bias)
    m = np.where(kept, p, p / z)
    m[x] *= math.exp(bias)
    return m, rest * math.log(z)


def served(case: Case, path: Tokens) -> list[np.ndarray]:
    """m at each position of a draft; none where rounding decides what the next one may lose."""
    rows, price = case.rows(path)[:-1], case.price
    if price is None and case.max_loss is not None:
        price = price_units(price_of_bound(case.max_loss, 1.0, case.is_drawn)) * UNIT
    if case.is_drawn:
        price = min(price, cap(case.left(0) // max(case.useful, 1)))
        strict = [not price or row.is_strict for row in rows]
        return [
            row.p if is_strict else clipped(case, path[:i], price)
            for i, (row, is_strict) in enumerate(zip(rows, strict, strict=True))
        ]
    draft = list(zip(path, rows, strict=True))
    if case.theta is not None:
        kinds = case.theta, frozenset({*case.ends, *case.protected})
        small = [oracle.is_relaxed(row.logits.tolist(), x, *kinds) for x, row in draft]
        one, pairs = np.eye(case.vocab), zip(small, draft, strict=True)
        return [one[x] if is_small and not r.is_strict else r.p for is_small, (x, r) in pairs]
    biases, ahead = [0.0] * len(path), 0.0
    for i, (x, row) in reversed(list(enumerate(draft[: case.useful]))):
        bias = price + ahead
        if row.is_strict or row.kept[x]:
            ahead = 0.0 if x in case.ends else row.p[x] * bias
        else:
            biases[i], ahead = bias, tilted(row.p, x, bias, row.kept)[1]
    found, lost = [], 0
    for i, (x, row) in enumerate(draft):
        bias = min(biases[i], cap(case.left(i) - lost))
        found.append(tilted(row.p, x, bias, row.kept)[0] if bias else row.p)
        units = special.rel_entr(found[i], row.p).sum() / UNIT
        if case.max_loss is not None and 0 < abs(units - round(units)) < 0.02:
            return []
        lost += math.ceil(units)
    return found


# A request's draft, its random numbers (by position; by token for the draw behind the accepted
# drafts, where a key is weight / noise), and what must come of it up to the answer's end: tokens,
# how many are drafts, the probability of all that, log m - log p of each, KL(m || p) where looked.
NAMES = "path uniform noise tokens accepted weight ratios losses"
Probe = namedtuple("Probe", NAMES, defaults=((), 0, 0.0, (), ()))


def noises(m: np.ndarray, q: np.ndarray | float) -> list[tuple[int, list[float]]]:
    """Each token that can be drawn from max(m - q, 0), and noise for which it is."""
    weights = np.maximum(m - q, 0)
    # With this noise any weight of a token that cannot come would win.
    slack = np.where(m > q * (1 - EPSILON), EPSILON * m, 0) + 1e-30
    noise = (weights + slack * (1 - 2 * np.eye(len(m)))).tolist()
    return [(y, noise[y]) for y in np.flatnonzero(weights > 4 * EPSILON * m).tolist()]


def blocks(path: Tokens, rows: list[Row], ms: list[np.ndarray]) -> tuple[list[float], ...]:
    """Of a drawn draft p_0 .. p_n, h_1 .. h_n, and what is drawn from behind 0 .. n - 1 tokens."""
    p = [1.0]
    for x, row, m in zip(path, rows, ms, strict=False):
        p.append(min(p[-1] * m[x] / row.q[x], 1.0))
    rests = [np.maximum(a * m - row.q, 0) for a, row, m in zip(p, rows, ms, strict=False)]
    sums = [rest.sum() for rest in rests[1:]]
    h = [s / (s + 1 - a) if s + 1 - a > 0 else 1.0 for a, s in zip(p[1:], sums, strict=False)]
    return p, [*h, p[-1]], rests


def end_of(case: Case, path: Tokens) -> int:
    """How many tokens of a draft are part of the answer, and none behind them."""
    ends = [i + 1 for i, x in enumerate(path) if x in case.ends or i + 1 == case.room]
    return ends[0] if ends else len(path) + 1


def told_of(case: Case, tokens: Tokens, ms: list[np.ndarray]) -> tuple[Tokens, Tokens]:
    """log m - log p of each token that was not drawn from the bonus row, and KL(m || p)."""
    rows = [case.row(tokens[:i]) for i in range(len(tokens))]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = [np.log(m[x] / r.p[x]) for x, r, m in zip(tokens, rows, ms, strict=False)]
        losses = [special.rel_entr(m, r.p).sum() for r, m in zip(rows, ms, strict=False)]
    return (*ratios, *[0.0] * (len(tokens) - len(ratios))), tuple(losses)


def drawn_probes(case: Case, path: Tokens) -> list[Probe]:
    """Of all that comes of a drawn draft, but of the bonus token one alone."""
    rows, ms = case.rows(path), served(case, path)
    p, h, rests = blocks(path, rows, ms)
    found, end, steps = [], end_of(case, path), len(path)
    for stay in range(steps + 1):
        share = math.prod(r.q[x] for r, x in zip(rows, path, strict=False))
        uniform = [0.5] * steps
        for i in range(max(stay - 1, 0), steps):
            accepts = i < stay
            share *= h[i] if accepts else 1 - h[i]
            # Where little is drawn from, float32 is further off.
            slack = EPSILON * (1 if i + 1 == steps else 1 + 1 / max(rests[i + 1].sum(), 1e-9))
            uniform[i] = h[i] * (1 - slack) if accepts else max(h[i] * (1 + slack), 1e-12)
        if share < 1e-12 or not all(0 < u < 1 for u in uniform):
            continue
        # What comes behind the answer's end does not count.
        draws, weights = [(0, [1.0] * case.vocab)], np.ones(case.vocab)
        if stay == steps < end:
            draws = noises(rows[-1].p, 0.0)
            draws = [draws[sum(path) % len(draws)]]
        elif stay < end:
            draws = noises(p[stay] * ms[stay], rows[stay].q)
            weights = rests[stay] / rests[stay].sum()
        for y, noise in draws:
            tokens = (*path[:stay], y)[:end]
            told, weight = told_of(case, tokens, ms), share * weights[y]
            found.append(Probe(path, uniform, noise, tokens, min(stay, end), weight, *told))
    return found


def probes(case: Case, path: Tokens) -> list[Probe]:
    """Of all that comes of a draft, but of the bonus token one alone."""
    uniform, even = [0.5] * len(path), [1.0] * case.vocab
    if case.room <= 0 or case.answer[-1] in case.ends:
        # The answer ended before this step.
        return [Probe(path, uniform, even)]
    if case.is_drawn:
        return drawn_probes(case, path)
    rows, ms = case.rows(path), served(case, path)
    found, share, end = [], 1.0, end_of(case, path)
    for i, (x, m) in enumerate(zip(path, ms, strict=False)):
        if m[x] * (1 + EPSILON) < 1:
            above = [*uniform[:i], max(m[x] * (1 + EPSILON), 1e-12), *uniform[i + 1 :]]
            rest = np.maximum(m - np.eye(case.vocab)[x], 0)
            for y, noise in noises(m, np.eye(case.vocab)[x]):
                tokens, weight = (*path[:i], y), share * (1 - m[x]) * rest[y] / rest.sum()
                told = told_of(case, tokens, ms)
                found.append(Probe(path, above, noise, tokens, i, weight, *told))
        share *= m[x]
        if not share:
            return found
        uniform[i] = m[x] * (1 - EPSILON)
        if i + 1 == end:
            tokens = path[:end]
            told = told_of(case, tokens, ms)
            return [*found, Probe(path, uniform, even, tokens, end, share, *told)]
    if ms:
        draws = noises(rows[-1].p, 0.0)
        y, noise = draws[sum(path) % len(draws)]
        told = told_of(case, (*path, y), ms)
        found.append(Probe(path, uniform, noise, (*path, y), len(path), share, *told))
    return found


class Batch:
    """The probes of a case, and what a step of them all takes, as tensors `[batch, ...]`."""

    def __init__(self, case: Case) -> None:
        drafts = itertools.product(range(case.vocab), repeat=case.steps)
        paths = list(dict.fromkeys(map(case.verified, drafts)))
        if case.is_drawn:
            # No draft is of what a draft cannot propose.
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
        self.logits = torch.tensor(np.array([row.logits for own in rows for row in own]))
        self.q = self._padded([row.q for own in rows for row in own[:-1]], case.vocab).float()
        self.uniform = self._padded([u for probe in self.probes for u in probe.uniform])
        self.noise = torch.tensor([probe.noise for probe in self.probes])

    def _padded(self, values: list[Any], *size: int) -> torch.Tensor:
        """Values of the draft tokens, by request and place; NaN where a draft has ended."""
        padded = torch.full((*self.is_draft.shape, *size), math.nan, dtype=torch.double)
        padded[self.is_draft] = torch.tensor(np.array(values)).double().reshape(-1, *size)
        return padded

    def check(self, reports: Any, emitted: list[list[int]], lost: torch.Tensor) -> None:
        """Each probe gives what it must, and its report is the distribution of what is emitted.

        The reports are of this batch alone; `lost` is by request, in units.
        """
        case, wrong, units = self.case, [], lost.numpy()
        table = reports.asked[0].table[:, 0].double().numpy()
        for probe, tokens, ratios, unit in zip(self.probes, emitted, table, units, strict=True):
            told, loss = ratios[: len(probe.tokens)], sum(probe.losses) / UNIT
            is_right = tuple(tokens[: len(told)]) == probe.tokens
            is_right &= np.allclose(told, probe.ratios, rtol=0, atol=2 * EPSILON)
            if not is_right or not -0.1 <= unit - loss <= len(probe.losses) + 0.1:
                wanted = f"{probe.tokens}, {np.array(probe.ratios)}, {loss:.1f}"
                wrong.append(f"{probe.path}: {tokens}, {told}, {unit}, not {wanted}")
        assert not wrong, "\n".join([f"{len(wrong)} of {len(table)}, {case}", *wrong[:9]])
        visited, accepted = np.array([(len(p.losses), p.accepted) for p in self.probes]).T
        counts, layout = reports.counters.device_counts, reports.counters.layout
        assert counts[layout.lost] == units.sum()
        for of, where in ((visited, layout.verified), (accepted, layout.accepted)):
            wanted = [(of > i).sum() for i in range(case.steps)]
            assert counts[where].tolist()[: case.steps] == wanted
        if not any(visited):
            return
        # Of each position that is reached, by the tokens before it, and the draft if that is fixed.
        masses = defaultdict(lambda: np.zeros(case.vocab))
        reported = defaultdict(lambda: np.zeros(case.vocab))
        weights = np.array([probe.weight for probe in self.probes])
        sums = [r[: len(p.tokens)].sum() for p, r in zip(self.probes, table, strict=True)]
        for probe, told in zip(self.probes, table, strict=True):
            for i in range(len(probe.losses)):
                before, token = probe.tokens[:i], probe.tokens[i]
                where = before, None if case.is_drawn else probe.path
                masses[where][token] += probe.weight
                reported[where][token] = case.row(before).p[token] * np.exp(told[i])
        for where, mass in masses.items():
            np.testing.assert_allclose(mass / mass.sum(), reported[where], rtol=0, atol=EPSILON)
        if case.is_drawn:
            self._check_law(weights)
        weights /= weights.sum()
        # Nothing mends what theta accepts outright.
        assert case.theta is not None or abs(weights @ np.exp(np.negative(sums)) - 1) < EPSILON
        assert -EPSILON < weights @ (units * UNIT - sums) < case.steps * UNIT + EPSILON

    def _check_law(self, weights: np.ndarray) -> None:
        """The joint law of a step and of tokens drawn from m behind it, and what is accepted."""
        case, masses = self.case, defaultdict(float)
        for probe, weight in zip(self.probes, weights, strict=True):
            masses[probe.tokens[: len(probe.path)]] += weight
        reached = by_position = 0.0
        for path in itertools.product(range(case.vocab), repeat=case.steps):
            rows, draft, end = case.rows(path), case.verified(path), end_of(case, path)
            ms = served(case, draft)
            # Nothing but the target's own follows a draft.
            followers = [row.p for row in rows[len(draft) : -1]]
            own = [m[x] for m, x in zip([*ms, *followers], path, strict=True)][:end]
            found = [masses[path[:i]] * math.prod(own[i:]) for i in range(len(own) + 1)]
            assert abs(sum(found) - math.prod(own)) < EPSILON, (path, found, own)
            q = [row.q[x] for row, x in zip(rows, path, strict=False)]
            if not all(q):
                continue
            p = blocks(draft, rows[: len(draft) + 1], ms)[0][1:]
            reached += math.prod(q) * sum(p[:end])
            ratios = [min(m / q, 1) for m, q, _ in zip(own, q, draft, strict=False)]
            by_position += math.prod(q) * np.cumprod(ratios).sum()
        accepted = weights @ [probe.accepted for probe in self.probes]
        assert abs(accepted - reached) < case.steps * EPSILON
        # A price can leave nothing to gain: what m lacks of q is then all masked.
        least = EPSILON if case.price == 0 and case.steps > 1 else -EPSILON
        assert reached - by_position > least
