"""The terms of one engine, for the samplers of both model runners."""

import torch

from vllm_mars.kernels.interface import EngineParams, Protected
from vllm_mars.options.config import MarsConfig


class LazyEngineParams:
    """The rule of one engine, and the tokens that keep their probability.

    Args:
        config: the options.
        protected_token_ids: these tokens.
    """

    def __init__(self, config: MarsConfig, protected_token_ids: list[int]) -> None:
        self.config, self._rule = config, config.rule
        self.protected_token_ids = protected_token_ids
        self._protected: Protected | None = None

    def on(self, logits: torch.Tensor) -> EngineParams:
        """The terms on logits of this width.

        The mask of the protected tokens is built on the first call, because only the logits tell
        how wide the model's output is.
        """
        vocab = logits.shape[1]
        if self._protected is None or self._protected.mask.shape[0] != vocab:
            mask = torch.zeros(vocab, dtype=torch.bool)
            mask[[token for token in self.protected_token_ids if token < vocab]] = True
            self._protected = Protected.of(mask, logits.device)
        return EngineParams(self._rule, self._protected)
