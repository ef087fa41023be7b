"""The rows of drawn drafts in Triton; `clip` has the rule and the meaning of each step.

    clip_kernel   grid (rows)           finds what a row may pay, streams the draft once for its
                                        log-sum-exp, and both once for each step of Newton's method
    mass_kernel   grid (rows, blocks)   behind it: what a draft has reached before the row, p_i, and
                                        a block's part of S_i (`rule`); not of a request's first row

What they find are CLIPPED numbers of a row; of the first five `log_ratio_of_clipped` makes
log m - log p of a token.

Any w, divided by F(w), serves a distribution that keeps the bound and has an exact log-ratio, so w
is found as roughly as pays: what F(w) is off by here costs less than 1 % of what a price gains.

All tokens of a row are summed, and then the few that are kept are taken off, so that a row is read
in 16-byte loads. Probabilities are logarithms to the base 2, which take one instruction each.

Nothing of the logits' size is written. Bytes read: vocab * itemsize of the draft, and vocab *
(itemsizes of both) for each step and for S_i. Only the rows of a small batch stay in the L2 cache
from pass to pass: all rows of a step are under way at once. A row without a price is read once by
`clip_kernel`, its draft.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from vllm_mars.kernels import clip
from vllm_mars.kernels.rows import (
    KEPT_CHUNK,
    LOG2_E,
    RECORD_SIZE,
    kept_sums,
    kept_tokens,
    log_sum_exp,
    num_kept,
    reduce_splits,
    unpack_value,
)
from vllm_mars.kernels.rule_kernel import (
    BEFORE,
    CLIPPED,
    DRIFT,
    LOSS_OF_ROW,
    OF_P,
    OF_Q,
    STRICT_BEFORE,
    allowance,
    drawn_price,
    is_kept,
    log_ratio_of_clipped,
)
from vllm_mars.kernels.terms import DRAWN_SCALE, Draws

# What F(w) may be off by before the division by it.
TOLERANCE = 1e-2
_START = tl.constexpr(clip.START)
_STEPS = tl.constexpr(clip.STEPS)
_MOST_CLIP_PRICE = tl.constexpr(clip.MOST_CLIP_PRICE)
_LEAST_REST = tl.constexpr(clip.LEAST_REST)
_EIGHTH = tl.constexpr(clip.EIGHTH)
_DRAWN_SCALE = tl.constexpr(DRAWN_SCALE)
_INF = tl.constexpr(float("inf"))
# So small a p adds nothing to a sum, where -inf would make a NaN of it.
_LEAST_LOG2 = tl.constexpr(-1e4)
# Of `clip_kernel`: three programs of 80 registers fit a multiprocessor.
WARPS = 8
# Logits that a program of `mass_kernel` reads.
_MASS_BLOCK = 8192
_UNALIGNED = [
    *("input_ids_ptr", "blocked_ptr", "total_len_ptr", "prompt_len_ptr"),
    *("row_slots_ptr", "row_places_ptr"),
]


@triton.jit
def _log_sum_exp(row_ptr, scale, vocab, BLOCK: tl.constexpr):
    """Log-sum-exp of a row times scale, base 2; NaN where a NaN or +inf is in it."""
    # A finite start, so that a lane that meets nothing above -inf subtracts no infinities.
    largest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
        value = value.to(tl.float32) * scale
        larger = tl.maximum(largest, value)
        total = total * libdevice.exp2(largest - larger) + libdevice.exp2(value - larger)
        largest = larger
    row_largest = tl.max(largest, axis=0)
    return row_largest + tl.log2(tl.sum(total * libdevice.exp2(largest - row_largest), axis=0))


@triton.jit
def _log_probabilities(target_ptr, draft_ptr, row, token, mask):
    """log2 p, and log2 q - log2 p, of tokens; of others a p of 0."""
    target_lse, scale, draft_lse = row
    target = tl.load(target_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)
    draft = tl.load(draft_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)
    log_p = tl.maximum(target * LOG2_E - target_lse, _LEAST_LOG2)
    return log_p, draft * scale - draft_lse - log_p


@triton.jit
def _sums(log_p, ratio, low, high):
    """What tokens add to a pass of Newton's method.

    To the sum of clipped p, to that which neither end clips, to KL, and to E[log p]; base 2.
    """
    clipped = log_ratio_of_clipped(ratio, low, high, 0.0)
    mass = libdevice.exp2(log_p + clipped)
    return mass, tl.where(clipped == ratio, mass, 0.0), mass * clipped, mass * log_p


@triton.jit(do_not_specialize=["num_splits", "num_rows"], do_not_specialize_on_alignment=_UNALIGNED)
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
    # One that was struck out has been drawn.
    if (draft == -1) | (draft >= vocab):
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
    own = own_row + tl.arange(0, 1)
    packed, _ = reduce_splits(partials, own, own >= 0, num_splits, SPLITS, False)
    lse, entropy = log_sum_exp(partials, own, own >= 0, unpack_value(packed), num_splits, SPLITS)
    target_lse = tl.max(lse, axis=0)
    mass, of_kept = kept_sums(partials, own, lse == lse, lse)
    # What p has, and its entropy, of the tokens that are not kept.
    rest = tl.max(1.0 - mass, axis=0)
    rest_entropy = tl.max(entropy - of_kept, axis=0)
    temperature = tl.load(sampling.drawn_at + slot)
    scale = LOG2_E / temperature
    draft_lse = _log_sum_exp(draft_ptr, scale, vocab, BLOCK)
    is_finite = (tl.abs(target_lse) < _INF) & (tl.abs(draft_lse) < _INF)
    may_pay = may_pay & is_finite & (rest > _LEAST_REST)
    price = tl.where(may_pay, tl.minimum(price, _MOST_CLIP_PRICE), 0.0)
    log_w = 0.0
    log_total = 0.0
    loss = 0.0
    drift = 0.0
    if price > 0:
        own_lse = (target_lse * LOG2_E, scale, draft_lse)
        low = tl.exp(-price)
        high = 1.0
        w = 1.0
        following = tl.exp(price * _START)
        total = 0.0
        taken = 0
        while (tl.abs(total - 1.0) > TOLERANCE) & (taken < _STEPS):
            w = following
            log_w = tl.log(w)
            lowest = log_w * LOG2_E
            highest = (log_w + price) * LOG2_E
            all_masses = tl.zeros([BLOCK], tl.float32)
            all_flats = tl.zeros([BLOCK], tl.float32)
            all_losses = tl.zeros([BLOCK], tl.float32)
            all_logs = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocab, BLOCK):
                token = start + tl.arange(0, BLOCK)
                log_p, ratio = _log_probabilities(
                    target_ptr, draft_ptr, own_lse, token, token < vocab
                )
                masses, flats, losses, logs = _sums(log_p, ratio, lowest, highest)
                all_masses += masses
                all_flats += flats
                all_losses += losses
                all_logs += logs
            total = tl.sum(all_masses, axis=0)
            flat = tl.sum(all_flats, axis=0)
            loss = tl.sum(all_losses, axis=0)
            logs_sum = tl.sum(all_logs, axis=0)
            for first in range(0, num_kept(protected), KEPT_CHUNK):
                kept = kept_tokens(first, record_ptr, protected, vocab)
                of_token = _log_probabilities(target_ptr, draft_ptr, own_lse, kept, kept >= 0)
                of_masses, of_flats, of_losses, of_logs = _sums(*of_token, lowest, highest)
                total -= tl.sum(of_masses, axis=0)
                flat -= tl.sum(of_flats, axis=0)
                loss -= tl.sum(of_losses, axis=0)
                logs_sum -= tl.sum(of_logs, axis=0)
            total = total / rest
            flat = flat / rest
            log_total = tl.log(total)
            loss = tl.maximum(loss / LOG2_E / total - rest * log_total, 0.0)
            drift = -logs_sum / LOG2_E / total - rest_entropy
            low = tl.where(total < 1.0, w, low)
            high = tl.where(total > 1.0, w, high)
            newton = w * (1.0 - flat) / (total - flat)
            is_inside = (newton > low) & (newton < high)
            following = tl.where(is_inside, newton, tl.sqrt(low) * tl.sqrt(high))
            taken += 1
        loss = tl.minimum(loss, price * price * _EIGHTH)
    draft_lse = draft_lse / LOG2_E
    log_p = tl.load(partials.logit + own_row) - target_lse
    log_q = tl.load(draft_ptr + draft, mask=draft >= 0, other=float("-inf")).to(tl.float32)
    log_q = log_q / temperature - draft_lse
    ratio = log_ratio_of_clipped(log_q - log_p, log_w, log_w + price, log_total)
    ratio = tl.where(is_kept(draft, protected, record_ptr, vocab), 0.0, ratio)
    of_draft = log_p + ratio - log_q
    # Neither what was struck out, nor what the draft does not hold, nor what is no number.
    of_draft = tl.where((log_q > -_INF) & (of_draft == of_draft), of_draft, -_INF)
    clipped_ptr += CLIPPED * own_row
    tl.store(clipped_ptr, log_w)
    tl.store(clipped_ptr + 1, price)
    tl.store(clipped_ptr + 2, log_total)
    tl.store(clipped_ptr + 3, target_lse)
    tl.store(clipped_ptr + 4, draft_lse)
    tl.store(clipped_ptr + LOSS_OF_ROW, loss)
    tl.store(clipped_ptr + DRIFT, drift)
    tl.store(clipped_ptr + OF_P, tl.where(draft >= 0, ratio, 0.0))
    tl.store(clipped_ptr + OF_Q, of_draft)


@triton.jit
def _residuals(log_p, ratio, own, reach):
    """max(p_i m - q, 0) of tokens, by log2 p_i."""
    lowest, highest, log_total = own
    log_m = log_p + log_ratio_of_clipped(ratio, lowest, highest, log_total)
    return tl.maximum(libdevice.exp2(reach + log_m) - libdevice.exp2(log_p + ratio), 0.0)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_UNALIGNED)
def mass_kernel(
    # [num_rows, blocks]
    masses_ptr,
    # As in `clip_kernel`
    clipped_ptr,
    logits_ptr,
    logits_stride,
    records_ptr,
    input_ids_ptr,
    protected,
    sampling,
    row_slots_ptr,
    row_places_ptr,
    draft_stride,
    draft_step_stride,
    num_rows,
    vocab,
    BLOCK: tl.constexpr,
):
    own_row = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(row_slots_ptr + own_row).to(tl.int64)
    place = tl.load(row_places_ptr + own_row)
    place_behind = tl.load(row_places_ptr + own_row + 1, mask=own_row + 1 < num_rows, other=0)
    # Not of a first row, nor of the bonus row.
    if (tl.load(sampling.temperature + slot) == 0.0) | (place == 0) | (place_behind == 0):
        return
    draft = tl.load(input_ids_ptr + own_row + 1)
    if (draft == -1) | (draft >= vocab):
        return
    reach = tl.zeros([], tl.float32)
    strict = tl.zeros([], tl.float32)
    for row in range(own_row - place, own_row):
        of_q = tl.load(clipped_ptr + CLIPPED * row + OF_Q)
        reach = tl.minimum(reach + of_q, 0.0)
        strict = tl.minimum(strict + of_q - tl.load(clipped_ptr + CLIPPED * row + OF_P), 0.0)
    clipped_ptr += CLIPPED * own_row
    log_w = tl.load(clipped_ptr)
    price = tl.load(clipped_ptr + 1)
    log_total = tl.load(clipped_ptr + 2)
    own_lse = (
        tl.load(clipped_ptr + 3) * LOG2_E,
        LOG2_E / tl.load(sampling.drawn_at + slot),
        tl.load(clipped_ptr + 4) * LOG2_E,
    )
    own = (log_w * LOG2_E, (log_w + price) * LOG2_E, log_total * LOG2_E)
    target_ptr = logits_ptr + own_row.to(tl.int64) * logits_stride
    draft_ptr = sampling.draft_logits + slot * draft_stride
    draft_ptr += place.to(tl.int64) * draft_step_stride
    token = block * BLOCK + tl.arange(0, BLOCK)
    log_p, ratio = _log_probabilities(target_ptr, draft_ptr, own_lse, token, token < vocab)
    mass = tl.sum(_residuals(log_p, ratio, own, reach * LOG2_E), axis=0)
    if block == 0:
        tl.store(clipped_ptr + BEFORE, reach)
        tl.store(clipped_ptr + STRICT_BEFORE, strict)
        if price > 0:
            record_ptr = records_ptr + slot * RECORD_SIZE
            for first in range(0, num_kept(protected), KEPT_CHUNK):
                kept = kept_tokens(first, record_ptr, protected, vocab)
                of_kept = _log_probabilities(target_ptr, draft_ptr, own_lse, kept, kept >= 0)
                as_p = _residuals(*of_kept, (0.0, 0.0, 0.0), reach * LOG2_E)
                as_m = _residuals(*of_kept, own, reach * LOG2_E)
                mass += tl.sum(as_p - as_m, axis=0)
    tl.store(masses_ptr + own_row * tl.num_programs(1) + block, mass)


def clip_settings(vocab: int) -> tuple[int, int]:
    """Settings of `clip_kernel`: (block size, warps), 8 logits of a row to a thread."""
    block = min(256 * WARPS, max(256, triton.next_power_of_2(vocab)))
    return block, max(4, block // 256)


def clip_rows(
    logits: torch.Tensor, draws: Draws, shared: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches `clip_kernel`, and `mass_kernel` where a draft can have a second token.

    Args:
        logits: `[num_rows, vocab]` of the step.
        draws: of the step, with `draft_logits`, as wide as the target's.
        shared: of `accept.rule_arguments`.

    Returns:
        `[num_rows, CLIPPED]` and `[num_rows, blocks]` float32; of a row without a draft token, and
        of greedy requests, nothing is found, and the last two numbers and the blocks, whose sum is
        S_i, not of a request's first row.
    """
    assert draws.sampling.drawn_at is not None, "drafts are drawn at a temperature"
    draft_logits = draws.sampling.draft_logits
    num_rows, vocab = draws.pos.shape[0], shared["vocab"]
    clipped = torch.empty((num_rows, CLIPPED.value), device=logits.device)
    block, warps = clip_settings(vocab)
    of_rows = {
        "row_slots_ptr": draws.row_slots,
        "row_places_ptr": draws.row_places,
        "draft_stride": draft_logits.stride(0),
        "draft_step_stride": draft_logits.stride(1),
        "num_rows": num_rows,
    }
    clip_kernel[(num_rows,)](
        clipped,
        logits,
        logits.stride(0),
        TOLERANCE=TOLERANCE,
        BLOCK=block,
        num_warps=warps,
        **of_rows,
        **shared,
    )
    block = min(_MASS_BLOCK, triton.next_power_of_2(vocab))
    masses = torch.empty((num_rows, triton.cdiv(vocab, block)), device=logits.device)
    if draft_logits.shape[1] > 1:
        names = ("records_ptr", "input_ids_ptr", "protected", "sampling", "vocab")
        mass_kernel[masses.shape](
            masses,
            clipped,
            logits,
            logits.stride(0),
            BLOCK=block,
            num_warps=max(1, block // 1024),
            enable_fp_fusion=False,
            **of_rows,
            **{name: shared[name] for name in names},
        )
    return clipped, masses
