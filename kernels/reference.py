"""Reference verification of a step in plain Python.

It runs on CPUs and defines what `kernels.fused` must compute.
"""

import numpy as np
import torch

from vllm_mars.kernels.accept import naive as accept
from vllm_mars.kernels.counters.naive import record_step
from vllm_mars.kernels.counters.table import CounterLayout
from vllm_mars.kernels.interface import (
    CpuConstraints,
    EngineParams,
    StepCounters,
    VerifyInputs,
    VerifyOutput,
)
from vllm_mars.kernels.row_stats.naive import num_extendable, read_rows


def verify(
    step: VerifyInputs,
    engine_params: EngineParams,
    constraints: CpuConstraints | None = None,
    step_counters: StepCounters | None = None,
    sampling_inputs: accept.CpuSamplingInputs | None = None,
    bonus: torch.Tensor | None = None,
) -> VerifyOutput:
    """Verifies a step and adds the losses of its requests to their records.

    Args:
        step: logits are processed, except for the temperature.
        bonus: bonus token of each request, `[batch]` or `[batch, 1]`; None, if all requests are
            greedy, for the argmax of the bonus rows.
    """
    step = step._replace(logits=step.logits.detach().float())
    slots = step.slots.tolist()
    width = step.num_speculative_tokens
    temperature = [0.0] * len(slots)
    if sampling_inputs is not None:
        temperature = sampling_inputs.temperature.tolist()
    rows = read_rows(step, engine_params, constraints, temperature, with_bonus=bonus is None)
    bonus_ids = None if bonus is None else bonus.reshape(-1).tolist()
    relaxes = step.records.relaxes
    layout = CounterLayout(width)
    tokens = np.full((len(slots), width + 1), -1, dtype=np.int32)
    summary = np.zeros((3, len(slots)), dtype=np.int64)
    begins = [0, *step.cu_num_logits.tolist()]
    for req_idx, budget in enumerate(accept.loss_budgets(step)):
        begin = begins[req_idx]
        end = begins[req_idx + 1] - 1
        emitted = accept.accept(
            rows=rows,
            budget=budget,
            step=step,
            engine_params=engine_params,
            req_idx=req_idx,
            sampling_inputs=sampling_inputs,
            constraints=constraints,
        )
        accepted, token = emitted.accepted, emitted.token
        if token is None:
            token = rows.argmax[end] if bonus_ids is None else bonus_ids[req_idx]
        tokens[req_idx, : accepted + 1] = [*rows.draft[begin : begin + accepted], token]
        # Positions after the end of the answer are not counted.
        num_counted = 0 if budget.has_ended else num_extendable(rows, begin, end, budget) + 1
        counted = emitted._replace(
            decisions=emitted.decisions[:num_counted], gained=emitted.gained[:num_counted]
        )
        num_relaxed, lost = record_step(
            counted,
            draft=rows.draft[begin:end],
            is_greedy=not temperature[req_idx],
            is_relaxable=bool(relaxes[slots[req_idx]]),
            req_idx=req_idx,
            step_counters=step_counters,
            layout=layout,
        )
        if lost:
            step.records.lost[slots[req_idx]] += lost
        summary[:, req_idx] = accepted + 1, num_relaxed, lost
    counts = torch.from_numpy(summary)
    return VerifyOutput(
        output_token_ids=torch.from_numpy(tokens),
        num_emitted=counts[0].int(),
        num_relaxed=counts[1].int(),
        lost=counts[2],
    )
