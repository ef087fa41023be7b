"""Requests in the batch of vLLM's V1 model runner."""

import itertools
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from vllm_mars.kernels.constraints.markers import MarkerTracker
from vllm_mars.kernels.constraints.naive import NgramIndex, cpu_constraints
from vllm_mars.kernels.interface import Column, CpuConstraints, Records, VerifyInputs
from vllm_mars.options.config import MarsConfig
from vllm_mars.options.requests import RequestOptions, options_of
from vllm_mars.worker.records import record_of


@dataclass
class _Request:
    """One request of the batch.

    Attributes:
        record: current only while the request is out of the batch; else see its slot.
        output: vLLM's list of output tokens, which grows.
        slot: row of `Records`, or -1 if the request is out of the batch.
        state: `MarkerTracker` state after the prompt and the first `num_scanned` output tokens.
    """

    options: RequestOptions
    record: list[int]
    prompt: Sequence[int]
    output: list[int]
    is_sampled: bool
    ngrams: NgramIndex
    slot: int = -1
    state: int = 0
    num_scanned: int = 0

    def resume(self, previous: "_Request") -> None:
        """Continues from the state in which the same request left the batch."""
        self.record[Column.LOST] = previous.record[Column.LOST]
        self.ngrams = previous.ngrams
        self.state = previous.state
        self.num_scanned = previous.num_scanned


class RequestsV1(LogitsProcessor):
    """Tracks the batch as a logits processor that changes no logits.

    Args:
        request_ids: returns the ids of the batch's requests, by batch index.
        unfinished: returns the ids of all requests that have not ended.
        ended: called with the losses of ended requests, int64 in units of 2**-LOSS_BITS nats.
        is_probabilistic: whether sampled requests have probabilistic drafts.
    """

    def __init__(
        self,
        config: MarsConfig,
        max_num_reqs: int,
        max_model_len: int,
        request_ids: Callable[[], Sequence[str]] = tuple,
        unfinished: Callable[[], Container[str]] = tuple,
        ended: Callable[[torch.Tensor], None] = lambda _: None,
        is_probabilistic: bool = False,
    ) -> None:
        self._config = config
        self._is_probabilistic = is_probabilistic
        self._max_model_len = max_model_len
        self._request_ids = request_ids
        self._unfinished = unfinished
        self._ended = ended
        self._tracker = MarkerTracker(config)
        # By batch index; vLLM's dummy runs use indices without a request.
        self._requests: dict[int, _Request] = {}
        # By id, until a request ends: the runner removes it from the batch in each step that does
        # not schedule it.
        self._known: dict[str, _Request] = {}
        # The last slot serves indices without a request.
        self._records = Records.new(max_num_reqs + 1, torch.device("cpu"))
        self._nobody = self._enter(SamplingParams(temperature=0, max_tokens=None), (), [])
        self._nobody.slot = max_num_reqs
        self._write(self._nobody)
        self._slots = torch.full((max_num_reqs,), max_num_reqs)
        # Output tokens, by slot.
        self._num_output_tokens = torch.zeros(max_num_reqs + 1, dtype=torch.int32)
        self._has_returns = False

    def is_argmax_invariant(self) -> bool:
        # A plain greedy batch remains one.
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if not batch_update:
            return
        before = list(self._requests.values())
        process_dict_updates(self._requests, batch_update, self._enter)
        requests = list(self._requests.values())
        in_batch = set(map(id, requests))
        for request in before:
            if id(request) not in in_batch:
                request.record = self._records.table[request.slot].tolist()
                request.slot = -1
        ids = self._request_ids()
        unfinished = self._unfinished()
        ended = [self._known.pop(req_id) for req_id in [*self._known] if req_id not in unfinished]
        lost = [request.record[Column.LOST] for request in ended]
        self._ended(torch.tensor(lost, dtype=torch.int64))
        free = set(range(self._nobody.slot)) - {request.slot for request in requests}
        for req_idx, request in self._requests.items():
            req_id = ids[req_idx] if req_idx < len(ids) else None
            if request.slot < 0:
                if request.output and req_id in self._known:
                    request.resume(self._known[req_id])
                else:
                    request.state = self._tracker.initial_state(request.prompt)
                request.slot = free.pop()
                self._write(request)
            if req_id is not None:
                self._known[req_id] = request
        # Moves within the batch change only the index, not the slot.
        req_indices = range(self._nobody.slot)
        self._slots = torch.tensor([self._request_at(req_idx).slot for req_idx in req_indices])
        self._has_returns = any(request.options.wants_return for request in requests)

    def _enter(
        self, params: SamplingParams, prompt: Sequence[int] | None, output: list[int]
    ) -> _Request:
        prompt = prompt or ()
        options = options_of(params, self._config)
        record = record_of(
            options=options,
            params=params,
            config=self._config,
            is_probabilistic=self._is_probabilistic,
            max_output_tokens=self._max_model_len - len(prompt),
            num_output_tokens=len(output),
        )
        return _Request(
            options=options,
            record=record,
            prompt=prompt,
            output=output,
            is_sampled=params.temperature != 0,
            ngrams=NgramIndex(self._config.repeat_ngram),
        )

    def _write(self, request: _Request) -> None:
        self._records.table[request.slot] = torch.tensor(request.record)

    def _request_at(self, req_idx: int) -> _Request:
        return self._requests.get(req_idx, self._nobody)

    def step(
        self,
        # [num_rows, vocab]; for each request its draft rows, then its bonus row
        logits: torch.Tensor,
        # Draft tokens of the batch's first requests.
        drafts: Sequence[Sequence[int]],
        num_speculative_tokens: int,
    ) -> tuple[VerifyInputs, CpuConstraints | None]:
        """Builds the inputs of a step, with constraints if any option depends on the text."""
        batch = len(drafts)
        requests = [self._request_at(req_idx) for req_idx in range(batch)]
        for request in requests:
            if request.num_scanned > len(request.output):
                # vLLM has discarded output tokens after a failed KV cache load.
                request.state = self._tracker.initial_state(request.prompt)
                request.num_scanned = 0
        slots = self._slots[:batch]
        self._num_output_tokens[slots] = torch.tensor(
            [len(request.output) for request in requests], dtype=torch.int32
        )
        input_ids: list[int] = []
        cu_num_logits: list[int] = []
        for request, draft in zip(requests, drafts, strict=True):
            input_ids += [request.output[-1] if request.output else -1, *draft]
            cu_num_logits.append(len(input_ids))
        step = VerifyInputs(
            logits=logits,
            input_ids=torch.tensor(input_ids),
            cu_num_logits=torch.tensor(cu_num_logits, dtype=torch.int32),
            records=self._records,
            slots=slots,
            # Without the prompt: only the difference to `prompt_len` is used.
            total_len=self._num_output_tokens,
            prompt_len=torch.zeros_like(self._num_output_tokens),
            num_speculative_tokens=num_speculative_tokens,
        )
        constraints = None
        if self._tracker or self._config.repeat_ngram:
            constraints = self._cpu_constraints(requests, drafts)
        return step, constraints

    def draft_shares(self, batch: int) -> torch.Tensor:
        """Returns draft temperature / temperature of the first requests, float32 `[batch]`."""
        # A strict request has no lower draft temperature.
        return torch.where(self.is_strict(batch), 1.0, self._config.draft_share)

    def is_strict(self, batch: int) -> torch.Tensor:
        """Returns which of the first requests never relax, bool `[batch]`."""
        strict: torch.Tensor = ~self._records.relaxes[self._slots[:batch]]
        return strict

    def returns(self, batch: int) -> dict[int, str]:
        if not self._has_returns:
            return {}
        ids = self._request_ids()
        return {
            req_idx: ids[req_idx]
            for req_idx in range(batch)
            if self._request_at(req_idx).options.wants_return
        }

    def _cpu_constraints(
        self, requests: list[_Request], drafts: Sequence[Sequence[int]]
    ) -> CpuConstraints:
        rows: list[tuple[int, bool, Collection[int]]] = []
        for request, draft in zip(requests, drafts, strict=True):
            if self._tracker:
                tokens = request.output[request.num_scanned :]
                request.state = self._tracker.advance(request.state, tokens)
                request.num_scanned += len(tokens)
            reasons = self._tracker.blocked(request.state, draft, request.record[Column.SCOPE])
            repeated: Iterable[list[set[int]]] = itertools.repeat([], len(draft))
            if self._config.repeat_ngram:
                repeated = request.ngrams.before(request.output, draft)
            rows.extend(cpu_constraints(reasons, draft, repeated, request.is_sampled))
            # The bonus row has no constraints.
            rows.append((0, False, ()))
        return CpuConstraints.of(rows)
