"""Acceptance of draft tokens in Triton.

    accept_kernel   grid (B,)   combines the splits of a request's rows, applies the rule, accepts
                                draft tokens; writes the output and the counters: `record_step`

Random numbers are vLLM's, so strict requests get the tokens that vLLM's sampler emits, with its
method `block` if drafts are probabilistic.
"""

import torch
import triton
import triton.language as tl

from vllm_mars.kernels.block_verify.fused import block_accept
from vllm_mars.kernels.budget.fused import ceil_units, has_ended, load_budget, round_units
from vllm_mars.kernels.constants import C
from vllm_mars.kernels.counters.fused import record_step
from vllm_mars.kernels.interface import StepCounters, VerifyOutput
from vllm_mars.kernels.launch import UNALIGNED, UNSPECIALIZED
from vllm_mars.kernels.row_stats.combine import forbids, num_extendable, read_logprobs, read_rows
from vllm_mars.kernels.row_stats.fused import Reduced, bucket_size, num_lanes
from vllm_mars.kernels.served_dist.fused import log_ratio_of_fixed


@triton.jit
def step_seed(seed, local_pos):
    """Per-position seed for block verification, as in vLLM 0.33."""
    # Acceptance depends on the random numbers of all positions, so the next step, which revisits
    # the rejected ones at smaller offsets, must not reuse theirs.
    return seed ^ (local_pos.to(tl.int64) << 32)


@triton.jit
def _uniform(seeds_ptr, pos_ptr, slot, row, mask, local_pos, BLOCK_VERIFY: tl.constexpr):
    pos = tl.load(pos_ptr + row, mask=mask, other=0)
    seed = tl.load(seeds_ptr + slot)
    if BLOCK_VERIFY:
        seed = step_seed(seed, local_pos)
    return tl.maximum(tl.rand(seed, pos), C.LEAST_DRAWN)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "vocab"], do_not_specialize_on_alignment=UNALIGNED)
def accept_kernel(
    # `VerifyOutput`, with aligned tensors like the next two
    output,
    # `StepCounters`
    step_counters,
    # `Partials`
    partials,
    # [num_slots, RECORD_SIZE]
    records_ptr,
    # [num_rows]; the draft token of a row is the next entry
    input_ids_ptr,
    # [batch], inclusive prefix sum of rows; the last row of a request is its bonus row
    cu_num_logits_ptr,
    # `Protected` or None
    protected,
    # `Constraints` or None
    constraints,
    # [batch]
    slots_ptr,
    # [num_slots]
    total_len_ptr,
    # [num_slots]
    prompt_len_ptr,
    # `SamplingTensors`, or None if all requests are greedy
    sampling,
    # [num_rows], or None if all requests are greedy
    pos_ptr,
    # [num_rows, NUM_CLIP_STATS], or None without probabilistic drafts
    clipped_ptr,
    # [num_rows, num_blocks], or None without probabilistic drafts
    masses_ptr,
    num_speculative_tokens,
    num_blocks,
    vocab,
    num_splits,
    SPLITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    POSITIONS: tl.constexpr,
    # Functions of the rule: see `rules.fused`
    GREEDY: tl.constexpr,
    FIXED: tl.constexpr,
    WITH_SECOND: tl.constexpr,
    # "no" sampled requests, or those with "fixed" or "probabilistic" drafts
    SAMPLED: tl.constexpr,
):
    req_idx = tl.program_id(0)
    end = tl.load(cu_num_logits_ptr + req_idx)
    start = tl.load(cu_num_logits_ptr + req_idx - 1, mask=req_idx > 0, other=0)
    slot = tl.load(slots_ptr + req_idx).to(tl.int64)
    offset = tl.arange(0, POSITIONS)
    row = start + offset
    is_row = row < end
    is_draft = row < end - 1
    length = end - start - 1
    is_greedy = tl.full([], True, tl.int1)
    if SAMPLED != "no":
        is_greedy = tl.load(sampling.temperature + slot) == 0.0

    record_ptr = records_ptr + slot * C.RECORD_SIZE
    produced = tl.load(total_len_ptr + slot) - tl.load(prompt_len_ptr + slot)
    rows = read_rows(
        partials=partials,
        input_ids_ptr=input_ids_ptr,
        protected=protected,
        constraints=constraints,
        record_ptr=record_ptr,
        row=row,
        is_row=is_row,
        is_draft=is_draft,
        is_greedy=is_greedy,
        vocab=vocab,
        num_splits=num_splits,
        SPLITS=SPLITS,
        WITH_SECOND=WITH_SECOND,
    )
    draft = rows.draft
    remaining, value, tokens_left = load_budget(record_ptr, produced, offset)
    is_over = has_ended(record_ptr, tl.load(input_ids_ptr + start), produced)
    extendable = num_extendable(rows.is_end, offset, length, tokens_left)
    # Last position of the answer; -1 if it had already ended.
    last_counted = tl.where(is_over != 0, -1, extendable)
    verdict = GREEDY(rows, value, remaining, extendable, offset, length)
    loss = rows.loss
    accepts = (verdict == C.VERDICT.FIRST) | (verdict == C.VERDICT.RELAXED)
    gained = tl.where(verdict == C.VERDICT.RELAXED, C.PER_NAT, 0.0).to(tl.int64)
    # If greedy, the drift is the loss.
    drift = loss
    ratio_accepted = tl.zeros([POSITIONS], tl.float32)
    ratio_rejected = tl.zeros([POSITIONS], tl.float32)
    accepted_by_block = 0
    if SAMPLED != "no":
        if is_greedy == 0:
            u = _uniform(
                seeds_ptr=sampling.seeds,
                pos_ptr=pos_ptr,
                slot=slot,
                row=row,
                mask=is_draft,
                local_pos=offset,
                BLOCK_VERIFY=SAMPLED == "probabilistic",
            )
            if SAMPLED == "probabilistic":
                # A placeholder ends the draft.
                draft_len = tl.min(tl.where(is_draft & (draft == -1), offset, length), axis=0)
                accepted_by_block, gain = block_accept(
                    clipped_ptr=clipped_ptr,
                    masses_ptr=masses_ptr,
                    num_blocks=num_blocks,
                    row=row,
                    offset=offset,
                    length=draft_len,
                    u=u,
                    BLOCKS=BLOCKS,
                )
                gained = round_units(gain)
                stats_ptr = clipped_ptr + C.NUM_CLIP_STATS * row
                has_stats = offset < draft_len
                ratio_accepted = tl.load(
                    stats_ptr + C.CLIP_STAT.LOG_RATIO, mask=has_stats, other=0.0
                )
                reason = forbids(rows, False)
                verdict = tl.where((draft >= 0) & (offset < extendable) & (value > 0), reason, 0)
                loss = ceil_units(tl.load(stats_ptr + C.CLIP_STAT.LOSS, mask=has_stats, other=0.0))
                drift = round_units(
                    tl.load(stats_ptr + C.CLIP_STAT.DRIFT, mask=has_stats, other=0.0)
                )
            else:
                logprobs = read_logprobs(rows, partials, row, is_draft, num_splits, SPLITS)
                decisions = FIXED(rows, logprobs, value, remaining, extendable, offset, length)
                verdict = decisions.verdict
                loss = decisions.loss
                gained = decisions.gained
                drift = round_units(decisions.drift)
                ratio_accepted = log_ratio_of_fixed(decisions, True)
                ratio_rejected = log_ratio_of_fixed(decisions, False)
                accepts = logprobs.is_number & (logprobs.log_p + ratio_accepted > tl.log(u))
                accepts = accepts | (verdict == C.VERDICT.RELAXED)

    stops = is_draft & (accepts == 0)
    accepted = tl.min(tl.where(stops, offset, length), axis=0)
    if SAMPLED == "probabilistic":
        accepted = tl.where(is_greedy, accepted, accepted_by_block)
    token = tl.where(offset < accepted, draft, -1)
    # The bonus row is never accepted, so it emits its argmax like a rejected row. `resample_kernel`
    # replaces the token of a sampled request, unless rounding leaves no mass: then the rejected
    # token remains.
    keeps_rejected = (is_greedy == 0) & (draft >= 0)
    next_token = tl.where(keeps_rejected, draft, rows.argmax.to(tl.int64))
    token = tl.where(is_row & (offset == accepted), next_token, token)
    token_ptr = output.output_token_ids + req_idx.to(tl.int64) * (num_speculative_tokens + 1)
    tl.store(token_ptr + offset, token, mask=offset <= num_speculative_tokens)
    # After the whole draft the target's bonus token follows, with ratio 0.
    ratio = tl.where(offset < accepted, ratio_accepted, ratio_rejected)
    num_relaxed, step_lost = record_step(
        step_counters=step_counters,
        lost_ptr=record_ptr + C.COLUMN.LOST,
        req_idx=req_idx,
        offset=offset,
        draft=draft,
        verdict=verdict,
        loss=loss,
        gained=gained,
        drift=drift,
        ratio=tl.where(is_draft, ratio, 0.0),
        accepted=accepted,
        is_counted=is_draft & (offset <= last_counted),
        is_greedy=is_greedy,
        is_relaxable=value != 0,
        num_speculative_tokens=num_speculative_tokens,
        BLOCK_VERIFY=SAMPLED == "probabilistic",
    )
    if SAMPLED == "probabilistic":
        if sampling.next_seeds is not None:
            # Acceptance depends on the random numbers that the draft was sampled with, so the next
            # draft needs others: the seed changes with the request's length, which grows in each
            # step.
            total = (tl.load(total_len_ptr + slot) + accepted + 1).to(tl.int64)
            seed = tl.load(sampling.seeds + slot) ^ (total << 32)
            tl.store(sampling.next_seeds + slot, seed)
    tl.store(output.num_emitted + req_idx, accepted + 1)
    tl.store(output.num_relaxed + req_idx, num_relaxed)
    tl.store(output.lost + req_idx, step_lost)


def accept(
    reduced: Reduced,
    output: VerifyOutput,
    step_counters: StepCounters,
    clipped: torch.Tensor | None = None,
    masses: torch.Tensor | None = None,
) -> None:
    """Launches `accept_kernel`; the table of `step_counters` must not be None."""
    step = reduced.step
    rule = reduced.engine_params.rule
    sampling_inputs = reduced.sampling_inputs
    if sampling_inputs is None:
        sampled = "no"
    else:
        sampled = "fixed" if clipped is None else "probabilistic"
    num_blocks = 1 if masses is None else masses.shape[1]
    vocab = step.logits.shape[1]
    positions = reduced.num_positions
    reduced.launch_cache.launch(
        accept_kernel,
        (step.slots.shape[0], 1, 1),
        output,
        step_counters,
        reduced.partials,
        step.records.table,
        step.input_ids,
        step.cu_num_logits,
        reduced.engine_params.protected,
        reduced.constraints,
        step.slots,
        step.total_len,
        step.prompt_len,
        None if sampling_inputs is None else sampling_inputs.sampling,
        None if sampling_inputs is None else sampling_inputs.pos,
        clipped,
        masses,
        step.num_speculative_tokens,
        num_blocks,
        vocab,
        reduced.num_splits,
        num_lanes(vocab),
        bucket_size(num_blocks, 1),
        positions,
        rule.jitted.greedy,
        rule.jitted.sampled,
        rule.needs_second,
        sampled,
        # One warp has too few registers for long drafts.
        num_warps=max(1, positions // 8),
        enable_fp_fusion=False,
    )
