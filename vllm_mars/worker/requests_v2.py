"""Requests in the slots of vLLM's Model Runner V2."""

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

from vllm_mars.kernels.constraints.fused import new_ring
from vllm_mars.kernels.constraints.markers import MarkerTracker
from vllm_mars.kernels.counters.fused import count_ended
from vllm_mars.kernels.interface import Column, ConstraintInputs, Markers, Records, VerifyInputs
from vllm_mars.options.config import MarsConfig
from vllm_mars.options.requests import options_of
from vllm_mars.report.counters import Counters
from vllm_mars.worker.records import record_of

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


# Sampling parameters that leave the logits unchanged, and the temperature, which the kernels can
# apply. A grammar masks the logits before the sampler. vLLM's front end sets `watermarking` in each
# request, and MARS refuses watermarks. `_features` checks top-k, which -1 also switches off.
_CHANGES_NO_LOGITS = frozenset(
    (
        "_all_stop_token_ids",
        "_eos_token_id",
        "_watermarking_skipped",
        "detokenize",
        "extra_args",
        "flat_logprobs",
        "ignore_eos",
        "include_stop_str_in_output",
        "logprob_token_ids",
        "logprobs",
        "max_tokens",
        "n",
        "output_kind",
        "output_text_buffer_length",
        "prompt_logprob_start",
        "prompt_logprob_token_ids",
        "prompt_logprobs",
        "repetition_detection",
        "routed_experts_prompt_start",
        "seed",
        "skip_clone",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "stream_interval",
        "structured_outputs",
        "temperature",
        "top_k",
        "watermarking",
    )
)


class RequestFeatures(enum.IntFlag):
    """Features of a request that decide how its batch is processed.

    LOGITS: something other than the temperature changes its logits.
    DRAFTS: penalties, top-k or top-p, which also apply to its drafts.
    SAMPLES: its temperature is not 0.
    APPLY_TEMPERATURE: its temperature is neither 0 nor 1.
    """

    LOGITS = enum.auto()
    DRAFTS = enum.auto()
    SAMPLES = enum.auto()
    APPLY_TEMPERATURE = enum.auto()


def _features(params: "SamplingParams") -> RequestFeatures:
    features = RequestFeatures(0)
    default = type(params)()
    # An unknown parameter may change the logits.
    for name in params.__struct_fields__:
        if name in _CHANGES_NO_LOGITS:
            continue
        value = getattr(params, name)
        # An empty `logit_bias` or list of tokens changes nothing either.
        if value != getattr(default, name) and value not in ([], {}):
            features |= RequestFeatures.LOGITS
    if params.top_k > 0 or params.top_p < 1 or use_penalty(params):
        features |= RequestFeatures.DRAFTS | RequestFeatures.LOGITS
    if params.temperature:
        features |= RequestFeatures.SAMPLES
        if params.temperature != 1:
            features |= RequestFeatures.APPLY_TEMPERATURE
    return features


# Larger than any vocabulary, and exact in float32.
_NO_TOP_K = 2.0**24
# Draft temperature (1 if greedy), top-k, top-p; repetition, frequency and presence penalty.
_NO_PARAMETERS = (1.0, _NO_TOP_K, 1.0, 1.0, 0.0, 0.0)


def _parameters_of(params: "SamplingParams", draft_temperature: float) -> tuple[float, ...]:
    """Returns a slot's column of `draft_parameters`, in the order of `_NO_PARAMETERS`."""
    return (
        draft_temperature or 1.0,
        params.top_k if params.top_k > 0 else _NO_TOP_K,
        params.top_p,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )


class _NewText(NamedTuple):
    """Tokens of a new request: `MarkerTracker` states after all and after the prompt, lengths."""

    state: int
    prompt_state: int
    length: int
    prompt_len: int


class RequestsV2(LogitsProcessor):
    """Tracks each slot's request as a logits processor that changes no logits.

    Args:
        req_states: the runner's `RequestState`, whose `add_request` is wrapped to see the tokens.
        pads_with_last_token: whether missing draft tokens are copies of the last token.
        is_probabilistic: whether sampled requests have probabilistic drafts.

    Attributes:
        naming: slots whose request has `logprob_token_ids`.
    """

    def __init__(
        self,
        config: MarsConfig,
        req_states: Any,
        pads_with_last_token: bool = False,
        is_probabilistic: bool = False,
    ) -> None:
        self._config = config
        self._is_probabilistic = is_probabilistic
        self._req_states = req_states
        self.pads_with_last_token = pads_with_last_token
        self._tracker = MarkerTracker(config)
        # Whether any option depends on the text.
        self._may_block = bool(self._tracker) or config.repeat_ngram > 0 or pads_with_last_token
        self.naming: set[int] = set()
        # The `RequestFeatures` of each slot's request.
        self._features = np.zeros(req_states.max_num_reqs, dtype=np.uint8)
        # Slots whose request wants a report.
        self._returning: set[int] = set()
        # By slot of a new request.
        self._new_texts: dict[int, _NewText] = {}
        # Slot of each request, and losses of requests that ended without one: vLLM frees the slot
        # of a request that gets more input, and a preempted request can end before it resumes.
        self._slots: dict[str, int] = {}
        self._lost: list[torch.Tensor] = []
        # Losses of preempted requests by id, and of resumed ones by slot; on the device, so that
        # the host does not wait.
        self._preempted_lost: dict[str, torch.Tensor] = {}
        self._restored: dict[int, torch.Tensor] = {}
        add_request = req_states.add_request

        def add_and_note(
            req_id: str, prompt_len: int, all_token_ids: list[int], *args: Any, **kwargs: Any
        ) -> None:
            add_request(req_id, prompt_len, all_token_ids, *args, **kwargs)
            prompt_state = self._tracker.initial_state(all_token_ids[:prompt_len])
            state = self._tracker.advance(prompt_state, all_token_ids[prompt_len:])
            if req_id in self._slots:
                self._lost.append(self.records.lost[self._slots[req_id]].clone())
            slot = self._slots[req_id] = req_states.req_id_to_index[req_id]
            self._new_texts[slot] = _NewText(state, prompt_state, len(all_token_ids), prompt_len)
            lost = self._preempted_lost.pop(req_id, None)
            if lost is not None and len(all_token_ids) > prompt_len:
                self._restored[slot] = lost

        req_states.add_request = add_and_note

    # Tensors are allocated on first use: vLLM's sleep mode can discard memory that is allocated
    # while the model is loaded.
    @cached_property
    def _staged(self) -> StagedWriteTensor:
        num_slots, device = self._req_states.max_num_reqs, self._req_states.device
        table = Records.new(num_slots, device).table
        staged = StagedWriteTensor(table.shape, table.dtype, device)
        staged.gpu = table
        return staged

    @cached_property
    def records(self) -> Records:
        return Records(self._staged.gpu)

    @cached_property
    def _draft_temperature(self) -> StagedWriteTensor:
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
    def draft_parameters(self) -> torch.Tensor:
        """Sampling parameters of drafts, float32 `[6, S]` with a fixed address."""
        parameters: torch.Tensor = self._parameters.gpu
        return parameters

    def _by_slot(self, dtype: torch.dtype) -> StagedWriteTensor:
        return StagedWriteTensor(self._req_states.max_num_reqs, dtype, self._req_states.device)

    @property
    def draft_sampling(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft temperature (float32) and next seed (int64) of each slot."""
        assert self._is_probabilistic, (
            "draft_sample_method is not 'probabilistic', but drafts are sampled"
        )
        return self._draft_temperature.gpu, self._next_seeds.gpu

    @cached_property
    def _ended(self) -> UvaBufferPool:
        return UvaBufferPool(self._req_states.max_num_reqs, torch.int32)

    @cached_property
    def _ring(self) -> torch.Tensor:
        ring: torch.Tensor = new_ring(self._req_states.max_num_reqs, self._req_states.device)
        return ring

    @cached_property
    def _markers(self) -> Markers | None:
        return self._tracker.markers(self._req_states.device)

    def add_request(self, req_idx: int, sampling_params: "SamplingParams") -> bool:
        """Stages a new request's record; returns False, since no logits change."""
        options = options_of(sampling_params, self._config)
        text = self._new_texts.pop(req_idx, None)
        if text is None:
            if req_idx in self._req_states.index_to_req_id:
                raise RuntimeError(
                    f"Request {self._req_states.index_to_req_id[req_idx]!r} is in slot {req_idx}, "
                    "but RequestState.add_request was not called with its tokens, from which "
                    "vllm-mars knows where it must be strict; install a vLLM that it knows, or "
                    "drop rejection_sample_method 'mars'."
                )
            # vLLM's dummy run uses slots without a request.
            text = _NewText(state=0, prompt_state=0, length=0, prompt_len=0)
        record = record_of(
            options=options,
            params=sampling_params,
            config=self._config,
            is_probabilistic=self._is_probabilistic,
            max_output_tokens=self._req_states.max_model_len - text.prompt_len,
            num_output_tokens=text.length - text.prompt_len,
        )
        previous_features = self._features[req_idx]
        features = _features(sampling_params)
        self._features[req_idx] = features
        _set_member(self._returning, req_idx, options.wants_return)
        _set_member(self.naming, req_idx, bool(sampling_params.logprob_token_ids))
        record[Column.STATE] = text.state
        record[Column.PROMPT_STATE] = text.prompt_state
        record[Column.NUM_SCANNED] = text.length
        record[Column.RING_END] = text.prompt_len
        self._staged.stage_write(req_idx, 0, record)
        if self._is_probabilistic:
            # A strict request does not gain from a lower draft temperature.
            share = self._config.draft_share if record[Column.VALUE] else 1.0
            draft_temperature = np.float32(sampling_params.temperature) * np.float32(share)
            self._draft_temperature.stage_write_elem(req_idx, float(draft_temperature))
            # Otherwise the slot already holds `_NO_PARAMETERS`.
            if (features | previous_features) & RequestFeatures.DRAFTS:
                parameters = _parameters_of(sampling_params, float(draft_temperature))
                for row, value in enumerate(parameters):
                    self._parameters.stage_write(row, req_idx, [value])
            seed = sampling_params.seed
            if seed is None:
                # As in vLLM, so that all tensor-parallel ranks get the same seed.
                seed = int(np.random.randint(2**62))
            # The first draft follows one token more, the one sampled after the prefill.
            self._next_seeds.stage_write_elem(req_idx, seed ^ (text.length + 1 << 32))
        return False

    def apply_staged_writes(self) -> None:
        self._staged.apply_write()
        if self._is_probabilistic:
            self._draft_temperature.apply_write()
            self._parameters.apply_write()
            self._next_seeds.apply_write()
        if self._restored:
            slots = async_tensor_h2d([*self._restored], self._req_states.device, torch.int64)
            lost = torch.stack([*self._restored.values()])
            self.records.lost[slots] = lost
            self._restored.clear()

    def leave(
        self, preempted: Collection[str], finished: Collection[str], counters: Counters
    ) -> None:
        """Saves the losses of preempted requests and counts finished ones, by id."""
        for req_id in preempted:
            if (slot := self._slots.pop(req_id, None)) is not None:
                self._preempted_lost[req_id] = self.records.lost[slot].clone()
        ended = []
        for req_id in finished:
            if (slot := self._slots.pop(req_id, None)) is not None:
                ended.append(slot)
            elif (lost := self._preempted_lost.pop(req_id, None)) is not None:
                self._lost.append(lost)
        if ended:
            self._returning.difference_update(ended)
            self.naming.difference_update(ended)
            count_ended(
                counts=counters.device_counts,
                layout=counters.layout,
                bounds=counters.bounds,
                records=self.records,
                slots=self._ended.copy_to_uva(ended),
            )
        if self._lost:
            counters.add_ended(torch.hstack(self._lost))
            self._lost.clear()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        return logits

    def features(self, idx_mapping_np: np.ndarray) -> int:
        return int(np.bitwise_or.reduce(self._features[idx_mapping_np]))

    def step(
        self,
        logits: torch.Tensor,
        input_ids: torch.Tensor,
        cu_num_logits: torch.Tensor,
        slots: torch.Tensor,
        # [S], float32; the others are as in `VerifyInputs`.
        temperature: torch.Tensor,
        num_speculative_tokens: int,
    ) -> tuple[VerifyInputs, ConstraintInputs | None]:
        """Builds the inputs of a step, and of its constraints if any option depends on the text."""
        states = self._req_states
        step = VerifyInputs(
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
        return step, ConstraintInputs(
            ring=self._ring,
            tokens=states.all_token_ids.gpu,
            temperature=temperature,
            markers=self._markers,
            ngram=self._config.repeat_ngram,
            pads_with_last_token=self.pads_with_last_token,
        )

    def returns(self, idx_mapping_np: np.ndarray) -> dict[int, str]:
        if not self._returning:
            return {}
        ids = self._req_states.index_to_req_id
        return {
            batch_idx: ids[slot]
            for batch_idx, slot in enumerate(idx_mapping_np.tolist())
            if slot in self._returning
        }


def _set_member(slots: set[int], slot: int, is_member: bool) -> None:
    (slots.add if is_member else slots.discard)(slot)
