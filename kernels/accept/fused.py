"""Which draft tokens of a request stay, in Triton.

`accept_kernel`, a program for each request, joins the splits of its rows, applies the rule, draws
whether each draft token stays, emits and counts. The random numbers are those of vLLM's own
sampler: what is strict is token for token what that emits, of drawn drafts by its method `block`.

Counting adds the step's loss to the request's record, updates the counters and writes its report
row: see `StepCounters`. A request's limits are read from its record, by slot.
"""

import torch
import triton
import triton.language as tl

from vllm_mars.kernels.block_verify.fused import block_accept
from vllm_mars.kernels.budget.fused import ceil_units, has_ended, load_budget, round_units
from vllm_mars.kernels.constants import C
from vllm_mars.kernels.counters.fused import record_step
from vllm_mars.kernels.interface import StepCounters, VerifyOutput
from vllm_mars.kernels.row_stats.combine import forbids, num_extendable, read_logprobs, read_rows
from vllm_mars.kernels.row_stats.fused import Reduced, bucket_size, num_lanes
from vllm_mars.kernels.served_dist.fused import log_ratio_of_fixed

# Views that start anywhere: their alignment would multiply the compiled variants and gain nothing.
_UNALIGNED = [
    *("input_ids_ptr", "cu_num_logits_ptr", "slots_ptr", "pos_ptr"),
    *("total_len_ptr", "prompt_len_ptr", "clipped_ptr", "masses_ptr"),
]
_UNSPECIALIZED = ["num_speculative_tokens", "num_blocks", "vocab", "num_splits"]


@triton.jit
def step_seed(seed, local_pos):
    """The seed of a place of a draft that is verified by blocks, as vLLM 0.33 has it.

    How many tokens stay depends on the numbers of all places, so those behind them, which the next
    step meets again at earlier places, must get others there.
    """
    return seed ^ (local_pos.to(tl.int64) << 32)


@triton.jit
def _uniform(seeds_ptr, pos_ptr, slot, row, mask, local_pos, BLOCK_VERIFY: tl.constexpr):
    """What vLLM draws for each position."""
    pos = tl.load(pos_ptr + row, mask=mask, other=0)
    seed = tl.load(seeds_ptr + slot)
    if BLOCK_VERIFY:
        seed = step_seed(seed, local_pos)
    return tl.maximum(tl.rand(seed, pos), C.LEAST_DRAWN)


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
def accept_kernel(
    # `VerifyOutput`, `StepCounters` and `Partials`: tensors that begin where memory does
    output,
    step_counters,
    partials,
    # [S, RECORD_SIZE]
    records_ptr,
    # [num_rows]: a row's draft token is the next entry
    input_ids_ptr,
    # [batch], inclusive prefix sum of the rows; a request's last row is its bonus row
    cu_num_logits_ptr,
    # `Protected` or None
    protected,
    # `Constraints` or None
    constraints,
    # [batch]
    slots_ptr,
    # By slot
    total_len_ptr,
    prompt_len_ptr,
    # Where requests sample: `SamplingTensors`, and [num_rows]
    sampling,
    pos_ptr,
    # Of drawn drafts: [num_rows, CLIPPED] and [num_rows, num_blocks] of `sum_residuals`
    clipped_ptr,
    masses_ptr,
    num_speculative_tokens,
    num_blocks,
    vocab,
    num_splits,
    SPLITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    POSITIONS: tl.constexpr,
    # Of the rule: see `rules.fused`
    GREEDY: tl.constexpr,
    FIXED: tl.constexpr,
    WITH_SECOND: tl.constexpr,
    # "no", "fixed" or "probabilistic" drafts
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
        partials,
        input_ids_ptr,
        protected,
        constraints,
        record_ptr,
        row,
        is_row,
        is_draft,
        is_greedy,
        vocab,
        num_splits,
        SPLITS,
        WITH_SECOND,
    )
    draft = rows.draft
    remaining, value, tokens_left = load_budget(record_ptr, produced, offset)
    is_over = has_ended(record_ptr, tl.load(input_ids_ptr + start), produced)
    extendable = num_extendable(rows.is_end, offset, length, tokens_left)
    # The last position of the answer; none where it had ended before.
    last_counted = tl.where(is_over != 0, -1, extendable)
    splits = partials, row, num_splits
    verdict = GREEDY(rows, splits, value, remaining, extendable, offset, length, SPLITS)
    loss = rows.loss
    accepts = (verdict == C.VERDICT.FIRST) | (verdict == C.VERDICT.RELAXED)
    gained = tl.where(verdict == C.VERDICT.RELAXED, C.PER_NAT, 0.0).to(tl.int64)
    # Greedily the drift is the loss.
    drift = loss
    ratio_accepted = tl.zeros([POSITIONS], tl.float32)
    ratio_rejected = tl.zeros([POSITIONS], tl.float32)
    accepted_by_block = 0
    if SAMPLED != "no":
        if is_greedy == 0:
            own = sampling.seeds, pos_ptr, slot, row, is_draft, offset
            u = _uniform(*own, SAMPLED == "probabilistic")
            if SAMPLED == "probabilistic":
                # A token that was never drawn ends the draft.
                length_drawn = tl.min(tl.where(is_draft & (draft == -1), offset, length), axis=0)
                of_draft = clipped_ptr, masses_ptr, num_blocks, row, offset, length_drawn, u
                accepted_by_block, gain = block_accept(*of_draft, BLOCKS)
                gained = round_units(gain)
                of_row, is_drafted = clipped_ptr + C.NUM_CLIP_STATS * row, offset < length_drawn
                ratio_accepted = tl.load(of_row + C.CLIP_STAT.LOG_RATIO, mask=is_drafted, other=0.0)
                reason = forbids(rows, False)
                verdict = tl.where((draft >= 0) & (offset < extendable) & (value > 0), reason, 0)
                loss = ceil_units(tl.load(of_row + C.CLIP_STAT.LOSS, mask=is_drafted, other=0.0))
                drift = round_units(tl.load(of_row + C.CLIP_STAT.DRIFT, mask=is_drafted, other=0.0))
            else:
                logprobs = read_logprobs(rows, partials, row, is_draft, num_splits, SPLITS)
                decisions = FIXED(
                    rows, logprobs, splits, value, remaining, extendable, offset, length, SPLITS
                )
                verdict, loss, gained = decisions.verdict, decisions.loss, decisions.gained
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
    # Never accepted, the bonus row emits its argmax like a row whose draft is rejected. Where a
    # request samples `resample_kernel` puts what it draws there, unless rounding leaves nothing to
    # draw from: then the rejected token stays.
    keeps_rejected = (is_greedy == 0) & (draft >= 0)
    next_token = tl.where(keeps_rejected, draft, rows.argmax.to(tl.int64))
    token = tl.where(is_row & (offset == accepted), next_token, token)
    of_request = output.output_token_ids + req_idx.to(tl.int64) * (num_speculative_tokens + 1)
    tl.store(of_request + offset, token, mask=offset <= num_speculative_tokens)
    # Behind the draft the target's own bonus token follows.
    ratio = tl.where(offset < accepted, ratio_accepted, ratio_rejected)
    num_relaxed, step_lost = record_step(
        step_counters,
        record_ptr + C.COLUMN.LOST,
        req_idx,
        offset,
        draft,
        verdict,
        loss,
        gained,
        drift,
        tl.where(is_draft, ratio, 0.0),
        accepted,
        is_draft & (offset <= last_counted),
        is_greedy,
        value != 0,
        num_speculative_tokens,
        SAMPLED == "probabilistic",
    )
    if SAMPLED == "probabilistic":
        if sampling.next_seeds is not None:
            # What stays of a draft depends on the numbers that it was drawn with, so the next one
            # gets others: a request's tokens grow with each step.
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
    """Launches `accept_kernel`.

    Args:
        reduced: the step.
        output: written; behind the drafts of a request that samples, a draw is still to come.
        step_counters: where the step is written down, with a table.
        clipped, masses: of drawn drafts, see `clip_rows` and `sum_residuals`.
    """
    step, sampling_inputs, rule = reduced.step, reduced.sampling_inputs, reduced.engine_params.rule
    kind = "no" if sampling_inputs is None else "fixed" if clipped is None else "probabilistic"
    num_blocks = 1 if masses is None else masses.shape[1]
    vocab, positions = step.logits.shape[1], reduced.num_positions
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
        rule.needs.second,
        kind,
        # Long drafts leave one warp too few registers.
        num_warps=max(1, positions // 8),
        enable_fp_fusion=False,
    )
