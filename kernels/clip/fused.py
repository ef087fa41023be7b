"""The rows of drawn drafts in Triton; `clip` has the rule and the meaning of each step.

    clip_kernel   grid (rows)           finds what a row may pay, and streams target and draft once
                                        for each step of Newton's method
    mass_kernel   grid (rows, blocks)   behind it: what a draft has reached before the row, p_i, and
                                        a block's part of S_i (`rule`); not of a request's first row

What they find are CLIPPED numbers of a row (`constants`); from the first five of them come log p,
log q and log m of its tokens, by `load_clipped`, `log_probabilities` and `log_ratio`, for the draw
as well.

Any w, divided by F(w), serves a distribution that keeps the bound and has an exact log-ratio, so w
is found as roughly as pays: what F(w) is off by here costs less than 1 % of what a price gains.

All tokens of a row are summed, and then the few that are kept are taken off, so that a row is read
in 16-byte loads. What the draft cannot propose, a logit of -inf, is summed apart on the way.
Probabilities are logarithms to the base 2, which take one instruction each.

Nothing of the logits' size is written. Bytes read: vocab * (itemsizes of both) for each step and
for S_i. Only the rows of a small batch stay in the L2 cache from pass to pass: all rows of a step
are under way at once. A row without a price is not read by `clip_kernel`.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from vllm_mars.kernels.constants import C
from vllm_mars.kernels.kept.fused import is_kept, kept_tokens, num_kept
from vllm_mars.kernels.ledger.fused import allowance
from vllm_mars.kernels.rows.fused import (
    Reduced,
    draft_log_sum_exp,
    draft_strides,
    kept_size,
    kept_sums,
    log_sum_exp,
    num_lanes,
    reduce_splits,
    unpack_value,
)
from vllm_mars.kernels.rules.fused import drawn_price
from vllm_mars.kernels.step import Draws

# What F(w) may be off by before the division by it.
TOLERANCE = 1e-2
# Of `clip_kernel`: three programs of 80 registers fit a multiprocessor.
WARPS = 8
# Logits that a program of `mass_kernel` reads.
_MASS_BLOCK = 8192
_UNALIGNED = [
    *("input_ids_ptr", "total_len_ptr", "prompt_len_ptr", "row_slots_ptr", "row_places_ptr"),
]
_UNSPECIALIZED = ["num_speculative_tokens", "num_splits", "num_rows"]


@triton.jit
def log_probabilities(target_ptr, draft_ptr, row, token, mask):
    """log2 p, and log2 q - log2 p, of tokens; of others a p of 0.

    `row` is the target's log-sum-exp, what the draft's logits are multiplied by, and the draft's
    log-sum-exp, base 2.
    """
    target_lse, scale, draft_lse = row
    target = tl.load(target_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)
    draft = tl.load(draft_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)
    log_p = tl.maximum(target * C.LOG2_E - target_lse, C.LEAST_LOG2)
    return log_p, draft * scale - draft_lse - log_p


@triton.jit
def load_clipped(clipped_ptr, drawn_at):
    """Of a row that `clip_kernel` has read, what `log_probabilities` and `log_ratio` take."""
    row = (
        tl.load(clipped_ptr + C.TARGET_LSE),
        C.LOG2_E / drawn_at,
        tl.load(clipped_ptr + C.DRAFT_LSE),
    )
    log_w = tl.load(clipped_ptr + C.LOG_W)
    own = (
        log_w,
        log_w + tl.load(clipped_ptr + C.PRICE_OF_ROW),
        tl.load(clipped_ptr + C.LOG_TOTAL),
    )
    return row, own


@triton.jit
def log_ratio(ratio, own):
    """log2 m - log2 p of tokens, not kept otherwise, by log2 q - log2 p: see `clip`.

    `own` is log w, that and the price, and log F(w), base 2.
    """
    lowest, highest, log_total = own
    clipped = tl.minimum(tl.maximum(ratio, lowest), highest) - log_total
    # What the draft cannot propose keeps its probability.
    return tl.where(ratio == -C.INF, 0.0, clipped)


@triton.jit
def _sums(log_p, ratio, low, high):
    """What tokens add to a pass of Newton's method; base 2.

    To the sum of clipped p, to that which neither end clips, to KL, and to E[log p]; in their place
    tokens that the draft cannot propose add to a sum of p, and of p log p.
    """
    clipped = log_ratio(ratio, (low, high, 0.0))
    mass = libdevice.exp2(log_p + clipped)
    drafted = tl.where(ratio == -C.INF, 0.0, mass)
    flat = tl.where(clipped == ratio, drafted, 0.0)
    others = mass - drafted
    return drafted, flat, drafted * clipped, drafted * log_p, others, others * log_p


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
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
    guard,
    total_len_ptr,
    prompt_len_ptr,
    sampling,
    # [num_rows] each: a row's slot, and its place within its request
    row_slots_ptr,
    row_places_ptr,
    draft_stride,
    draft_step_stride,
    num_speculative_tokens,
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
    # What fills up a batch of a fixed size.
    if slot < 0:
        return
    drawn_at = tl.load(sampling.drawn_at + slot)
    if drawn_at == 0.0:
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
    record_ptr = records_ptr + slot * C.RECORD_SIZE
    produced = tl.load(total_len_ptr + slot) - tl.load(prompt_len_ptr + slot)
    most, price, room = allowance(record_ptr, produced, tl.arange(0, 1))
    # Of the longest draft: where this one ends can depend on its tokens, on which no price may.
    useful = tl.minimum(num_speculative_tokens, room)
    price = drawn_price(tl.max(most, axis=0), price, useful)
    may_pay = place < room
    if guard is not None:
        may_pay = may_pay & (tl.load(guard.blocked + own_row) == 0)

    # int64 before the multiply: a row can start past 2**31 elements.
    target_ptr = logits_ptr + own_row.to(tl.int64) * logits_stride
    draft_ptr = sampling.draft_logits + slot * draft_stride
    draft_ptr += place.to(tl.int64) * draft_step_stride
    own = own_row + tl.arange(0, 1)
    packed, _ = reduce_splits(partials, own, own >= 0, num_splits, SPLITS, False)
    lse, entropy = log_sum_exp(partials, own, own >= 0, unpack_value(packed), num_splits, SPLITS)
    target_lse = tl.max(lse, axis=0)
    mass, of_kept = kept_sums(partials, own, lse == lse, lse)
    # What p has, and its entropy, of the tokens that are not kept, but that a draft may lack.
    unkept = tl.max(1.0 - mass, axis=0)
    unkept_entropy = tl.max(entropy - of_kept, axis=0)
    target_lse *= C.LOG2_E
    scale = C.LOG2_E / drawn_at
    draft_lse = draft_log_sum_exp(partials, own_row, num_splits, SPLITS)
    own_lse = (target_lse, scale, draft_lse)
    is_finite = (tl.abs(target_lse) < C.INF) & (tl.abs(draft_lse) < C.INF)
    may_pay = may_pay & is_finite & (unkept > C.LEAST_REST)
    price = tl.where(may_pay, tl.minimum(price, C.MOST_CLIP_PRICE), 0.0)
    # Within a branch the condition of a loop knows no field of a constant.
    STEPS: tl.constexpr = C.STEPS
    log_w = 0.0
    log_total = 0.0
    loss = 0.0
    drift = 0.0
    if price > 0:
        low = tl.exp(-price)
        high = 1.0
        w = 1.0
        following = tl.exp(price * C.START)
        total = 0.0
        rest = unkept
        taken = 0
        while (tl.abs(total - 1.0) > TOLERANCE) & (taken < STEPS):
            w = following
            log_w = tl.log(w)
            lowest = log_w * C.LOG2_E
            highest = (log_w + price) * C.LOG2_E
            all_masses = tl.zeros([BLOCK], tl.float32)
            all_flats = tl.zeros([BLOCK], tl.float32)
            all_losses = tl.zeros([BLOCK], tl.float32)
            all_logs = tl.zeros([BLOCK], tl.float32)
            all_others = tl.zeros([BLOCK], tl.float32)
            all_other_logs = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocab, BLOCK):
                token = start + tl.arange(0, BLOCK)
                log_p, ratio = log_probabilities(
                    target_ptr, draft_ptr, own_lse, token, token < vocab
                )
                masses, flats, losses, logs, others, other_logs = _sums(
                    log_p, ratio, lowest, highest
                )
                all_masses += masses
                all_flats += flats
                all_losses += losses
                all_logs += logs
                all_others += others
                all_other_logs += other_logs
            total = tl.sum(all_masses, axis=0)
            flat = tl.sum(all_flats, axis=0)
            loss = tl.sum(all_losses, axis=0)
            logs_sum = tl.sum(all_logs, axis=0)
            undrafted = tl.sum(all_others, axis=0)
            undrafted_logs = tl.sum(all_other_logs, axis=0)
            for first in range(0, num_kept(protected, guard, own_row), C.KEPT_CHUNK):
                kept = kept_tokens(first, record_ptr, protected, guard, own_row, vocab)
                of_token = log_probabilities(target_ptr, draft_ptr, own_lse, kept, kept >= 0)
                masses, flats, losses, logs, others, other_logs = _sums(*of_token, lowest, highest)
                total -= tl.sum(masses, axis=0)
                flat -= tl.sum(flats, axis=0)
                loss -= tl.sum(losses, axis=0)
                logs_sum -= tl.sum(logs, axis=0)
                undrafted -= tl.sum(others, axis=0)
                undrafted_logs -= tl.sum(other_logs, axis=0)
            rest = unkept - undrafted
            is_enough = rest > C.LEAST_REST
            # Where it is not, that ends the passes.
            total = tl.where(is_enough, total / rest, 1.0)
            flat = flat / rest
            log_total = tl.log(total)
            loss = tl.maximum(loss / C.LOG2_E / total - rest * log_total, 0.0)
            drift = -logs_sum / C.LOG2_E / total - unkept_entropy - undrafted_logs / C.LOG2_E
            low = tl.where(total < 1.0, w, low)
            high = tl.where(total > 1.0, w, high)
            newton = w * (1.0 - flat) / (total - flat)
            is_inside = (newton > low) & (newton < high)
            following = tl.where(is_inside, newton, tl.sqrt(low) * tl.sqrt(high))
            taken += 1
        loss = tl.minimum(loss, price * price * C.EIGHTH)
        # As without a price.
        is_enough = rest > C.LEAST_REST
        price = tl.where(is_enough, price, 0.0)
        log_w = tl.where(is_enough, log_w, 0.0)
        loss = tl.where(is_enough, loss, 0.0)
        drift = tl.where(is_enough, drift, 0.0)
    clipped = (log_w * C.LOG2_E, (log_w + price) * C.LOG2_E, log_total * C.LOG2_E)
    log_p, of_q = log_probabilities(target_ptr, draft_ptr, own_lse, draft, draft >= 0)
    ratio = log_ratio(of_q, clipped) / C.LOG2_E
    keeps_draft = is_kept(draft, protected, None, own_row, record_ptr, vocab)
    if guard is not None:
        keeps_draft = keeps_draft | (tl.load(guard.repeats + own_row) != 0)
    ratio = tl.where(keeps_draft, 0.0, ratio)
    of_draft = ratio - of_q / C.LOG2_E
    # Neither what was struck out, nor what the draft does not hold or the target forbids, nor what
    # is no number.
    is_there = (draft >= 0) & (of_q > -C.INF) & (log_p > C.LEAST_LOG2)
    of_draft = tl.where(is_there & (of_draft == of_draft), of_draft, -C.INF)
    clipped_ptr += C.CLIPPED * own_row
    tl.store(clipped_ptr + C.LOG_W, clipped[0])
    tl.store(clipped_ptr + C.PRICE_OF_ROW, price * C.LOG2_E)
    tl.store(clipped_ptr + C.LOG_TOTAL, clipped[2])
    tl.store(clipped_ptr + C.TARGET_LSE, target_lse)
    tl.store(clipped_ptr + C.DRAFT_LSE, draft_lse)
    tl.store(clipped_ptr + C.LOSS_OF_ROW, loss)
    tl.store(clipped_ptr + C.DRIFT, drift)
    tl.store(clipped_ptr + C.OF_P, tl.where(draft >= 0, ratio, 0.0))
    tl.store(clipped_ptr + C.OF_Q, of_draft)


@triton.jit
def _residuals(log_p, ratio, own, reach):
    """max(p_i m - q, 0) of tokens, by log2 p_i."""
    log_m = log_p + log_ratio(ratio, own)
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
    guard,
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
    place = tl.load(row_places_ptr + own_row)
    place_behind = tl.load(row_places_ptr + own_row + 1, mask=own_row + 1 < num_rows, other=0)
    # Not of a first row, nor of the bonus row.
    if (place == 0) | (place_behind == 0):
        return
    slot = tl.load(row_slots_ptr + own_row).to(tl.int64)
    # What fills up a batch of a fixed size.
    if slot < 0:
        return
    drawn_at = tl.load(sampling.drawn_at + slot)
    if drawn_at == 0.0:
        return
    draft = tl.load(input_ids_ptr + own_row + 1)
    if (draft == -1) | (draft >= vocab):
        return
    reach = tl.zeros([], tl.float32)
    strict = tl.zeros([], tl.float32)
    for row in range(own_row - place, own_row):
        of_q = tl.load(clipped_ptr + C.CLIPPED * row + C.OF_Q)
        reach = tl.minimum(reach + of_q, 0.0)
        strict = tl.minimum(strict + of_q - tl.load(clipped_ptr + C.CLIPPED * row + C.OF_P), 0.0)
    clipped_ptr += C.CLIPPED * own_row
    own_lse, own = load_clipped(clipped_ptr, drawn_at)
    target_ptr = logits_ptr + own_row.to(tl.int64) * logits_stride
    draft_ptr = sampling.draft_logits + slot * draft_stride
    draft_ptr += place.to(tl.int64) * draft_step_stride
    token = block * BLOCK + tl.arange(0, BLOCK)
    log_p, ratio = log_probabilities(target_ptr, draft_ptr, own_lse, token, token < vocab)
    mass = tl.sum(_residuals(log_p, ratio, own, reach * C.LOG2_E), axis=0)
    if block == 0:
        tl.store(clipped_ptr + C.BEFORE, reach)
        tl.store(clipped_ptr + C.STRICT_BEFORE, strict)
        if tl.load(clipped_ptr + C.PRICE_OF_ROW) > 0:
            record_ptr = records_ptr + slot * C.RECORD_SIZE
            for first in range(0, num_kept(protected, guard, own_row), C.KEPT_CHUNK):
                kept = kept_tokens(first, record_ptr, protected, guard, own_row, vocab)
                of_kept = log_probabilities(target_ptr, draft_ptr, own_lse, kept, kept >= 0)
                as_p = _residuals(*of_kept, (0.0, 0.0, 0.0), reach * C.LOG2_E)
                as_m = _residuals(*of_kept, own, reach * C.LOG2_E)
                mass += tl.sum(as_p - as_m, axis=0)
    tl.store(masses_ptr + own_row * tl.num_programs(1) + block, mass)


@functools.cache
def clip_settings(vocab: int) -> tuple[int, int]:
    """Settings of `clip_kernel`: (block size, warps), 8 logits of a row to a thread."""
    block = min(256 * WARPS, max(256, triton.next_power_of_2(vocab)))
    return block, max(4, block // 256)


@functools.cache
def mass_settings(vocab: int) -> tuple[int, int]:
    """Settings of `mass_kernel`: (blocks of a row, block size)."""
    block = min(_MASS_BLOCK, triton.next_power_of_2(vocab))
    return triton.cdiv(vocab, block), block


@functools.cache
def _kept_clipped(
    num_rows: int, num_blocks: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    clipped = torch.empty((num_rows, C.value.CLIPPED), device=device)
    return clipped, torch.empty((num_rows, num_blocks), device=device)


def clip_rows(reduced: Reduced, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches `clip_kernel`, and `mass_kernel` where a draft can have a second token.

    Args:
        reduced: the step.
        draws: of the step, with `draft_logits`, as wide as the target's.

    Returns:
        `[num_rows, CLIPPED]` and `[num_rows, blocks]` float32, and maybe rows behind these; of a
        row without a draft token, and of greedy requests, nothing is found, and the last two
        numbers and the blocks, whose sum is S_i, not of a request's first row. They are written
        over in the next step.
    """
    assert draws.sampling.drawn_at is not None, "drafts are drawn at a temperature"
    assert draws.sampling.draft_logits is not None, "and these are kept"
    step, launch = reduced.step, reduced.variant.launch
    most_drafts, vocab = draws.sampling.draft_logits.shape[1:]
    logits, num_rows = step.logits, draws.pos.shape[0]
    block, warps = clip_settings(vocab)
    num_blocks, mass_block = mass_settings(vocab)
    clipped, masses = _kept_clipped(kept_size(num_rows, 256), num_blocks, logits.device)
    of_rows = draws.row_slots, draws.row_places, *draft_strides(draws)
    launch(
        clip_kernel,
        (num_rows, 1, 1),
        clipped,
        logits,
        logits.stride(0),
        reduced.partials,
        step.records.table,
        step.input_ids,
        reduced.rule.protected,
        reduced.guard,
        step.total_len,
        step.prompt_len,
        draws.sampling,
        *of_rows,
        most_drafts,
        num_rows,
        vocab,
        reduced.num_splits,
        num_lanes(vocab),
        reduced.num_positions,
        TOLERANCE,
        block,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    if most_drafts > 1:
        launch(
            mass_kernel,
            (num_rows, num_blocks, 1),
            masses,
            clipped,
            logits,
            logits.stride(0),
            step.records.table,
            step.input_ids,
            reduced.rule.protected,
            reduced.guard,
            draws.sampling,
            *of_rows,
            num_rows,
            vocab,
            mass_block,
            num_warps=max(1, mass_block // 1024),
            enable_fp_fusion=False,
        )
    return clipped, masses
