"""Compiles the Triton kernels before the first request, in every variant that serving reaches.

Triton compiles a kernel for the dtypes, the constants and, of the logits, the alignment of its
arguments, in about a second each. The samplers call this on their first call, which is vLLM's dummy
run at start; what varies from step to step afterwards is no part of a variant, or is met here. What
`counters.fused` launches beside a step is met by the requests that vLLM warms its own kernels with:
they sample, and end.
"""

import torch

from vllm_mars.kernels import fused
from vllm_mars.kernels.constraints.fused import compute_constraints, new_ring
from vllm_mars.kernels.constraints.markers import MarkerTracker
from vllm_mars.kernels.interface import Records, SamplingInputs, SamplingTensors, VerifyInputs
from vllm_mars.report.worker import StepReports
from vllm_mars.worker.engine_params import LazyEngineParams


def warm_up(
    engine_params: LazyEngineParams,
    reports: StepReports,
    logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    use_fp64: bool = False,
    pads_with_last_token: bool = False,
) -> None:
    """Compiles what the sampler reaches.

    Args:
        engine_params: of the engine.
        reports: where its steps are written down.
        logits: `[num_rows, vocab]` of a step; only its dtype, width and stride count.
        draft_logits: `[max_num_reqs, K, vocab]` where drafts are drawn, else None.
        use_fp64: whether the noise of a draw is float64.
        pads_with_last_token: as `RequestsV2` has it.
    """
    device, config = logits.device, engine_params.config
    inputs, end, zero = _ids(0, device).repeat(2), _ids(2, device), _ids(0, device)
    # V2's slots are int64.
    own = Records.new(1, device), zero.long(), zero, zero, reports.num_speculative_tokens
    float_one, by_row = torch.ones(1, device=device), inputs.long()
    sampling = SamplingTensors(float_one, zero.long())
    if draft_logits is not None:
        sampling = sampling._replace(draft_logits=draft_logits, draft_temperature=float_one)
    processed = torch.zeros((2, logits.shape[1]), device=device)
    markers, ngram = MarkerTracker(config).markers(device), config.repeat_ngram
    for rows in (*_row_layouts(logits), processed):
        step, constraints = VerifyInputs(rows, inputs, end, *own), None
        if markers is not None or ngram or pads_with_last_token:
            text = (
                new_ring(1, device),
                zero[None],
                step,
                float_one,
                markers,
                ngram,
                pads_with_last_token,
            )
            constraints = compute_constraints(*text)
        sampling_inputs = SamplingInputs(sampling, by_row, by_row, inputs, use_fp64)
        # What vLLM has processed has been divided.
        with_temperature = (
            () if rows is processed else (sampling_inputs._replace(apply_temperature=True),)
        )
        for of_step in (None, sampling_inputs, *with_temperature):
            step_counters = reports.step_counters(1, device, {})
            fused.verify(step, engine_params.on(rows), constraints, step_counters, of_step)


def _row_layouts(logits: torch.Tensor) -> list[torch.Tensor]:
    """Two rows of zeros in each layout that the model's logits may have.

    Most models cut their padded output to the vocabulary, so the stride of a real step can be
    divisible by 16 where that of the dummy run is not; and a part of a large batch may begin where
    no 16 bytes do.
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


def _ids(value: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)
