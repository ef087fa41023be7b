"""All that a sampled step can emit, without sampling: each draw is probed from both sides.

A draft token x is accepted with probability min(1, m(x) / q(x)); what comes in its place is drawn
from max(m - q, 0). A draft that is not drawn is q = 1 at its token. So of each drafted path two
things are probed at each position, each probe a request of its own:

    acceptance   with all random numbers just below m / q the drafts are accepted; with that of one
                 position just above it, the step ends there
    the rest     with noise that makes the keys of all tokens equal, but for that of one which is
                 greater by EPSILON of m, this one comes out

What m is, the rule says: `served`, from its formulas in double precision, with scipy's root for w.
For a drawn draft it looks only at the tokens before the position, and is held against all paths.
From the probes follows the exact distribution of what is emitted, and from that what the step must
report: log m - log p of each token, and the divergence that it charges.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import optimize
from vllm import SamplingParams

import oracle
from vllm_mars import MarsConfig
from vllm_mars.kernels.terms import DRAWN_SCALE, NO_LIMIT, PRICE_BURSTS, loss_rate, most_lost
from vllm_mars.runner.records import SAMPLED_C2

# How far from their values probabilities are probed, and how exact an expectation is.
EPSILON = 1e-5
UNIT = 2.0**-16
# What a request may lose beyond its rate, in units.
BURST = 2 << 16
# Tokens of an n-gram that must not be repeated.
NGRAM = 4

Tokens = tuple[int, ...]


class Row(NamedTuple):
    """A position: the target's logits, p, q as it is drawn from, and whether m must be p."""

    logits: np.ndarray
    p: np.ndarray
    q: np.ndarray
    is_strict: bool


@dataclass(frozen=True)
class Case:
    """A request that samples, in the middle of its answer, and the server's options.

    Attributes:
        is_drawn: whether its drafts are drawn. Else each draft is verified for itself, or
        every: each so many of them.
        theta, price, max_loss, opening: options; without theta and price the bound sets the price.
        steps: the draft's length.
        answer: output tokens so far.
        ends: its end of sequence, then its stop tokens.
        low: tokens far below the first choice.
        masked: tokens that the target cannot emit.
        room: output tokens that may still come.
        lost: what it has lost, in units.
    """

    is_drawn: bool
    price: float | None = 1.0
    max_loss: float | None = None
    theta: float | None = None
    opening: int = 0
    seed: int = 0
    steps: int = 2
    vocab: int = 5
    every: int = 1
    answer: Tokens = (0,)
    ends: Tokens = ()
    protected: Tokens = ()
    low: Tokens = ()
    masked: Tokens = ()
    room: int = 40
    lost: int = 0

    @property
    def config(self) -> MarsConfig:
        given = {"theta": self.theta, "price": self.price, "max_loss": self.max_loss}
        return MarsConfig(**given, strict_opening=self.opening)

    def params(self, seed: int = 0) -> SamplingParams:
        most = len(self.answer) + self.room
        stops = list(self.ends[1:])
        params = SamplingParams(temperature=1, seed=seed, max_tokens=most, stop_token_ids=stops)
        params.update_from_generation_config({}, self.ends[0] if self.ends else None)
        return params

    @property
    def is_over(self) -> bool:
        """Whether the answer ended before this step."""
        return self.room <= 0 or self.answer[-1] in self.ends

    @property
    def useful(self) -> int:
        """Positions that a further token of the answer can follow."""
        return min(self.steps, self.room - 1)

    @property
    def kept(self) -> np.ndarray:
        """Whether each token keeps its probability."""
        return np.isin(range(self.vocab), [*self.ends, *self.protected])

    @functools.cache  # noqa: B019
    def row(self, before: Tokens) -> Row:
        """The row behind these tokens of the step."""
        rng = np.random.default_rng([self.seed, len(before), *before])
        logits, noise = rng.normal([[2], [0]], [[1.2], [0.8]], (2, self.vocab))
        logits[list(self.low)] = np.delete(logits, self.low).max() - 5
        q = np.exp(0.5 * logits + noise)
        logits[list(self.masked)] = -np.inf
        logits, q = logits.astype(np.float32), (q / q.sum()).astype(np.float32)
        p = np.exp(logits.astype(float))
        answer = (*self.answer, *before)
        held = {answer[i : i + NGRAM - 1] for i in range(len(answer) - NGRAM + 1)}
        repeats = self.theta is None and answer[1 - NGRAM :] in held
        is_strict = repeats or len(before) >= self.useful or len(answer) < self.opening
        return Row(logits, p / p.sum(), q.astype(float), is_strict)

    def left(self, place: int) -> int:
        """What the step's tokens up to this place may lose, in units."""
        if self.max_loss is None:
            return NO_LIMIT
        tokens = len(self.answer) + place + 1
        return max(most_lost(loss_rate(self.max_loss), BURST, tokens) - self.lost, 0)

    @property
    def own_price(self) -> float:
        """In nats per token gained."""
        if self.price is not None or self.max_loss is None:
            return self.price or 0.0
        scale = 4 * SAMPLED_C2 * loss_rate(self.max_loss) // BURST
        scale *= DRAWN_SCALE if self.is_drawn else 1
        return math.isqrt(scale * min(self.left(0), PRICE_BURSTS * BURST)) * UNIT


def random_case(seed: int, **given: Any) -> Case:
    """A case of all features."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = rng.permutation(5).tolist()
    answers = [(0,), (1, 2, 3, 4, 1, 2), (1, 1, 1, 1), (3, 3, 1, 2, 0, 3, 3, 1)]
    answer = answers[rng.integers(4)]
    ends = [token for token in tokens[: rng.integers(3)] if token != answer[-1]]
    return Case(
        is_drawn=bool(rng.integers(2)),
        price=rng.choice([None, 0.3, 1.0, 2.5]),
        max_loss=float(rng.choice([0.002, 0.05, 0.5])),
        opening=int(rng.choice([0, 0, len(answer) + 1])),
        seed=seed,
        answer=answer,
        ends=tuple(ends),
        protected=tuple(tokens[2 : rng.integers(2, 4)]),
        low=tuple(tokens[: rng.integers(3)]),
        masked=tuple(tokens[3 : rng.integers(3, 5)]),
        room=int(rng.choice([1, 2, 3, 40, 40])),
        lost=int(rng.integers(BURST + 300)),
        **given,
    )


FEATURES: dict[str, dict[str, Any]] = {
    "price": {"masked": (3,)},
    "no price": {"price": 0.0},
    "large price": {"price": 4.0},
    "bound": {"price": 3.0, "max_loss": 0.01, "lost": BURST - 3000},
    "bound alone": {"price": None, "max_loss": 0.05, "lost": BURST // 2},
    "opening": {"opening": 2},
    "room": {"room": 2},
    "guard": {"answer": (1, 2, 3, 4, 1, 2)},
    "guard at once": {"answer": (1, 2, 3, 4, 1, 2, 3)},
    "guard, overlapping": {"answer": (1, 1, 1), "steps": 3},
    "ends": {"ends": (4, 3), "low": (3, 4)},
    "likely ends": {"ends": (4, 3)},
    "later end": {"ends": (4,), "masked": (4,), "max_loss": 0.001, "lost": BURST},
    "protected": {"protected": (2,)},
    "all": {
        **{"price": None, "max_loss": 0.1, "opening": 2, "answer": (1, 2, 3, 4, 1, 2)},
        **{"ends": (4, 3), "protected": (0,), "low": (3, 0), "steps": 3, "room": 3, "every": 3},
    },
    "behind the end": {"ends": (0,)},
    "behind the room": {"room": 0},
}


def cap(units: int) -> float:
    """The largest price whose loss, at most price**2 / 8, fits."""
    return math.sqrt(8 * max(units, 0) * UNIT) * (1 - 2**-20)


def divergence(m: np.ndarray, p: np.ndarray) -> float:
    return oracle.divergence(m.tolist(), p.tolist())


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
    rows, price, kept = [case.row(path[:i]) for i in range(case.steps)], case.own_price, case.kept
    if case.is_drawn:
        price = min(price, cap(case.left(0) // max(case.useful, 1)))
        is_plain = price == 0
        return [row.p if row.is_strict or is_plain else clipped(row, price, kept) for row in rows]
    if case.theta is not None:
        strict = frozenset({*case.ends, *case.protected})
        return [
            np.eye(case.vocab)[x]
            if oracle.is_relaxed(row.logits.tolist(), x, case.theta, strict) and not row.is_strict
            else row.p
            for row, x in zip(rows, path, strict=True)
        ]
    biases, ahead = [0.0] * case.steps, 0.0
    for i in reversed(range(case.useful)):
        x, bias = path[i], price + ahead
        if rows[i].is_strict or kept[x]:
            ahead = 0.0 if x in case.ends else rows[i].p[x] * bias
        else:
            biases[i], ahead = bias, tilted(rows[i].p, x, bias, kept)[1]
    found, lost = [], 0
    for i, (x, row, bias) in enumerate(zip(path, rows, biases, strict=True)):
        m = tilted(row.p, x, min(bias, cap(case.left(i) - lost)), kept)[0] if bias else row.p
        units = divergence(m, row.p) / UNIT
        if case.max_loss is not None and 0 < abs(units - round(units)) < 0.02:
            return []
        found.append(m)
        lost += math.ceil(units)
    return found


@dataclass
class Probe:
    """A request, its random numbers, and what must come of it.

    Attributes:
        path: its draft.
        uniform: a number for each position.
        tokens: what is emitted up to the answer's end.
        accepted: drafts among these.
        weight: the probability of all that.
        ratios: log m - log p of the tokens.
        losses: KL(m || p) at the positions that are looked at.
        noise: of the draw behind the accepted drafts; the key of a token is its weight over it.
    """

    path: Tokens
    uniform: list[float]
    tokens: Tokens = ()
    accepted: int = 0
    weight: float = 0.0
    ratios: Sequence[float] = ()
    losses: Sequence[float] = ()
    noise: Sequence[float] = (1.0,)


def noises(m: np.ndarray, q: np.ndarray) -> Iterator[tuple[int, list[float]]]:
    """Each token that can be drawn from max(m - q, 0), and noise for which it is.

    Of a token that cannot come the noise is so small that any weight would win; where m is q up to
    EPSILON, that is too much to ask.
    """
    weights = np.maximum(m - q, 0)
    slack = np.where(m > q * (1 - EPSILON), EPSILON * m, 0) + 1e-30
    for y in np.flatnonzero(weights > 4 * EPSILON * m):
        noise = weights + slack
        noise[y] = weights[y] - slack[y]
        yield int(y), noise.tolist()


def probes(case: Case) -> list[Probe]:
    """Of all that the step can emit, but of the bonus token one alone for each draft."""
    paths = list(itertools.product(range(case.vocab), repeat=case.steps))
    if not case.is_drawn:
        paths = paths[case.seed % case.every :: case.every]
    return [probe for path in paths for probe in probes_of(case, path)]


def probes_of(case: Case, path: Tokens) -> Iterator[Probe]:
    """The probes of one draft."""
    uniform = [0.5] * case.steps
    if case.is_over:
        yield Probe(path, uniform)
        return
    rows, ms = [case.row(path[:i]) for i in range(case.steps + 1)], served(case, path)
    share = 1.0
    if case.is_drawn:
        share = math.prod(row.q[x] for row, x in zip(rows, path, strict=False))
    ratios, losses = [], []
    for i, (x, row, m) in enumerate(zip(path, rows, ms, strict=False)):
        q = row.q if case.is_drawn else np.eye(case.vocab)[x]
        accepted, rest = min(m[x] / q[x], 1.0), np.maximum(m - q, 0)
        losses = [*losses, divergence(m, row.p)]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log(m / row.p)
        if accepted * (1 + EPSILON) < 1:
            above = [*uniform[:i], max(accepted * (1 + EPSILON), 1e-12), *uniform[i + 1 :]]
            for y, noise in noises(m, q):
                weight = share * (1 - accepted) * rest[y] / rest.sum()
                tokens, told = (*path[:i], y), [*ratios, ratio[y]]
                yield Probe(path, above, tokens, i, weight, told, losses, noise)
        share *= accepted
        if not share:
            return
        uniform[i], ratios = accepted * (1 - EPSILON), [*ratios, ratio[x]]
        if x in case.ends or i + 1 == case.room:
            yield Probe(path, uniform, path[: i + 1], i + 1, share, ratios, losses)
            return
    if ms:
        draws = list(noises(rows[-1].p, np.zeros(case.vocab)))
        y, noise = draws[sum(path) % len(draws)]
        yield Probe(path, uniform, (*path, y), case.steps, share, [*ratios, 0.0], losses, noise)


class Batch:
    """The probes of a case, and what a step of them all takes, as tensors `[batch, ...]`."""

    def __init__(self, case: Case) -> None:
        self.case, self.probes = case, probes(case)
        rows = [[case.row(p.path[:i]) for i in range(case.steps + 1)] for p in self.probes]
        self.paths = [list(probe.path) for probe in self.probes]
        self.logits = torch.tensor(np.array([[row.logits for row in own] for own in rows]))
        self.q = torch.tensor(np.array([[row.q for row in own[:-1]] for own in rows])).float()
        self.uniform = torch.tensor([probe.uniform for probe in self.probes]).double()
        noise = [np.broadcast_to(probe.noise, case.vocab) for probe in self.probes]
        self.noise = torch.tensor(np.array(noise)).float()

    def check(
        self, sampler: Any, emitted: list[list[int]], lost: torch.Tensor, knows_bonus: bool
    ) -> None:
        """Each probe gives what it must, and its report is the distribution of what is emitted.

        Args:
            sampler: which has verified this batch and nothing else.
            emitted: tokens of each request.
            lost: units that each request lost, `[batch]`.
            knows_bonus: whether the bonus token was drawn with the noise, too.
        """
        case, wrong, layout = self.case, [], sampler.verification.counters.layout
        table = sampler.verification.returned[0].table[:, 0].double().numpy()
        units, losses = lost.numpy(), np.array([sum(p.losses) / UNIT for p in self.probes])
        visited = np.array([len(probe.losses) for probe in self.probes])
        for place, (probe, tokens) in enumerate(zip(self.probes, emitted, strict=True)):
            told = table[place, : len(probe.tokens)]
            known = slice(len(probe.tokens) if knows_bonus else case.steps)
            if tuple(tokens[: len(probe.tokens)][known]) != probe.tokens[known]:
                wrong.append(f"{probe.path} emits {tokens}, not {probe.tokens}")
            if not np.allclose(told, probe.ratios, rtol=0, atol=2 * EPSILON):
                wrong.append(f"{probe.path} reports {told}, not {probe.ratios}")
            if not -0.1 <= units[place] - losses[place] <= visited[place] + 0.1:
                wrong.append(f"{probe.path} is charged {units[place]}, not {losses[place]}")
        message = f"{len(wrong)} faults of {len(self.probes)} probes of {case}"
        assert not wrong, "\n".join([message, *wrong[:12]])
        accepted = np.array([probe.accepted for probe in self.probes])
        counts = sampler.verification.counters.device_counts.numpy()
        assert counts[layout.lost] == units.sum()
        for i in range(case.steps):
            assert counts[layout.verified][i] == (visited > i).sum()
            assert counts[layout.accepted][i] == (accepted > i).sum()
        if not case.is_over:
            self._check_expectations(table, units)

    def _check_expectations(self, table: np.ndarray, units: np.ndarray) -> None:
        case = self.case
        # Of each position that is reached, by the tokens before it, and the draft if that is fixed.
        masses: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros(case.vocab))
        ratios: dict[Any, np.ndarray] = defaultdict(lambda: np.full(case.vocab, -np.inf))
        for probe, told in zip(self.probes, table, strict=True):
            for i in range(len(probe.losses)):
                where = probe.tokens[:i], None if case.is_drawn else probe.path
                masses[where][probe.tokens[i]] += probe.weight
                ratios[where][probe.tokens[i]] = told[i]
        for where, mass in masses.items():
            reported = case.row(where[0]).p * np.exp(ratios[where])
            np.testing.assert_allclose(mass / mass.sum(), reported, rtol=0, atol=EPSILON)
        weights = np.array([probe.weight for probe in self.probes])
        pairs = zip(table, self.probes, strict=True)
        sums = np.array([told[: len(probe.tokens)].sum() for told, probe in pairs])
        weights /= weights.sum()
        # What is accepted outright has no weight that mends it.
        assert case.theta is not None or abs(weights @ np.exp(-sums) - 1) < EPSILON
        assert -EPSILON < weights @ (units * UNIT - sums) < case.steps * UNIT + EPSILON
