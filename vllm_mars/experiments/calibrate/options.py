"""What `vllm-mars calibrate` calibrates."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_mars.config import METHOD, OPTION, MarsConfig, lossy_reason
from vllm_mars.experiments.quality.scores import MIN_SOLVED
from vllm_mars.local.drafts import NGRAM, speculative_config
from vllm_mars.local.prompts import PACKAGED
from vllm_mars.lock import check_lock

# Nats per token: perplexity grows by at most 1 %.
BUDGET = 0.01


@dataclass(frozen=True)
class CalibrateOptions:
    """What to calibrate: the options of `vllm-mars calibrate`, which explains them (`command`).

    Attributes:
        budget: loss that is allowed, nats per token, above 0.
        recovery: share of the strict answers' task score that must be kept, in (0, 1]; where it is
            given, `budget` does not count.
        prompts: every second one is held out for the confirmation.
        output: the file that `"auto:FILE"` reads.

    Raises:
        ValueError: a value is out of range.
        RuntimeError: the environment forbids lossy verification.
    """

    model: str | None = None
    draft: str = NGRAM
    num_speculative_tokens: int = 4
    metric: str = "ratio"
    budget: float = BUDGET
    recovery: float | None = None
    min_solved: int = MIN_SOLVED
    prompts: Path = PACKAGED
    max_tokens: int = 128
    output: Path = Path("build/calibration.json")
    engine_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.metric not in OPTION:
            raise ValueError(f"metric={self.metric!r} is not one of {', '.join(OPTION)}.")
        if not 0 < self.budget < math.inf:
            raise ValueError(
                f"budget={self.budget} is outside (0, inf); give nats per token, such as {BUDGET}."
            )
        if self.recovery is not None and not 0 < self.recovery <= 1:
            raise ValueError(
                f"recovery={self.recovery} is outside (0, 1]; give a share of the strict answers' "
                "task score, such as 0.98."
            )
        for name in ("num_speculative_tokens", "max_tokens", "min_solved"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)} is below 1; give a positive number."
                )
        if any(arg.startswith(("--spec", "-sc")) for arg in self.engine_args):
            raise ValueError(
                f"server_args={self.engine_args} names a draft; give it with --draft and "
                "--num-speculative-tokens."
            )
        # Its requests are lossy, whatever threshold comes out.
        check_lock(lossy_reason(MarsConfig(), METHOD))

    def speculative_config(self) -> dict[str, Any]:
        """Draft and its length, as vLLM takes them."""
        return speculative_config(self.draft, self.num_speculative_tokens)
