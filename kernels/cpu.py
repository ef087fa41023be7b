"""Verification on a CPU: the rows by NumPy, then `rule` as it is written.

NumPy's vectorised argmax takes a third of the time of torch's, and its small operations a quarter,
which counts for a single request. z2 is never computed. With t the threshold and "larger" the
number of logits above a pivot, a draft token x is one of the two largest within a small margin if

    x is not the argmax:  z[x] > t  and  larger(z[x]) <= 1      (z[x] is z2, or ties with z1)
    x is the argmax:      larger(t) >= 2                        (z1 and z2 are above t)

so a step reads all rows once, for the argmax, once more the candidate rows alone, and, where a
request samples, for the softmax. float32 logits are read in place; others are
converted first.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_mars.kernels import rule as definition
from vllm_mars.kernels.clip import Clipped
from vllm_mars.kernels.rule import Allowance, Position, Rows
from vllm_mars.kernels.terms import (
    END_NATS,
    LOSS_BITS,
    MOST_LOSS,
    Account,
    Drafts,
    Requests,
    Rule,
    Verdict,
    VerifyOutput,
    count_starts,
)

ReadRows = Callable[..., tuple[Rows, np.ndarray]]


class Plan(NamedTuple):
    """What was decided about a step in which requests sample.

    Attributes:
        begins: where each request's draft begins, and behind the last one the end.
        positions: of each draft position of a request that samples, and of one that is greedy.
        gainful: of each request, the positions that a further token of its answer can follow.
        is_greedy: of each request.
        saved: `[num_draft, 1]`, the draft tokens' logits before anything was added.
        clipped: where drafts are drawn, the rows that are served instead.
        prices: with `clipped`, the price in nats at each position.
    """

    begins: list[int]
    positions: list[Position]
    gainful: list[int]
    is_greedy: list[bool]
    saved: torch.Tensor
    clipped: Clipped | None = None
    prices: Sequence[float] = ()


def read_rows(
    drafts: Drafts,
    thresholds: np.ndarray,
    ends: np.ndarray,
    rule: Rule,
    blocked: Sequence[int] | None,
    is_sampled: np.ndarray | None = None,
    is_drawn: bool = False,
) -> tuple[Rows, np.ndarray]:
    """What the rule reads, and the argmax of each row of logits, int64 `[num_rows]`.

    Args:
        drafts: the step's, without V2's layout.
        thresholds: float32 `[num_draft]`, theta at each position.
        ends: int32 `[num_draft, E]`, the tokens that end the request of each position.
        rule: of the engine.
        blocked: a `Verdict` at each position that must stay strict, else 0; or None.
        is_sampled: bool `[num_draft]`, which positions are of requests that sample; None if none
            are.
        is_drawn: whether the drafts of those are drawn, of which log p and entropy are not read.
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
    is_near_end = may_end(rows, target, first, ends, is_sampled)
    log_p = entropy = None
    if is_sampled is not None and not is_drawn:
        # torch's softmax takes a quarter of the time of NumPy's exponentials. That of the first
        # choice never underflows.
        p = drafts.logits.softmax(dim=-1).numpy()
        with np.errstate(invalid="ignore"):
            log_first = np.log(p[target, argmax])
            log_p = np.minimum(logit - first + log_first, 0.0)
            of_rows = zip(target, first, log_first, strict=True)
            entropy = [entropy_of(p[row], rows[row], *of) for row, *of in of_rows]
        log_p[~(in_vocab & is_sampled)] = -math.inf
    return (
        Rows(
            np.where(in_vocab, ids, -1).tolist(),
            argmax.tolist(),
            units.astype(np.int64).tolist(),
            is_small.tolist(),
            (in_vocab & (logit > -np.inf) & (first < np.inf)).tolist(),
            (in_vocab & is_among(safe, ends)).tolist(),
            forbidden(safe, argmax, ends, is_near_end, rule, blocked),
            None if log_p is None else log_p.tolist(),
            entropy,
        ),
        row_argmax,
    )


def entropy_of(p: np.ndarray, logits: np.ndarray, first: float, log_first: float) -> float:
    """The entropy in nats of p, the softmax of a row of which `first` is the largest logit."""
    found = float(p.dot(first - logits) - log_first)
    # Where something is forbidden that was 0 times infinity. Logarithms take four times as long.
    return found if found == found else float(torch.special.entr(torch.from_numpy(p)).sum())


def is_among(token: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Whether each position's token is one of those that end its request; bool `[num_draft]`."""
    found: np.ndarray = (ends == token[:, None]).any(axis=1)
    return found


def may_end(
    rows: np.ndarray,
    target: np.ndarray,
    first: np.ndarray,
    ends: np.ndarray,
    is_sampled: np.ndarray | None,
) -> np.ndarray:
    """Whether the draw at a position may well end its request; bool `[num_draft]`."""
    if is_sampled is None:
        return np.zeros(len(target), dtype=bool)
    is_token = (ends >= 0) & (ends < rows.shape[1])
    logits = np.where(is_token, rows[target[:, None], np.where(is_token, ends, 0)], -np.inf)
    nearest = logits.max(axis=1, initial=-np.inf)
    found: np.ndarray = is_sampled & (nearest >= first - np.float32(END_NATS))
    return found


def forbidden(
    draft: np.ndarray,
    argmax: np.ndarray,
    ends: np.ndarray,
    is_near_end: np.ndarray,
    rule: Rule,
    blocked: Sequence[int] | None,
) -> list[int]:
    """Why each position must stay strict, or NONE."""
    is_protected = is_among(draft, ends) | is_among(argmax, ends) | is_near_end
    if rule.protected is not None:
        mask = rule.protected.cpu().numpy()
        is_protected |= mask[draft] | mask[argmax]
    reasons = np.where(is_protected, Verdict.PROTECTED, 0)
    found: list[int] = reasons.tolist()
    if blocked is not None:
        found = [block or reason for block, reason in zip(blocked, found, strict=True)]
    return found


def accept(
    drafts: Drafts,
    requests: Requests,
    rule: Rule,
    blocked: Sequence[int] | None = None,
    account: Account | None = None,
    read: ReadRows = read_rows,
) -> VerifyOutput:
    """Verifies a step of greedy requests; what they lose is added to their records."""
    begins, *of_positions = _prepare(drafts, requests)
    rows, row_argmax = read(drafts, *of_positions, rule, blocked)
    batch = len(begins) - 1
    tokens = np.full((batch, drafts.max_draft_len + 1), -1, dtype=np.int32)
    bonus: list[int] | None = None
    if drafts.bonus_rows is not None:
        bonus = row_argmax[drafts.bonus_rows.cpu().numpy()].tolist()
    elif drafts.bonus_token_ids is not None:
        bonus = drafts.bonus_token_ids.reshape(-1).tolist()
    summary = np.zeros((3, batch), dtype=np.int64)
    for place, allowed in enumerate(_allowances(requests, rule, [False] * batch)):
        begin, end = begins[place : place + 2]
        verdicts = definition.greedy(rows, begin, end, rule.name, allowed)
        gainful = definition.num_gainful(rows, begin, end, allowed)
        accepted = _accepted(verdicts)
        tokens[place, :accepted] = rows.draft[begin : begin + accepted]
        if begin + accepted < end:
            tokens[place, accepted] = rows.argmax[begin + accepted]
        elif bonus is not None:
            tokens[place, accepted] = bonus[place]
        positions = [
            _of_greedy(verdict, rows.loss[begin + i]) for i, verdict in enumerate(verdicts)
        ]
        num_relaxed, lost, _ = _finish(
            place,
            positions[: gainful + 1],
            rows.draft[begin:end],
            accepted,
            True,
            requests,
            account,
        )
        summary[:, place] = accepted, num_relaxed, lost
    accepted_, relaxed_, lost_ = torch.from_numpy(summary)
    return VerifyOutput(torch.from_numpy(tokens), accepted_.int(), relaxed_.int(), lost_)


def plan(
    drafts: Drafts,
    requests: Requests,
    rule: Rule,
    temperature: torch.Tensor,
    blocked: Sequence[int] | None = None,
    clip: Callable[[torch.Tensor], Clipped] | None = None,
    read: ReadRows = read_rows,
) -> Plan:
    """Decides about a step in which requests sample, and adds it to the draft tokens' logits.

    Args:
        drafts: the step's, with processed float32 logits, a row for each draft in order.
        requests: of the step; their records are read.
        rule: of the engine.
        temperature: float32 `[batch]`; 0 is greedy.
        blocked: as in `read_rows`.
        clip: makes `clip_rows` of the prices at the positions, where drafts are drawn.
        read: reads the rows.
    """
    begins, *of_positions = _prepare(drafts, requests)
    is_greedy = (temperature == 0).tolist()
    lengths = [end - begin for begin, end in zip(begins[:-1], begins[1:], strict=True)]
    is_sampled = np.repeat(np.logical_not(is_greedy), lengths)
    rows, _ = read(drafts, *of_positions, rule, blocked, is_sampled, clip is not None)
    positions: list[Position] = []
    prices: list[float] = []
    gainful: list[int] = []
    is_drawn = [clip is not None and not greedy for greedy in is_greedy]
    for place, allowed in enumerate(_allowances(requests, rule, is_drawn)):
        begin, end = begins[place : place + 2]
        gainful.append(definition.num_gainful(rows, begin, end, allowed))
        if is_greedy[place]:
            verdicts = definition.greedy(rows, begin, end, rule.name, allowed)
            positions += map(_of_greedy, verdicts, rows.loss[begin:end])
            prices += [0.0] * (end - begin)
        elif clip is None:
            positions += definition.sampled(rows, begin, end, rule.name, allowed)
        else:
            prices += definition.drawn_prices(rows, begin, end, allowed)
            last = begin + gainful[-1] if allowed.price > 0 else begin
            positions += [
                Position(Verdict(rows.forbidden[i] * (i < last and rows.draft[i] >= 0)))
                for i in range(begin, end)
            ]
    index = drafts.draft_token_ids.long().clamp(0, drafts.logits.shape[1] - 1)[:, None]
    saved = drafts.logits.gather(1, index)
    clipped = None
    if clip is not None:
        clipped = clip(torch.tensor(prices, dtype=torch.float32))
        losses = map(definition.units_of, clipped.losses.tolist())
        gained = map(definition.nearest_units, clipped.gained.tolist())
        drifts = map(definition.nearest_units, clipped.drift.tolist())
        positions = [
            position._replace(loss=lost, gained=gain, drift=drift) if sampled else position
            for position, lost, gain, drift, sampled in zip(
                positions, losses, gained, drifts, is_sampled, strict=True
            )
        ]
    logits = drafts.logits if clipped is None else clipped.logits
    if any(position.bias for position in positions):
        # The largest finite logit: its probability is exactly 1, and softmax meets no inf - inf.
        certain = torch.finfo(logits.dtype).max
        bias = torch.tensor([position.bias for position in positions])[:, None]
        served = logits.gather(1, index) + bias
        logits.scatter_(1, index, torch.where(bias.isinf(), certain, served))
    return Plan(begins, positions, gainful, is_greedy, saved, clipped, prices)


def settle(
    plan: Plan,
    drafts: Drafts,
    requests: Requests,
    rule: Rule,
    output_token_ids: torch.Tensor,
    account: Account | None = None,
) -> None:
    """Restores the logits that `plan` changed, and writes down what the step did.

    Args:
        plan: of this step.
        drafts: the step's.
        requests: of the step; what they lost is added to their records.
        rule: of the engine.
        output_token_ids: int32 `[batch, max_draft_len + 1]`, -1 behind the last token.
        account: where the step is counted.
    """
    if plan.clipped is None:
        index = drafts.draft_token_ids.long().clamp(0, drafts.logits.shape[1] - 1)[:, None]
        drafts.logits.scatter_(1, index, plan.saved)
    ids = drafts.draft_token_ids.tolist()
    for place, tokens in enumerate(output_token_ids.tolist()):
        begin, end = plan.begins[place : place + 2]
        accepted = sum(token >= 0 for token in tokens) - 1
        is_greedy = plan.is_greedy[place]
        positions, draft = plan.positions[begin:end], ids[begin:end]
        counted = positions[: plan.gainful[place] + 1]
        _, _, drift = _finish(place, counted, draft, accepted, is_greedy, requests, account)
        if plan.clipped is not None and not is_greedy and requests.records.draft_share is not None:
            slot, shares = requests.slots[place], requests.records.draft_share
            shares[slot] = definition.next_share(float(shares[slot]), drift, rule.share_gain)
        if is_greedy or account is None or account.table is None:
            continue
        ratios = account.table[place, 0]
        for offset, token in enumerate(tokens[: accepted + 1]):
            if begin + offset == end:
                ratios[offset] = 0.0
            elif plan.clipped is None:
                position = positions[offset]
                bias = position.bias if offset < accepted and position.bias < math.inf else 0.0
                ratios[offset] = bias - position.log_z
            else:
                row = begin + offset
                rows = plan.clipped.logits, drafts.logits
                # From a row of NaN vLLM's sampler may draw what is no token.
                place_of = min(token, drafts.logits.shape[1] - 1)
                served, own = (float(logits[row, place_of]) for logits in rows)
                lse = float(plan.clipped.target_lse[row])
                ratios[offset] = served - own + lse if plan.prices[row] else 0.0


def _prepare(drafts: Drafts, requests: Requests) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Where each request's draft begins; the threshold and the end tokens at each position."""
    begins = drafts.cu_num_draft_tokens.cpu().numpy()
    lengths = np.diff(begins, prepend=0)
    records, slots = requests.records, requests.slots.long()
    thresholds, ends = (of[slots].cpu().numpy() for of in (records.threshold, records.ends))
    return [0, *begins.tolist()], thresholds.repeat(lengths), ends.repeat(lengths, axis=0)


def _allowances(requests: Requests, rule: Rule, is_drawn: Sequence[bool]) -> list[Allowance]:
    records, slots = requests.records, requests.slots.long()
    of_slots = (records.price, records.price_scale, records.rate, records.lost, records.most_tokens)
    own = (values[slots].tolist() for values in of_slots)
    return [
        Allowance.of(price, scale, rate, rule.burst, lost, produced, most_tokens, drawn)
        for price, scale, rate, lost, most_tokens, produced, drawn in zip(
            *own, requests.produced.tolist(), is_drawn, strict=True
        )
    ]


def _accepted(verdicts: Sequence[Verdict]) -> int:
    for offset, verdict in enumerate(verdicts):
        if verdict not in (Verdict.FIRST, Verdict.RELAXED):
            return offset
    return len(verdicts)


def _of_greedy(verdict: Verdict, loss: int) -> Position:
    if verdict == Verdict.RELAXED:
        return Position(verdict, math.inf, 0.0, loss, 1 << LOSS_BITS, loss)
    return Position(verdict)


def _finish(
    place: int,
    positions: Sequence[Position],
    draft: Sequence[int],
    accepted: int,
    is_greedy: bool,
    requests: Requests,
    account: Account | None,
) -> tuple[int, int, int]:
    """Counts a request's step and takes its losses off; returns relaxed tokens, loss and drift.

    `positions` are those of the answer's tokens.
    """
    num_relaxed = lost = gained = drift_up = drift_down = 0
    counts = None if account is None else account.counts.numpy()
    starts = {} if account is None else count_starts(account.longest)
    table = None if account is None or account.table is None else account.table[place]
    if table is not None:
        table[0] = math.nan
        table[1] = 0
    # Up to and including the first rejected one.
    for offset, position in enumerate(positions[: accepted + 1]):
        is_accepted, verdict = offset < accepted, position.verdict
        is_relaxed = is_accepted and verdict == Verdict.RELAXED
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
        if counts is not None and draft[offset] >= 0:
            counts[starts["verified"] + offset] += 1
            counts[starts["accepted"] + offset] += is_accepted
            counts[starts["relaxed"] + offset] += is_relaxed
            if verdict >= Verdict.PROTECTED:
                counts[starts["refused"] + verdict - Verdict.PROTECTED] += 1
    if counts is not None:
        counts[starts["lost"]] += lost
        counts[starts["gained"]] += gained
        counts[starts["drift_up"]] += drift_up
        counts[starts["drift_down"]] += drift_down
    if lost:
        requests.records.lost[requests.slots[place]] += lost
    return num_relaxed, lost, drift_up - drift_down
