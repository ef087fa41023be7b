"""Which draft tokens of a request stay, on a CPU.

Where a request samples its rows are divided by the temperature and their softmax is found, one
request at a time: those of a drawn draft up to the first token that was never drawn, all of one
that is not drawn, for what the rule looks ahead to, and of a strict request what is reached.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_mars.kernels.blocks.naive import num_staying, reach
from vllm_mars.kernels.law.naive import Position, clip_row, drawn_prices, log_ratio
from vllm_mars.kernels.ledger.naive import LOSS_BITS, Allowance, nearest_units, units_of
from vllm_mars.kernels.record import Column
from vllm_mars.kernels.rows.naive import Rows, num_gainful, read_probabilities
from vllm_mars.kernels.rules import Rule
from vllm_mars.kernels.step import Step, Terms
from vllm_mars.kernels.strictness.naive import Guarded
from vllm_mars.kernels.verdicts import Verdict


class Chance:
    """How the requests of a step sample, and the random numbers that decide.

    Args:
        temperature: float32 `[batch]`; 0 is greedy. A row is divided by it when it is reached; 1
            where that has been done.
        uniform: float64 `[num_draft]`, in [0, 1).
        draft_probs: float32 `[num_draft, vocab]`, what drafts were drawn from; None if they were
            not drawn.
        generators: of requests that have one of their own, by place in the batch.
        noise: `[vocab]`, the reciprocals of exponential random numbers that vLLM's sampler draws,
            by place, of requests that are to emit what it emits. Others take one number.
    """

    def __init__(
        self,
        temperature: torch.Tensor,
        uniform: np.ndarray,
        draft_probs: torch.Tensor | None = None,
        generators: Mapping[int, torch.Generator] | None = None,
        noise: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self.temperature = temperature
        self.draft_probs = draft_probs
        self._uniform = uniform
        self._generators = generators or {}
        self._noise = noise or {}

    def accepts(self, position: int, probability: float) -> bool:
        """Whether the draft token at a position stays that does so with this probability."""
        return bool(probability > 0 and probability >= self._uniform[position])

    def draws(self, place: int, weights: torch.Tensor) -> int:
        """The token that comes instead, by its weight; float32 `[vocab]`, not all 0."""
        if place in self._noise:
            return int((weights * self._noise[place]).argmax())
        sums = weights.cumsum(0, dtype=torch.float64)
        u = torch.rand((), dtype=torch.float64, generator=self._generators.get(place))
        # Below the whole sum, so that a token comes which adds to it. Not so of a NaN.
        return min(int(torch.searchsorted(sums, u * sums[-1], right=True)), len(sums) - 1)


class Emitted(NamedTuple):
    """What a step emits for one request.

    Attributes:
        accepted: draft tokens.
        token: what comes in the place of the first rejected one, or None where all are accepted.
        positions: what was decided at the positions that were looked at.
        log_ratios: of a request that samples, log m - log p of each token.
        gained: of a drawn draft what the rule adds to the chance that each of its tokens stays, of
            those that were not reached, too; in units of 2**-LOSS_BITS.
    """

    accepted: int
    token: int | None
    positions: Sequence[Position]
    log_ratios: Sequence[float] = ()
    gained: Sequence[int] = ()


def allowances(step: Step) -> Iterator[Allowance]:
    """What each request of a step may pay and lose."""
    slots = step.slots.long()
    columns = [Column.VALUE, Column.RATE, Column.LOST, Column.MOST_TOKENS]
    own = step.records.table[slots][:, columns].tolist()
    produced = (step.total_len[slots] - step.prompt_len[slots]).tolist()
    inputs = step.input_ids.tolist()
    last = [inputs[first] for first in [0, *step.cu_num_logits.tolist()[:-1]]] if own else []
    ends = step.records.ends[slots].tolist()
    for place, (value, rate, lost, most_tokens) in enumerate(own):
        found = Allowance.of(value, rate, lost, produced[place], most_tokens)
        is_end = produced[place] > 0 and last[place] >= 0 and last[place] in ends[place]
        yield found._replace(has_ended=found.has_ended or is_end)


def accept(
    rows: Rows,
    allowed: Allowance,
    step: Step,
    terms: Terms,
    place: int,
    chance: Chance | None,
    guard: Guarded | None,
) -> Emitted:
    """What a step emits for the request at a place of the batch."""
    ends = step.cu_num_logits
    begin, end = int(ends[place - 1]) if place else 0, int(ends[place]) - 1
    if chance is None or not chance.temperature[place]:
        return _greedy(rows, begin, end, allowed, terms.rule)
    followers = () if guard is None else guard.followers[begin:end]
    own = SampledDraft(step, terms, chance, place, begin, end, followers)
    if chance.draft_probs is None:
        return _fixed(rows, allowed, terms.rule, own)
    return _drawn(rows, allowed, own)


def _greedy(rows: Rows, begin: int, end: int, allowed: Allowance, rule: Rule) -> Emitted:
    verdicts = rule.plain.greedy(rows, begin, end, allowed)
    positions = []
    for offset, verdict in enumerate(verdicts):
        loss = rows.loss[begin + offset]
        positions.append(Position(verdict, loss=loss, gained=1 << LOSS_BITS, drift=loss))
        if verdict not in (Verdict.FIRST, Verdict.RELAXED):
            return Emitted(offset, rows.argmax[begin + offset], positions)
    return Emitted(len(verdicts), None, positions)


# By width, and kept: to get new memory for rows takes as long as to read them.
_BUFFERS: dict[int, torch.Tensor] = {}


def _buffers(num_rows: int, vocab: int) -> torch.Tensor:
    """Rows to write to; float32 `[num_rows, vocab]`, the same ones for each call."""
    found = _BUFFERS.get(vocab)
    if found is None or len(found) < num_rows:
        # What is made in inference mode, where an engine runs, could be written to there alone.
        with torch.inference_mode(False):
            found = _BUFFERS[vocab] = torch.empty(num_rows, vocab)
    return found[:num_rows]


class SampledDraft:
    """The draft of a request that samples, and its rows.

    Args:
        step: with float32 logits.
        terms: of the engine.
        chance: what decides.
        place: of the request in the batch.
        begin, end: its first row, and its bonus row.
        followers: of each row, what `Guarded` lists; nothing for none.

    Attributes:
        z: float32 `[n, vocab]`, the rows, once they are read divided by the temperature.
        p: likewise, their softmax.
        q: likewise, what a draft was drawn from, or None.
        kept: of each row int64 `[m]`, the tokens that keep their probability, each once.
        buffers: float32 `[3 + n, vocab]`, to be written.
        most_drafts: K, the longest draft of a request.
    """

    def __init__(
        self,
        step: Step,
        terms: Terms,
        chance: Chance,
        place: int,
        begin: int,
        end: int,
        followers: Sequence[Collection[int]] = (),
    ) -> None:
        self.begin, self.end = begin, end
        self.most_drafts = step.num_speculative_tokens
        length, vocab = end - begin, step.logits.shape[1]
        self._temperature = float(chance.temperature[place])
        self._place, self._chance = place, chance
        # The draft tokens of a step have no bonus rows between them.
        self._first = begin - place
        self._logits = step.logits[begin:end]
        self.q = None
        if chance.draft_probs is not None:
            self.q = chance.draft_probs[self._first : self._first + length]
        buffers = _buffers(3 + 3 * length, vocab)
        self.buffers, self.p, z = buffers.tensor_split([3 + length, 3 + 2 * length])
        self.z = self._logits if self._temperature == 1 else z
        ends = step.records.ends[int(step.slots[place])].tolist()
        own = {*ends} if terms.protected is None else {*ends, *terms.protected.ids.tolist()}
        kept = (own.union(more) for more in followers or [()] * length)
        self.kept = [
            torch.tensor(sorted(it for it in of_row if 0 <= it < vocab), dtype=torch.int64)
            for of_row in kept
        ]

    def read(self, rows: slice) -> None:
        """Finds z and p of rows."""
        if self._temperature != 1:
            torch.div(self._logits[rows], self._temperature, out=self.z[rows])
        torch.softmax(self.z[rows], dim=-1, out=self.p[rows])

    def accepts(self, offset: int, probability: float) -> bool:
        """Whether a draft token stays that does so with this probability."""
        return self._chance.accepts(self._first + offset, probability)

    def draws(self, weights: torch.Tensor) -> int:
        """The token that comes instead, by its weight."""
        return self._chance.draws(self._place, weights)


def _fixed(rows: Rows, allowed: Allowance, rule: Rule, own: SampledDraft) -> Emitted:
    begin, end, p = own.begin, own.end, own.p
    is_strict = not allowed.value
    positions = [Position(Verdict.NONE)] * (end - begin)
    if not is_strict:
        own.read(slice(None))
        rows = read_probabilities(rows, begin, own.z, p, own.kept)
        positions = rule.plain.sampled(rows, begin, end, allowed)
    log_ratios: list[float] = []
    for offset, position in enumerate(positions):
        i = begin + offset
        draft, ratio = rows.draft[i], log_ratio(position, is_draft=True)
        if is_strict:
            own.read(slice(offset, offset + 1))
        # What is strict compares vLLM's own number.
        accepted = float(p[offset, draft]) if draft >= 0 else 0.0
        if position.bias:
            accepted = math.exp(min(rows.log_p[i] + ratio, 0.0))
        if own.accepts(offset, accepted):
            log_ratios.append(ratio)
            continue
        weights = p[offset]
        if draft >= 0:
            weights[draft] = 0.0
        if position.bias:
            # Not kept tokens times Z, which may be too large for a number.
            of_kept = weights[own.kept[offset]]
            weights *= math.exp(log_ratio(position, is_draft=False))
            weights[own.kept[offset]] = of_kept
        # Only rounding leaves nothing to draw from.
        token = own.draws(weights) if weights.any() or draft < 0 else draft
        is_kept = token in own.kept[offset]
        log_ratios.append(log_ratio(position, token == draft, is_kept))
        return Emitted(offset, token, positions[: offset + 1], log_ratios)
    return Emitted(end - begin, None, positions, [*log_ratios, 0.0])


def _drawn(rows: Rows, allowed: Allowance, own: SampledDraft) -> Emitted:
    begin, end, q = own.begin, own.end, own.q
    assert q is not None
    prices = drawn_prices(rows, begin, end, allowed, own.most_drafts)
    gainful = num_gainful(rows, begin, end, allowed)
    drafts = rows.draft[begin:end]
    # A token that was never drawn ends the draft.
    length = next((i for i, draft in enumerate(drafts) if draft == -1), end - begin)
    # Nothing is looked at behind it, but that a token is drawn there.
    own.read(slice(length + 1))
    z, p, buffers = own.z, own.p, own.buffers
    served, reaches, gained = [], [], []
    own_reach = strict = 1.0
    for i in range(length):
        out = buffers[3 + i]
        of_row = clip_row(z[i], p[i], q[i], prices[i], own.kept[i], out, buffers[:3])
        at_draft = (p[i], of_row.m, q[i])
        of_p, of_m, of_q = (float(it[drafts[i]]) if drafts[i] >= 0 else 0.0 for it in at_draft)
        own_reach, strict = reach(own_reach, of_m, of_q), reach(strict, of_p, of_q)
        served.append(of_row)
        reaches.append(own_reach)
        gained.append(nearest_units(own_reach - strict))

    def residual(i: int) -> torch.Tensor:
        """What is drawn from behind i drafts."""
        m = torch.mul(served[i].m, reaches[i - 1] if i else 1.0, out=buffers[0])
        return m.sub_(q[i]).clamp_(min=0)

    accepted = num_staying(
        reaches,
        lambda i: float(residual(i).sum()),
        lambda i, chance: own.accepts(i - 1, chance),
    )
    token: int | None = None
    if accepted < length:
        weights = residual(accepted)
        # Only rounding leaves nothing to draw from.
        if weights.any():
            token = own.draws(weights)
        else:
            token = drafts[accepted] if drafts[accepted] >= 0 else int(z[accepted].argmax())
    elif length < end - begin:
        token = own.draws(p[length])
    positions: list[Position] = []
    log_ratios: list[float] = []
    for i in range(min(accepted + 1, end - begin)):
        verdict = Verdict.NONE
        if drafts[i] >= 0 and allowed.value > 0 and i < gainful:
            verdict = rows.forbids(begin + i, looks_at_first=False)
        if i == length:
            positions.append(Position(verdict))
            break
        loss = units_of(served[i].loss)
        drift = nearest_units(served[i].drift)
        positions.append(Position(verdict, loss=loss, drift=drift))
        emitted = drafts[i] if i < accepted else token
        ratio = float(served[i].m[emitted] / p[i, emitted])
        # Of a row that holds a NaN any token may come.
        is_told = 0 < ratio < math.inf and emitted not in own.kept[i]
        log_ratios.append(math.log(ratio) if is_told else 0.0)
    if accepted == length:
        log_ratios.append(0.0)
    return Emitted(accepted, token, positions, log_ratios, gained)
