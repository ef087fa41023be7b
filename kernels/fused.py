"""Verification of a step in Triton: the kernels and the order in which they are launched.

Symbols: B requests, R rows, S splits of a row.

    constraints_kernel  grid (B,)         the rows that the preceding text makes strict, if an
                                          option depends on the text
    rows_kernel         grid (R, S)       z1 with its id, and the statistics of a split that the
                                          rule needs
    clip_kernel         grid (R,)         probabilistic drafts: the served distribution of a row
    mass_kernel         grid (R, blocks)  several probabilistic drafts: see `block_verify`
    accept_kernel       grid (B,)         accepts draft tokens; writes the output and the counters
    resample_kernel     grid (B, blocks)  sampled requests: the token after the accepted drafts

Bytes moved: each row once, except bonus rows of sampled requests; for each of those requests one
row again; logits of draft tokens and preserved tokens; partials and outputs. Probabilistic drafts:
see `served_dist`. Not materialised: anything of the logits' size.
"""

import functools

import torch

from vllm_mars.kernels.accept.fused import accept
from vllm_mars.kernels.block_verify.fused import sum_residuals
from vllm_mars.kernels.constraints.fused import compute_constraints
from vllm_mars.kernels.counters.table import CounterLayout
from vllm_mars.kernels.interface import (
    ConstraintInputs,
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
    constraints: ConstraintInputs | Constraints | None = None,
    step_counters: StepCounters | None = None,
    sampling_inputs: SamplingInputs | None = None,
) -> VerifyOutput:
    """Verifies a step and adds the losses of its requests to their records.

    As `kernels.reference.verify`, but tokens are int64, and logits of sampled requests are fully
    processed unless `sampling_inputs.apply_temperature`. `ConstraintInputs` are computed first.
    """
    output = _new_output(step)
    step_counters = _with_buffers(step_counters, step)
    if not step.slots.shape[0]:
        return output
    if isinstance(constraints, ConstraintInputs):
        constraints = compute_constraints(step, constraints)
    reduced = reduce_rows(step, engine_params, constraints, sampling_inputs)
    clipped = masses = None
    if sampling_inputs is not None and sampling_inputs.sampling.draft_logits is not None:
        clipped = clip_rows(reduced, sampling_inputs)
        masses = sum_residuals(reduced, sampling_inputs, clipped)
    accept(reduced, output, step_counters, clipped, masses)
    if sampling_inputs is not None:
        # Imported here because it needs vLLM's Gumbel noise, and `verify_greedy` works without.
        from vllm_mars.kernels.accept.resample import draw

        draw(reduced, sampling_inputs, clipped, output, step_counters)
    return output


def _new_output(step: VerifyInputs) -> VerifyOutput:
    batch = step.slots.shape[0]
    width = step.num_speculative_tokens + 1
    device = step.logits.device
    return VerifyOutput(
        output_token_ids=torch.empty((batch, width), dtype=torch.int64, device=device),
        num_emitted=torch.empty(batch, dtype=torch.int32, device=device),
        num_relaxed=torch.empty(batch, dtype=torch.int32, device=device),
        lost=torch.empty(batch, dtype=torch.int64, device=device),
    )


def _with_buffers(step_counters: StepCounters | None, step: VerifyInputs) -> StepCounters:
    k = step.num_speculative_tokens
    device = step.logits.device
    if step_counters is None:
        counts = torch.zeros(CounterLayout(k).size, dtype=torch.int64, device=device)
        step_counters = StepCounters(counts, None)
    if step_counters.table is None:
        size = bucket_size(step.slots.shape[0], 256)
        step_counters = step_counters._replace(table=_cached_table(size, k + 1, device))
    return step_counters


@functools.cache
def _cached_table(batch: int, width: int, device: torch.device) -> torch.Tensor:
    return torch.empty((batch, 2, width), device=device)
