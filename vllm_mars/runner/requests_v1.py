"""The requests in the batch of vLLM's V1 model runner, and what each brings to a step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)

from vllm_mars.config import MarsConfig
from vllm_mars.kernels.terms import (
    Drafts,
    LossBudget,
    Margin,
    Markers,
    Slots,
    Verdict,
    loss_rate,
    loss_units,
    lost_before,
)
from vllm_mars.requests import RequestOptions, options_of
from vllm_mars.runner.repeats import AnswerNgrams, DeviceAnswer, DeviceAnswers
from vllm_mars.runner.sections import Sections

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


@dataclass
class _Request:
    """One request of the batch.

    Attributes:
        options: what it chose.
        output: its output tokens; vLLM's own list, which grows.
        ngrams: of the output, for the guard against repetition on a CPU.
        answer: the output, for that guard on an accelerator.
        state: of `Sections`, after the prompt and the first `scanned` output tokens.
        scanned: how many output tokens the state has taken in.
    """

    options: RequestOptions
    output: list[int]
    ngrams: AnswerNgrams
    answer: DeviceAnswer
    state: int = 0
    scanned: int = 0


class RequestsV1(LogitsProcessor):
    """Follows the batch as a logits processor that changes no logit.

    It stands among those that cannot change the argmax, so a plain greedy batch stays one.

    Args:
        config: the server's options.
        max_num_reqs: most requests of a batch.
        device: device of the logits.
        request_ids: gives the ids of the batch's requests by place.
        need_output_tokens: is told with each change of the batch whether its output lists must be
            up to date when a step is verified.
    """

    def __init__(
        self,
        config: MarsConfig,
        max_num_reqs: int,
        device: torch.device,
        request_ids: Callable[[], Sequence[str]] = tuple,
        need_output_tokens: Callable[[bool], object] = bool,
    ) -> None:
        self._config = config
        self._device = device
        self._on_host = device.type == "cpu"
        self._request_ids = request_ids
        self._need_output_tokens = need_output_tokens
        self._sections = Sections(config)
        # By place in the batch; a place of vLLM's dummy runs may be empty.
        self._requests: dict[int, _Request] = {}
        self._nobody = self._request(RequestOptions(config.value), [])
        self._has_structured = self._has_returns = self._has_loss_bound = False
        # The rule's value by place, where a request has its own.
        self._values: torch.Tensor | None = None
        # What each lost, by place, in units of 2**-LOSS_BITS nats, and `LossBudget.rate` of each,
        # while any has a bound.
        self._lost = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self._loss_rates = torch.zeros_like(self._lost)
        self._answers = DeviceAnswers(config.repeat_ngram, max_num_reqs, device, self._to_device)

    @property
    def needs_output_tokens(self) -> bool:
        """Whether the output lists of the batch must be up to date when a step is verified."""
        has_guard = self._config.repeat_ngram > 0
        return bool(self._sections) or self._has_loss_bound or has_guard

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
        had_loss_bound = self._has_loss_bound
        process_dict_updates(self._requests, batch_update, self._enter)
        self._answers.follow([request.answer for request in self._requests.values()])
        options = [request.options for request in self._requests.values()]
        self._has_structured = any(o.is_structured for o in options)
        self._has_returns = any(o.wants_return for o in options)
        is_bound = any(o.max_loss < math.inf for o in options)
        self._has_loss_bound = is_bound and not self._config.is_shadow
        if self._has_loss_bound:
            # Without a bound in the batch nobody kept it.
            lost = self._lost if had_loss_bound else torch.zeros_like(self._lost)
            self._lost = self._moved(lost, batch_update)
            rates = [loss_rate(o.max_loss) for o in self._options_by_place()]
            self._loss_rates = self._to_device(rates)
        self._values = None
        if any(o.value != self._config.value for o in options):
            self._values = self._to_device([o.value for o in self._options_by_place()])
        self._need_output_tokens(self.needs_output_tokens)

    def _enter(
        self, params: "SamplingParams", prompt: list[int] | None, output: list[int]
    ) -> _Request:
        state = self._sections.advance(0, prompt or ()) if self._sections else 0
        return self._request(options_of(params, self._config), output, state)

    def _request(self, options: RequestOptions, output: list[int], state: int = 0) -> _Request:
        ngrams = AnswerNgrams(self._config.repeat_ngram)
        return _Request(options, output, ngrams, DeviceAnswer(output), state)

    def _of_place(self, place: int) -> _Request:
        return self._requests.get(place, self._nobody)

    def _options_by_place(self) -> list[RequestOptions]:
        return [self._of_place(place).options for place in range(self._lost.shape[0])]

    def _lost_before(self, params: "SamplingParams", num_output_tokens: int) -> int:
        rate = loss_rate(options_of(params, self._config).max_loss)
        lost: int = lost_before(rate, loss_units(self._config.loss_burst), num_output_tokens)
        return lost

    def _moved(self, spent: torch.Tensor, update: BatchUpdate) -> torch.Tensor:
        """What each request has spent, `[max_num_reqs]`, once the batch has changed."""
        size = spent.shape[0]
        source = list(range(size))
        # vLLM does not tell a request that comes back from a new one. What was spent on the output
        # that it already has is taken to be all that was allowed.
        begin = [0] * size
        for place, params, _, output in update.added:
            source[place] = -1
            begin[place] = self._lost_before(params, len(output))
        for a, b, direction in update.moved:
            if direction == MoveDirectionality.SWAP:
                source[a], source[b] = source[b], source[a]
                begin[a], begin[b] = begin[b], begin[a]
            else:
                source[b], begin[b] = source[a], begin[a]
        index = self._to_device(source)
        moved = spent[index.clamp(min=0)]
        return torch.where(index < 0, self._to_device(begin).to(spent.dtype), moved)

    def margin(self, drafts: Drafts) -> Margin:
        """What may be relaxed of the first requests in this step, protected tokens aside.

        Args:
            drafts: of these requests; the logits are not read.
        """
        batch = drafts.cu_num_draft_tokens.shape[0]
        blocked = None
        if self._sections or self._has_structured or self._config.repeat_ngram:
            blocked = self._blocked(drafts)
        loss_budget = None
        if self._has_loss_bound:
            lengths = [len(self._of_place(place).output) for place in range(batch)]
            produced = self._to_device(lengths).int()
            burst = loss_units(self._config.loss_burst)
            rates, lost = self._loss_rates[:batch], self._lost[:batch]
            loss_budget = LossBudget(rates, burst, lost, produced)
        value = self._config.value if self._values is None else self._values[:batch]
        limits = {"blocked": blocked, "loss_budget": loss_budget}
        return Margin.of(self._config.rule, value, **limits)

    def spend(self, lost: torch.Tensor) -> None:
        """Takes what a step lost off the budgets.

        Args:
            lost: int64 `[batch]`, in units of 2**-LOSS_BITS nats.
        """
        if self._has_loss_bound:
            self._lost[: lost.shape[0]] += lost

    def returns(self, batch: int) -> dict[int, str]:
        """Ids of those of the first `batch` requests that want to know what was relaxed."""
        if not self._has_returns:
            return {}
        ids = self._request_ids()
        places = range(batch)
        return {place: ids[place] for place in places if self._of_place(place).options.wants_return}

    @cached_property
    def _markers(self) -> Markers:
        return self._sections.markers(self._device)

    def _blocked(self, drafts: Drafts) -> torch.Tensor:
        ids, ends = drafts.draft_token_ids, drafts.cu_num_draft_tokens
        requests = [self._of_place(place) for place in range(ends.shape[0])]
        for request in requests:
            if self._sections:
                tokens = request.output[request.scanned :]
                request.state = self._sections.advance(request.state, tokens)
                request.scanned += len(tokens)
        states = [request.state for request in requests]
        is_structured = [request.options.is_structured for request in requests]
        if self._on_host:
            drafted, begin = ids.tolist(), 0
            reasons = list(self._sections.blocked(states, is_structured, drafted, ends.tolist()))
            for request, end in zip(requests, ends.tolist(), strict=True):
                if self._config.repeat_ngram:
                    repeats = request.ngrams.repeated(request.output, drafted[begin:end])
                    for position, is_repeat in enumerate(repeats, start=begin):
                        reasons[position] = reasons[position] or Verdict.REPEAT * is_repeat
                begin = end
            return torch.tensor(reasons, dtype=torch.int8)
        from vllm_mars.kernels.sections import blocked_rows

        none = torch.zeros(len(requests), dtype=torch.int32, device=self._device)
        places = torch.arange(len(requests), dtype=torch.int32, device=self._device)
        rows: torch.Tensor = blocked_rows(
            self._to_device(states).int(),
            none.clone(),
            self._to_device(is_structured).int(),
            Slots(places, none[:, None], none, none),
            # A row's draft token is looked for one entry behind it.
            drafts._replace(draft_token_ids=torch.nn.functional.pad(ids, (1, 0))),
            self._markers,
        )
        blocked = rows[: ids.shape[0]]
        if self._config.repeat_ngram:
            self._answers.block_repeats(blocked, [request.answer for request in requests], drafts)
        return blocked

    def _to_device(self, values: Sequence[float]) -> torch.Tensor:
        # New memory each time: an earlier copy may not have been made yet, with steps queued ahead.
        pinned = torch.tensor(values, pin_memory=self._device.type == "cuda")
        return pinned.to(self._device, non_blocking=True)
