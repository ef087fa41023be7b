"""Margin-aware verification in plain torch: the definition that every backend is checked against.

The rule (arXiv 2601.15498, Section 3), at one draft position with target logits z, draft token x,
z1 >= z2 the two largest logits counted with multiplicity:

    strict(x)   x = argmax z, of equal maxima the lowest id
    relaxed(x)  z[x] >= z2  and  z2 > theta * z1 - gap  and  (theta = 1 or z1 > 0)
                and neither x nor argmax z is protected
    accept(x)   strict(x) or relaxed(x)

What else forbids relaxed(x) at a position where the margin allows it is its `Verdict`: a protected
token, a caller's `blocked` position, or the `RelaxedBudget` of its request.

All comparisons are in float32: first `theta * z1`, rounded, then `- gap`, rounded. A row that holds
a NaN is never relaxed: torch's topk carries the NaN into z1. A draft id outside [0, vocab) is
padding and never accepted. It runs on any device and reads the rows about four times.
"""

import torch

from vllm_mars.kernels.terms import (
    Drafts,
    Judgement,
    Margin,
    RelaxedBudget,
    Verdict,
    VerifyOutput,
    most_relaxed,
)


def _target_rows(drafts: Drafts) -> torch.Tensor:
    """The rows of logits of the draft positions, `[num_draft, vocab]`."""
    if drafts.target_rows is None:
        return drafts.logits[: drafts.draft_token_ids.shape[0]]
    return drafts.logits[drafts.target_rows]


def _per_position(value: float | torch.Tensor, drafts: Drafts) -> torch.Tensor:
    """A float, or `[batch]` values repeated for each request's draft positions, as float32."""
    ends = drafts.cu_num_draft_tokens
    if not isinstance(value, torch.Tensor):
        return torch.tensor(value, dtype=torch.float32, device=ends.device)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    return value.repeat_interleave(counts, output_size=drafts.draft_token_ids.shape[0])


def _verdicts(drafts: Drafts, margin: Margin, first_choice: bool) -> torch.Tensor:
    """The verdicts, int8 `[num_draft]`; with `first_choice` FIRST where the argmax is drafted."""
    rows, ids = _target_rows(drafts), drafts.draft_token_ids
    in_vocab, ids = _in_vocabulary(ids, rows.shape[1])
    argmax = rows.argmax(dim=-1)
    strict = in_vocab & (ids == argmax) & first_choice
    verdicts = torch.zeros_like(ids, dtype=torch.int8)
    if rows.shape[1] > 1:
        theta = _per_position(margin.theta, drafts)
        gap = _per_position(margin.gap, drafts)
        # Values do not depend on how topk orders ties, so it may give them; ids it may not.
        first, second = rows.topk(2, dim=-1).values.float().unbind(-1)
        is_small = (
            in_vocab
            & ~strict
            & (rows.gather(1, ids[:, None]).squeeze(1).float() >= second)
            & (second > theta * first - gap)
            & ((theta == 1) | (first > 0))
        )
        verdicts = is_small.to(torch.int8) * Verdict.RELAXED
        if margin.protected is not None:
            of_either = margin.protected[ids] | margin.protected[argmax]
            verdicts[is_small & of_either] = Verdict.PROTECTED
        if margin.blocked is not None:
            verdicts = torch.where(is_small & (margin.blocked != 0), margin.blocked, verdicts)
    if margin.budget is not None:
        verdicts = _within_budget(verdicts, drafts.cu_num_draft_tokens, margin.budget)
    verdicts[strict] = Verdict.FIRST
    return verdicts


def _within_budget(
    verdicts: torch.Tensor, cu_num_draft_tokens: torch.Tensor, budget: RelaxedBudget
) -> torch.Tensor:
    """The verdicts, with BUDGET where a request's budget is used up."""
    verdicts = verdicts.clone()
    begin = 0
    limits = budget.num_relaxed.tolist(), budget.num_output_tokens.tolist()
    for end, used, produced in zip(cu_num_draft_tokens.tolist(), *limits, strict=True):
        for position in range(begin, end):
            if verdicts[position] == Verdict.RELAXED:
                if used < most_relaxed(budget.share, produced + position - begin + 1):
                    used += 1
                else:
                    verdicts[position] = Verdict.BUDGET
        begin = end
    return verdicts


def _in_vocabulary(draft_token_ids: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which drafts are tokens at all, and int64 ids that are safe to index with."""
    in_vocab = (draft_token_ids >= 0) & (draft_token_ids < vocab)
    return in_vocab, torch.where(in_vocab, draft_token_ids, 0).long()


def top2(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-2 of each `[rows, vocab]` row: float32 values and int32 ids, both `[rows, 2]`.

    Of equal logits the lower ids come first, in order, which `torch.topk` leaves open. A row that
    holds a NaN gives NaN for both values, the first NaN's id and -1; a vocabulary of one token
    gives 0 and -1.
    """
    values = logits.float()
    first, first_id = values.max(dim=-1, keepdim=True)
    second, second_id = values.scatter(1, first_id, -torch.inf).max(dim=-1, keepdim=True)
    # A row whose every other logit is -inf: the masked maximum ties with the mask itself.
    second_id = torch.where((second_id == first_id) & (first_id == 0), 1, second_id)
    nan = first.isnan()
    second = torch.where(nan, torch.nan, second)
    second_id = torch.where(nan | (second_id >= logits.shape[1]), -1, second_id)
    return torch.cat([first, second], 1), torch.cat([first_id, second_id], 1).int()


def judge_positions(drafts: Drafts, margin: Margin, with_top2_values: bool = False) -> Judgement:
    """The torch form of `vllm_mars.verify.judge_positions`."""
    values = top2(_target_rows(drafts))[0] if with_top2_values else None
    return Judgement(_verdicts(drafts, margin, first_choice=False), values)


def verify_greedy(
    drafts: Drafts, margin: Margin, with_verdicts: bool = False, dry_run: bool = False
) -> VerifyOutput:
    """The torch form of `vllm_mars.verify_greedy`."""
    num_draft = drafts.draft_token_ids.shape[0]
    batch = drafts.cu_num_draft_tokens.shape[0]
    device = drafts.logits.device

    rows = _target_rows(drafts)
    verdicts = _verdicts(drafts, margin, first_choice=True)
    relaxed = (verdicts == Verdict.RELAXED) & (not dry_run)
    is_accepted = (verdicts == Verdict.FIRST) | relaxed

    # Ragged to padded: position j of request i is draft token start[i] + j, if j < counts[i].
    ends = drafts.cu_num_draft_tokens.long()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    counts = ends - starts
    offsets = torch.arange(drafts.max_draft_len + 1, device=device)
    is_draft = offsets < counts[:, None]
    output = torch.full((batch, len(offsets)), -1, dtype=torch.int32, device=device)
    if num_draft:
        index = (starts[:, None] + offsets).clamp_(max=num_draft - 1)
        kept = (is_draft & is_accepted[index]).cumprod(1).bool()
        num_accepted = kept.sum(1)
        num_relaxed = (kept & relaxed[index]).sum(1).int()
        output = torch.where(kept, drafts.draft_token_ids[index].int(), output)
        is_corrected = is_draft & (offsets == num_accepted[:, None])
        output = torch.where(is_corrected, rows.argmax(dim=-1)[index].int(), output)
    else:
        num_accepted = torch.zeros(batch, dtype=torch.int64, device=device)
        num_relaxed = torch.zeros(batch, dtype=torch.int32, device=device)

    bonus_token_ids = drafts.bonus_token_ids
    if drafts.bonus_rows is not None:
        bonus_token_ids = drafts.logits[drafts.bonus_rows].argmax(dim=-1)
    if bonus_token_ids is not None:
        is_bonus = (offsets == counts[:, None]) & (num_accepted == counts)[:, None]
        output = torch.where(is_bonus, bonus_token_ids.reshape(-1, 1).int(), output)

    return VerifyOutput(
        output,
        num_accepted.int(),
        num_relaxed,
        top2(rows)[0] if with_verdicts else None,
        verdicts if with_verdicts else None,
    )
