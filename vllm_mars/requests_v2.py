"""Thresholds of the requests in the slots of vLLM's Model Runner V2."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor

from vllm_mars.config import MarsConfig
from vllm_mars.margin import Thresholds
from vllm_mars.requests import thresholds_of

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


class RequestThresholdsV2(LogitsProcessor):
    """Keeps each slot's thresholds as a logits processor that changes no logit.

    Args:
        config: the server's options.
        max_num_reqs: number of slots.
    """

    def __init__(self, config: MarsConfig, max_num_reqs: int) -> None:
        self._config = config
        self._theta = UvaBackedTensor(max_num_reqs, dtype=torch.float32)
        self._gap = UvaBackedTensor(max_num_reqs, dtype=torch.float32)
        # Whether a slot's thresholds are not the server's.
        self._is_own = np.zeros(max_num_reqs, dtype=bool)

    def add_request(self, req_idx: int, sampling_params: "SamplingParams") -> bool:
        """Notes the thresholds of a slot's new request; no logit changes, so False."""
        thresholds = thresholds_of(sampling_params, self._config)
        self._theta.np[req_idx], self._gap.np[req_idx] = thresholds
        self._is_own[req_idx] = thresholds != self._config.thresholds
        return False

    def apply_staged_writes(self) -> None:
        """Hands the thresholds to the device."""
        self._theta.copy_to_uva()
        self._gap.copy_to_uva()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Returns the logits as they are."""
        return logits

    def of_batch(self, idx_mapping: torch.Tensor, idx_mapping_np: np.ndarray) -> Thresholds:
        """Theta and gap of a batch: floats, or float32 `[num_reqs]` each.

        Args:
            idx_mapping: `[num_reqs]` slot of each request.
            idx_mapping_np: the same on the host.
        """
        if not self._is_own[idx_mapping_np].any():
            return self._config.thresholds
        return self._theta.gpu[idx_mapping], self._gap.gpu[idx_mapping]
