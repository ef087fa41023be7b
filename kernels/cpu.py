"""Margin-aware verification on a CPU: the same results as `reference`, at the cost of one argmax.

NumPy's vectorised argmax takes a third of the time of torch's, and its small operations a quarter,
which counts for a single request. z2 is computed only for a caller that wants verdicts. With
t = theta * z1 - gap and "larger" the number of logits above a pivot, relaxed(x) is

    x is not the argmax:  z[x] > t  and  larger(z[x]) <= 1      (z[x] is z2, or ties with z1)
    x is the argmax:      larger(t) >= 2                        (z1 and z2 are above t)

so a step reads all rows once, for the argmax, and once more the candidate rows alone, those that
pass every other condition. A price needs no second read. float32 logits are read in place; others
are converted first.
"""

import numpy as np
import torch

from vllm_mars.kernels.terms import (
    LOSS_BITS,
    MOST_LOSS,
    SHARE_BITS,
    Drafts,
    Judgement,
    Margin,
    Verdict,
    VerifyOutput,
    price_units,
    share_units,
)


def verify_greedy(
    drafts: Drafts, margin: Margin, with_verdicts: bool = False, dry_run: bool = False
) -> VerifyOutput:
    """The CPU form of `vllm_mars.verify_greedy`."""
    rows = _as_numpy(drafts.logits)
    row_argmax = rows.argmax(axis=-1)
    ids = drafts.draft_token_ids.numpy()
    num_draft = len(ids)
    target = _target_rows(drafts)
    argmax = row_argmax[target]
    ends = drafts.cu_num_draft_tokens.numpy().astype(np.int64)
    counts = np.diff(ends, prepend=0)

    verdicts, losses = _verdicts(rows, target, ids, argmax, counts, margin)

    # Ragged to padded: position j of request i is draft token start[i] + j, if j < counts[i].
    offsets = np.arange(drafts.max_draft_len + 1)
    is_draft = offsets < counts[:, None]
    output = np.full((len(counts), len(offsets)), -1, dtype=np.int32)
    if num_draft:
        index = np.minimum((ends - counts)[:, None] + offsets, num_draft - 1)
        if margin.price is not None:
            price = np.asarray(price_units(margin.price))
            keep_best_stop(verdicts, losses, index, counts, price)
        relaxed = (verdicts == Verdict.RELAXED) & (not dry_run)
        accepted = (verdicts == Verdict.FIRST) | relaxed
        kept = np.logical_and.accumulate(is_draft & accepted[index], axis=1)
        num_accepted = kept.sum(axis=1)
        is_relaxed = kept & relaxed[index]
        num_relaxed = is_relaxed.sum(axis=1)
        lost = np.where(is_relaxed, losses[index], 0).sum(axis=1)
        # Up to the first rejection the draft is emitted, there the argmax, behind it nothing.
        is_corrected = is_draft & (offsets == num_accepted[:, None])
        emitted = np.where(kept, ids[index], argmax[index])
        np.copyto(output, emitted, where=kept | is_corrected, casting="unsafe")
    else:
        num_accepted = num_relaxed = lost = np.zeros_like(counts)

    bonus = None
    if drafts.bonus_rows is not None:
        bonus = row_argmax[drafts.bonus_rows.numpy()]
    elif drafts.bonus_token_ids is not None:
        bonus = drafts.bonus_token_ids.numpy().reshape(-1)
    if bonus is not None:
        complete = np.flatnonzero(num_accepted == counts)
        output[complete, counts[complete]] = bonus[complete]

    values = None
    if with_verdicts:
        # Behind the first rejection nobody looks, but in a dry run.
        behind = 0 if dry_run else (ends - counts + num_accepted).repeat(counts)
        looked_at = np.flatnonzero(dry_run | (np.arange(num_draft) <= behind))
        values = _top2_values(rows, target, argmax, looked_at)
    return VerifyOutput(
        torch.from_numpy(output),
        torch.from_numpy(num_accepted.astype(np.int32)),
        torch.from_numpy(num_relaxed.astype(np.int32)),
        torch.from_numpy(lost),
        values,
        torch.from_numpy(verdicts) if with_verdicts else None,
        torch.from_numpy(losses) if with_verdicts else None,
    )


def judge_positions(drafts: Drafts, margin: Margin, with_top2_values: bool = False) -> Judgement:
    """The CPU form of `vllm_mars.verify.judge_drafts`."""
    ids = drafts.draft_token_ids.numpy()
    rows = _as_numpy(drafts.logits)
    target = _target_rows(drafts)
    # Rows that are not asked for may come along; reading them costs less than a copy of the others.
    argmax = rows.argmax(axis=-1)[target]
    counts = np.diff(drafts.cu_num_draft_tokens.numpy().astype(np.int64), prepend=0)
    verdicts, losses = _verdicts(rows, target, ids, argmax, counts, margin, alone=True)
    values = None
    if with_top2_values:
        values = _top2_values(rows, target, argmax, np.arange(len(ids)))
    return Judgement(torch.from_numpy(verdicts), values, torch.from_numpy(losses))


def _target_rows(drafts: Drafts) -> np.ndarray:
    if drafts.target_rows is None:
        return np.arange(len(drafts.draft_token_ids))
    return drafts.target_rows.numpy()


def _as_numpy(logits: torch.Tensor) -> np.ndarray:
    return logits.detach().float().numpy()


def _per_position(value: float | torch.Tensor, counts: np.ndarray) -> np.ndarray | np.float32:
    if isinstance(value, torch.Tensor):
        return value.numpy().repeat(counts)
    return np.float32(value)


def _verdicts(
    rows: np.ndarray,
    target: np.ndarray,
    drafts: np.ndarray,
    argmax: np.ndarray,
    counts: np.ndarray,
    margin: Margin,
    alone: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The verdicts, int8, and the losses, int32; both `[num_draft]`.

    FIRST stands where the argmax is drafted, but where each position is judged alone. With a price
    RELAXED stands at each payable position; alone, at those that pay for themselves.
    """
    in_vocab = (drafts >= 0) & (drafts < rows.shape[1])
    considered = in_vocab if alone else in_vocab & (drafts != argmax)
    safe = np.where(in_vocab, drafts, 0)
    first, draft_logits = rows[target, argmax], rows[target, safe]
    # float32 as the rule says; of infinities no number comes out.
    with np.errstate(invalid="ignore"):
        loss = first - draft_logits
        units = np.ceil(np.minimum(loss * np.float32(2**LOSS_BITS), np.float32(MOST_LOSS)))
    losses = np.where(in_vocab & (loss == loss), units, 0).astype(np.int32)
    if margin.price is None:
        theta, gap = _per_position(margin.theta, counts), _per_position(margin.gap, counts)
        threshold = theta * first - gap
        allowed = considered & (draft_logits > threshold) & ((theta == 1) | (first > 0))
        pivot = np.where(safe == argmax, threshold, draft_logits)
        _keep_two_largest(allowed, rows, target, safe == argmax, pivot)
        refusable = allowed
    else:
        allowed = considered & (draft_logits > -np.inf) & (first < np.inf)
        price = price_units(margin.price)
        pays = losses < (price if isinstance(price, int) else price.numpy().repeat(counts))
        refusable = allowed & pays
        if alone:
            allowed = refusable
    verdicts = allowed.astype(np.int8)
    if margin.protected is not None:
        mask = margin.protected.numpy()
        forbidden = mask[safe] | mask[argmax]
        verdicts[allowed & forbidden] = Verdict.NONE
        verdicts[refusable & forbidden] = Verdict.PROTECTED
    if margin.blocked is not None:
        blocked = margin.blocked.numpy()
        verdicts[allowed & (blocked != 0)] = Verdict.NONE
        np.copyto(verdicts, blocked, where=refusable & (blocked != 0))
    if margin.budget is not None or margin.loss_budget is not None:
        _keep_budgets(verdicts, losses, counts, margin)
    if not alone:
        verdicts[drafts == argmax] = Verdict.FIRST
    return verdicts, losses


def _keep_two_largest(
    allowed: np.ndarray,
    rows: np.ndarray,
    target: np.ndarray,
    is_argmax: np.ndarray,
    pivot: np.ndarray,
) -> None:
    """Writes False where too many logits are above the pivot, or for the argmax too few."""
    # Row by row: indexing with the list would copy the rows, which costs more than the count.
    for position in np.flatnonzero(allowed):
        larger = np.count_nonzero(rows[target[position]] > pivot[position])
        allowed[position] = larger >= 2 if is_argmax[position] else larger <= 1


def _keep_budgets(
    verdicts: np.ndarray, losses: np.ndarray, counts: np.ndarray, margin: Margin
) -> None:
    """Writes BUDGET or LOSS where a request has used up what it may relax or lose."""
    request_of = np.arange(len(counts)).repeat(counts)
    offset = np.arange(len(verdicts)) - (counts.cumsum() - counts).repeat(counts)
    # What each position may bring the sums of its request to, in this step.
    most_relaxed = most_lost = None
    if (budget := margin.budget) is not None:
        produced = budget.num_output_tokens.numpy().astype(np.int64)[request_of] + offset + 1
        most_relaxed = share_units(budget.share) * produced >> SHARE_BITS
        most_relaxed -= budget.num_relaxed.numpy()[request_of]
    if (nats := margin.loss_budget) is not None:
        produced = nats.num_output_tokens.numpy().astype(np.int64)[request_of] + offset + 1
        rate = nats.rate if isinstance(nats.rate, int) else nats.rate.numpy()[request_of]
        most_lost = (rate * produced >> (SHARE_BITS - LOSS_BITS)) + nats.burst
        most_lost -= nats.lost.numpy()[request_of]
    relaxed, lost = [0] * len(counts), [0] * len(counts)
    for position in np.flatnonzero(verdicts == Verdict.RELAXED):
        request, loss = request_of[position], int(losses[position])
        if most_relaxed is not None and relaxed[request] >= most_relaxed[position]:
            verdicts[position] = Verdict.BUDGET
        elif most_lost is not None and lost[request] + loss > most_lost[position]:
            verdicts[position] = Verdict.LOSS
        else:
            relaxed[request] += 1
            lost[request] += loss


def keep_best_stop(
    verdicts: np.ndarray,
    losses: np.ndarray,
    index: np.ndarray,
    counts: np.ndarray,
    price: np.ndarray | int,
) -> None:
    """Writes NONE in place of RELAXED from each request's best stop on.

    Args:
        verdicts: `[num_draft]`, RELAXED where a position is payable.
        losses: `[num_draft]`.
        index: `[batch, max_draft_len + 1]`, the position at each offset of a request.
        counts: `[batch]`, the drafts' lengths.
        price: in units of 2**-LOSS_BITS nats, an int or `[batch]`.
    """
    offsets = np.arange(index.shape[1])
    is_draft = offsets < counts[:, None]
    strict = is_draft & (verdicts[index] == Verdict.FIRST)
    payable = is_draft & (verdicts[index] == Verdict.RELAXED)
    gain = np.reshape(price, (-1, 1)) - np.where(payable, losses[index], 0).astype(np.int64)
    gain = np.where(is_draft, gain, 0)
    # Of a stop: what comes before it.
    value = gain.cumsum(axis=1) - gain
    is_open = np.logical_and.accumulate(strict | payable, axis=1)
    is_reached = np.column_stack([np.ones(len(counts), bool), is_open[:, :-1]])
    is_stop = is_reached & ~strict & (offsets <= counts[:, None])
    # argmax takes the first of equals.
    best = np.where(is_stop, value, np.iinfo(np.int64).min).argmax(axis=1)
    behind = payable & (offsets >= best[:, None])
    verdicts[index[behind]] = Verdict.NONE


def _top2_values(
    rows: np.ndarray, target: np.ndarray, argmax: np.ndarray, looked_at: np.ndarray
) -> torch.Tensor:
    """z1 and z2 at the positions that are looked at, NaN elsewhere; float32 `[num_draft, 2]`."""
    values = np.full((len(target), 2), np.nan, dtype=np.float32)
    for position in looked_at:
        row, token = rows[target[position]], argmax[position]
        first = row[token]
        if first == first:
            # Taken out for a moment, which costs less than a copy or a sort of the row.
            row[token] = -np.inf
            values[position] = first, row.max()
            row[token] = first
    return torch.from_numpy(values)
