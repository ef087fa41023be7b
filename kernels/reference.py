"""Verification of a step in plain Python: what is done for its requests, in which order.

It serves a CPU, and is the definition of what `kernels.fused` does.
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
    """Verifies a step; what its requests lose is added to their records.

    Args:
        step: its logits are processed but for the temperature.
        engine_params: of the engine.
        constraints: what the text before each row asks; or None, where it asks nothing.
        step_counters: where the step is written down.
        sampling_inputs: what decides where requests sample; None if all are greedy.
        bonus: what follows the draft of each request if all of it is accepted, `[batch]` or
            `[batch, 1]`; None, where all are greedy, for the first choice of the row behind it.
    """
    step = step._replace(logits=step.logits.detach().float())
    slots, width = step.slots.tolist(), step.num_speculative_tokens
    temperature = (
        [0.0] * len(slots) if sampling_inputs is None else sampling_inputs.temperature.tolist()
    )
    rows = read_rows(step, engine_params, constraints, temperature, with_bonus=bonus is None)
    bonus_ids = None if bonus is None else bonus.reshape(-1).tolist()
    relaxes, layout = step.records.relaxes, CounterLayout(width)
    tokens = np.full((len(slots), width + 1), -1, dtype=np.int32)
    summary = np.zeros((3, len(slots)), dtype=np.int64)
    begins = [0, *step.cu_num_logits.tolist()]
    for req_idx, budget in enumerate(accept.loss_budgets(step)):
        begin, end = begins[req_idx], begins[req_idx + 1] - 1
        emitted = accept.accept(
            rows, budget, step, engine_params, req_idx, sampling_inputs, constraints
        )
        accepted, token = emitted.accepted, emitted.token
        if token is None:
            token = rows.argmax[end] if bonus_ids is None else bonus_ids[req_idx]
        tokens[req_idx, : accepted + 1] = [*rows.draft[begin : begin + accepted], token]
        # What lies behind the answer's end is no part of it.
        num_counted = 0 if budget.has_ended else num_extendable(rows, begin, end, budget) + 1
        counted = emitted._replace(
            decisions=emitted.decisions[:num_counted], gained=emitted.gained[:num_counted]
        )
        own = rows.draft[begin:end], not temperature[req_idx], bool(relaxes[slots[req_idx]])
        num_relaxed, lost = record_step(counted, *own, req_idx, step_counters, layout)
        if lost:
            step.records.lost[slots[req_idx]] += lost
        summary[:, req_idx] = accepted + 1, num_relaxed, lost
    emitted_, relaxed_, lost_ = torch.from_numpy(summary)
    return VerifyOutput(torch.from_numpy(tokens), emitted_.int(), relaxed_.int(), lost_)
