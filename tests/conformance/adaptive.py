"""Lets vLLM's adaptive verification run on a CPU, for tests, and looks at what it does.

vLLM asks for full CUDA graphs, and for attention that takes the lengths of drafts from the device
alone, as that of a CPU does. What a step costs it measures while it captures the graphs; here that
is given.
"""

from collections import Counter
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

# Between two fits are 100 steps, which take the interpreter long.
REFIT_INTERVAL = 20


def allow(draft_ms: list[list[float]], verify_ms: list[list[float]]) -> list[dict[str, float]]:
    """Lifts what vLLM refuses, in the process that calls it.

    Args:
        draft_ms, verify_ms: what a step costs, as pairs of a size and milliseconds: of the drafter
            by requests, of the target by tokens.

    Returns:
        What the steps between two fits of the estimator did, which grows: drafts `admitted`, those
        `observed` (accepted, or the first one that is not), the chance with which they were
        `predicted` to be accepted, in sum, and those that were `accepted`; and requests' `steps`.
    """
    VllmConfig._validate_adaptive_verification = lambda self: None
    model_runner.resolve_adaptive_cudagraph_mode = lambda mode, **_: CUDAGraphMode.NONE
    for name in ("query_lens_mismatch", "varlen_cudagraph"):
        setattr(adaptive_verification, f"get_{name}_unsupported_backend", lambda *_, **__: None)
    # Compiled it is the same.
    assign = adaptive_verification._assign_draft_token_budget
    adaptive_verification._assign_draft_token_budget_compiled = assign
    manager = adaptive_verification.AdaptiveVerificationManager
    init = manager.__init__

    def init_with_costs(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.set_cost_curves(draft_ms, verify_ms)

    manager.__init__ = init_with_costs
    OnlineAcceptanceEstimator.REFIT_INTERVAL = REFIT_INTERVAL
    step, rounds = OnlineAcceptanceEstimator.step, []

    def look_and_step(
        self: Any, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        accepted = (num_sampled - 1).clamp(min=0)[:, None]
        admitted = accepted + num_rejected[:, None]
        place = torch.arange(self.num_speculative_steps)
        is_observed = (place <= accepted) & (place < admitted)
        if self._refits == len(rounds):
            rounds.append(Counter())
        found = {
            "admitted": admitted,
            "observed": is_observed,
            "predicted": self.predictions[idx_mapping][is_observed],
            "accepted": accepted,
            "steps": num_sampled > 0,
        }
        rounds[-1].update({name: values.sum().item() for name, values in found.items()})
        step(self, idx_mapping, num_sampled, num_rejected)

    OnlineAcceptanceEstimator.step = look_and_step
    return rounds
