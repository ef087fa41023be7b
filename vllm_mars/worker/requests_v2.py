"""The requests in the slots of vLLM's Model Runner V2, and what each brings to a step."""

import enum
from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBufferPool
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.sample.penalties import use_penalty

from vllm_mars.kernels.account.fused import count_ended
from vllm_mars.kernels.record import Column, Records
from vllm_mars.kernels.step import Step
from vllm_mars.kernels.strictness.fused import guard_positions, new_ring
from vllm_mars.kernels.strictness.naive import Guard, Markers, Sections
from vllm_mars.options.config import MarsConfig
from vllm_mars.options.requests import options_of
from vllm_mars.report.counters import Counters
from vllm_mars.worker.records import record_of

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


# What a request may choose while nothing but its temperature changes its logits; a grammar masks
# them before the sampler.
_CHANGES_NO_LOGITS = frozenset(
    (
        *("n", "temperature", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens"),
        *("logprobs", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start"),
        *("logprob_token_ids", "flat_logprobs", "detokenize", "skip_special_tokens"),
        *("spaces_between_special_tokens", "include_stop_str_in_output", "output_kind"),
        *("stream_interval", "skip_clone", "output_text_buffer_length", "_eos_token_id"),
        *("_all_stop_token_ids", "structured_outputs", "extra_args", "skip_reading_prefix_cache"),
        *("repetition_detection", "routed_experts_prompt_start"),
    )
)


class Asks(enum.IntFlag):
    """What a request asks for beside its tokens.

    LOGITS: that something beside the temperature changes its logits.
    DRAFTS: that this is something that its drafts are drawn under as well.
    SAMPLES: a temperature.
    DIVIDES: one that is not 1.
    """

    LOGITS = enum.auto()
    DRAFTS = enum.auto()
    SAMPLES = enum.auto()
    DIVIDES = enum.auto()


def _asks(params: "SamplingParams") -> Asks:
    """A choice that is not known here may change the logits."""
    found = Asks(0)
    default = type(params)()
    for name in params.__struct_fields__:
        if name not in _CHANGES_NO_LOGITS and getattr(params, name) != getattr(default, name):
            found |= Asks.LOGITS
    if params.top_k > 0 or params.top_p < 1 or use_penalty(params):
        found |= Asks.DRAFTS
    if params.temperature:
        found |= Asks.SAMPLES if params.temperature == 1 else Asks.SAMPLES | Asks.DIVIDES
    return found


# As in `DraftParameters`; more than any vocabulary, and a number that float32 holds.
_NO_PARAMETERS = 1.0, 2.0**24, 1.0, 1.0, 0.0, 0.0


def _parameters_of(params: "SamplingParams", drawn_at: float) -> tuple[float, ...]:
    """A slot's column of `DraftParameters`."""
    top_k = params.top_k if params.top_k > 0 else _NO_PARAMETERS[1]
    penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    return drawn_at or 1.0, top_k, params.top_p, *penalties


class DraftParameters(NamedTuple):
    """What drafts are drawn under, by slot: views of a table that does not move.

    Attributes:
        table: float32 `[6, S]`, of which a row is each of
        divisor: what the logits are divided by, 1 of a greedy request; for top-p.
        top_k, top_p: at least the vocabulary, and 1, of a request that has none.
        repetition, frequency, presence: penalties.
    """

    table: torch.Tensor
    divisor: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


class RequestsV2(LogitsProcessor):
    """Keeps what each slot's request chose, as a logits processor that changes no logit.

    Args:
        config: the server's options.
        req_states: the runner's `RequestState`. Its `add_request` is wrapped, on this instance
            alone, since it is told the tokens that a request brings.
        fills: whether drafts are the last token again where the drafter has none.
        is_drawn: whether drafts are drawn where requests sample.

    Attributes:
        naming: slots whose request names tokens for their logprobs.
    """

    def __init__(
        self,
        config: MarsConfig,
        req_states: Any,
        fills: bool = False,
        is_drawn: bool = False,
    ) -> None:
        self._config = config
        self._is_drawn = is_drawn
        self._req_states = req_states
        self.fills = fills
        self._sections = Sections(config)
        # Whether anything looks at tokens.
        self._may_block = bool(self._sections) or config.repeat_ngram > 0 or fills
        self.naming: set[int] = set()
        # The `Asks` of each slot's request.
        self._asks = np.zeros(req_states.max_num_reqs, dtype=np.uint8)
        # Slots whose request wants to know what was done.
        self._returning: set[int] = set()
        # What a slot's new request brings: the section's states behind all its tokens and behind
        # its prompt, and the lengths of both.
        self._brought: dict[int, tuple[int, int, int, int]] = {}
        # The slot of each request, and what those lost that were in none when they ended. One that
        # gets a further input vLLM takes out of its slot, and its next answer begins anew. A
        # preempted one can end before it comes back.
        self._slots: dict[str, int] = {}
        self._lost: list[torch.Tensor] = []
        # What preempted requests have lost, by id, and those that came back, by slot; it is on the
        # device, so that the host waits for nothing.
        self._kept: dict[str, torch.Tensor] = {}
        self._restored: dict[int, torch.Tensor] = {}
        add_request = req_states.add_request

        def add_and_note(
            req_id: str, prompt_len: int, all_token_ids: list[int], *args: Any, **kwargs: Any
        ) -> None:
            add_request(req_id, prompt_len, all_token_ids, *args, **kwargs)
            begun = self._sections.begin(all_token_ids[:prompt_len])
            state = self._sections.advance(begun, all_token_ids[prompt_len:])
            if req_id in self._slots:
                self._lost.append(self.records.lost[self._slots[req_id]].clone())
            slot = self._slots[req_id] = req_states.req_id_to_index[req_id]
            self._brought[slot] = state, begun, len(all_token_ids), prompt_len
            kept = self._kept.pop(req_id, None)
            if kept is not None and len(all_token_ids) > prompt_len:
                self._restored[slot] = kept

        req_states.add_request = add_and_note

    # These are built on first use: what is allocated while the model is loaded can be memory that
    # vLLM's sleep mode throws away.
    @cached_property
    def _staged(self) -> StagedWriteTensor:
        num_slots, device = self._req_states.max_num_reqs, self._req_states.device
        table = Records.new(num_slots, device).table
        staged = StagedWriteTensor(table.shape, table.dtype, device)
        staged.gpu = table
        return staged

    @cached_property
    def records(self) -> Records:
        """Those of all slots."""
        return Records(self._staged.gpu)

    @cached_property
    def _drawn_at(self) -> StagedWriteTensor:
        return self._by_slot(torch.float32)

    @cached_property
    def _next_seeds(self) -> StagedWriteTensor:
        return self._by_slot(torch.int64)

    @cached_property
    def _parameters(self) -> StagedWriteTensor:
        num_slots, device = self._req_states.max_num_reqs, self._req_states.device
        staged = StagedWriteTensor((len(_NO_PARAMETERS), num_slots), torch.float32, device)
        staged.gpu.copy_(torch.tensor(_NO_PARAMETERS)[:, None])
        return staged

    @property
    def draft_parameters(self) -> DraftParameters:
        """What the next drafts are drawn under."""
        return DraftParameters(self._parameters.gpu, *self._parameters.gpu)

    def _by_slot(self, dtype: torch.dtype) -> StagedWriteTensor:
        return StagedWriteTensor(self._req_states.max_num_reqs, dtype, self._req_states.device)

    @property
    def drawn_with(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Temperature and seed that the next drafts are drawn with, float32 and int64, by slot."""
        assert self._is_drawn, "draft_sample_method is not 'probabilistic', but drafts are drawn"
        return self._drawn_at.gpu, self._next_seeds.gpu

    @cached_property
    def _ended(self) -> UvaBufferPool:
        return UvaBufferPool(self._req_states.max_num_reqs, torch.int32)

    @cached_property
    def _ring(self) -> torch.Tensor:
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
        own = self._config, self._is_drawn, room, length - prompt_len
        record = record_of(options, sampling_params, *own)
        asked, asks = self._asks[req_idx], _asks(sampling_params)
        self._asks[req_idx] = asks
        _put(self._returning, req_idx, options.wants_return)
        _put(self.naming, req_idx, bool(sampling_params.logprob_token_ids))
        record[Column.STATE], record[Column.BEGUN] = state, begun
        record[Column.SCANNED], record[Column.HELD] = length, prompt_len
        self._staged.stage_write(req_idx, 0, record)
        if self._is_drawn:
            # A strict request has nothing of drafts that are drawn at a share of its temperature.
            share = self._config.draft_share if record[Column.VALUE] else 1.0
            drawn_at = np.float32(sampling_params.temperature) * np.float32(share)
            self._drawn_at.stage_write_elem(req_idx, float(drawn_at))
            # Else the slot has none already.
            if (asks | asked) & Asks.DRAFTS:
                for row, value in enumerate(_parameters_of(sampling_params, float(drawn_at))):
                    self._parameters.stage_write(row, req_idx, [value])
            # As vLLM does it, so that all tensor-parallel ranks take the same one. Behind its
            # prefill a request has one token more.
            seed = sampling_params.seed
            seed = int(np.random.randint(2**62)) if seed is None else seed
            self._next_seeds.stage_write_elem(req_idx, seed ^ (length + 1 << 32))
        return False

    def apply_staged_writes(self) -> None:
        """Hands what is new to the device."""
        self._staged.apply_write()
        if self._is_drawn:
            self._drawn_at.apply_write()
            self._parameters.apply_write()
            self._next_seeds.apply_write()
        if self._restored:
            slots = async_tensor_h2d([*self._restored], self._req_states.device, torch.int64)
            kept = torch.stack([*self._restored.values()])
            self.records.lost[slots] = kept
            self._restored.clear()

    def leave(
        self, preempted: Collection[str], finished: Collection[str], counters: Counters
    ) -> None:
        """Notes what requests have lost that leave their slots and will come back.

        Args:
            preempted: their ids.
            finished: ids of those that will not.
            counters: where these are counted, and those that got a further input.
        """
        for name in preempted:
            if (slot := self._slots.pop(name, None)) is not None:
                self._kept[name] = self.records.lost[slot].clone()
        ended = []
        for name in finished:
            if (slot := self._slots.pop(name, None)) is not None:
                ended.append(slot)
            elif (kept := self._kept.pop(name, None)) is not None:
                self._lost.append(kept)
        if ended:
            self._returning.difference_update(ended)
            self.naming.difference_update(ended)
            slots = self._ended.copy_to_uva(ended)
            own = counters.device_counts, counters.layout, counters.bounds
            count_ended(*own, self.records, slots)
        if self._lost:
            counters.add_ended(torch.hstack(self._lost))
            self._lost.clear()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Returns the logits as they are."""
        return logits

    def asks(self, idx_mapping_np: np.ndarray) -> int:
        """The `Asks` of all requests of a batch together."""
        return int(np.bitwise_or.reduce(self._asks[idx_mapping_np]))

    def step(
        self,
        logits: torch.Tensor,
        input_ids: torch.Tensor,
        cu_num_logits: torch.Tensor,
        slots: torch.Tensor,
        temperature: torch.Tensor,
        num_speculative_tokens: int,
    ) -> tuple[Step, Guard | None]:
        """A step, and what the text before each of its rows asks.

        Args:
            logits, input_ids, cu_num_logits, slots, num_speculative_tokens: see `Step`.
            temperature: float32, by slot.

        Returns:
            The step, and what `guard_positions` finds; None where nothing looks at tokens.
        """
        states = self._req_states
        step = Step(
            logits=logits,
            input_ids=input_ids,
            cu_num_logits=cu_num_logits,
            records=self.records,
            slots=slots,
            total_len=states.total_len.gpu,
            prompt_len=states.prompt_len.gpu,
            num_speculative_tokens=num_speculative_tokens,
        )
        if not self._may_block:
            return step, None
        given = self._ring, states.all_token_ids.gpu, step, temperature, self._markers
        return step, guard_positions(*given, self._config.repeat_ngram, self.fills)

    def returns(self, idx_mapping_np: np.ndarray) -> dict[int, str]:
        """Ids of the requests that want to know what was done, by place in the batch."""
        if not self._returning:
            return {}
        ids, slots = self._req_states.index_to_req_id, idx_mapping_np.tolist()
        return {place: ids[slot] for place, slot in enumerate(slots) if slot in self._returning}


def _put(slots: set[int], slot: int, belongs: bool) -> None:
    (slots.add if belongs else slots.discard)(slot)
