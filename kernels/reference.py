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

import enum
import math
from typing import NamedTuple

import torch

# Shares of a `RelaxedBudget` are compared as integers in units of 2**-SHARE_BITS, rounded up, so
# that every backend agrees.
SHARE_BITS = 30


class Verdict(enum.IntEnum):
    """What the margin says about the draft token at one position.

    NONE where the margin does not accept it, RELAXED where it does and nothing forbids it, else
    what forbids it. Greedy verification asks the margin only where the draft token is not the
    target's FIRST choice.
    """

    NONE = 0
    RELAXED = 1
    PROTECTED = 2
    SPAN = 3
    BUDGET = 4
    STRUCTURED = 5
    FIRST = 6


def most_relaxed(share: float, num_output_tokens: int) -> int:
    """How many of so many output tokens may be relaxed: their share, rounded down."""
    return share_units(share) * num_output_tokens >> SHARE_BITS


def share_units(share: float) -> int:
    """A share in [0, 1] in units of 2**-SHARE_BITS, rounded up."""
    return math.ceil(share * 2**SHARE_BITS)


class RelaxedBudget(NamedTuple):
    """How many of a request's output tokens may be relaxed.

    The token at offset j of a step may be relaxed if, with it, no more than
    `floor(share * (num_output_tokens + j + 1))` output tokens of the request are.

    Attributes:
        share: in [0, 1]; 1 allows all, 0 none.
        num_relaxed: `[batch]` int32, relaxed tokens of each request before this step.
        num_output_tokens: `[batch]` int32, output tokens of each request before this step.
    """

    share: float
    num_relaxed: torch.Tensor
    num_output_tokens: torch.Tensor

    @property
    def share_units(self) -> int:
        """The share as an integer."""
        return share_units(self.share)


class VerifyOutput(NamedTuple):
    """What one verification step emits.

    Attributes:
        output_token_ids: `[batch, max_draft_len + 1]` int32; the accepted drafts, then the
            corrected or the bonus token, then -1.
        num_accepted: `[batch]` int32, accepted draft tokens.
        num_relaxed: `[batch]` int32, those of them that only the margin accepted.
        top2_values: `[num_draft, 2]` float32 or None, z1 and z2 of each draft position. A row that
            holds a NaN gives NaN for both.
        top2_ids: `[num_draft, 2]` int32 or None, their ids; of equal logits the lower ids, in
            order. A row that holds a NaN gives the first NaN's id and -1, a vocabulary of one token
            gives 0 and -1.
        verdicts: `[num_draft]` int8 or None, a `Verdict` each.
    """

    output_token_ids: torch.Tensor
    num_accepted: torch.Tensor
    num_relaxed: torch.Tensor
    top2_values: torch.Tensor | None = None
    top2_ids: torch.Tensor | None = None
    verdicts: torch.Tensor | None = None


class Judgement(NamedTuple):
    """What the margin says of a batch, without verifying it.

    Attributes:
        verdicts: `[num_draft]` int8, a `Verdict` each; the target's first choice is RELAXED, too,
            where the margin is small.
        top2_values: `[num_draft, 2]` float32 or None, as in `VerifyOutput`.
    """

    verdicts: torch.Tensor
    top2_values: torch.Tensor | None = None


def new_output(
    batch: int,
    max_draft_len: int,
    num_draft: int,
    device: torch.device,
    with_top2: bool = False,
    with_verdicts: bool = False,
    token_dtype: torch.dtype = torch.int32,
) -> VerifyOutput:
    """An uninitialised `VerifyOutput` with the buffers that are wanted."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    wants_values = with_top2 or with_verdicts
    return VerifyOutput(
        empty(batch, max_draft_len + 1, dtype=token_dtype),
        empty(batch),
        empty(batch),
        empty(num_draft, 2, dtype=torch.float32) if wants_values else None,
        empty(num_draft, 2) if with_top2 else None,
        empty(num_draft, dtype=torch.int8) if with_verdicts else None,
    )


def _per_position(
    value: float | torch.Tensor, cu_num_draft_tokens: torch.Tensor, num_draft: int
) -> torch.Tensor:
    """A float, or `[batch]` values repeated for each request's draft positions, as float32."""
    if not isinstance(value, torch.Tensor):
        return torch.tensor(value, dtype=torch.float32, device=cu_num_draft_tokens.device)
    counts = torch.diff(cu_num_draft_tokens, prepend=cu_num_draft_tokens.new_zeros(1))
    return value.repeat_interleave(counts, output_size=num_draft)


def _verdicts(
    rows: torch.Tensor,
    drafts: torch.Tensor,
    in_vocab: torch.Tensor,
    argmax: torch.Tensor,
    theta: torch.Tensor,
    gap: torch.Tensor,
    protected: torch.Tensor | None,
    blocked: torch.Tensor | None,
) -> torch.Tensor:
    """The verdicts but for the budget, int8 `[num_draft]`, for `[num_draft, vocab]` rows."""
    if rows.shape[1] < 2:
        return torch.zeros_like(drafts, dtype=torch.int8)
    # Values do not depend on how topk orders ties, so it may give them; ids it may not.
    first, second = rows.topk(2, dim=-1).values.float().unbind(-1)
    draft_logits = rows.gather(1, drafts[:, None]).squeeze(1).float()
    margin = (
        in_vocab
        & (draft_logits >= second)
        & (second > theta * first - gap)
        & ((theta == 1) | (first > 0))
    )
    verdicts = margin.to(torch.int8) * Verdict.RELAXED
    if protected is not None:
        verdicts[margin & (protected[drafts] | protected[argmax])] = Verdict.PROTECTED
    if blocked is not None:
        verdicts = torch.where(margin & (blocked != 0), blocked, verdicts)
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

    Ties and NaN are resolved as `VerifyOutput` says; `torch.topk` alone leaves the order of ties
    open.
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


def judge_positions(
    logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    theta: float | torch.Tensor,
    gap: float | torch.Tensor,
    protected: torch.Tensor | None,
    target_rows: torch.Tensor | None,
    blocked: torch.Tensor | None = None,
    budget: RelaxedBudget | None = None,
    with_top2_values: bool = False,
) -> Judgement:
    """The torch form of `vllm_mars.verify.judge_positions`, which documents the arguments."""
    num_draft = draft_token_ids.shape[0]
    rows = logits[:num_draft] if target_rows is None else logits[target_rows]
    in_vocab, drafts = _in_vocabulary(draft_token_ids, logits.shape[1])
    theta = _per_position(theta, cu_num_draft_tokens, num_draft)
    gap = _per_position(gap, cu_num_draft_tokens, num_draft)
    argmax = rows.argmax(dim=-1)
    verdicts = _verdicts(rows, drafts, in_vocab, argmax, theta, gap, protected, blocked)
    if budget is not None:
        verdicts = _within_budget(verdicts, cu_num_draft_tokens, budget)
    return Judgement(verdicts, top2(rows)[0] if with_top2_values else None)


def verify_greedy(
    logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    bonus_token_ids: torch.Tensor | None,
    theta: float | torch.Tensor,
    gap: float | torch.Tensor,
    protected: torch.Tensor | None,
    target_rows: torch.Tensor | None,
    bonus_rows: torch.Tensor | None,
    max_draft_len: int,
    with_top2: bool = False,
    blocked: torch.Tensor | None = None,
    budget: RelaxedBudget | None = None,
    with_verdicts: bool = False,
    dry_run: bool = False,
) -> VerifyOutput:
    """The torch form of `vllm_mars.verify_greedy`, which documents the arguments."""
    num_draft = draft_token_ids.shape[0]
    batch = cu_num_draft_tokens.shape[0]
    device = logits.device

    rows = logits[:num_draft] if target_rows is None else logits[target_rows]
    argmax = rows.argmax(dim=-1)
    in_vocab, drafts = _in_vocabulary(draft_token_ids, logits.shape[1])
    strict = in_vocab & (drafts == argmax)

    theta = _per_position(theta, cu_num_draft_tokens, num_draft)
    gap = _per_position(gap, cu_num_draft_tokens, num_draft)
    verdicts = _verdicts(rows, drafts, in_vocab & ~strict, argmax, theta, gap, protected, blocked)
    if budget is not None:
        verdicts = _within_budget(verdicts, cu_num_draft_tokens, budget)
    verdicts[strict] = Verdict.FIRST
    relaxed = (verdicts == Verdict.RELAXED) & (not dry_run)

    # Ragged to padded: position j of request i is draft token start[i] + j, if j < counts[i].
    ends = cu_num_draft_tokens.long()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    counts = ends - starts
    offsets = torch.arange(max_draft_len + 1, device=device)
    is_draft = offsets < counts[:, None]
    output = torch.full((batch, max_draft_len + 1), -1, dtype=torch.int32, device=device)
    if num_draft:
        index = (starts[:, None] + offsets).clamp_(max=num_draft - 1)
        kept = (is_draft & (strict | relaxed)[index]).cumprod(1).bool()
        num_accepted = kept.sum(1)
        num_relaxed = (kept & relaxed[index]).sum(1).int()
        output = torch.where(kept, drafts[index].int(), output)
        is_corrected = is_draft & (offsets == num_accepted[:, None])
        output = torch.where(is_corrected, argmax[index].int(), output)
    else:
        num_accepted = torch.zeros(batch, dtype=torch.int64, device=device)
        num_relaxed = torch.zeros(batch, dtype=torch.int32, device=device)

    if bonus_rows is not None:
        bonus_token_ids = logits[bonus_rows].argmax(dim=-1)
    if bonus_token_ids is not None:
        is_bonus = (offsets == counts[:, None]) & (num_accepted == counts)[:, None]
        output = torch.where(is_bonus, bonus_token_ids.reshape(-1, 1).int(), output)

    values, ids = top2(rows) if with_top2 or with_verdicts else (None, None)
    return VerifyOutput(
        output,
        num_accepted.int(),
        num_relaxed,
        values,
        ids if with_top2 else None,
        verdicts if with_verdicts else None,
    )
