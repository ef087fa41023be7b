"""Compiles the Triton kernels before the first request, in every variant that serving reaches.

Triton specializes on dtypes, constants and the alignment of the logits, and takes about a second
for each variant. The samplers warm up on their first call, in vLLM's dummy run at start. The other
kernels of `counters.fused` are compiled by vLLM's warm-up requests, which are sampled and end.
"""

import torch

from vllm_mars.kernels import fused
from vllm_mars.kernels.constraints.fused import new_ring
from vllm_mars.kernels.constraints.markers import MarkerTracker
from vllm_mars.kernels.interface import (
    ConstraintInputs,
    Records,
    SamplingInputs,
    SamplingTensors,
    VerifyInputs,
)
from vllm_mars.report.worker import StepReports
from vllm_mars.worker.engine_params import LazyEngineParams


def warm_up(
    engine_params: LazyEngineParams,
    reports: StepReports,
    # [num_rows, vocab]; only the dtype, width and stride are read
    logits: torch.Tensor,
    # [max_num_reqs, K, vocab]; None for fixed drafts
    draft_logits: torch.Tensor | None,
    use_fp64: bool = False,
    pads_with_last_token: bool = False,
) -> None:
    """Verifies one dummy request in each variant that the sampler reaches."""
    device = logits.device
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    zero_int64 = zero.long()
    float_one = torch.ones(1, device=device)
    input_ids = zero.repeat(2)
    positions = input_ids.long()
    cu_num_logits = zero + 2
    records = Records.new(1, device)
    sampling = SamplingTensors(temperature=float_one, seeds=zero_int64)
    if draft_logits is not None:
        sampling = sampling._replace(draft_logits=draft_logits, draft_temperature=float_one)
    sampling_inputs = SamplingInputs(
        sampling=sampling,
        pos=positions,
        expanded_idx_mapping=positions,
        expanded_local_pos=input_ids,
        use_fp64=use_fp64,
    )
    with_temperature = sampling_inputs._replace(apply_temperature=True)
    # float32 logits after vLLM's processors, which have applied the temperature.
    processed = torch.zeros((2, logits.shape[1]), device=device)
    markers = MarkerTracker(engine_params.config).markers(device)
    ngram = engine_params.config.repeat_ngram
    for rows in (*_row_layouts(logits), processed):
        step = VerifyInputs(
            logits=rows,
            input_ids=input_ids,
            cu_num_logits=cu_num_logits,
            records=records,
            # V2's slots are int64.
            slots=zero_int64,
            total_len=zero,
            prompt_len=zero,
            num_speculative_tokens=reports.num_speculative_tokens,
        )
        constraint_inputs = None
        if markers is not None or ngram or pads_with_last_token:
            constraint_inputs = ConstraintInputs(
                ring=new_ring(1, device),
                tokens=zero[None],
                temperature=float_one,
                markers=markers,
                ngram=ngram,
                pads_with_last_token=pads_with_last_token,
            )
        variants = [None, sampling_inputs]
        if rows is not processed:
            variants.append(with_temperature)
        for variant in variants:
            fused.verify(
                step,
                engine_params.on(rows),
                constraints=constraint_inputs,
                step_counters=reports.step_counters(1, device, {}),
                sampling_inputs=variant,
            )


def _row_layouts(logits: torch.Tensor) -> list[torch.Tensor]:
    """Returns two rows of zeros in each layout that the model's logits may have.

    Most models slice padded logits to the vocabulary, so a real step's stride can be divisible by
    16 even if the dummy run's is not, and a chunk of a large batch may not be 16-byte aligned.
    """
    vocab, itemsize = logits.shape[1], logits.element_size()
    strides = {vocab, logits.stride(0)}
    if vocab % 16:
        strides.add((vocab // 16 + 1) * 16)
    layouts = []
    for stride in sorted(stride for stride in strides if stride >= vocab):
        rows = torch.zeros((3, stride), dtype=logits.dtype, device=logits.device)[:, :vocab]
        layouts.append(rows[:2])
        if stride * itemsize % 16:
            layouts.append(rows[1:])
    return layouts
