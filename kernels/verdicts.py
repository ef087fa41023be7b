"""The rule at the draft positions of one request, as a part of the kernels of `greedy`.

What a request may relax and lose is given out position by position: a weight that does not fit
leaves room for a later one that does, so no prefix sum tells it. With a price, the best stop is
the largest prefix sum at a position where verification may end: no loop.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_mars.kernels.terms import (
    LOSS_BITS,
    MOST_LOSS,
    MOST_PRICE,
    SHARE_BITS,
    Drafts,
    Margin,
    Verdict,
    price_units,
)
from vllm_mars.kernels.top2 import reduce_rows, reduce_splits, unpack_id, unpack_value

_RELAXED = tl.constexpr(int(Verdict.RELAXED))
_PROTECTED = tl.constexpr(int(Verdict.PROTECTED))
_BUDGET = tl.constexpr(int(Verdict.BUDGET))
_LOSS = tl.constexpr(int(Verdict.LOSS))
_FIRST = tl.constexpr(int(Verdict.FIRST))
_SHARE_BITS = tl.constexpr(SHARE_BITS)
_RATE_SHIFT = tl.constexpr(SHARE_BITS - LOSS_BITS)
_UNIT = tl.constexpr(2.0**LOSS_BITS)
_MOST_LOSS = tl.constexpr(float(MOST_LOSS))
_MOST_PRICE = tl.constexpr(float(MOST_PRICE))


@triton.jit
def rows_at(target_rows_ptr, position, is_draft, HAS_TARGET_ROWS: tl.constexpr):
    """The row of logits of each draft position, int64."""
    if HAS_TARGET_ROWS:
        return tl.load(target_rows_ptr + position, mask=is_draft, other=0).to(tl.int64)
    return position.to(tl.int64)


@triton.jit
def verdicts_at(
    best_ptr,
    second_ptr,
    logits_ptr,
    logits_stride,
    draft_token_ids_ptr,
    protected_ptr,
    blocked_ptr,
    # Of the draft token; of the partial results of its row; of the row among the logits.
    position,
    index,
    row,
    is_row,
    is_draft,
    theta,
    gap,
    price,
    vocab,
    num_splits,
    SPLITS: tl.constexpr,
    HAS_PROTECTED: tl.constexpr,
    HAS_BLOCKED: tl.constexpr,
    HAS_PRICE: tl.constexpr,
    WITH_SECOND: tl.constexpr,
    # Each position is judged alone; else the argmax is the FIRST choice and with a price RELAXED
    # stands at each payable position.
    ALONE: tl.constexpr,
):
    """Draft token, verdict before budgets and stops, loss, z1, z2 and the argmax."""
    packed, second = reduce_splits(
        best_ptr, second_ptr, index, is_row, num_splits, SPLITS, WITH_SECOND
    )
    first = unpack_value(packed)
    argmax = unpack_id(packed)
    draft = tl.load(draft_token_ids_ptr + position, mask=is_draft, other=-1).to(tl.int64)
    in_vocab = is_draft & (draft >= 0) & (draft < vocab)
    draft_logit = tl.load(
        logits_ptr + row * logits_stride + draft, mask=in_vocab, other=float("-inf")
    ).to(tl.float32)
    # Of infinities and a NaN no number comes out, which compares with nothing.
    loss = first - draft_logit
    units = tl.ceil(tl.minimum(loss * _UNIT, _MOST_LOSS))
    loss = tl.where(in_vocab & (loss == loss), units, 0.0).to(tl.int64)
    if HAS_PRICE:
        allowed = in_vocab & (draft_logit > float("-inf")) & (first < float("inf"))
        refusable = allowed & (loss < price)
        if ALONE:
            allowed = refusable
    else:
        theta = theta + tl.zeros(first.shape, tl.float32)
        # Launched without fusion, so that theta * z1 is rounded before gap is taken off, as in
        # torch.
        threshold = theta * first - gap
        allowed = in_vocab & (draft_logit >= second) & (second > threshold)
        allowed = allowed & ((theta == 1.0) | (first > 0.0))
        refusable = allowed
    verdict = tl.where(allowed, _RELAXED, 0)
    if HAS_PROTECTED:
        of_draft = tl.load(protected_ptr + draft, mask=in_vocab, other=0)
        of_argmax = tl.load(protected_ptr + argmax, mask=in_vocab, other=0)
        forbidden = (of_draft != 0) | (of_argmax != 0)
        verdict = tl.where(allowed & forbidden, tl.where(refusable, _PROTECTED, 0), verdict)
    if HAS_BLOCKED:
        blocked = tl.load(blocked_ptr + position, mask=is_draft, other=0).to(tl.int32)
        verdict = tl.where(allowed & (blocked != 0), tl.where(refusable, blocked, 0), verdict)
    if not ALONE:
        verdict = tl.where(is_draft & (draft == argmax), _FIRST, verdict)
    return draft, verdict, loss, first, second, argmax


@triton.jit
def price_of(price, request, PER_REQUEST: tl.constexpr):
    """A request's price as an integer: given as one, or float32 per request."""
    if PER_REQUEST:
        price = tl.minimum(tl.floor(tl.load(price + request) * _UNIT), _MOST_PRICE)
    return price.to(tl.int64)


@triton.jit
def within_budgets(
    verdict,
    loss,
    offset,
    length,
    produced,
    left_to_relax,
    left_to_lose,
    share,
    rate,
    HAS_BUDGET: tl.constexpr,
    HAS_LOSS_BUDGET: tl.constexpr,
):
    """The verdicts with BUDGET or LOSS where what is relaxed in this step uses a sum up.

    `left_to_relax` and `left_to_lose` are what the request starts the step with, to which each
    output token adds its share or rate.
    """
    relaxed = tl.zeros([], tl.int64)
    lost = tl.zeros([], tl.int64)
    most_relaxed = ((share * (produced + offset + 1)) >> _SHARE_BITS) + left_to_relax
    most_lost = ((rate * (produced + offset + 1)) >> _RATE_SHIFT) + left_to_lose
    for j in range(0, length):
        here = (offset == j) & (verdict == _RELAXED)
        weight = tl.sum(tl.where(here, loss, 0), axis=0)
        count = tl.sum(here.to(tl.int64), axis=0)
        fits = count > 0
        if HAS_BUDGET:
            fits_count = relaxed < tl.sum(tl.where(here, most_relaxed, 0), axis=0)
            verdict = tl.where(here & (fits_count == 0), _BUDGET, verdict)
            fits = fits & fits_count
        if HAS_LOSS_BUDGET:
            fits_loss = lost + weight <= tl.sum(tl.where(here, most_lost, 0), axis=0)
            verdict = tl.where(here & (verdict == _RELAXED) & (fits_loss == 0), _LOSS, verdict)
            fits = fits & fits_loss
        relaxed += tl.where(fits, count, 0)
        lost += tl.where(fits, weight, 0)
    return verdict


@triton.jit
def up_to_best_stop(verdict, loss, offset, is_row, length, price):
    """The verdicts, NONE in place of RELAXED from the stop on that is worth most."""
    strict = verdict == _FIRST
    payable = verdict == _RELAXED
    gain = tl.where(is_row, price - tl.where(payable, loss, 0), 0)
    # Of a stop: what comes before it.
    value = tl.cumsum(gain, axis=0) - gain
    last = tl.min(tl.where(is_row & ~(strict | payable), offset, length), axis=0)
    is_stop = (offset <= last) & ~(is_row & strict)
    value = tl.where(is_stop, value, -0x7FFFFFFFFFFFFFFF)
    stop = tl.min(tl.where(value == tl.max(value, axis=0), offset, length), axis=0)
    return tl.where(payable & (offset >= stop), 0, verdict)


@triton.jit
def store_values(top2_values_ptr, position, first, second, mask):
    """z1 and z2, both NaN where the row holds one."""
    tl.store(top2_values_ptr + 2 * position, first, mask=mask)
    tl.store(top2_values_ptr + 2 * position + 1, tl.where(first != first, first, second), mask=mask)


def row_arguments(drafts: Drafts, margin: Margin, with_values: bool = False) -> dict[str, Any]:
    """Launches `top2_kernel`; returns what each kernel takes that then judges the rows."""
    price = margin.price
    with_second = price is None or with_values
    best, second, num_splits, padded_splits = reduce_rows(drafts, with_second)
    return {
        "best_ptr": best,
        "second_ptr": second,
        "logits_ptr": drafts.logits,
        "logits_stride": drafts.logits.stride(0),
        "draft_token_ids_ptr": drafts.draft_token_ids,
        "protected_ptr": margin.protected,
        "cu_num_draft_tokens_ptr": drafts.cu_num_draft_tokens,
        "theta": margin.theta,
        "gap": margin.gap,
        "price": price if isinstance(price, torch.Tensor) else price_units(price or 0.0),
        "vocab": drafts.logits.shape[1],
        "num_splits": num_splits,
        "SPLITS": padded_splits,
        "HAS_PROTECTED": margin.protected is not None,
        "HAS_PRICE": price is not None,
        "THETA_PER_REQUEST": isinstance(margin.theta, torch.Tensor),
        "GAP_PER_REQUEST": isinstance(margin.gap, torch.Tensor),
        "PRICE_PER_REQUEST": isinstance(price, torch.Tensor),
        "WITH_SECOND": with_second,
        "enable_fp_fusion": False,
    }
