"""The rows of drawn drafts in Triton; `clip` has the rule and the meaning of each step.

    clip_kernel   grid (rows)   finds what a row may pay, streams the draft once for its
                                log-sum-exp, and both once for each step of Newton's method

What it finds are CLIPPED numbers; of the first five `log_ratio_of_clipped` makes log m - log p of a
token.

Any w, divided by F(w), serves a distribution that keeps the bound and has an exact log-ratio, so w
is found as roughly as pays: what F(w) is off by here costs less than 1 % of what a price gains.

Nothing of the logits' size is written. Bytes read: vocab * itemsize of the draft, and vocab *
(itemsizes of both) for each step. Only the rows of a small batch stay in the L2 cache from pass to
pass: all rows of a step are under way at once. A row without a price is read once, its draft.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_mars.kernels import clip
from vllm_mars.kernels.rule_kernel import (
    CLIPPED,
    allowance,
    drawn_price,
    is_kept,
    log_ratio_of_clipped,
)
from vllm_mars.kernels.terms import DRAWN_SCALE, Draws
from vllm_mars.kernels.top2 import (
    RECORD_SIZE,
    block_size,
    kept_sums,
    log_sum_exp,
    reduce_splits,
    unpack_value,
)

# What F(w) may be off by before the division by it.
TOLERANCE = 1e-2
# Newton's method starts at exp(_START price), where w is for most rows.
_START = tl.constexpr(-0.3)
_STEPS = tl.constexpr(clip.STEPS)
_MOST_CLIP_PRICE = tl.constexpr(clip.MOST_CLIP_PRICE)
_LEAST_REST = tl.constexpr(clip.LEAST_REST)
_EIGHTH = tl.constexpr(clip.EIGHTH)
_DRAWN_SCALE = tl.constexpr(DRAWN_SCALE)


@triton.jit
def _log_sum_exp(row_ptr, scale, vocab, BLOCK: tl.constexpr):
    """Log-sum-exp of a row divided by scale; NaN where a NaN or +inf is in it."""
    # A finite start, so that a lane that meets nothing above -inf subtracts no infinities.
    largest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
        value = value.to(tl.float32) / scale
        larger = tl.maximum(largest, value)
        total = total * tl.exp(largest - larger) + tl.exp(value - larger)
        largest = larger
    row_largest = tl.max(largest, axis=0)
    return row_largest + tl.log(tl.sum(total * tl.exp(largest - row_largest), axis=0))


@triton.jit
def _load(
    target_ptr,
    target_lse,
    draft_ptr,
    draft_lse,
    temperature,
    token,
    protected,
    record_ptr,
    vocab,
):
    """Logits of tokens, their p, and r = q / p; p = 0 of kept ones and behind the vocabulary."""
    mask = (token < vocab) & (is_kept(token, protected, record_ptr, vocab) == 0)
    target = tl.load(target_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)
    p = tl.exp(target - target_lse)
    draft = tl.load(draft_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)
    ratio = tl.exp(draft / temperature - draft_lse) / p
    return target, p, tl.where(ratio == ratio, ratio, 1.0)


@triton.jit(
    do_not_specialize=["num_splits", "num_rows"],
    do_not_specialize_on_alignment=[
        *("input_ids_ptr", "blocked_ptr", "total_len_ptr", "prompt_len_ptr"),
        *("row_slots_ptr", "row_places_ptr"),
    ],
)
def clip_kernel(
    # [num_rows, CLIPPED]
    clipped_ptr,
    # [num_rows, vocab]
    logits_ptr,
    logits_stride,
    # As in `accept_kernel`
    partials,
    records_ptr,
    input_ids_ptr,
    protected,
    blocked_ptr,
    total_len_ptr,
    prompt_len_ptr,
    sampling,
    # [num_rows] each: a row's slot, and its place within its request
    row_slots_ptr,
    row_places_ptr,
    draft_stride,
    draft_step_stride,
    num_rows,
    vocab,
    num_splits,
    SPLITS: tl.constexpr,
    POSITIONS: tl.constexpr,
    TOLERANCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    own_row = tl.program_id(0)
    slot = tl.load(row_slots_ptr + own_row).to(tl.int64)
    if tl.load(sampling.temperature + slot) == 0.0:
        return
    place = tl.load(row_places_ptr + own_row)
    # The rows of the request are those that count on from its first.
    offset = tl.arange(0, POSITIONS)
    row = own_row - place + offset
    places = tl.load(row_places_ptr + row, mask=row < num_rows, other=-1)
    length = tl.sum((places == offset).to(tl.int32), axis=0) - 1
    draft = tl.load(input_ids_ptr + own_row + 1, mask=place < length, other=-1)
    if (draft < 0) | (draft >= vocab):
        return
    record_ptr = records_ptr + slot * RECORD_SIZE
    produced = tl.load(total_len_ptr + slot) - tl.load(prompt_len_ptr + slot)
    most, price, room = allowance(record_ptr, produced, _DRAWN_SCALE, tl.arange(0, 1))
    useful = tl.minimum(length, room)
    price = drawn_price(tl.max(most, axis=0), price, useful)
    may_pay = (place < useful) & (tl.load(blocked_ptr + own_row) == 0)

    # int64 before the multiply: a row can start past 2**31 elements.
    target_ptr = logits_ptr + own_row.to(tl.int64) * logits_stride
    draft_ptr = sampling.draft_logits + slot * draft_stride
    draft_ptr += place.to(tl.int64) * draft_step_stride
    temperature = tl.load(sampling.drawn_at + slot)
    own = own_row + tl.arange(0, 1)
    packed, _ = reduce_splits(partials, own, own >= 0, num_splits, SPLITS, False)
    lse, entropy = log_sum_exp(partials, own, own >= 0, unpack_value(packed), num_splits, SPLITS)
    target_lse = tl.max(lse, axis=0)
    mass, of_kept = kept_sums(partials, own, lse == lse, lse)
    # What p has, and its entropy, of the tokens that are not kept.
    rest = tl.max(1.0 - mass, axis=0)
    rest_entropy = tl.max(entropy - of_kept, axis=0)
    draft_lse = _log_sum_exp(draft_ptr, temperature, vocab, BLOCK)
    is_finite = (target_lse > float("-inf")) & (target_lse < float("inf"))
    may_pay = may_pay & is_finite & (rest > _LEAST_REST)
    price = tl.where(may_pay, tl.minimum(price, _MOST_CLIP_PRICE), 0.0)
    log_w = 0.0
    log_total = 0.0
    loss = 0.0
    gain = 0.0
    drift = 0.0
    if price > 0:
        spread = tl.exp(price)
        low = tl.exp(-price)
        high = 1.0
        w = 1.0
        following = tl.exp(price * _START)
        total = 0.0
        taken = 0
        while (tl.abs(total - 1.0) > TOLERANCE) & (taken < _STEPS):
            w = following
            sums = tl.zeros([BLOCK], tl.float32)
            flats = tl.zeros([BLOCK], tl.float32)
            aboves = tl.zeros([BLOCK], tl.float32)
            losses = tl.zeros([BLOCK], tl.float32)
            gains = tl.zeros([BLOCK], tl.float32)
            surprises = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocab, BLOCK):
                token = start + tl.arange(0, BLOCK)
                target, p, ratio = _load(
                    *(target_ptr, target_lse, draft_ptr, draft_lse, temperature, token),
                    *(protected, record_ptr, vocab),
                )
                clipped = tl.maximum(tl.minimum(ratio, w * spread), w)
                share = p * clipped
                sums += share
                flats += tl.where(clipped == ratio, share, 0.0)
                aboves += tl.where(clipped < ratio, share, 0.0)
                losses += share * tl.log(clipped)
                gains += p * (tl.minimum(clipped, ratio) - tl.minimum(ratio, 1.0))
                surprise = tl.where(p > 0.0, target_lse - target, 0.0)
                surprises += share * surprise
            total = tl.sum(sums, axis=0) / rest
            flat = tl.sum(flats, axis=0) / rest
            log_w = tl.log(w)
            log_total = tl.log(total)
            loss = tl.maximum(tl.sum(losses, axis=0) / total - rest * log_total, 0.0)
            # The division by F(w) takes from what meets q, or adds to what q is above.
            moved = tl.sum(aboves, axis=0) + tl.where(total > 1.0, rest * flat, 0.0)
            gain = tl.sum(gains, axis=0) + moved * (1.0 / total - 1.0)
            drift = tl.sum(surprises, axis=0) / total - rest_entropy
            low = tl.where(total < 1.0, w, low)
            high = tl.where(total > 1.0, w, high)
            newton = w * (1.0 - flat) / (total - flat)
            is_inside = (newton > low) & (newton < high)
            following = tl.where(is_inside, newton, tl.sqrt(low) * tl.sqrt(high))
            taken += 1
        loss = tl.minimum(loss, price * price * _EIGHTH)
        gain = tl.maximum(gain, 0.0)
    log_p = tl.load(partials.logit + own_row) - target_lse
    log_q = tl.load(draft_ptr + draft).to(tl.float32) / temperature - draft_lse
    ratio = log_ratio_of_clipped(log_p, log_q, log_w, price, log_total)
    ratio = tl.where(is_kept(draft, protected, record_ptr, vocab), 0.0, ratio)
    clipped_ptr += CLIPPED * own_row
    tl.store(clipped_ptr, log_w)
    tl.store(clipped_ptr + 1, price)
    tl.store(clipped_ptr + 2, log_total)
    tl.store(clipped_ptr + 3, target_lse)
    tl.store(clipped_ptr + 4, draft_lse)
    tl.store(clipped_ptr + 5, loss)
    tl.store(clipped_ptr + 6, gain)
    tl.store(clipped_ptr + 7, drift)
    tl.store(clipped_ptr + 8, ratio)
    tl.store(clipped_ptr + 9, log_p + ratio - log_q)


def clip_rows(logits: torch.Tensor, draws: Draws, shared: dict[str, Any]) -> torch.Tensor:
    """Launches `clip_kernel`.

    Args:
        logits: `[num_rows, vocab]` of the step.
        draws: of the step, with `draft_logits`, as wide as the target's.
        shared: of `accept.rule_arguments`.

    Returns:
        `[num_rows, CLIPPED]` float32; of a row without a draft token, and of greedy requests,
        nothing is found.
    """
    assert draws.sampling.drawn_at is not None, "drafts are drawn at a temperature"
    draft_logits = draws.sampling.draft_logits
    num_rows = draws.pos.shape[0]
    clipped = torch.empty((num_rows, CLIPPED.value), device=logits.device)
    # Few rows leave most of the chip idle, so each has many threads in flight: half of what a
    # multiprocessor takes at 64 registers. No other number was tried on hardware.
    block = block_size(shared["vocab"])
    clip_kernel[(num_rows,)](
        clipped,
        logits,
        logits.stride(0),
        row_slots_ptr=draws.row_slots,
        row_places_ptr=draws.row_places,
        draft_stride=draft_logits.stride(0),
        draft_step_stride=draft_logits.stride(1),
        num_rows=num_rows,
        TOLERANCE=TOLERANCE,
        BLOCK=block,
        num_warps=16 if block == 4096 else 4,
        **shared,
    )
    return clipped
