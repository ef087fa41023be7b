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
        self._max_num_reqs = max_num_reqs
        self._device = device
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
            of_place = [
                self._own.get(place, self._config.thresholds) for place in range(self._max_num_reqs)
            ]
            theta, gap = zip(*of_place, strict=True)
            self._on_device = self._to_device(theta), self._to_device(gap)
        theta_of_place, gap_of_place = self._on_device
        return theta_of_place[:batch], gap_of_place[:batch]

    def _to_device(self, values: tuple[float, ...]) -> torch.Tensor:
        # New memory each time: an earlier copy may not have been made yet, with steps queued ahead.
        pinned = torch.tensor(values, pin_memory=self._device.type == "cuda")
        return pinned.to(self._device, non_blocking=True)
