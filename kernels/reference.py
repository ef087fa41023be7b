"""Margin-aware verification in plain torch: the reference and the CPU backend.

The rule (arXiv 2601.15498, Section 3), at one draft position with target logits z, draft token x,
z1 >= z2 the two largest logits counted with multiplicity:

    strict(x)   x = argmax z, of equal maxima the lowest id
    relaxed(x)  z[x] >= z2  and  z2 > theta * z1 - gap  and  (theta = 1 or z1 > 0)
                and neither x nor argmax z is protected
    accept(x)   strict(x) or relaxed(x)

All comparisons are in float32: first `theta * z1`, rounded, then `- gap`, rounded. A row that holds
a NaN is never relaxed, because torch's max and topk carry the NaN into z1. A draft id outside
[0, vocab) is padding and never accepted.

Cost on a CPU: one pass for max and argmax over all rows. The second pass, for z2, reads only the
candidate rows, those where the draft token is not the argmax and its own logit already passes the
margin: x can then be relaxed only if z[x] is itself z2 (or equals z1), so `z[x]` stands in for z2.
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
            order. A row that holds a NaN gives the first NaN's id and -1.
    """

    output_token_ids: torch.Tensor
    num_accepted: torch.Tensor
    num_relaxed: torch.Tensor
    top2_values: torch.Tensor | None = None
    top2_ids: torch.Tensor | None = None


def expand_to_positions(
    per_request: torch.Tensor, cu_num_draft_tokens: torch.Tensor, num_draft: int
) -> torch.Tensor:
    """Repeats `[batch]` values for each request's draft positions, giving `[num_draft]`."""
    counts = torch.diff(cu_num_draft_tokens, prepend=cu_num_draft_tokens.new_zeros(1))
    return per_request.repeat_interleave(counts, output_size=num_draft)


def _passes_margin(
    first: torch.Tensor,
    second: torch.Tensor,
    theta: float | torch.Tensor,
    gap: float | torch.Tensor,
) -> torch.Tensor:
    """`second > theta * first - gap` in float32, with `first > 0` wherever theta is below 1."""
    theta = torch.as_tensor(theta, dtype=torch.float32, device=first.device)
    gap = torch.as_tensor(gap, dtype=torch.float32, device=first.device)
    return (second > theta * first - gap) & ((theta == 1) | (first > 0))


def _allowed(
    draft_token_ids: torch.Tensor, argmax: torch.Tensor, protected: torch.Tensor | None
) -> torch.Tensor | bool:
    if protected is None:
        return True
    return ~(protected[draft_token_ids] | protected[argmax])


def top2(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-2 of each `[rows, vocab]` row: float32 values and int32 ids, both `[rows, 2]`.

    Ties and NaN are resolved as `VerifyOutput` says; `torch.topk` alone leaves the order of ties
    open.
    """
    values = logits.float()
    first, first_id = values.max(dim=-1, keepdim=True)
    second, second_id = values.scatter(1, first_id, -torch.inf).max(dim=-1, keepdim=True)
    # A row whose every other logit is -inf: the masked maximum ties with the mask itself.
    second_id = torch.where(
        (second_id == first_id) & (first_id == 0) & (logits.shape[1] > 1), 1, second_id
    )
    nan = first.isnan()
    second = torch.where(nan, torch.nan, second)
    second_id = torch.where(nan, -1, second_id)
    return torch.cat([first, second], 1), torch.cat([first_id, second_id], 1).int()


def relaxed_positions(
    logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    theta: float | torch.Tensor,
    gap: float | torch.Tensor,
    protected: torch.Tensor | None,
    target_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Where the margin accepts the draft token, strict or not: the relaxed(x) of the rule.

    Unlike `verify_greedy` this counts the argmax as relaxed where the margin is small: in sampling
    it is accepted outright there, without the draw that the strict rule would make.

    Args:
        logits: `[num_rows, vocab]`, processed (temperature, top-k, top-p applied).
        draft_token_ids: `[num_draft]`.
        theta: float or `[num_draft]` float32.
        gap: float or `[num_draft]` float32.
        protected: bool `[vocab]` or None.
        target_rows: `[num_draft]` row of each position, or None for the rows 0..num_draft-1.

    Returns:
        bool `[num_draft]`.
    """
    rows = logits[: draft_token_ids.shape[0]] if target_rows is None else logits[target_rows]
    vocab = rows.shape[1]
    if vocab < 2:
        return torch.zeros_like(draft_token_ids, dtype=torch.bool)
    in_vocab = (draft_token_ids >= 0) & (draft_token_ids < vocab)
    drafts = torch.where(in_vocab, draft_token_ids, 0).long()
    # Values do not depend on how topk orders ties, so it may give them; the id of the maximum may
    # not.
    first, second = rows.topk(2, dim=-1).values.float().unbind(-1)
    draft_logits = rows.gather(1, drafts[:, None]).squeeze(1).float()
    relaxed = in_vocab & (draft_logits >= second) & _passes_margin(first, second, theta, gap)
    # z2 = -inf passes only where the threshold is -inf too: an infinite gap. One candidate: strict.
    relaxed &= second > -torch.inf
    if protected is not None:
        relaxed = relaxed & _allowed(drafts, rows.argmax(dim=-1), protected)
    return relaxed


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
    vocab = logits.shape[1]

    # One pass over all rows, without gathering them first: the gather would cost another pass.
    row_max, row_argmax = logits.max(dim=-1)
    if target_rows is None:
        target_rows = torch.arange(num_draft, device=device)
    target_rows = target_rows.long()
    argmax = row_argmax[target_rows]
    first = row_max[target_rows].float()

    in_vocab = (draft_token_ids >= 0) & (draft_token_ids < vocab)
    drafts = torch.where(in_vocab, draft_token_ids, 0).long()
    draft_logits = logits[target_rows, drafts].float()
    strict = in_vocab & (drafts == argmax)

    if isinstance(theta, torch.Tensor):
        theta = expand_to_positions(theta, cu_num_draft_tokens, num_draft)
    if isinstance(gap, torch.Tensor):
        gap = expand_to_positions(gap, cu_num_draft_tokens, num_draft)
    relaxed = (
        in_vocab
        & ~strict
        & (draft_logits > -torch.inf)
        & _passes_margin(first, draft_logits, theta, gap)
        & _allowed(drafts, argmax, protected)
    )
    candidates = relaxed.nonzero().squeeze(1)
    if candidates.numel():
        second = logits[target_rows[candidates]].topk(2, dim=-1).values[:, 1].float()
        relaxed[candidates] = draft_logits[candidates] >= second

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
        bonus_token_ids = row_argmax[bonus_rows.long()]
    if bonus_token_ids is not None:
        is_bonus = (offsets == counts[:, None]) & (num_accepted == counts)[:, None]
        output = torch.where(is_bonus, bonus_token_ids.reshape(-1, 1).int(), output)

    values, ids = top2(logits[target_rows]) if with_top2 else (None, None)
    return VerifyOutput(output, num_accepted.int(), num_relaxed, values, ids)
