"""Margin-aware verification on a CPU: the same results as `reference`, at the cost of one argmax.

NumPy's vectorised argmax takes a third of the time of torch's, and its small operations a quarter,
which counts for a single request. z2 is computed only for a caller that wants verdicts. With
t = theta * z1 - gap and "larger" the number of logits above a pivot, relaxed(x) is

    x is not the argmax:  z[x] > t  and  larger(z[x]) <= 1      (z[x] is z2, or ties with z1)
    x is the argmax:      larger(t) >= 2                        (z1 and z2 are above t)

so a step reads all rows once, for the argmax, and once more the candidate rows alone, those that
pass every other condition. float32 logits are read in place; others are converted first.
"""

import numpy as np
import torch

from vllm_mars.kernels.terms import (
    SHARE_BITS,
    Drafts,
    Judgement,
    Margin,
    RelaxedBudget,
    Verdict,
    VerifyOutput,
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

    accepted = ids == argmax
    verdicts = _verdicts(rows, target, ids, argmax, counts, margin, ~accepted)
    verdicts[accepted] = Verdict.FIRST
    relaxed = (verdicts == Verdict.RELAXED) & (not dry_run)
    accepted |= relaxed

    # Ragged to padded: position j of request i is draft token start[i] + j, if j < counts[i].
    offsets = np.arange(drafts.max_draft_len + 1)
    is_draft = offsets < counts[:, None]
    output = np.full((len(counts), len(offsets)), -1, dtype=np.int32)
    if num_draft:
        index = np.minimum((ends - counts)[:, None] + offsets, num_draft - 1)
        kept = np.logical_and.accumulate(is_draft & accepted[index], axis=1)
        num_accepted = kept.sum(axis=1)
        num_relaxed = (kept & relaxed[index]).sum(axis=1)
        # Up to the first rejection the draft is emitted, there the argmax, behind it nothing.
        is_corrected = is_draft & (offsets == num_accepted[:, None])
        emitted = np.where(kept, ids[index], argmax[index])
        np.copyto(output, emitted, where=kept | is_corrected, casting="unsafe")
    else:
        num_accepted = np.zeros_like(counts)
        num_relaxed = np.zeros_like(counts)

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
        values,
        torch.from_numpy(verdicts) if with_verdicts else None,
    )


def judge_positions(drafts: Drafts, margin: Margin, with_top2_values: bool = False) -> Judgement:
    """The CPU form of `vllm_mars.verify.judge_positions`."""
    ids = drafts.draft_token_ids.numpy()
    rows = _as_numpy(drafts.logits)
    target = _target_rows(drafts)
    # Rows that are not asked for may come along; reading them costs less than a copy of the others.
    argmax = rows.argmax(axis=-1)[target]
    counts = np.diff(drafts.cu_num_draft_tokens.numpy().astype(np.int64), prepend=0)
    verdicts = _verdicts(rows, target, ids, argmax, counts, margin, np.True_)
    values = None
    if with_top2_values:
        values = _top2_values(rows, target, argmax, np.arange(len(ids)))
    return Judgement(torch.from_numpy(verdicts), values)


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
    considered: np.ndarray | np.bool_,
) -> np.ndarray:
    """The verdicts, NONE where not considered; all int8 `[num_draft]`."""
    theta, gap = _per_position(margin.theta, counts), _per_position(margin.gap, counts)
    relaxed = (drafts >= 0) & (drafts < rows.shape[1]) & considered
    safe = np.where(relaxed, drafts, 0)
    first, draft_logits = rows[target, argmax], rows[target, safe]
    threshold = theta * first - gap
    relaxed &= draft_logits > threshold
    relaxed &= (theta == 1) | (first > 0)
    candidates = np.flatnonzero(relaxed)
    if candidates.size:
        is_argmax = (safe == argmax)[candidates]
        pivot = np.where(is_argmax, threshold[candidates], draft_logits[candidates])
        # Row by row: indexing with the list would copy the rows, which costs more than the count.
        larger = np.array(
            [
                np.count_nonzero(rows[row] > value)
                for row, value in zip(target[candidates], pivot, strict=True)
            ]
        )
        relaxed[candidates] = np.where(is_argmax, larger >= 2, larger <= 1)
    verdicts = relaxed.astype(np.int8)
    if margin.protected is not None:
        mask = margin.protected.numpy()
        verdicts[relaxed & (mask[safe] | mask[argmax])] = Verdict.PROTECTED
    if margin.blocked is not None:
        blocked = margin.blocked.numpy()
        np.copyto(verdicts, blocked, where=relaxed & (blocked != 0))
    if margin.budget is not None:
        _keep_budget(verdicts, counts, margin.budget)
    return verdicts


def _keep_budget(verdicts: np.ndarray, counts: np.ndarray, budget: RelaxedBudget) -> None:
    """Writes BUDGET where a request's budget is used up."""
    request_of = np.arange(len(counts)).repeat(counts)
    begin = counts.cumsum() - counts
    used = budget.num_relaxed.numpy().astype(np.int64)
    produced = budget.num_output_tokens.numpy().astype(np.int64)
    for position in np.flatnonzero(verdicts == Verdict.RELAXED):
        request = request_of[position]
        output_tokens = produced[request] + position - begin[request] + 1
        if used[request] < (budget.share_units * output_tokens) >> SHARE_BITS:
            used[request] += 1
        else:
            verdicts[position] = Verdict.BUDGET


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
