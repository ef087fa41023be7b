"""Margin-aware verification in plain torch: the reference and the CPU backend.

The rule (arXiv 2601.15498, Section 3), at one draft position with target logits z, draft token x,
z1 >= z2 the two largest logits counted with multiplicity:

    strict(x)   x = argmax z, of equal maxima the lowest id
    relaxed(x)  z[x] >= z2  and  z2 > theta * z1 - gap  and  (theta = 1 or z1 > 0)
                and neither x nor argmax z is protected
    accept(x)   strict(x) or relaxed(x)

All comparisons are in float32: first `theta * z1`, rounded, then `- gap`, rounded; call the result
t. A row that holds a NaN is never relaxed, because the NaN is its argmax and so its z1. A draft id
outside [0, vocab) is padding and never accepted.

z2 itself is not computed. With "larger" the number of logits above a pivot, relaxed(x) is

    x is not the argmax:  z[x] > t  and  larger(z[x]) <= 1      (z[x] is z2, or ties with z1)
    x is the argmax:      larger(t) >= 2                        (z1 and z2 are above t)

so a step costs one pass for the argmax over all rows, and one count over the candidate rows alone,
those that pass every other condition.
"""

from typing import NamedTuple

import numpy as np
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


def _suits_numpy(logits: torch.Tensor) -> bool:
    """Whether NumPy's vectorised loops can take the rows; they are several times torch's speed."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Argmax of each row, int64; the lowest id of equal maxima, the first NaN if there is one."""
    if _suits_numpy(logits):
        return torch.from_numpy(logits.detach().numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _count_larger(logits: torch.Tensor, rows: torch.Tensor, pivot: torch.Tensor) -> torch.Tensor:
    """How many logits of each of the given rows are larger than the row's float32 pivot."""
    if _suits_numpy(logits):
        larger = logits.detach().numpy()[rows.numpy()] > pivot[:, None].numpy()
        return torch.from_numpy(np.count_nonzero(larger, axis=-1))
    return (logits[rows].float() > pivot[:, None]).sum(dim=-1)


def expand_to_positions(
    per_request: torch.Tensor, cu_num_draft_tokens: torch.Tensor, num_draft: int
) -> torch.Tensor:
    """Repeats `[batch]` values for each request's draft positions, giving `[num_draft]`."""
    counts = torch.diff(cu_num_draft_tokens, prepend=cu_num_draft_tokens.new_zeros(1))
    return per_request.repeat_interleave(counts, output_size=num_draft)


def _relaxed(
    logits: torch.Tensor,
    rows: torch.Tensor,
    drafts: torch.Tensor,
    argmax: torch.Tensor,
    considered: torch.Tensor,
    theta: float | torch.Tensor,
    gap: float | torch.Tensor,
    protected: torch.Tensor | None,
) -> torch.Tensor:
    """relaxed(x) of the rule at the considered positions, False elsewhere; all `[num_draft]`."""
    first = logits[rows, argmax].float()
    draft_logits = logits[rows, drafts].float()
    theta = torch.as_tensor(theta, dtype=torch.float32, device=logits.device)
    threshold = theta * first - torch.as_tensor(gap, dtype=torch.float32, device=logits.device)
    relaxed = (
        considered
        & (draft_logits > threshold)
        & (draft_logits > -torch.inf)
        & ((theta == 1) | (first > 0))
    )
    if protected is not None:
        relaxed &= ~(protected[drafts] | protected[argmax])
    candidates = relaxed.nonzero().squeeze(1)
    if candidates.numel():
        is_argmax = (drafts == argmax)[candidates]
        pivot = torch.where(is_argmax, threshold[candidates], draft_logits[candidates])
        larger = _count_larger(logits, rows[candidates], pivot)
        relaxed[candidates] = torch.where(is_argmax, larger >= 2, larger <= 1)
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
    if target_rows is None:
        target_rows = torch.arange(draft_token_ids.shape[0], device=logits.device)
        argmax = _argmax(logits[: draft_token_ids.shape[0]])
    else:
        target_rows = target_rows.long()
        argmax = _argmax(logits)[target_rows]
    in_vocab, drafts = _in_vocabulary(draft_token_ids, logits.shape[1])
    return _relaxed(logits, target_rows, drafts, argmax, in_vocab, theta, gap, protected)


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

    # One pass over all rows, without gathering them first: the gather would cost another pass.
    row_argmax = _argmax(logits)
    if target_rows is None:
        target_rows = torch.arange(num_draft, device=device)
    target_rows = target_rows.long()
    argmax = row_argmax[target_rows]
    in_vocab, drafts = _in_vocabulary(draft_token_ids, logits.shape[1])
    strict = in_vocab & (drafts == argmax)

    if isinstance(theta, torch.Tensor):
        theta = expand_to_positions(theta, cu_num_draft_tokens, num_draft)
    if isinstance(gap, torch.Tensor):
        gap = expand_to_positions(gap, cu_num_draft_tokens, num_draft)
    relaxed = _relaxed(
        logits, target_rows, drafts, argmax, in_vocab & ~strict, theta, gap, protected
    )

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
