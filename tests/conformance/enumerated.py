"""All that a sampled step can emit, without sampling: each draw is probed from both sides.

A draft token x is accepted with probability min(1, m(x) / q(x)); what comes in its place is drawn
from max(m - q, 0); a draft that is not drawn is q = 1 at its token. So with each drafted path, a
request for each probe, random numbers just below m / q must accept; one just above must end the
step there, and noise that makes the keys of all tokens equal, but one greater by EPSILON of m, must
yield that one. What m is, `served` says from the rule's formulas, in double precision. For drawn
drafts it sees only the tokens before a position, and is held against all that may follow.

From the probes follows the exact distribution of what is emitted, and what the step must report.
"""

import itertools
import math
from collections import defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, special
from vllm import SamplingParams

import oracle
from vllm_mars import MarsConfig
from vllm_mars.kernels.terms import DRAWN_SCALE, FIXED_SCALE, NO_LIMIT, loss_rate, most_lost

# How far from their values probabilities are probed, and how exact expectations are.
EPSILON = 1e-5
# Nats; tokens that must not repeat.
UNIT, NGRAM = 2.0**-16, 4
Tokens = tuple[int, ...]
# A position: the target's logits, p, the draft's distribution, and whether m must be p.
Row = namedtuple("Row", "logits p q is_strict")


@dataclass(frozen=True)
class Case:
    """A request that samples, in the middle of its answer, and the server's options.

    Attributes:
        every: of drafts that are not drawn, each verified for itself, each so many.
        answer, room: output tokens so far, and how many may still come.
        ends: its end of sequence, then its stop tokens.
        low, masked: tokens far below the first choice, and those that the target cannot emit.
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

    def row(self, before: Tokens) -> Row:
        """The row behind these tokens of the step."""
        rng = np.random.default_rng([self.seed, len(before), *before])
        logits, noise = rng.normal([[2], [0]], [[1.2], [0.8]], (2, self.vocab))
        logits[[*self.low]] = np.delete(logits, self.low).max() - 5
        q = special.softmax(0.5 * logits + noise).astype(np.float32)
        logits[[*self.masked]] = -np.inf
        logits, answer = logits.astype(np.float32), (*self.answer, *before)
        held = {answer[i : i + NGRAM - 1] for i in range(len(answer) - NGRAM + 1)}
        repeats = self.theta is None and answer[1 - NGRAM :] in held
        is_strict = repeats or len(before) >= self.useful or len(answer) < self.opening
        return Row(logits, special.softmax(logits.astype(float)), q.astype(float), is_strict)

    def rows(self, path: Tokens) -> list[Row]:
        """Of a draft, and of its bonus."""
        return [self.row(path[:i]) for i in range(self.steps + 1)]

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
    "large price": {"price": 2.0},
    "theta": {"price": None, "theta": 0.7, "max_loss": None},
    "bound": {"price": 3.0, "max_loss": 0.01, "lost": 62_500},
    "bound alone": {"price": None, "max_loss": 0.05, "lost": 1 << 17},
    "opening": {"opening": 2},
    "room": {"room": 2},
    "guard": {"answer": (1, 2, 3, 4, 1, 2)},
    "guard at once": {"answer": (1, 2, 3, 4, 1, 2, 3)},
    "guard, overlapping": {"answer": (1, 1, 1)},
    "ends": {"ends": (4, 3), "low": (3, 4)},
    "likely ends": {"ends": (4, 3)},
    "later end": {"ends": (4,), "masked": (4,), "max_loss": 0.001, "lost": 6553},
    "protected": {"protected": (2,)},
    "all": {**_ALL, "ends": (4, 1), "protected": (0,), "low": (4, 0), "room": 3},
    "behind the end": {"ends": (0,)},
    "behind the room": {"room": 0},
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


def clipped(row: Row, price: float, kept: np.ndarray) -> np.ndarray:
    """m = clip(q, w p, w p e^price) outside the kept tokens, with w such that all sums to 1."""

    def clip(log_w: float) -> np.ndarray:
        least = math.exp(log_w) * row.p
        return np.where(kept, row.p, np.clip(row.q, least, least * math.exp(price)))

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
        scale = DRAWN_SCALE if case.is_drawn else FIXED_SCALE
        most = 4 * most_lost(loss_rate(case.max_loss), 0)
        price = math.isqrt(scale * min(case.left(0), most)) * UNIT
    # The tokens that keep their probability.
    kept = np.isin(range(case.vocab), [*case.ends, *case.protected])
    if case.is_drawn:
        price = min(price, cap(case.left(0) // max(case.useful, 1)))
        return [clipped(r, price, kept) if price and not r.is_strict else r.p for r in rows]
    draft = list(zip(path, rows, strict=True))
    if case.theta is not None:
        kinds = case.theta, frozenset({*case.ends, *case.protected})
        small = [oracle.is_relaxed(row.logits.tolist(), x, *kinds) for x, row in draft]
        one, pairs = np.eye(case.vocab), zip(small, draft, strict=True)
        return [one[x] if is_small and not r.is_strict else r.p for is_small, (x, r) in pairs]
    biases, ahead = [0.0] * case.steps, 0.0
    for i, (x, row) in reversed(list(enumerate(draft[: case.useful]))):
        bias = price + ahead
        if row.is_strict or kept[x]:
            ahead = 0.0 if x in case.ends else row.p[x] * bias
        else:
            biases[i], ahead = bias, tilted(row.p, x, bias, kept)[1]
    found, lost = [], 0
    for i, (x, row) in enumerate(draft):
        bias = min(biases[i], cap(case.left(i) - lost))
        found.append(tilted(row.p, x, bias, kept)[0] if bias else row.p)
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


def probes(case: Case, path: Tokens) -> list[Probe]:
    """Of all that comes of a draft, but of the bonus token one alone."""
    uniform, even = [0.5] * case.steps, [1.0] * case.vocab
    if case.room <= 0 or case.answer[-1] in case.ends:
        # The answer ended before this step.
        return [Probe(path, uniform, even)]
    rows, ms = case.rows(path), served(case, path)
    found, ratios, losses = [], (), ()
    share = math.prod(r.q[x] for r, x in zip(rows, path, strict=False)) if case.is_drawn else 1.0
    for i, (x, row, m) in enumerate(zip(path, rows, ms, strict=False)):
        q = row.q if case.is_drawn else np.eye(case.vocab)[x]
        accepted, rest = min(m[x] / q[x], 1.0), np.maximum(m - q, 0)
        losses = *losses, special.rel_entr(m, row.p).sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log(m / row.p).tolist()
        if accepted * (1 + EPSILON) < 1:
            above = [*uniform[:i], max(accepted * (1 + EPSILON), 1e-12), *uniform[i + 1 :]]
            for y, noise in noises(m, q):
                weight, told = share * (1 - accepted) * rest[y] / rest.sum(), (*ratios, ratio[y])
                found.append(Probe(path, above, noise, (*path[:i], y), i, weight, told, losses))
        share *= accepted
        if not share:
            return found
        uniform[i], ratios = accepted * (1 - EPSILON), (*ratios, ratio[x])
        if x in case.ends or i + 1 == case.room:
            tokens = path[: i + 1]
            return [*found, Probe(path, uniform, even, tokens, i + 1, share, ratios, losses)]
    if ms:
        draws, told = noises(rows[-1].p, 0.0), (*ratios, 0.0)
        y, noise = draws[sum(path) % len(draws)]
        found.append(Probe(path, uniform, noise, (*path, y), len(path), share, told, losses))
    return found


class Batch:
    """The probes of a case, and what a step of them all takes, as tensors `[batch, ...]`."""

    def __init__(self, case: Case) -> None:
        paths = list(itertools.product(range(case.vocab), repeat=case.steps))
        if not case.is_drawn:
            paths = paths[case.seed % case.every :: case.every]
        self.case, self.probes = case, [probe for path in paths for probe in probes(case, path)]
        self.paths = [list(probe.path) for probe in self.probes]
        rows = [case.rows(probe.path) for probe in self.probes]
        self.logits = torch.tensor(np.array([[row.logits for row in own] for own in rows]))
        self.q = torch.tensor(np.array([[row.q for row in own[:-1]] for own in rows])).float()
        self.uniform = torch.tensor([probe.uniform for probe in self.probes]).double()
        self.noise = torch.tensor([probe.noise for probe in self.probes])

    def check(self, verification: Any, emitted: list[list[int]], lost: torch.Tensor) -> None:
        """Each probe gives what it must, and its report is the distribution of what is emitted.

        The verification has seen this batch alone; `lost` is by request, in units.
        """
        case, wrong, units = self.case, [], lost.numpy()
        table = verification.returned[0].table[:, 0].double().numpy()
        for probe, tokens, ratios, unit in zip(self.probes, emitted, table, units, strict=True):
            told, loss = ratios[: len(probe.tokens)], sum(probe.losses) / UNIT
            is_right = tuple(tokens[: len(told)]) == probe.tokens
            is_right &= np.allclose(told, probe.ratios, rtol=0, atol=2 * EPSILON)
            if not is_right or not -0.1 <= unit - loss <= len(probe.losses) + 0.1:
                wanted = f"{probe.tokens}, {np.array(probe.ratios)}, {loss:.1f}"
                wrong.append(f"{probe.path}: {tokens}, {told}, {unit}, not {wanted}")
        assert not wrong, "\n".join([f"{len(wrong)} of {len(table)}, {case}", *wrong[:9]])
        visited, accepted = np.array([(len(p.losses), p.accepted) for p in self.probes]).T
        counts, layout = verification.counters.device_counts, verification.counters.layout
        assert counts[layout.lost] == units.sum()
        for of, where in ((visited, layout.verified), (accepted, layout.accepted)):
            assert counts[where].tolist()[: case.steps] == [sum(of > i) for i in range(case.steps)]
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
        weights /= weights.sum()
        # Nothing mends what theta accepts outright.
        assert case.theta is not None or abs(weights @ np.exp(np.negative(sums)) - 1) < EPSILON
        assert -EPSILON < weights @ (units * UNIT - sums) < case.steps * UNIT + EPSILON
