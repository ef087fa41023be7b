"""The requests in the slots of vLLM's Model Runner V2, and what each brings to a step."""

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBackedTensor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor

from vllm_mars.config import MarsConfig
from vllm_mars.kernels.terms import (
    Drafts,
    LossBudget,
    Margin,
    Markers,
    Slots,
    loss_rate,
    loss_units,
    lost_before,
)
from vllm_mars.requests import options_of
from vllm_mars.runner.sections import Sections

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


class RequestsV2(LogitsProcessor):
    """Keeps what each slot's request chose, as a logits processor that changes no logit.

    Args:
        config: the server's options.
        req_states: the runner's `RequestState`. Its `add_request` is wrapped, on this instance
            alone, since it is told the tokens that a request brings.
    """

    def __init__(self, config: MarsConfig, req_states: Any) -> None:
        self._config = config
        self._req_states = req_states
        slots, device = req_states.max_num_reqs, req_states.device
        # The rule's value.
        self._value = UvaBackedTensor(slots, dtype=torch.float32)
        self._is_structured = UvaBackedTensor(slots, dtype=torch.int32)
        # Whether a slot's value is not the server's, and who wants to know what was relaxed.
        self._is_own = np.zeros(slots, dtype=bool)
        self._wants_return = np.zeros(slots, dtype=bool)
        self._sections = Sections(config)
        self._state = StagedWriteTensor(slots, dtype=torch.int32, device=device)
        self._scanned = StagedWriteTensor(slots, dtype=torch.int32, device=device)
        # What each lost, in units of 2**-LOSS_BITS nats, and `LossBudget.rate` of each.
        self._lost = StagedWriteTensor(slots, dtype=torch.int64, device=device)
        self._loss_rate = UvaBackedTensor(slots, dtype=torch.int64)
        self._has_loss_bound = np.zeros(slots, dtype=bool)
        # Output tokens that each came with.
        self._produced = np.zeros(slots, dtype=np.int64)
        add_request = req_states.add_request

        def add_and_note(
            req_id: str, prompt_len: int, all_token_ids: list[int], *args: Any, **kwargs: Any
        ) -> None:
            add_request(req_id, prompt_len, all_token_ids, *args, **kwargs)
            self._begin(req_states.req_id_to_index[req_id], prompt_len, all_token_ids)

        req_states.add_request = add_and_note

    # Built on first use: what is allocated while the model is loaded can be memory that vLLM's
    # sleep mode throws away. The slots' values are written anew for each request.
    @cached_property
    def _markers(self) -> Markers:
        return self._sections.markers(self._req_states.device)

    def _begin(self, slot: int, prompt_len: int, tokens: list[int]) -> None:
        state = self._sections.advance(0, tokens) if self._sections else 0
        self._state.stage_write_elem(slot, state)
        self._scanned.stage_write_elem(slot, len(tokens))
        # Of a request that comes back after a preemption nobody knows what was lost: it is taken to
        # be all that was allowed.
        self._produced[slot] = len(tokens) - prompt_len

    def add_request(self, req_idx: int, sampling_params: "SamplingParams") -> bool:
        """Notes the options of a slot's new request; no logit changes, so False."""
        options = options_of(sampling_params, self._config)
        self._value.np[req_idx] = options.value
        self._is_own[req_idx] = options.value != self._config.value
        self._is_structured.np[req_idx] = options.is_structured
        self._wants_return[req_idx] = options.wants_return
        rate, burst = loss_rate(options.max_loss), loss_units(self._config.loss_burst)
        lost = lost_before(rate, burst, int(self._produced[req_idx]))
        self._lost.stage_write_elem(req_idx, lost)
        self._loss_rate.np[req_idx] = rate
        self._has_loss_bound[req_idx] = options.max_loss < math.inf and not self._config.is_shadow
        return False

    def apply_staged_writes(self) -> None:
        """Hands what is new to the device."""
        for uva in (self._value, self._is_structured, self._loss_rate):
            uva.copy_to_uva()
        for staged in (self._state, self._scanned, self._lost):
            staged.apply_write()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Returns the logits as they are."""
        return logits

    def margin(
        self, drafts: Drafts, idx_mapping: torch.Tensor, idx_mapping_np: np.ndarray
    ) -> Margin:
        """What may be relaxed of a batch's requests in this step, protected tokens aside.

        Args:
            drafts: of these requests, with the bonus row last; the logits are not read.
            idx_mapping: `[num_reqs]` slot of each request.
            idx_mapping_np: the same on the host.
        """
        value: float | torch.Tensor = self._config.value
        if self._is_own[idx_mapping_np].any():
            value = self._value.gpu[idx_mapping]
        states = self._req_states
        slots = Slots(
            idx_mapping, states.all_token_ids.gpu, states.prompt_len.gpu, states.total_len.gpu
        )
        blocked = None
        if self._sections or self._is_structured.np[idx_mapping_np].any():
            from vllm_mars.kernels.sections import blocked_rows

            blocked = blocked_rows(
                self._state.gpu,
                self._scanned.gpu,
                self._is_structured.gpu,
                slots,
                drafts,
                self._markers,
            )
        if self._config.repeat_ngram:
            from vllm_mars.kernels.repeats import block_repeats

            if blocked is None:
                blocked = torch.zeros_like(drafts.draft_token_ids, dtype=torch.int8)
            block_repeats(blocked, slots, drafts, self._config.repeat_ngram)
        loss_budget = None
        if self._has_loss_bound[idx_mapping_np].any():
            loss_budget = LossBudget(
                self._loss_rate.gpu[idx_mapping],
                loss_units(self._config.loss_burst),
                self._lost.gpu[idx_mapping],
                slots.total_len[idx_mapping] - slots.prompt_len[idx_mapping],
            )
        limits = {"blocked": blocked, "loss_budget": loss_budget}
        return Margin.of(self._config.rule, value, **limits)

    def spend(self, lost: torch.Tensor, idx_mapping: torch.Tensor) -> None:
        """Takes what a step lost off the budgets.

        Args:
            lost: int64 `[num_reqs]`, in units of 2**-LOSS_BITS nats.
            idx_mapping: `[num_reqs]` slot of each request.
        """
        if self._has_loss_bound.any():
            self._lost.gpu.index_add_(0, idx_mapping.long(), lost)

    def returns(self, idx_mapping_np: np.ndarray) -> dict[int, str]:
        """Ids of the requests that want to know what was relaxed, by place in the batch."""
        wanted = np.flatnonzero(self._wants_return[idx_mapping_np])
        ids = self._req_states.index_to_req_id
        return {int(place): ids[int(idx_mapping_np[place])] for place in wanted}
