"""The requests in the slots of vLLM's Model Runner V2, and what each brings to a step."""

from collections.abc import Collection, Set
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor

from vllm_mars.config import MarsConfig
from vllm_mars.kernels.terms import Column, Markers, Records, Step
from vllm_mars.requests import options_of
from vllm_mars.runner.records import record_of
from vllm_mars.runner.strictness import LOOKED_AT, Sections

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


class RequestsV2(LogitsProcessor):
    """Keeps what each slot's request chose, as a logits processor that changes no logit.

    Args:
        config: the server's options.
        req_states: the runner's `RequestState`. Its `add_request` is wrapped, on this instance
            alone, since it is told the tokens that a request brings.
        turns: see `Sections`.
        fills: whether drafts are the last token again where the drafter has none.
    """

    def __init__(
        self,
        config: MarsConfig,
        req_states: Any,
        turns: Set[int] = frozenset(),
        fills: bool = False,
    ) -> None:
        self._config = config
        self._req_states = req_states
        self.fills = fills
        self._sections = Sections(config, turns)
        # Whether anything looks at tokens.
        self._may_block = bool(self._sections) or config.repeat_ngram > 0 or fills
        self._wants_return = np.zeros(req_states.max_num_reqs, dtype=bool)
        # What a slot's new request brings: the section's states behind all its tokens and behind
        # its prompt, and the lengths of both.
        self._brought: dict[int, tuple[int, int, int, int]] = {}
        # Records that the device has not got yet, by slot.
        self._staged: dict[int, list[int]] = {}
        # The slot of each request, and what those had lost that got a further input: vLLM takes
        # such a request out of its slot, and its next answer begins anew.
        self._slots: dict[str, int] = {}
        self._replaced: list[torch.Tensor] = []
        # The records of preempted requests, by id, and of those that came back, by slot; on the
        # device, so that the host waits for nothing.
        self._kept: dict[str, torch.Tensor] = {}
        self._restored: dict[int, torch.Tensor] = {}
        add_request = req_states.add_request

        def add_and_note(
            req_id: str, prompt_len: int, all_token_ids: list[int], *args: Any, **kwargs: Any
        ) -> None:
            add_request(req_id, prompt_len, all_token_ids, *args, **kwargs)
            # A prompt can be long.
            last = all_token_ids[max(prompt_len - LOOKED_AT, 0) : prompt_len]
            begun = self._sections.begin(last)
            state = self._sections.advance(begun, all_token_ids[prompt_len:])
            if req_id in self._slots:
                self._replaced.append(self._records.lost[self._slots[req_id]].clone())
            slot = self._slots[req_id] = req_states.req_id_to_index[req_id]
            self._brought[slot] = state, begun, len(all_token_ids), prompt_len
            kept = self._kept.pop(req_id, None)
            if kept is not None and len(all_token_ids) > prompt_len:
                self._restored[slot] = kept

        req_states.add_request = add_and_note

    # These three are built on first use: what is allocated while the model is loaded can be memory
    # that vLLM's sleep mode throws away.
    @cached_property
    def _records(self) -> Records:
        return Records.new(self._req_states.max_num_reqs, self._req_states.device)

    @cached_property
    def _ring(self) -> torch.Tensor:
        from vllm_mars.kernels.strictness import new_ring

        ring: torch.Tensor = new_ring(self._req_states.max_num_reqs, self._req_states.device)
        return ring

    @cached_property
    def _markers(self) -> Markers | None:
        return self._sections.markers(self._req_states.device)

    def add_request(self, req_idx: int, sampling_params: "SamplingParams") -> bool:
        """Notes the options of a slot's new request; no logit changes, so False.

        Raises:
            RuntimeError: the request came another way than by the runner's `RequestState`.
        """
        options = options_of(sampling_params, self._config)
        brought = self._brought.pop(req_idx, None)
        if brought is None:
            if req_idx in self._req_states.index_to_req_id:
                raise RuntimeError(
                    f"Request {self._req_states.index_to_req_id[req_idx]!r} is in slot {req_idx}, "
                    "but RequestState.add_request was not told its tokens, by which vllm-mars "
                    "knows where it must be strict; install a vLLM that it knows, or drop "
                    "rejection_sample_method 'mars'."
                )
            # vLLM's dummy run, of a slot that holds no request.
            brought = 0, 0, 0, 0
        state, begun, length, prompt_len = brought
        room = self._req_states.max_model_len - prompt_len
        record = record_of(sampling_params, self._config, room, length - prompt_len)
        self._wants_return[req_idx] = options.wants_return
        record[Column.STATE], record[Column.BEGUN] = state, begun
        record[Column.SCANNED], record[Column.HELD] = length, prompt_len
        self._staged[req_idx] = record
        return False

    def apply_staged_writes(self) -> None:
        """Hands what is new to the device."""
        if not self._staged:
            return
        rows = [[slot, *record] for slot, record in self._staged.items()]
        staged = async_tensor_h2d(rows, self._req_states.device, torch.int64)
        self._records.table.index_copy_(0, staged[:, 0], staged[:, 1:])
        if self._restored:
            slots = async_tensor_h2d([*self._restored], self._req_states.device, torch.int64)
            kept = torch.stack([*self._restored.values()])
            for column in (Column.LOST, Column.DRAFT_SHARE):
                self._records.table[slots, column] = kept[:, column]
        self._staged.clear()
        self._restored.clear()

    def keep(self, preempted: Collection[str], finished: Collection[str]) -> torch.Tensor:
        """Notes what requests have lost that leave their slots and will come back.

        Args:
            preempted: their ids.
            finished: ids of those that will not.

        Returns:
            What these have lost, and those that got a further input; int64 `[n]`, in units of
            2**-LOSS_BITS nats.
        """
        ended, self._replaced = self._replaced, []
        preempted = [name for name in preempted if name in self._slots]
        leaving = [*preempted, *(set(finished) & self._slots.keys() - set(preempted))]
        if leaving:
            slots = [self._slots.pop(name) for name in leaving]
            records = self._records.table[
                async_tensor_h2d(slots, self._req_states.device, torch.int64)
            ]
            self._kept.update(zip(preempted, records, strict=False))
            ended.append(records[len(preempted) :, Column.LOST])
        # A preempted request can end before it comes back.
        ended += [self._kept.pop(name)[Column.LOST] for name in finished if name in self._kept]
        return torch.hstack(ended) if ended else torch.empty(0, dtype=torch.int64)

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Returns the logits as they are."""
        return logits

    def step(
        self,
        logits: torch.Tensor,
        input_ids: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        num_speculative_tokens: int,
    ) -> tuple[Step, torch.Tensor | None]:
        """A step, and where its drafts must stay strict.

        Args:
            logits, input_ids, cu_num_logits, num_speculative_tokens: see `Step`.
            idx_mapping: `[num_reqs]` slot of each request.
            temperature: float32 `[max_num_reqs]`.

        Returns:
            The step, and int8 `[num_rows]` as `blocked_positions` has it; None where nothing looks
            at tokens.
        """
        states = self._req_states
        total_len, prompt_len = states.total_len.gpu, states.prompt_len.gpu
        own = self._records, idx_mapping, total_len, prompt_len
        step = Step(logits, input_ids, cu_num_logits, *own, num_speculative_tokens)
        if not self._may_block:
            return step, None
        from vllm_mars.kernels.strictness import blocked_positions

        guard = self._config.repeat_ngram, self.fills
        blocked = blocked_positions(
            *(self._ring, states.all_token_ids.gpu, step, temperature, self._markers, *guard)
        )
        return step, blocked

    @property
    def draft_shares(self) -> torch.Tensor:
        """What drafts of each slot's request are drawn at; float32 `[S]`."""
        shares: torch.Tensor = self._records.draft_share
        return shares

    def returns(self, idx_mapping_np: np.ndarray) -> dict[int, str]:
        """Ids of the requests that want to know what was done, by place in the batch."""
        wanted = np.flatnonzero(self._wants_return[idx_mapping_np])
        ids = self._req_states.index_to_req_id
        return {int(place): ids[int(idx_mapping_np[place])] for place in wanted}
