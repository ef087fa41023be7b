"""The served distribution in Triton: see `served_dist.naive` for the formulas.

    point_mass_dist  device function: the served distribution of a fixed draft
    clip_kernel      grid (rows)   reads target and draft row once for each Newton step of a
                                   probabilistic draft that has a price

Buffer: clipped [rows, NUM_CLIP_STATS] float32, see `constants.ClipStat`. From its first five
numbers `block_verify` and `resample_kernel` compute log p, log q and log m of any token:
`load_row_inputs`, `load_clip_bounds`, `log_probabilities` and `log_ratio`.

Sums run over all tokens, in 16-byte loads; then the few preserved tokens are subtracted. Tokens
that the draft cannot propose (a logit of -inf) are summed separately. Logarithms of probabilities
are base 2, which takes one instruction each.

Bytes moved: vocab * (itemsizes of both) for each step. All rows of a step are in flight at once, so
only those of a small batch stay in the L2 cache between Newton steps. Not materialised: anything of
the logits' size.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from vllm_mars.kernels.budget.fused import ceil_units, load_budget
from vllm_mars.kernels.constants import C
from vllm_mars.kernels.interface import SamplingInputs
from vllm_mars.kernels.launch import UNALIGNED, UNSPECIALIZED
from vllm_mars.kernels.preserved import is_preserved, num_preserved, preserved_tokens
from vllm_mars.kernels.row_stats.combine import (
    draft_log_sum_exp,
    log_sum_exp,
    preserved_sums,
    reduce_splits,
)
from vllm_mars.kernels.row_stats.fused import (
    Reduced,
    bucket_size,
    divide_logits,
    draft_strides,
    num_lanes,
    temperature_divisor,
    unpack_value,
)

# Largest error of F(w). After division by F(w) any w yields a distribution within the bound and
# with an exact log-ratio, so w is solved only roughly: the error costs under 1% of the gain.
TOLERANCE = 1e-2
# Three programs of `clip_kernel`, 80 registers a thread, fit a multiprocessor.
WARPS = 8


class RowDecisions(NamedTuple):
    """`naive.RowDecision` as vectors on the device, except drift, in nats."""

    verdict: tl.tensor
    bias: tl.tensor
    log_z: tl.tensor
    loss: tl.tensor
    gained: tl.tensor
    drift: tl.tensor


class RowInputs(NamedTuple):
    """Logits of a row, target and draft, and their normalization, base 2."""

    target_ptr: tl.tensor
    draft_ptr: tl.tensor
    target_lse: tl.tensor
    draft_scale: tl.tensor
    draft_lse: tl.tensor
    divisor: tl.tensor


class ClipBounds(NamedTuple):
    """Bounds of log2 q - log2 p, log2 w and log2 (w e^b), and log2 F(w)."""

    lowest: tl.tensor
    highest: tl.tensor
    log_total: tl.tensor


@triton.jit
def max_bias(units):
    return tl.sqrt(8.0 * units.to(tl.float32) * C.UNIT) * C.CAUTION


@triton.jit
def log_share_of(log_p, rest):
    return tl.where(rest > 0.0, tl.minimum(log_p - tl.log(tl.maximum(rest, 1e-30)), 0.0), 0.0)


@triton.jit
def log_partition(log_share, bias):
    """log Z for a token with the share exp(log_share), in (0, 1], of R."""
    # log(0) is -inf, which adds nothing.
    log_others = tl.log(tl.maximum(1.0 - tl.exp(log_share), 0.0))
    # For small p, 1 - p loses its digits, and log(1 - p) is -p.
    log_others = tl.where(log_share < -9.0, -tl.exp(log_share), log_others)
    biased = log_share + bias
    largest = tl.maximum(log_others, biased)
    log_z = largest + tl.log(tl.exp(log_others - largest) + tl.exp(biased - largest))
    # Exactly 0 without a bias, unlike a sum of rounded logarithms.
    return tl.where(bias > 0.0, log_z, 0.0)


@triton.jit
def point_mass_dist(log_share, rest, bias, left):
    """Served distribution of a fixed draft: log Z, and loss and gain in units."""
    log_z = log_partition(log_share, bias)
    share = tl.exp(tl.minimum(log_share + bias - log_z, 0.0))
    # The loss is at most `left` by Hoeffding's lemma; rounding may exceed it by a unit.
    loss = tl.minimum(ceil_units(rest * tl.maximum(share * bias - log_z, 0.0)), left)
    gained = rest * tl.maximum(share - tl.exp(log_share), 0.0) * C.PER_NAT + 0.5
    return log_z, loss, gained.to(tl.int64)


@triton.jit
def point_mass_drift(log_z, log_p, rest, entropy):
    """Drift of `point_mass_dist` in nats."""
    return (1.0 - tl.exp(-log_z)) * (-log_p * rest - entropy)


@triton.jit
def log_ratio_of_fixed(decisions, IS_DRAFT: tl.constexpr):
    """log m - log p of a token, not preserved, at each position of a fixed draft."""
    ratio = -decisions.log_z
    if IS_DRAFT:
        # For a token that is accepted outright log Z is its log p.
        ratio += tl.where(decisions.verdict == C.VERDICT.RELAXED, 0.0, decisions.bias)
    return ratio


@triton.jit
def clip_price(remaining, price, num_positions):
    """Price in nats of a probabilistic draft: see `naive.clip_prices`."""
    per_position = tl.maximum(remaining, 0) // tl.maximum(num_positions, 1)
    return tl.minimum(price.to(tl.float32) * C.UNIT, max_bias(per_position))


@triton.jit
def log_probabilities(row_inputs, token, mask, APPLY_TEMPERATURE: tl.constexpr):
    """log2 p and log2 q - log2 p of tokens; log2 p is LEAST_LOG2 if the mask is False."""
    target = tl.load(row_inputs.target_ptr + token, mask=mask, other=float("-inf"))
    target = divide_logits(target, row_inputs.divisor, APPLY_TEMPERATURE)
    draft = tl.load(row_inputs.draft_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)
    log_p = tl.maximum(target * C.LOG2_E - row_inputs.target_lse, C.LEAST_LOG2)
    return log_p, draft * row_inputs.draft_scale - row_inputs.draft_lse - log_p


@triton.jit
def load_row_inputs(clipped_ptr, target_ptr, draft_ptr, draft_temperature, divisor):
    """`RowInputs` of a row that `clip_kernel` has read."""
    return RowInputs(
        target_ptr=target_ptr,
        draft_ptr=draft_ptr,
        target_lse=tl.load(clipped_ptr + C.CLIP_STAT.TARGET_LSE),
        draft_scale=C.LOG2_E / draft_temperature,
        draft_lse=tl.load(clipped_ptr + C.CLIP_STAT.DRAFT_LSE),
        divisor=divisor,
    )


@triton.jit
def load_clip_bounds(clipped_ptr):
    log_w = tl.load(clipped_ptr + C.CLIP_STAT.LOG_W)
    return ClipBounds(
        lowest=log_w,
        highest=log_w + tl.load(clipped_ptr + C.CLIP_STAT.PRICE),
        log_total=tl.load(clipped_ptr + C.CLIP_STAT.LOG_TOTAL),
    )


@triton.jit
def log_ratio(ratio, bounds):
    """log2 m - log2 p of tokens, not preserved, from log2 q - log2 p."""
    clipped = tl.minimum(tl.maximum(ratio, bounds.lowest), bounds.highest) - bounds.log_total
    # Tokens that the draft cannot propose are preserved.
    return tl.where(ratio == -C.INF, 0.0, clipped)


@triton.jit
def _sums(log_p, ratio, lowest, highest):
    """Terms of a Newton step for each token; base 2."""
    clipped = log_ratio(ratio, ClipBounds(lowest=lowest, highest=highest, log_total=0.0))
    mass = libdevice.exp2(log_p + clipped)
    drafted = tl.where(ratio == -C.INF, 0.0, mass)
    flat = tl.where(clipped == ratio, drafted, 0.0)
    others = mass - drafted
    # Clipped p, the part that is not clipped, and the terms of KL and E[log p]; then p and p log p
    # of tokens that the draft cannot propose.
    return drafted, flat, drafted * clipped, drafted * log_p, others, others * log_p


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def clip_kernel(
    # [num_rows, NUM_CLIP_STATS]
    clipped_ptr,
    # [num_rows, vocab]
    logits_ptr,
    logits_stride,
    # `Partials`
    partials,
    # [num_slots, RECORD_SIZE]
    records_ptr,
    # [num_rows]; the draft token of a row is the next entry
    input_ids_ptr,
    # `Protected` or None
    protected,
    # `Constraints` or None
    constraints,
    # [num_slots]
    total_len_ptr,
    # [num_slots]
    prompt_len_ptr,
    # `SamplingTensors`
    sampling,
    # [num_rows], slot of each row
    expanded_idx_mapping_ptr,
    # [num_rows], position of each row in its request
    expanded_local_pos_ptr,
    # Strides of `sampling.draft_logits`, [num_slots, steps, vocab]
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
    APPLY_TEMPERATURE: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(expanded_idx_mapping_ptr + row).to(tl.int64)
    draft_temperature = tl.load(sampling.draft_temperature + slot)
    if draft_temperature == 0.0:
        return
    local_pos = tl.load(expanded_local_pos_ptr + row)
    # Rows of the request have consecutive local positions.
    offset = tl.arange(0, POSITIONS)
    rows = row - local_pos + offset
    local_positions = tl.load(expanded_local_pos_ptr + rows, mask=rows < num_rows, other=-1)
    length = tl.sum((local_positions == offset).to(tl.int32), axis=0) - 1
    draft = tl.load(input_ids_ptr + row + 1, mask=local_pos < length, other=-1)
    # GRAMMAR_REJECTED tokens were sampled, so they are not skipped.
    if (draft == -1) | (draft >= vocab):
        return
    record_ptr = records_ptr + slot * C.RECORD_SIZE
    produced = tl.load(total_len_ptr + slot) - tl.load(prompt_len_ptr + slot)
    remaining, price, tokens_left = load_budget(record_ptr, produced, tl.arange(0, 1))
    # In the longest draft: the length of this one can depend on its tokens, and a price must not.
    num_positions = tl.minimum(num_speculative_tokens, tokens_left)
    price = clip_price(tl.max(remaining, axis=0), price, num_positions)
    may_pay = local_pos < tokens_left
    if constraints is not None:
        may_pay = may_pay & (tl.load(constraints.blocked + row) == 0)

    # int64 before the multiply: a row can start past 2**31 elements.
    target_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    draft_ptr = sampling.draft_logits + slot * draft_stride
    draft_ptr += local_pos.to(tl.int64) * draft_step_stride
    # The combining functions take vectors of rows.
    row_vector = row + tl.arange(0, 1)
    is_row = row_vector >= 0
    packed, _ = reduce_splits(partials, row_vector, is_row, num_splits, SPLITS, False)
    lse, entropy = log_sum_exp(
        partials=partials,
        row=row_vector,
        mask=is_row,
        first=unpack_value(packed),
        num_splits=num_splits,
        SPLITS=SPLITS,
    )
    target_lse = tl.max(lse, axis=0)
    preserved_mass, preserved_entropy = preserved_sums(partials, row_vector, lse == lse, lse)
    # Mass and entropy of p outside the preserved tokens; q may be 0 for some of these.
    unpreserved = tl.max(1.0 - preserved_mass, axis=0)
    unpreserved_entropy = tl.max(entropy - preserved_entropy, axis=0)
    target_lse *= C.LOG2_E
    draft_lse = draft_log_sum_exp(partials, row, num_splits, SPLITS)
    divisor = temperature_divisor(sampling, slot, APPLY_TEMPERATURE)
    row_inputs = RowInputs(
        target_ptr=target_ptr,
        draft_ptr=draft_ptr,
        target_lse=target_lse,
        draft_scale=C.LOG2_E / draft_temperature,
        draft_lse=draft_lse,
        divisor=divisor,
    )
    is_finite = (tl.abs(target_lse) < C.INF) & (tl.abs(draft_lse) < C.INF)
    may_pay = may_pay & is_finite & (unpreserved > C.LEAST_REST)
    price = tl.where(may_pay, tl.minimum(price, C.MAX_CLIP_PRICE), 0.0)
    # A loop condition inside a branch cannot read a field of a constant.
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
        rest = unpreserved
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
                    row_inputs, token, token < vocab, APPLY_TEMPERATURE
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
            for first in range(0, num_preserved(protected, constraints, row), C.PRESERVED_CHUNK):
                preserved = preserved_tokens(first, record_ptr, protected, constraints, row, vocab)
                log_p, ratio = log_probabilities(
                    row_inputs, preserved, preserved >= 0, APPLY_TEMPERATURE
                )
                masses, flats, losses, logs, others, other_logs = _sums(
                    log_p, ratio, lowest, highest
                )
                total -= tl.sum(masses, axis=0)
                flat -= tl.sum(flats, axis=0)
                loss -= tl.sum(losses, axis=0)
                logs_sum -= tl.sum(logs, axis=0)
                undrafted -= tl.sum(others, axis=0)
                undrafted_logs -= tl.sum(other_logs, axis=0)
            rest = unpreserved - undrafted
            is_enough = rest > C.LEAST_REST
            # 1 ends the loop if too little mass is left outside S.
            total = tl.where(is_enough, total / rest, 1.0)
            flat = flat / rest
            log_total = tl.log(total)
            loss = tl.maximum(loss / C.LOG2_E / total - rest * log_total, 0.0)
            drift = -logs_sum / C.LOG2_E / total - unpreserved_entropy - undrafted_logs / C.LOG2_E
            low = tl.where(total < 1.0, w, low)
            high = tl.where(total > 1.0, w, high)
            # F is piecewise linear: w <- w (1 - flat) / (F(w) - flat), or bisection of log w.
            newton = w * (1.0 - flat) / (total - flat)
            is_inside = (newton > low) & (newton < high)
            following = tl.where(is_inside, newton, tl.sqrt(low) * tl.sqrt(high))
            taken += 1
        loss = tl.minimum(loss, price * price * C.EIGHTH)
        # If too little mass is left outside S, m = p as at price 0.
        is_enough = rest > C.LEAST_REST
        price = tl.where(is_enough, price, 0.0)
        log_w = tl.where(is_enough, log_w, 0.0)
        loss = tl.where(is_enough, loss, 0.0)
        drift = tl.where(is_enough, drift, 0.0)
    bounds = ClipBounds(
        lowest=log_w * C.LOG2_E,
        highest=(log_w + price) * C.LOG2_E,
        log_total=log_total * C.LOG2_E,
    )
    # log2 q - log2 p, and log m - log p, of the draft token.
    log_p, q_ratio = log_probabilities(row_inputs, draft, draft >= 0, APPLY_TEMPERATURE)
    ratio = log_ratio(q_ratio, bounds) / C.LOG2_E
    is_draft_preserved = is_preserved(draft, protected, None, row, record_ptr, vocab)
    if constraints is not None:
        is_draft_preserved = is_draft_preserved | (tl.load(constraints.repeats + row) != 0)
    ratio = tl.where(is_draft_preserved, 0.0, ratio)
    log_accept_ratio = ratio - q_ratio / C.LOG2_E
    # -inf for tokens that a grammar or the target forbids or q does not hold, and for NaN.
    may_accept = (draft >= 0) & (q_ratio > -C.INF) & (log_p > C.LEAST_LOG2)
    log_accept_ratio = tl.where(
        may_accept & (log_accept_ratio == log_accept_ratio), log_accept_ratio, -C.INF
    )
    clipped_ptr += C.NUM_CLIP_STATS * row
    tl.store(clipped_ptr + C.CLIP_STAT.LOG_W, bounds.lowest)
    tl.store(clipped_ptr + C.CLIP_STAT.PRICE, price * C.LOG2_E)
    tl.store(clipped_ptr + C.CLIP_STAT.LOG_TOTAL, bounds.log_total)
    tl.store(clipped_ptr + C.CLIP_STAT.TARGET_LSE, target_lse)
    tl.store(clipped_ptr + C.CLIP_STAT.DRAFT_LSE, draft_lse)
    tl.store(clipped_ptr + C.CLIP_STAT.LOSS, loss)
    tl.store(clipped_ptr + C.CLIP_STAT.DRIFT, drift)
    tl.store(clipped_ptr + C.CLIP_STAT.LOG_RATIO, tl.where(draft >= 0, ratio, 0.0))
    tl.store(clipped_ptr + C.CLIP_STAT.LOG_ACCEPT_RATIO, log_accept_ratio)


@functools.cache
def clip_settings(vocab: int) -> tuple[int, int]:
    """Settings of `clip_kernel`: (block size, warps), 8 logits of a row per thread."""
    block = min(256 * WARPS, max(256, triton.next_power_of_2(vocab)))
    return block, max(4, block // 256)


@functools.cache
def _cached_clipped(num_rows: int, device: torch.device) -> torch.Tensor:
    return torch.empty((num_rows, C.value.NUM_CLIP_STATS), device=device)


def clip_rows(reduced: Reduced, sampling_inputs: SamplingInputs) -> torch.Tensor:
    """Launches `clip_kernel`; `draft_logits` must be as wide as the target's.

    Returns:
        `[>= num_rows, NUM_CLIP_STATS]` float32, overwritten in the next step; `mass_kernel` writes
        the last two columns. Rows of greedy requests or without a draft token are not written.
    """
    sampling = sampling_inputs.sampling
    assert sampling.draft_temperature is not None, "probabilistic drafts have a temperature"
    assert sampling.draft_logits is not None, "probabilistic drafts have logits"
    step = reduced.step
    logits = step.logits
    num_rows = sampling_inputs.pos.shape[0]
    max_draft_len, vocab = sampling.draft_logits.shape[1:]
    draft_stride, draft_step_stride = draft_strides(sampling_inputs)
    block, warps = clip_settings(vocab)
    clipped = _cached_clipped(bucket_size(num_rows, 256), logits.device)
    reduced.launch_cache.launch(
        clip_kernel,
        (num_rows, 1, 1),
        clipped,
        logits,
        logits.stride(0),
        reduced.partials,
        step.records.table,
        step.input_ids,
        reduced.engine_params.protected,
        reduced.constraints,
        step.total_len,
        step.prompt_len,
        sampling,
        sampling_inputs.expanded_idx_mapping,
        sampling_inputs.expanded_local_pos,
        draft_stride,
        draft_step_stride,
        max_draft_len,
        num_rows,
        vocab,
        reduced.num_splits,
        num_lanes(vocab),
        reduced.num_positions,
        TOLERANCE,
        block,
        sampling_inputs.apply_temperature,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return clipped
