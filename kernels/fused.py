"""Verification of a step in Triton: which kernels are launched, in which order.

Symbols: B requests, R rows, S splits of a row.

    rows_kernel      grid (R, S)       z1 with its id, and what else of each split the rule needs
    clip_kernel      grid (R,)         where drafts are drawn: what is served at each row
    mass_kernel      grid (R, blocks)  likewise, of drafts of more than one token: see
    `block_verify` accept_kernel    grid (B,)         which draft tokens stay; emits and counts
    resample_kernel  grid (B, blocks)  where requests sample: the token behind these

What the text asks of each row `constraints_kernel` has found before.

Bytes moved: the rows once, but the bonus row of a request that samples; of such a request one row
again; the logits of the draft token and of kept tokens; the partial results, the outputs; for drawn
drafts see `served_dist`. Not materialised: anything of the logits' size.
"""

import functools

import torch

from vllm_mars.kernels.accept.fused import accept
from vllm_mars.kernels.block_verify.fused import sum_residuals
from vllm_mars.kernels.counters.table import CounterLayout
from vllm_mars.kernels.interface import (
    Constraints,
    EngineParams,
    SamplingInputs,
    StepCounters,
    VerifyInputs,
    VerifyOutput,
)
from vllm_mars.kernels.row_stats.fused import bucket_size, reduce_rows
from vllm_mars.kernels.served_dist.fused import clip_rows


def verify(
    step: VerifyInputs,
    engine_params: EngineParams,
    constraints: Constraints | None = None,
    step_counters: StepCounters | None = None,
    sampling_inputs: SamplingInputs | None = None,
) -> VerifyOutput:
    """Verifies a step; what its requests lose is added to their records.

    Args:
        step: its logits are processed, where requests sample.
        engine_params: of the engine.
        constraints: what the text before each row asks; or None, where it asks nothing.
        step_counters: where the step is written down; what is not given is made, and dropped.
        sampling_inputs: of the step, where requests sample.

    Returns:
        As in `kernels.reference.verify`, but that the tokens are int64.
    """
    output, step_counters = _new_output(step), _whole(step_counters, step)
    if not step.slots.shape[0]:
        return output
    reduced = reduce_rows(step, engine_params, constraints, sampling_inputs)
    clipped = masses = None
    if sampling_inputs is not None and sampling_inputs.sampling.draft_logits is not None:
        clipped = clip_rows(reduced, sampling_inputs)
        masses = sum_residuals(reduced, sampling_inputs, clipped)
    accept(reduced, output, step_counters, clipped, masses)
    if sampling_inputs is not None:
        # Its noise is vLLM's, without which `verify_greedy` works.
        from vllm_mars.kernels.accept.resample import draw

        draw(reduced, sampling_inputs, clipped, output, step_counters)
    return output


def _new_output(step: VerifyInputs) -> VerifyOutput:
    batch, device = step.slots.shape[0], step.logits.device
    return VerifyOutput(
        torch.empty((batch, step.num_speculative_tokens + 1), dtype=torch.int64, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int64, device=device),
    )


def _whole(step_counters: StepCounters | None, step: VerifyInputs) -> StepCounters:
    width, device = step.num_speculative_tokens, step.logits.device
    if step_counters is None:
        size = CounterLayout(width).size
        step_counters = StepCounters(torch.zeros(size, dtype=torch.int64, device=device), None)
    if step_counters.table is None:
        size = bucket_size(step.slots.shape[0], 256)
        step_counters = step_counters._replace(table=_cached_table(size, width + 1, device))
    return step_counters


@functools.cache
def _cached_table(batch: int, width: int, device: torch.device) -> torch.Tensor:
    return torch.empty((batch, 2, width), device=device)
