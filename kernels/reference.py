"""Margin-aware verification in plain torch: the definition that every backend is checked against.

The rule (arXiv 2601.15498, Section 3), at one draft position with target logits z, draft token x,
z1 >= z2 the two largest logits counted with multiplicity:

    strict(x)   x = argmax z, of equal maxima the lowest id
    relaxed(x)  z[x] >= z2  and  z2 > theta * z1 - gap  and  (theta = 1 or z1 > 0)
                and neither x nor argmax z is protected
    accept(x)   strict(x) or relaxed(x)

All comparisons are in float32: first `theta * z1`, rounded, then `- gap`, rounded. A row that holds
a NaN is never relaxed: torch's topk carries the NaN into z1. A draft id outside [0, vocab) is
padding and never accepted. It runs on any device and reads the rows about four times.
"""

from typing import NamedTuple

import torch


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
    """

    output_token_ids: torch.Tensor
    num_accepted: torch.Tensor
    num_relaxed: torch.Tensor
    top2_values: torch.Tensor | None = None
    top2_ids: torch.Tensor | None = None


def new_output(
    batch: int,
    max_draft_len: int,
    num_draft: int | None,
    device: torch.device,
    token_dtype: torch.dtype = torch.int32,
) -> VerifyOutput:
    """An uninitialised `VerifyOutput`; with top-2 buffers if `num_draft` is given."""
    return VerifyOutput(
        torch.empty((batch, max_draft_len + 1), dtype=token_dtype, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        None if num_draft is None else torch.empty((num_draft, 2), device=device),
        None
        if num_draft is None
        else torch.empty((num_draft, 2), dtype=torch.int32, device=device),
    )


def _per_position(
    value: float | torch.Tensor, cu_num_draft_tokens: torch.Tensor, num_draft: int
) -> torch.Tensor:
    """A float, or `[batch]` values repeated for each request's draft positions, as float32."""
    if not isinstance(value, torch.Tensor):
        return torch.tensor(value, dtype=torch.float32, device=cu_num_draft_tokens.device)
    counts = torch.diff(cu_num_draft_tokens, prepend=cu_num_draft_tokens.new_zeros(1))
    return value.repeat_interleave(counts, output_size=num_draft)


def _relaxed(
    rows: torch.Tensor,
    drafts: torch.Tensor,
    argmax: torch.Tensor,
    theta: torch.Tensor,
    gap: torch.Tensor,
    protected: torch.Tensor | None,
) -> torch.Tensor:
    """relaxed(x) of the rule for `[num_draft, vocab]` rows, as bool `[num_draft]`."""
    if rows.shape[1] < 2:
        return torch.zeros_like(drafts, dtype=torch.bool)
    # Values do not depend on how topk orders ties, so it may give them; ids it may not.
    first, second = rows.topk(2, dim=-1).values.float().unbind(-1)
    draft_logits = rows.gather(1, drafts[:, None]).squeeze(1).float()
    relaxed = (
        (draft_logits >= second) & (second > theta * first - gap) & ((theta == 1) | (first > 0))
    )
    if protected is not None:
        relaxed &= ~(protected[drafts] | protected[argmax])
    return relaxed


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


def relaxed_positions(
    logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    theta: float | torch.Tensor,
    gap: float | torch.Tensor,
    protected: torch.Tensor | None,
    target_rows: torch.Tensor | None,
) -> torch.Tensor:
    """The torch form of `vllm_mars.verify.relaxed_positions`, which documents the arguments."""
    num_draft = draft_token_ids.shape[0]
    rows = logits[:num_draft] if target_rows is None else logits[target_rows]
    in_vocab, drafts = _in_vocabulary(draft_token_ids, logits.shape[1])
    theta = _per_position(theta, cu_num_draft_tokens, num_draft)
    gap = _per_position(gap, cu_num_draft_tokens, num_draft)
    return in_vocab & _relaxed(rows, drafts, rows.argmax(dim=-1), theta, gap, protected)


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
    relaxed = in_vocab & ~strict & _relaxed(rows, drafts, argmax, theta, gap, protected)

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

    values, ids = top2(rows) if with_top2 else (None, None)
    return VerifyOutput(output, num_accepted.int(), num_relaxed, values, ids)
