"""The law of what is sampled, in Triton; `served_dist.naive` has its formulas.

    point_mass_dist  a device function: what is served where a draft is not drawn
    clip_kernel      grid (rows)   finds what a row of a drawn draft may pay, and streams target and
                                draft once for each step of Newton's method

What the kernel finds of a row is `constants.ClipStat`; from its first five numbers come
log p, log q and log m of its tokens, by `load_clipped`, `log_probabilities` and `log_ratio`, for
`block_verify` and the draw as well.

Any w, divided by F(w), serves a distribution that keeps the bound and has an exact log-ratio, so w
is found as roughly as pays: what F(w) is off by here costs less than 1 % of what a price gains.

All tokens of a row are summed, and then the few that are kept are taken off, so that a row is read
in 16-byte loads. What the draft cannot propose, a logit of -inf, is summed apart on the way.
Probabilities are logarithms to the base 2, which take one instruction each.

Nothing of the logits' size is written. Bytes read: vocab * (itemsizes of both) for each step. Only
the rows of a small batch stay in the L2 cache from pass to pass: all rows of a step are under way
at once. A row without a price is not read.
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

# What F(w) may be off by before the division by it.
TOLERANCE = 1e-2
# Of `clip_kernel`: three programs of 80 registers fit a multiprocessor.
WARPS = 8
_UNALIGNED = [
    *(
        "input_ids_ptr",
        "total_len_ptr",
        "prompt_len_ptr",
        "expanded_idx_mapping_ptr",
        "expanded_local_pos_ptr",
    ),
]
_UNSPECIALIZED = ["num_speculative_tokens", "num_splits", "num_rows"]


class RowDecisions(NamedTuple):
    """As `naive.RowDecision`: vectors on the device; loss and gain in units, the drift in nats."""

    verdict: tl.tensor
    bias: tl.tensor
    log_z: tl.tensor
    loss: tl.tensor
    gained: tl.tensor
    drift: tl.tensor


@triton.jit
def max_bias(units):
    """The largest b that loses no more than so many units, by Hoeffding's lemma, in nats."""
    return tl.sqrt(8.0 * units.to(tl.float32) * C.UNIT) * C.CAUTION


@triton.jit
def log_share_of(log_p, rest):
    """The logarithm of a token's share of what is not kept."""
    return tl.where(rest > 0.0, tl.minimum(log_p - tl.log(tl.maximum(rest, 1e-30)), 0.0), 0.0)


@triton.jit
def log_partition(log_share, bias):
    """log(1 - p + p exp(bias)) of a token that has the share p in (0, 1] of what is not kept."""
    # log(0) is -inf, which then adds nothing.
    log_others = tl.log(tl.maximum(1.0 - tl.exp(log_share), 0.0))
    # Where p is small 1 - p loses its digits: -p is log(1 - p) there.
    log_others = tl.where(log_share < -9.0, -tl.exp(log_share), log_others)
    biased = log_share + bias
    largest = tl.maximum(log_others, biased)
    log_z = largest + tl.log(tl.exp(log_others - largest) + tl.exp(biased - largest))
    # Exactly 0 without a bias, which a sum of rounded logarithms is not.
    return tl.where(bias > 0.0, log_z, 0.0)


@triton.jit
def point_mass_dist(log_share, rest, bias, left):
    """What is served where q is a point: log Z, and loss and gain in units."""
    log_z = log_partition(log_share, bias)
    share = tl.exp(tl.minimum(log_share + bias - log_z, 0.0))
    # No more than what is left, by Hoeffding's lemma; a float may say a unit more.
    loss = tl.minimum(ceil_units(rest * tl.maximum(share * bias - log_z, 0.0)), left)
    gained = rest * tl.maximum(share - tl.exp(log_share), 0.0) * C.PER_NAT + 0.5
    return log_z, loss, gained.to(tl.int64)


@triton.jit
def point_mass_drift(log_z, log_p, rest, entropy):
    """Its drift in nats."""
    return (1.0 - tl.exp(-log_z)) * (-log_p * rest - entropy)


@triton.jit
def log_ratio_of_fixed(decisions, IS_DRAFT: tl.constexpr):
    """log m - log p of a token, not kept, at each position of a fixed draft."""
    ratio = -decisions.log_z
    if IS_DRAFT:
        # Where the draft token is accepted outright, log Z is its log p.
        ratio += tl.where(decisions.verdict == C.VERDICT.RELAXED, 0.0, decisions.bias)
    return ratio


@triton.jit
def clip_price(remaining, price, useful):
    """The price in nats at the positions of a drawn draft that may pay.

    What may be lost is shared by the positions at which something can be gained.
    """
    each = tl.maximum(remaining, 0) // tl.maximum(useful, 1)
    return tl.minimum(price.to(tl.float32) * C.UNIT, max_bias(each))


@triton.jit
def log_probabilities(target_ptr, draft_ptr, row, token, mask):
    """log2 p, and log2 q - log2 p, of tokens; of others a p of 0.

    `row` is the target's log-sum-exp, what the draft's logits are multiplied by, the draft's
    log-sum-exp, base 2, and what `divide_logits` takes beside the target's logits.
    """
    target_lse, scale, draft_lse, divisor, APPLY_TEMPERATURE = row
    target = tl.load(target_ptr + token, mask=mask, other=float("-inf"))
    target = divide_logits(target, divisor, APPLY_TEMPERATURE)
    draft = tl.load(draft_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)
    log_p = tl.maximum(target * C.LOG2_E - target_lse, C.LEAST_LOG2)
    return log_p, draft * scale - draft_lse - log_p


@triton.jit
def load_clipped(clipped_ptr, draft_temperature, divisor, APPLY_TEMPERATURE: tl.constexpr):
    """Of a row that `clip_kernel` has read, what `log_probabilities` and `log_ratio` take."""
    row = (
        tl.load(clipped_ptr + C.CLIP_STAT.TARGET_LSE),
        C.LOG2_E / draft_temperature,
        tl.load(clipped_ptr + C.CLIP_STAT.DRAFT_LSE),
        divisor,
        APPLY_TEMPERATURE,
    )
    log_w = tl.load(clipped_ptr + C.CLIP_STAT.LOG_W)
    own = (
        log_w,
        log_w + tl.load(clipped_ptr + C.CLIP_STAT.PRICE),
        tl.load(clipped_ptr + C.CLIP_STAT.LOG_TOTAL),
    )
    return row, own


@triton.jit
def log_ratio(ratio, own):
    """log2 m - log2 p of tokens, not kept otherwise, by log2 q - log2 p.

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
    constraints,
    total_len_ptr,
    prompt_len_ptr,
    sampling,
    # [num_rows] each: a row's slot, and its place within its request
    expanded_idx_mapping_ptr,
    expanded_local_pos_ptr,
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
    own_row = tl.program_id(0)
    slot = tl.load(expanded_idx_mapping_ptr + own_row).to(tl.int64)
    draft_temperature = tl.load(sampling.draft_temperature + slot)
    if draft_temperature == 0.0:
        return
    local_pos = tl.load(expanded_local_pos_ptr + own_row)
    # The rows of the request are those that count on from its first.
    offset = tl.arange(0, POSITIONS)
    row = own_row - local_pos + offset
    local_positions = tl.load(expanded_local_pos_ptr + row, mask=row < num_rows, other=-1)
    length = tl.sum((local_positions == offset).to(tl.int32), axis=0) - 1
    draft = tl.load(input_ids_ptr + own_row + 1, mask=local_pos < length, other=-1)
    # One that was struck out has been drawn.
    if (draft == -1) | (draft >= vocab):
        return
    record_ptr = records_ptr + slot * C.RECORD_SIZE
    produced = tl.load(total_len_ptr + slot) - tl.load(prompt_len_ptr + slot)
    remaining, price, tokens_left = load_budget(record_ptr, produced, tl.arange(0, 1))
    # Of the longest draft: where this one ends can depend on its tokens, on which no price may.
    useful = tl.minimum(num_speculative_tokens, tokens_left)
    price = clip_price(tl.max(remaining, axis=0), price, useful)
    may_pay = local_pos < tokens_left
    if constraints is not None:
        may_pay = may_pay & (tl.load(constraints.blocked + own_row) == 0)

    # int64 before the multiply: a row can start past 2**31 elements.
    target_ptr = logits_ptr + own_row.to(tl.int64) * logits_stride
    draft_ptr = sampling.draft_logits + slot * draft_stride
    draft_ptr += local_pos.to(tl.int64) * draft_step_stride
    own = own_row + tl.arange(0, 1)
    packed, _ = reduce_splits(partials, own, own >= 0, num_splits, SPLITS, False)
    lse, entropy = log_sum_exp(partials, own, own >= 0, unpack_value(packed), num_splits, SPLITS)
    target_lse = tl.max(lse, axis=0)
    mass, of_preserved = preserved_sums(partials, own, lse == lse, lse)
    # What p has, and its entropy, of the tokens that are not kept, but that a draft may lack.
    unpreserved = tl.max(1.0 - mass, axis=0)
    unpreserved_entropy = tl.max(entropy - of_preserved, axis=0)
    target_lse *= C.LOG2_E
    scale = C.LOG2_E / draft_temperature
    draft_lse = draft_log_sum_exp(partials, own_row, num_splits, SPLITS)
    divisor = temperature_divisor(sampling, slot, APPLY_TEMPERATURE)
    own_lse = (target_lse, scale, draft_lse, divisor, APPLY_TEMPERATURE)
    is_finite = (tl.abs(target_lse) < C.INF) & (tl.abs(draft_lse) < C.INF)
    may_pay = may_pay & is_finite & (unpreserved > C.LEAST_REST)
    price = tl.where(may_pay, tl.minimum(price, C.MAX_CLIP_PRICE), 0.0)
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
            for first in range(
                0, num_preserved(protected, constraints, own_row), C.PRESERVED_CHUNK
            ):
                preserved = preserved_tokens(
                    first, record_ptr, protected, constraints, own_row, vocab
                )
                of_token = log_probabilities(
                    target_ptr, draft_ptr, own_lse, preserved, preserved >= 0
                )
                masses, flats, losses, logs, others, other_logs = _sums(*of_token, lowest, highest)
                total -= tl.sum(masses, axis=0)
                flat -= tl.sum(flats, axis=0)
                loss -= tl.sum(losses, axis=0)
                logs_sum -= tl.sum(logs, axis=0)
                undrafted -= tl.sum(others, axis=0)
                undrafted_logs -= tl.sum(other_logs, axis=0)
            rest = unpreserved - undrafted
            is_enough = rest > C.LEAST_REST
            # Where it is not, that ends the passes.
            total = tl.where(is_enough, total / rest, 1.0)
            flat = flat / rest
            log_total = tl.log(total)
            loss = tl.maximum(loss / C.LOG2_E / total - rest * log_total, 0.0)
            drift = -logs_sum / C.LOG2_E / total - unpreserved_entropy - undrafted_logs / C.LOG2_E
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
    keeps_draft = is_preserved(draft, protected, None, own_row, record_ptr, vocab)
    if constraints is not None:
        keeps_draft = keeps_draft | (tl.load(constraints.repeats + own_row) != 0)
    ratio = tl.where(keeps_draft, 0.0, ratio)
    log_accept_ratio = ratio - of_q / C.LOG2_E
    # Neither what was struck out, nor what the draft does not hold or the target forbids, nor what
    # is no number.
    is_there = (draft >= 0) & (of_q > -C.INF) & (log_p > C.LEAST_LOG2)
    log_accept_ratio = tl.where(
        is_there & (log_accept_ratio == log_accept_ratio), log_accept_ratio, -C.INF
    )
    clipped_ptr += C.NUM_CLIP_STATS * own_row
    tl.store(clipped_ptr + C.CLIP_STAT.LOG_W, clipped[0])
    tl.store(clipped_ptr + C.CLIP_STAT.PRICE, price * C.LOG2_E)
    tl.store(clipped_ptr + C.CLIP_STAT.LOG_TOTAL, clipped[2])
    tl.store(clipped_ptr + C.CLIP_STAT.TARGET_LSE, target_lse)
    tl.store(clipped_ptr + C.CLIP_STAT.DRAFT_LSE, draft_lse)
    tl.store(clipped_ptr + C.CLIP_STAT.LOSS, loss)
    tl.store(clipped_ptr + C.CLIP_STAT.DRIFT, drift)
    tl.store(clipped_ptr + C.CLIP_STAT.LOG_RATIO, tl.where(draft >= 0, ratio, 0.0))
    tl.store(clipped_ptr + C.CLIP_STAT.LOG_ACCEPT_RATIO, log_accept_ratio)


@functools.cache
def clip_settings(vocab: int) -> tuple[int, int]:
    """Settings of `clip_kernel`: (block size, warps), 8 logits of a row to a thread."""
    block = min(256 * WARPS, max(256, triton.next_power_of_2(vocab)))
    return block, max(4, block // 256)


@functools.cache
def _cached_clipped(num_rows: int, device: torch.device) -> torch.Tensor:
    return torch.empty((num_rows, C.value.NUM_CLIP_STATS), device=device)


def clip_rows(reduced: Reduced, sampling_inputs: SamplingInputs) -> torch.Tensor:
    """Launches `clip_kernel`.

    Args:
        reduced: the step.
        sampling_inputs: of the step, with `draft_logits`, as wide as the target's.

    Returns:
        `[num_rows, NUM_CLIP_STATS]` float32, and maybe rows behind these; the last two numbers are
        those of `mass_kernel`. Of a row without a draft token, and of greedy requests, nothing is
        found. They are written over in the next step.
    """
    assert sampling_inputs.sampling.draft_temperature is not None, (
        "drafts are drawn at a temperature"
    )
    assert sampling_inputs.sampling.draft_logits is not None, "and these are kept"
    step = reduced.step
    max_draft_len, vocab = sampling_inputs.sampling.draft_logits.shape[1:]
    logits, num_rows = step.logits, sampling_inputs.pos.shape[0]
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
        sampling_inputs.sampling,
        sampling_inputs.expanded_idx_mapping,
        sampling_inputs.expanded_local_pos,
        *draft_strides(sampling_inputs),
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
