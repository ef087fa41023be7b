"""Thresholds of the requests in the batch of vLLM's V1 model runner."""

from typing import TYPE_CHECKING

import torch
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from vllm_mars.config import MarsConfig
from vllm_mars.margin import Thresholds
from vllm_mars.requests import thresholds_of

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


class RequestThresholdsV1(LogitsProcessor):
    """Follows the batch as a logits processor that changes no logit.

    It stands among those that cannot change the argmax, so a plain greedy batch stays one.

    Args:
        config: the server's options.
        max_num_reqs: most requests of a batch.
        device: device of the logits.
    """

    def __init__(self, config: MarsConfig, max_num_reqs: int, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._theta = torch.empty(max_num_reqs, pin_memory=device.type == "cuda")
        self._gap = torch.empty_like(self._theta)
        # Requests whose thresholds are not the server's, by their place in the batch.
        self._own: dict[int, tuple[float, float]] = {}
        self._on_device: tuple[torch.Tensor, torch.Tensor] | None = None

    def is_argmax_invariant(self) -> bool:
        """True: no logit changes."""
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits as they are."""
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Notes which requests came, went and moved."""

        def own_thresholds(
            params: "SamplingParams", prompt: object, output: object
        ) -> tuple[float, float] | None:
            thresholds = thresholds_of(params, self._config)
            return None if thresholds == self._config.thresholds else thresholds

        if process_dict_updates(self._own, batch_update, own_thresholds):
            self._on_device = None

    def of_batch(self, batch: int) -> Thresholds:
        """Theta and gap of the first `batch` requests: floats, or float32 `[batch]` each."""
        if not self._own:
            return self._config.thresholds
        if self._on_device is None:
            theta, gap = self._config.thresholds
            self._theta.fill_(theta)
            self._gap.fill_(gap)
            for index, (own_theta, own_gap) in self._own.items():
                self._theta[index] = own_theta
                self._gap[index] = own_gap
            # A copy, also on a CPU: the buffers are written again while a step may still read.
            self._on_device = (
                self._theta.to(self._device, non_blocking=True, copy=True),
                self._gap.to(self._device, non_blocking=True, copy=True),
            )
        theta_of_slot, gap_of_slot = self._on_device
        return theta_of_slot[:batch], gap_of_slot[:batch]
