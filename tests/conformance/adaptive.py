"""Enables vLLM's adaptive verification on a CPU for tests, and records its decisions.

vLLM requires full CUDA graphs, and attention that reads draft lengths from the device only, as a
CPU's does. Costs of a step, which vLLM measures during graph capture, are given.
"""

from collections import Counter
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

# vLLM refits every 100 steps, which take the interpreter long.
REFIT_INTERVAL = 20


def allow(draft_ms: list[list[float]], verify_ms: list[list[float]]) -> list[dict[str, float]]:
    """Removes vLLM's checks in the calling process.

    Args:
        draft_ms, verify_ms: costs as pairs of a size and milliseconds: of the drafter by requests,
    of the target by tokens.

    Returns:
        Counters by refit interval of the estimator; the list grows. Drafts that were `admitted`,
    `observed` (accepted, or the first rejected one) and `accepted`, the sum of their `predicted`
    acceptance probabilities, and requests' `steps`.
    """
    VllmConfig._validate_adaptive_verification = lambda self: None
    model_runner.resolve_adaptive_cudagraph_mode = lambda mode, **_: CUDAGraphMode.NONE
    for name in ("query_lens_mismatch", "varlen_cudagraph"):
        setattr(adaptive_verification, f"get_{name}_unsupported_backend", lambda *_, **__: None)
    # The compiled function is the same.
    assign = adaptive_verification._assign_draft_token_budget
    adaptive_verification._assign_draft_token_budget_compiled = assign
    manager = adaptive_verification.AdaptiveVerificationManager
    init = manager.__init__

    def init_with_costs(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.set_cost_curves(draft_ms, verify_ms)

    manager.__init__ = init_with_costs
    OnlineAcceptanceEstimator.REFIT_INTERVAL = REFIT_INTERVAL
    step, intervals = OnlineAcceptanceEstimator.step, []

    def record_and_step(
        self: Any, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        accepted = (num_sampled - 1).clamp(min=0)[:, None]
        admitted = accepted + num_rejected[:, None]
        position = torch.arange(self.num_speculative_steps)
        is_observed = (position <= accepted) & (position < admitted)
        if self._refits == len(intervals):
            intervals.append(Counter())
        values_by_name = {
            "admitted": admitted,
            "observed": is_observed,
            "predicted": self.predictions[idx_mapping][is_observed],
            "accepted": accepted,
            "steps": num_sampled > 0,
        }
        intervals[-1].update({name: values.sum().item() for name, values in values_by_name.items()})
        step(self, idx_mapping, num_sampled, num_rejected)

    OnlineAcceptanceEstimator.step = record_and_step
    return intervals
