"""The requests in the batch of vLLM's V1 model runner, and what each brings to a step."""

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
        options: what it chose.
        record: what it allows, and what it had lost when it came or left.
        prompt: its prompt's tokens.
        output: its output tokens; vLLM's own list, which grows.
        samples: whether it does.
        followers: of the output, for the guard against repetition.
        slot: of its record; -1 while it has none.
        state: of `MarkerTracker`, after the prompt and the first `scanned` output tokens.
        scanned: how many output tokens the state has taken in.
    """

    options: RequestOptions
    record: list[int]
    prompt: Sequence[int]
    output: list[int]
    samples: bool
    followers: NgramIndex
    slot: int = -1
    state: int = 0
    scanned: int = 0

    def resume(self, left: "_Request") -> None:
        """Goes on where the same request left the batch."""
        self.record[Column.LOST] = left.record[Column.LOST]
        self.followers, self.state, self.scanned = left.followers, left.state, left.scanned


class RequestsV1(LogitsProcessor):
    """Follows the batch as a logits processor that changes no logit.

    It stands among those that cannot change the argmax, so a plain greedy batch stays one. What is
    known of a request stays as long as the request: the runner takes it out of the batch for each
    step that leaves it out.

    Args:
        config: the server's options.
        max_num_reqs: most requests of a batch.
        max_model_len: most tokens of prompt and output.
        request_ids: gives the ids of the batch's requests by place.
        unfinished: gives the ids of all requests that have not ended.
        ended: takes what requests that have ended had lost; int64, in units of 2**-LOSS_BITS nats.
        is_probabilistic: whether drafts are drawn where requests sample.
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
        self._is_drawn = is_probabilistic
        self._max_model_len = max_model_len
        self._request_ids = request_ids
        self._unfinished = unfinished
        self._ended = ended
        self._tracker = MarkerTracker(config)
        # By place in the batch; a place of vLLM's dummy runs may be empty.
        self._requests: dict[int, _Request] = {}
        # By id, those outside the batch among them.
        self._known: dict[str, _Request] = {}
        # The last slot is that of no request.
        self._records = Records.new(max_num_reqs + 1, torch.device("cpu"))
        self._nobody = self._enter(SamplingParams(temperature=0, max_tokens=None), (), [])
        self._nobody.slot = max_num_reqs
        self._write(self._nobody)
        self._slots = torch.full((max_num_reqs,), max_num_reqs)
        # By slot.
        self._produced = torch.zeros(max_num_reqs + 1, dtype=torch.int32)
        self._has_returns = False

    def is_argmax_invariant(self) -> bool:
        """True: no logit changes."""
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits as they are."""
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Notes which requests came, went and moved."""
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
        ids, unfinished = self._request_ids(), self._unfinished()
        ended = [self._known.pop(own) for own in [*self._known] if own not in unfinished]
        lost = [request.record[Column.LOST] for request in ended]
        self._ended(torch.tensor(lost, dtype=torch.int64))
        free = set(range(self._nobody.slot)) - {request.slot for request in requests}
        for req_idx, request in self._requests.items():
            own = ids[req_idx] if req_idx < len(ids) else None
            if request.slot < 0:
                if request.output and own in self._known:
                    request.resume(self._known[own])
                else:
                    request.state = self._tracker.initial_state(request.prompt)
                request.slot = free.pop()
                self._write(request)
            if own is not None:
                self._known[own] = request
        # A request keeps its record while it is in the batch; only the index follows its moves.
        req_indices = range(self._nobody.slot)
        self._slots = torch.tensor([self._request_at(req_idx).slot for req_idx in req_indices])
        self._has_returns = any(request.options.wants_return for request in requests)

    def _enter(
        self, params: SamplingParams, prompt: Sequence[int] | None, output: list[int]
    ) -> _Request:
        prompt = prompt or ()
        max_output_tokens = self._max_model_len - len(prompt)
        options = options_of(params, self._config)
        record = record_of(
            options, params, self._config, self._is_drawn, max_output_tokens, len(output)
        )
        own = params.temperature != 0, NgramIndex(self._config.repeat_ngram)
        return _Request(options, record, prompt, output, *own)

    def _write(self, request: _Request) -> None:
        self._records.table[request.slot] = torch.tensor(request.record)

    def _request_at(self, req_idx: int) -> _Request:
        return self._requests.get(req_idx, self._nobody)

    def step(
        self,
        logits: torch.Tensor,
        drafts: Sequence[Sequence[int]],
        num_speculative_tokens: int,
    ) -> tuple[VerifyInputs, CpuConstraints | None]:
        """A step of the first requests as they are before it, and what their text asks of it.

        Args:
            logits: `[num_rows, vocab]`, of each request a row for each draft token and one behind.
            drafts: the draft tokens of each request.
            num_speculative_tokens: see `VerifyInputs`.

        Returns:
            The step, and what the text before each row asks; None where nothing looks at tokens.
        """
        batch = len(drafts)
        requests = [self._request_at(req_idx) for req_idx in range(batch)]
        for request in requests:
            if request.scanned > len(request.output):
                # A failed load of the KV cache took tokens back.
                request.state = self._tracker.initial_state(request.prompt)
                request.scanned = 0
        looks_at_tokens = self._tracker or self._config.repeat_ngram
        slots = self._slots[:batch]
        self._produced[slots] = torch.tensor(
            [len(request.output) for request in requests], dtype=torch.int32
        )
        inputs: list[int] = []
        ends: list[int] = []
        for request, own in zip(requests, drafts, strict=True):
            inputs += [request.output[-1] if request.output else -1, *own]
            ends.append(len(inputs))
        step = VerifyInputs(
            logits,
            torch.tensor(inputs),
            torch.tensor(ends, dtype=torch.int32),
            self._records,
            slots,
            self._produced,
            torch.zeros_like(self._produced),
            num_speculative_tokens,
        )
        return step, self._cpu_constraints(requests, drafts) if looks_at_tokens else None

    def draft_shares(self, batch: int) -> torch.Tensor:
        """The share of the temperature that drafts of the first requests are drawn at.

        That of a strict request is 1; float32 `[batch]`.
        """
        return torch.where(self.is_strict(batch), 1.0, self._config.draft_share)

    def is_strict(self, batch: int) -> torch.Tensor:
        """Which of the first `batch` requests relax nothing anywhere; bool `[batch]`."""
        strict: torch.Tensor = ~self._records.relaxes[self._slots[:batch]]
        return strict

    def returns(self, batch: int) -> dict[int, str]:
        """Ids of those of the first `batch` requests that want to know what was done."""
        if not self._has_returns:
            return {}
        ids = self._request_ids()
        req_indices = range(batch)
        return {
            req_idx: ids[req_idx]
            for req_idx in req_indices
            if self._request_at(req_idx).options.wants_return
        }

    def _cpu_constraints(
        self, requests: list[_Request], drafts: Sequence[Sequence[int]]
    ) -> CpuConstraints:
        rows: list[tuple[int, bool, Collection[int]]] = []
        for request, draft in zip(requests, drafts, strict=True):
            if self._tracker:
                tokens = request.output[request.scanned :]
                request.state = self._tracker.advance(request.state, tokens)
                request.scanned += len(tokens)
            reasons = self._tracker.blocked(request.state, draft, request.record[Column.SCOPE])
            repeated: Iterable[list[set[int]]] = itertools.repeat([], len(draft))
            if self._config.repeat_ngram:
                repeated = request.followers.before(request.output, draft)
            # A bonus row asks nothing.
            rows += [*cpu_constraints(reasons, draft, repeated, request.samples), (0, False, ())]
        return CpuConstraints.of(rows)
