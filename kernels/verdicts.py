"""The rule at the draft positions of one request, as a part of the kernels of `greedy`.

The budget of a request, of which j is an offset, m(j) whether the margin allows the draft there,
L(j) = max(0, floor(share * (produced + j + 1)) - used), and a(j) = min(a(j-1) + m(j), L(j)) with
a(-1) = 0 the tokens relaxed up to j: m(j) is allowed iff a(j-1) < L(j). As L never falls, with
M the prefix sum of m, a(j) = M(j) + min(0, min over i <= j of L(i) - M(i)): no loop over j.
"""

import triton
import triton.language as tl

from vllm_mars.kernels.terms import SHARE_BITS, Verdict
from vllm_mars.kernels.top2 import reduce_splits, unpack_id, unpack_value

_RELAXED = tl.constexpr(int(Verdict.RELAXED))
_PROTECTED = tl.constexpr(int(Verdict.PROTECTED))
_BUDGET = tl.constexpr(int(Verdict.BUDGET))
_SHARE_BITS = tl.constexpr(SHARE_BITS)


@triton.jit
def verdicts_at(
    best_ptr,
    second_ptr,
    logits_ptr,
    logits_stride,
    draft_token_ids_ptr,
    protected_ptr,
    blocked_ptr,
    target_rows_ptr,
    position,
    is_row,
    is_draft,
    theta,
    gap,
    vocab,
    num_splits,
    SPLITS: tl.constexpr,
    HAS_TARGET_ROWS: tl.constexpr,
    HAS_PROTECTED: tl.constexpr,
    HAS_BLOCKED: tl.constexpr,
):
    """Draft token, verdict before the budget is applied, z1, z2 and the argmax at each position."""
    packed, second = reduce_splits(best_ptr, second_ptr, position, is_row, num_splits, SPLITS)
    first = unpack_value(packed)
    argmax = unpack_id(packed)
    draft = tl.load(draft_token_ids_ptr + position, mask=is_draft, other=-1).to(tl.int64)
    if HAS_TARGET_ROWS:
        row = tl.load(target_rows_ptr + position, mask=is_draft, other=0).to(tl.int64)
    else:
        row = position.to(tl.int64)
    in_vocab = is_draft & (draft >= 0) & (draft < vocab)
    draft_logit = tl.load(
        logits_ptr + row * logits_stride + draft, mask=in_vocab, other=float("-inf")
    ).to(tl.float32)
    theta = theta + tl.zeros(first.shape, tl.float32)
    # Launched without fusion, so that theta * z1 is rounded before gap is taken off, as in torch.
    threshold = theta * first - gap
    margin = in_vocab & (draft_logit >= second) & (second > threshold)
    margin = margin & ((theta == 1.0) | (first > 0.0))
    verdict = tl.where(margin, _RELAXED, 0)
    if HAS_PROTECTED:
        of_draft = tl.load(protected_ptr + draft, mask=in_vocab, other=0)
        of_argmax = tl.load(protected_ptr + argmax, mask=in_vocab, other=0)
        verdict = tl.where(margin & ((of_draft != 0) | (of_argmax != 0)), _PROTECTED, verdict)
    if HAS_BLOCKED:
        blocked = tl.load(blocked_ptr + position, mask=is_draft, other=0).to(tl.int32)
        verdict = tl.where(margin & (blocked != 0), blocked, verdict)
    return draft, verdict, first, second, argmax


@triton.jit
def within_budget(verdict, offset, used, produced, share):
    """The verdicts with BUDGET where it is used up, and how many are still RELAXED."""
    is_relaxed = (verdict == _RELAXED).to(tl.int32)
    # [i, j] is whether offset i is not behind offset j.
    precedes = offset[:, None] <= offset[None, :]
    sums = tl.sum(tl.where(precedes, is_relaxed[:, None], 0), axis=0)
    limit = ((share * (produced + offset + 1)) >> _SHARE_BITS).to(tl.int32)
    limit = tl.maximum(limit - used, 0)
    before = ((share * (produced + offset)) >> _SHARE_BITS).to(tl.int32)
    slack = tl.where(offset == 0, 0, tl.maximum(before - used, 0) - (sums - is_relaxed))
    least = tl.min(tl.where(precedes, slack[:, None], 0), axis=0)
    is_allowed = sums - is_relaxed + least < limit
    verdict = tl.where((is_relaxed != 0) & (is_allowed == 0), _BUDGET, verdict)
    return verdict, tl.sum((verdict == _RELAXED).to(tl.int32), axis=0)


@triton.jit
def store_values(top2_values_ptr, position, first, second, mask):
    """z1 and z2, both NaN where the row holds one."""
    tl.store(top2_values_ptr + 2 * position, first, mask=mask)
    tl.store(top2_values_ptr + 2 * position + 1, tl.where(first != first, first, second), mask=mask)
