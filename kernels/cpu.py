"""Verification on a CPU: the rows by NumPy, then `rule` as it is written.

NumPy's vectorised argmax takes a third of the time of torch's, and its small operations a quarter,
which counts for a single request. z2 is never computed. With t the threshold and "larger" the
number of logits above a pivot, a draft token x is one of the two largest within a small margin if

    x is not the argmax:  z[x] > t  and  larger(z[x]) <= 1      (z[x] is z2, or ties with z1)
    x is the argmax:      larger(t) >= 2                        (z1 and z2 are above t)

so a step reads all rows once, for the argmax, and once more the candidate rows alone. float32
logits are read in place; others are converted first. Where a request samples, their softmax is
read as well; of drawn drafts only that of the rows which are reached.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vllm_mars.kernels import rule as definition
from vllm_mars.kernels.clip import clip_row
from vllm_mars.kernels.rule import Allowance, Position, Rows
from vllm_mars.kernels.terms import (
    DRAWN_SCALE,
    FIXED_SCALE,
    GREEDY_SCALE,
    LOSS_BITS,
    MOST_LOSS,
    STRUCK,
    Account,
    Column,
    CounterLayout,
    Drafts,
    Requests,
    Rule,
    RuleName,
    Verdict,
    VerifyOutput,
)


class Chance(Protocol):
    """What decides where a request samples."""

    def accepts(self, position: int, probability: float) -> bool:
        """Whether the draft token at a position stays that does so with this probability."""

    def draws(self, place: int, weights: torch.Tensor) -> int:
        """The token that comes instead, by its weight; float32 `[vocab]`, not all 0."""


class Random(NamedTuple):
    """Random numbers.

    Attributes:
        uniform: float64 `[num_draft]`, in [0, 1).
        generators: of requests that have one of their own, by place in the batch.
        noise: `[vocab]`, the reciprocals of exponential random numbers that vLLM's sampler draws,
            by place, of requests that are to emit what it emits. Others take one number.
    """

    uniform: np.ndarray
    generators: Mapping[int, torch.Generator]
    noise: Mapping[int, torch.Tensor]

    def accepts(self, position: int, probability: float) -> bool:
        """See `Chance`."""
        return bool(probability > 0 and probability >= self.uniform[position])

    def draws(self, place: int, weights: torch.Tensor) -> int:
        """See `Chance`."""
        if place in self.noise:
            return int((weights * self.noise[place]).argmax())
        sums = weights.cumsum(0, dtype=torch.float64)
        u = torch.rand((), dtype=torch.float64, generator=self.generators.get(place))
        # Below the whole sum, so that a token comes which adds to it. Not so of a NaN.
        return min(int(torch.searchsorted(sums, u * sums[-1], right=True)), len(sums) - 1)


class Sampled(NamedTuple):
    """How the requests of a step sample.

    Attributes:
        temperature: float32 `[batch]`; 0 is greedy. The logits have been divided by it.
        chance: what decides.
        draft_probs: float32 `[num_draft, vocab]`, what drafts were drawn from; None if they were
            not drawn.
    """

    temperature: torch.Tensor
    chance: Chance
    draft_probs: torch.Tensor | None = None


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


def read_rows(
    drafts: Drafts,
    thresholds: np.ndarray,
    ends: np.ndarray,
    rule: Rule,
    blocked: Sequence[int] | None,
    is_sampled: np.ndarray | None = None,
) -> tuple[Rows, np.ndarray]:
    """What the rule reads, and the argmax of each row of logits, int64 `[num_rows]`.

    Args:
        drafts: the step's, without V2's layout.
        thresholds: float32 `[num_draft]`, theta at each position.
        ends: int64 `[num_draft, MOST_ENDS]`, the tokens that end the request of each position.
        rule: of the engine.
        blocked: a `Verdict` at each position that must stay strict, else 0; or None.
        is_sampled: bool `[num_draft]`, which positions are of requests that sample.
    """
    rows = drafts.logits.detach().float().numpy()
    row_argmax = rows.argmax(axis=-1)
    ids = drafts.draft_token_ids.numpy()
    if drafts.target_rows is None:
        target = np.arange(len(ids))
    else:
        target = drafts.target_rows.numpy()
    argmax = row_argmax[target]
    in_vocab = (ids >= 0) & (ids < rows.shape[1])
    safe = np.where(in_vocab, ids, 0)
    first, logit = rows[target, argmax], rows[target, safe]
    with np.errstate(invalid="ignore"):
        loss = first - logit
        units = np.ceil(np.minimum(loss * np.float32(2**LOSS_BITS), np.float32(MOST_LOSS)))
        units = np.where(in_vocab & (loss == loss), units, 0)
        is_small = np.zeros(len(ids), dtype=bool)
        if rule.name != "price":
            t = thresholds * first
            is_small = in_vocab & (logit > t) & ((thresholds == 1) | (first > 0))
            is_argmax = safe == argmax
            if is_sampled is None:
                is_small &= ~is_argmax
            # Row by row: indexing with the list would copy the rows, which costs more.
            for i in np.flatnonzero(is_small):
                larger = np.count_nonzero(rows[target[i]] > (t if is_argmax[i] else logit)[i])
                is_small[i] = larger >= 2 if is_argmax[i] else larger <= 1
    is_end = in_vocab & _is_among(safe, ends)
    is_kept, keeps_first = is_end, _is_among(argmax, ends)
    if rule.protected is not None:
        mask = rule.protected.mask.numpy()
        is_kept, keeps_first = is_kept | (in_vocab & mask[safe]), keeps_first | mask[argmax]
    return (
        Rows(
            np.where(in_vocab, ids, np.where(ids == STRUCK, STRUCK, -1)).tolist(),
            argmax.tolist(),
            units.astype(np.int64).tolist(),
            is_small.tolist(),
            (in_vocab & (logit > -np.inf) & (first < np.inf)).tolist(),
            is_end.tolist(),
            is_kept.tolist(),
            (in_vocab & keeps_first).tolist(),
            [0] * len(ids) if blocked is None else blocked,
        ),
        row_argmax,
    )


def _is_among(token: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Whether each position's token is one of those that end its request; bool `[num_draft]`."""
    found: np.ndarray = (ends == token[:, None]).any(axis=1)
    return found


def read_probabilities(
    rows: Rows, logits: torch.Tensor, begins: list[int], kept: list[torch.Tensor]
) -> tuple[Rows, torch.Tensor]:
    """Adds what the rule reads where requests sample, with drafts that are not drawn.

    Args:
        rows: of the step.
        logits: float32 `[num_draft, vocab]`.
        begins: where each request's draft begins, and behind the last one the end.
        kept: of each request, int64 `[n]`, the tokens of S, each once.

    Returns:
        The rows, and the softmax of the logits.
    """
    # torch's softmax takes a quarter of the time of NumPy's exponentials.
    shares = logits.softmax(dim=-1)
    p, z = shares.numpy(), logits.numpy()
    at, draft = np.arange(len(p)), np.asarray(rows.draft, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        # That of the first choice never underflows.
        log_first = np.log(p[at, rows.argmax])
        first = z[at, rows.argmax]
        log_p = np.minimum(z[at, np.maximum(draft, 0)] - first + log_first, 0.0)
        entropy = [_entropy(*of) for of in zip(p, z, first, log_first, strict=True)]
    log_p[draft < 0] = -math.inf
    rest, rest_entropy = [], []
    for begin, end, own in zip(begins[:-1], begins[1:], kept, strict=True):
        of_kept = shares[begin:end, own].double()
        rest += (1 - of_kept.sum(1)).clamp(min=0).tolist()
        rest_entropy += torch.special.entr(of_kept).sum(1).tolist()
    rest_entropy = [whole - part for whole, part in zip(entropy, rest_entropy, strict=True)]
    sums = {"rest": rest, "entropy": entropy, "rest_entropy": rest_entropy}
    return rows._replace(log_p=log_p.tolist(), **sums), shares


def _entropy(p: np.ndarray, logits: np.ndarray, first: float, log_first: float) -> float:
    """The entropy in nats of p, the softmax of a row of which `first` is the largest logit."""
    found = float(p.dot(first - logits) - log_first)
    # Where something is forbidden that was 0 times infinity. Logarithms take four times as long.
    return found if found == found else float(torch.special.entr(torch.from_numpy(p)).sum())


def accept(
    drafts: Drafts,
    requests: Requests,
    rule: Rule,
    blocked: Sequence[int] | None = None,
    account: Account | None = None,
    sampled: Sampled | None = None,
) -> VerifyOutput:
    """Verifies a step; what its requests lose is added to their records.

    Args:
        drafts: the step's; where requests sample, with processed float32 logits, a row for each
            draft token in order.
        requests: of the step.
        rule: of the engine.
        blocked: a `Verdict` at each position that must stay strict, else 0; or None.
        account: where the step is counted.
        sampled: how the requests sample; None if all are greedy.
    """
    begins = [0, *drafts.cu_num_draft_tokens.tolist()]
    batch, lengths, slots = len(begins) - 1, np.diff(begins), requests.slots.long()
    thresholds = requests.records.threshold[slots].numpy()
    ends = requests.records.ends[slots].numpy()
    is_sampled, samples = None, [False] * batch
    if sampled is not None:
        samples = (sampled.temperature != 0).tolist()
        is_sampled = np.repeat(samples, lengths)
    of_positions = thresholds.repeat(lengths), ends.repeat(lengths, axis=0)
    rows, row_argmax = read_rows(drafts, *of_positions, rule, blocked, is_sampled)
    kept = [_kept(rule, own, drafts.logits.shape[1]) for own in ends] if any(samples) else []
    draft_probs = None if sampled is None else sampled.draft_probs
    if any(samples) and draft_probs is None:
        rows, shares = read_probabilities(rows, drafts.logits, begins, kept)
    bonus: list[int] | None = None
    if drafts.bonus_rows is not None:
        bonus = row_argmax[drafts.bonus_rows.numpy()].tolist()
    elif drafts.bonus_token_ids is not None:
        bonus = drafts.bonus_token_ids.reshape(-1).tolist()
    tokens = np.full((batch, drafts.num_speculative_tokens + 1), -1, dtype=np.int32)
    summary = np.zeros((3, batch), dtype=np.int64)
    layout = CounterLayout(drafts.num_speculative_tokens)
    for place, allowed in enumerate(_allowances(requests, ends, samples, draft_probs)):
        begin, end = begins[place : place + 2]
        own = rows, begin, end, allowed
        if sampled is None or not samples[place]:
            emitted = _greedy(*own, rule.name)
        elif draft_probs is None:
            emitted = _fixed(*own, rule.name, shares, kept[place], place, sampled.chance)
        else:
            of_drafts = drafts.logits, draft_probs
            emitted = _drawn(*own, *of_drafts, kept[place], place, sampled.chance)
        accepted = emitted.accepted
        tokens[place, :accepted] = rows.draft[begin : begin + accepted]
        if emitted.token is not None:
            tokens[place, accepted] = emitted.token
        elif bonus is not None:
            tokens[place, accepted] = bonus[place]
        # What lies behind the answer's end is no part of it.
        most = definition.num_gainful(rows, begin, end, allowed) + 1
        most = 0 if allowed.has_ended else most
        counted = emitted._replace(
            positions=emitted.positions[:most], gained=emitted.gained[:most]
        )
        drafted = rows.draft[begin:end]
        num_relaxed, lost, drift = _write_down(
            counted, drafted, not samples[place], place, requests, account, layout
        )
        if samples[place] and draft_probs is not None:
            share = float(requests.records.draft_share[slots[place]])
            share = definition.next_share(share, drift, rule.share_gain)
            requests.records.draft_share[slots[place]] = share
        summary[:, place] = accepted + 1, num_relaxed, lost
    emitted_, relaxed_, lost_ = torch.from_numpy(summary)
    return VerifyOutput(torch.from_numpy(tokens), emitted_.int(), relaxed_.int(), lost_)


def _kept(rule: Rule, ends: np.ndarray, vocab: int) -> torch.Tensor:
    """The tokens that keep their probability in a request, each once; int64."""
    own = {token for token in ends.tolist() if 0 <= token < vocab}
    if rule.protected is not None:
        own.update(rule.protected.ids.tolist())
    return torch.tensor(sorted(own - {-1}), dtype=torch.int64)


def _allowances(
    requests: Requests,
    ends: np.ndarray,
    samples: list[bool],
    draft_probs: torch.Tensor | None,
) -> Iterator[Allowance]:
    columns = [Column.PRICE, Column.RATE, Column.LOST, Column.MOST_TOKENS]
    own = requests.records.table[requests.slots.long()][:, columns].tolist()
    scale = FIXED_SCALE if draft_probs is None else DRAWN_SCALE
    at = zip(requests.produced.tolist(), requests.last.tolist(), ends.tolist(), strict=True)
    for record, (produced, last, own_ends), is_sampled in zip(own, at, samples, strict=True):
        price, rate, lost, most_tokens = record
        of_price = scale if is_sampled else GREEDY_SCALE
        found = Allowance.of(price, rate, lost, produced, most_tokens, of_price)
        is_end = produced > 0 and last >= 0 and last in own_ends
        yield found._replace(has_ended=found.has_ended or is_end)


def _greedy(rows: Rows, begin: int, end: int, allowed: Allowance, name: RuleName) -> Emitted:
    verdicts = definition.greedy(rows, begin, end, name, allowed)
    positions = []
    for offset, verdict in enumerate(verdicts):
        loss = rows.loss[begin + offset]
        positions.append(Position(verdict, loss=loss, gained=1 << LOSS_BITS, drift=loss))
        if verdict not in (Verdict.FIRST, Verdict.RELAXED):
            return Emitted(offset, rows.argmax[begin + offset], positions)
    return Emitted(len(verdicts), None, positions)


def _fixed(
    rows: Rows,
    begin: int,
    end: int,
    allowed: Allowance,
    name: RuleName,
    p: torch.Tensor,
    kept: torch.Tensor,
    place: int,
    chance: Chance,
) -> Emitted:
    positions = definition.sampled(rows, begin, end, name, allowed)
    log_ratios: list[float] = []
    for offset, position in enumerate(positions):
        i = begin + offset
        draft, log_z = rows.draft[i], position.log_z
        # What is strict compares vLLM's own number.
        accepted = float(p[i, draft]) if draft >= 0 else 0.0
        if position.bias:
            accepted = math.exp(min(rows.log_p[i] + position.bias - log_z, 0.0))
        if position.verdict == Verdict.RELAXED:
            accepted, position = 1.0, position._replace(bias=0.0)
        if chance.accepts(i, accepted):
            log_ratios.append(position.bias - log_z)
            continue
        weights = p[i]
        if draft >= 0:
            weights[draft] = 0.0
        if log_z:
            # Not kept tokens times Z, which may be too large for a number.
            of_kept = weights[kept]
            weights *= math.exp(-log_z)
            weights[kept] = of_kept
        # Only rounding leaves nothing to draw from.
        token = chance.draws(place, weights) if weights.any() or draft < 0 else draft
        ratio = position.bias - log_z if token == draft else -log_z
        log_ratios.append(0.0 if token in kept else ratio)
        return Emitted(offset, token, positions[: offset + 1], log_ratios)
    return Emitted(end - begin, None, positions, [*log_ratios, 0.0])


def _drawn(
    rows: Rows,
    begin: int,
    end: int,
    allowed: Allowance,
    logits: torch.Tensor,
    draft_probs: torch.Tensor,
    kept: torch.Tensor,
    place: int,
    chance: Chance,
) -> Emitted:
    prices = definition.drawn_prices(rows, begin, end, allowed)
    gainful = definition.num_gainful(rows, begin, end, allowed)
    drafts = rows.draft[begin:end]
    # A token that was never drawn ends the draft.
    length = next((i for i, draft in enumerate(drafts) if draft == -1), end - begin)
    logits, q = logits[begin:end], draft_probs[begin:end]
    buffers = _buffers(3 + 2 * length, logits)
    p = torch.softmax(logits[:length], dim=-1, out=buffers[3 : 3 + length])
    served, reaches, gained = [], [], []
    reach = strict = 1.0
    for i in range(length):
        out = buffers[3 + length + i]
        of_row = clip_row(logits[i], p[i], q[i], prices[i], kept, out, buffers[:3])
        at_draft = (p[i], of_row.m, q[i])
        of_p, of_m, of_q = (float(it[drafts[i]]) if drafts[i] >= 0 else 0.0 for it in at_draft)
        reach, strict = definition.reach(reach, of_m, of_q), definition.reach(strict, of_p, of_q)
        served.append(of_row)
        reaches.append(reach)
        gained.append(definition.nearest_units(reach - strict))

    def residual(i: int) -> torch.Tensor:
        """What is drawn from behind i drafts."""
        m = torch.mul(served[i].m, reaches[i - 1] if i else 1.0, out=buffers[0])
        return m.sub_(q[i]).clamp_(min=0)

    accepted = 0
    for i in range(length, 0, -1):
        # h is at most p.
        if not chance.accepts(begin + i - 1, reaches[i - 1]):
            continue
        h = reaches[i - 1]
        if i < length:
            h = definition.stays(h, float(residual(i).sum()))
        if chance.accepts(begin + i - 1, h):
            accepted = i
            break
    token: int | None = None
    if accepted < length:
        weights = residual(accepted)
        token = drafts[accepted] if drafts[accepted] >= 0 else rows.argmax[begin + accepted]
        # Only rounding leaves nothing to draw from.
        if weights.any():
            token = chance.draws(place, weights)
    elif length < end - begin:
        token = chance.draws(place, logits[length].softmax(dim=-1))
    positions: list[Position] = []
    log_ratios: list[float] = []
    for i in range(min(accepted + 1, end - begin)):
        verdict = Verdict.NONE
        if drafts[i] >= 0 and allowed.price > 0 and i < gainful:
            verdict = rows.forbids(begin + i, looks_at_first=False)
        if i == length:
            positions.append(Position(verdict))
            break
        loss = definition.units_of(served[i].loss)
        drift = definition.nearest_units(served[i].drift)
        positions.append(Position(verdict, loss=loss, drift=drift))
        emitted = drafts[i] if i < accepted else token
        ratio = float(served[i].m[emitted] / p[i, emitted])
        # Of a row that holds a NaN any token may come.
        is_told = 0 < ratio < math.inf and emitted not in kept
        log_ratios.append(math.log(ratio) if is_told else 0.0)
    if accepted == length:
        log_ratios.append(0.0)
    return Emitted(accepted, token, positions, log_ratios, gained)


# By width, and kept: to get new memory for rows takes as long as to read them.
_BUFFERS: dict[int, torch.Tensor] = {}


def _buffers(num_rows: int, like: torch.Tensor) -> torch.Tensor:
    """Rows to write to; float32 `[num_rows, vocab]`, the same ones for each call."""
    vocab = like.shape[1]
    found = _BUFFERS.get(vocab)
    if found is None or len(found) < num_rows:
        found = _BUFFERS[vocab] = like.new_empty(num_rows, vocab)
    return found[:num_rows]


def _write_down(
    emitted: Emitted,
    draft: Sequence[int],
    is_greedy: bool,
    place: int,
    requests: Requests,
    account: Account | None,
    layout: CounterLayout,
) -> tuple[int, int, int]:
    """Counts a request's step and takes its losses off; returns relaxed tokens, loss and drift."""
    num_relaxed = lost = drift_up = drift_down = 0
    gained = sum(emitted.gained)
    table = None if account is None or account.table is None else account.table[place]
    if table is not None:
        table[0] = math.nan
        table[1] = 0
        table[0, : len(emitted.log_ratios)] = torch.tensor(emitted.log_ratios)
    for offset, position in enumerate(emitted.positions):
        is_relaxed = offset < emitted.accepted and position.verdict == Verdict.RELAXED
        num_relaxed += is_relaxed
        if is_relaxed or not is_greedy:
            lost += position.loss
            gained += position.gained
            drift_up += max(position.drift, 0)
            drift_down += max(-position.drift, 0)
        if table is not None and is_relaxed and is_greedy:
            table[0, offset] = position.loss * 2.0**-LOSS_BITS
        if table is not None and not is_greedy:
            table[1, offset] = position.drift * 2.0**-LOSS_BITS
    if account is not None:
        counts = account.counts.numpy()
        for offset, position in enumerate(emitted.positions):
            if draft[offset] < 0:
                continue
            is_accepted, verdict = offset < emitted.accepted, position.verdict
            counts[layout.verified][offset] += 1
            counts[layout.accepted][offset] += is_accepted
            counts[layout.relaxed][offset] += is_accepted and verdict == Verdict.RELAXED
            if verdict >= Verdict.PROTECTED:
                counts[layout.refused][verdict - Verdict.PROTECTED] += 1
        counts[layout.lost] += lost
        counts[layout.gained] += gained
        counts[layout.drift_up] += drift_up
        counts[layout.drift_down] += drift_down
    if lost:
        requests.records.lost[requests.slots[place]] += lost
    return num_relaxed, lost, drift_up - drift_down
