"""Engine-wide verification parameters, for the samplers of both model runners."""

import torch

from vllm_mars.kernels.interface import EngineParams, Protected
from vllm_mars.options.config import MarsConfig


class LazyEngineParams:
    """`EngineParams` that are built on the first call of `on`, which knows the logits' width."""

    def __init__(self, config: MarsConfig, protected_token_ids: list[int]) -> None:
        self.config = config
        self.protected_token_ids = protected_token_ids
        self._protected: Protected | None = None

    def on(self, logits: torch.Tensor) -> EngineParams:
        """Returns the parameters on the logits' device, with a mask of their width."""
        vocab = logits.shape[1]
        if self._protected is None or self._protected.mask.shape[0] != vocab:
            mask = torch.zeros(vocab, dtype=torch.bool)
            mask[[token for token in self.protected_token_ids if token < vocab]] = True
            self._protected = Protected.of(mask, logits.device)
        return EngineParams(self.config.rule, self._protected)
