"""Reference for the counters and report rows of a step, in plain Python."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vllm_mars.kernels.budget import UNIT
from vllm_mars.kernels.counters.table import CounterLayout
from vllm_mars.kernels.interface import StepCounters, Verdict

if TYPE_CHECKING:
    from vllm_mars.kernels.accept.naive import Emitted


def record_step(
    emitted: "Emitted",
    draft: Sequence[int],
    is_greedy: bool,
    is_relaxable: bool,
    req_idx: int,
    step_counters: StepCounters | None,
    layout: CounterLayout,
) -> tuple[int, int]:
    """Counts a request's step; returns the number of relaxed tokens, and the loss in units."""
    num_relaxed = lost = drift_up = drift_down = 0
    gained = sum(emitted.gained)
    table = None
    if step_counters is not None and step_counters.table is not None:
        table = step_counters.table[req_idx]
        table[0] = math.nan
        table[1] = 0
        table[0, : len(emitted.log_ratios)] = torch.tensor(emitted.log_ratios)
    for offset, decision in enumerate(emitted.decisions):
        is_relaxed = offset < emitted.accepted and decision.verdict == Verdict.RELAXED
        num_relaxed += is_relaxed
        if is_relaxed or not is_greedy:
            lost += decision.loss
            gained += decision.gained
            drift_up += max(decision.drift, 0)
            drift_down += max(-decision.drift, 0)
        if table is not None and is_relaxed and is_greedy:
            table[0, offset] = decision.loss * UNIT
        if table is not None and not is_greedy:
            table[1, offset] = decision.drift * UNIT
    if step_counters is not None:
        counts = step_counters.counts.numpy()
        for offset, decision in enumerate(emitted.decisions):
            if draft[offset] < 0:
                continue
            is_accepted = offset < emitted.accepted
            verdict = decision.verdict
            counts[layout.verified][offset] += 1
            counts[layout.relaxable] += is_relaxable
            counts[layout.accepted][offset] += is_accepted
            counts[layout.relaxed][offset] += is_accepted and verdict == Verdict.RELAXED
            if verdict >= Verdict.PROTECTED:
                counts[layout.refused][verdict - Verdict.PROTECTED] += 1
        counts[layout.lost] += lost
        counts[layout.gained] += gained
        counts[layout.drift_up] += drift_up
        counts[layout.drift_down] += drift_down
    return num_relaxed, lost


def log_ratios(table: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Returns log m - log p of a step's tokens, `[batch, K + 1]`; 0 if greedy or after the end."""
    return table[:, 0].nan_to_num(0.0).masked_fill(temperature[:, None] == 0, 0.0)


def of_sampled(token_ids: torch.Tensor, ratios: torch.Tensor) -> torch.Tensor:
    """Returns the log-ratios in the columns of the sampled token, which may occur twice, else 0."""
    # token_ids: [num_rows, columns], the sampled token first. ratios: [num_rows].
    return torch.where(token_ids == token_ids[:, :1], ratios[:, None], 0.0)
