"""What the demo runs."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_mars.config import METHOD, lossy_reason, split_speculative_config
from vllm_mars.local.draft_head import check_head, is_head, packaged_head
from vllm_mars.local.drafts import (
    NGRAM,
    RECOMMENDED,
    WITHOUT_FILES,
    draft_name,
    speculative_config,
)
from vllm_mars.local.prompts import PACKAGED
from vllm_mars.lock import check_lock

MODES = ("autoregressive", "strict", "mars")
# Draft tokens per step where neither the user nor the draft says how many.
NUM_SPECULATIVE_TOKENS = 4


@dataclass(frozen=True)
class DemoOptions:
    """What to run: the options of `vllm-mars demo`, which explains them (`command`).

    Attributes:
        draft: None takes the packaged model's EAGLE-3 head where there is one, else ngram.
        price: None takes the recommended price and bound on the loss, or theta.
        num_speculative_tokens: None takes what the head names as its best, else 4.
        repeats: timed passes over the prompts; of each answer's times the median counts.
        output: the JSON file; the servers' logs go beside it.

    Raises:
        ValueError: a number is out of range.
        RuntimeError: the environment forbids lossy verification.
    """

    model: str | None = None
    draft: str | None = None
    theta: float | None = None
    price: float | None = None
    num_speculative_tokens: int | None = None
    prompts: Path = PACKAGED
    max_tokens: int = 24
    repeats: int = 1
    short: bool = False
    output: Path = Path("build/demo.json")
    server_args: tuple[str, ...] = ()
    startup_timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.theta is not None and self.price is not None:
            raise ValueError(
                f"theta={self.theta} and price={self.price} are two rules; give one of them."
            )
        config, _ = split_speculative_config(self._rule)
        check_lock(lossy_reason(config, METHOD))
        for name in ("num_speculative_tokens", "max_tokens", "repeats"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is below 1; give a positive number.")
        if self.startup_timeout <= 0:
            raise ValueError(
                f"startup_timeout={self.startup_timeout} is not above 0; give seconds, such as 600."
            )

    def resolved(self, model: str) -> "DemoOptions":
        """Returns the options with what None stands for, once the model is known.

        Raises:
            ValueError: the draft is a head that is damaged or made for another target.
        """
        draft = self.draft
        if draft is None:
            head = packaged_head() if self.model is None else None
            draft = NGRAM if head is None else str(head)
        tokens = NUM_SPECULATIVE_TOKENS
        if draft not in WITHOUT_FILES and is_head(Path(draft)):
            tokens = check_head(Path(draft), Path(model))
        tokens = self.num_speculative_tokens or tokens
        return replace(self, draft=draft, num_speculative_tokens=tokens)

    @property
    def _rule(self) -> dict[str, Any]:
        """What makes a server verify by the margin."""
        method = {"rejection_sample_method": METHOD}
        if self.theta is not None:
            return {**method, "mars_theta": self.theta}
        if self.price is None:
            return RECOMMENDED
        return {**method, "mars_metric": "price", "mars_price": self.price}

    @property
    def rule_name(self) -> str:
        """The rule with its threshold, for tables, such as "theta 0.9"."""
        if self.theta is not None:
            return f"theta {self.theta:g}"
        return f"price {self._rule['mars_price']:g}"

    @property
    def draft_name(self) -> str:
        """The draft's name without the directories it lies in, for tables and files."""
        return draft_name(self.draft or NGRAM)

    def speculative_config(self, mode: str) -> dict[str, Any] | None:
        """Returns vLLM's speculative config of a mode; None for autoregressive decoding."""
        if mode == "autoregressive":
            return None
        tokens = self.num_speculative_tokens or NUM_SPECULATIVE_TOKENS
        mars = self._rule if mode == "mars" else {}
        return speculative_config(self.draft or NGRAM, tokens, **mars)
