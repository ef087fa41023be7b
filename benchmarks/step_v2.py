"""One verification step of Model Runner V2 without an engine, for `kernel`, `launches` and tests.

vLLM's real sampler and its state verify random or given rows; around them is as much of a runner as
verification meets. Of the model, the drafter and the copies of vLLM's own output there is nothing.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

MAX_MODEL_LEN = 1024
# Of each random request: its prompt, output tokens, and how many kinds of these there are, so that
# the guard against repetition finds some again.
PROMPT, ANSWER, KINDS = [5, 7], 512, 1_000
# The processed logits, the tokens `[batch, k + 1]` and how many of them count.
Verify = Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@functools.cache
def vllm_config() -> Any:
    """One with vLLM's defaults."""
    from vllm.config import VllmConfig

    return VllmConfig()


@dataclass
class Request:
    """A request in the middle of its answer.

    Attributes:
        sampling: its `SamplingParams`.
        drafts: the draft tokens to verify.
        tokens: prompt and answer so far; the last one is the input of the first row.
        prompt_len: how many of `tokens` are the prompt.
        prefill_len: how many of `tokens` the last prefill computed; by default all but the last.
            Drafts of a request that has sampled nothing since are placeholders.
    """

    sampling: Any
    drafts: list[int]
    tokens: list[int] = dataclasses.field(default_factory=lambda: [3, 1, 4, 1, 5])
    prompt_len: int = 3
    prefill_len: int | None = None

    @property
    def filled(self) -> int:
        """`prefill_len`."""
        return len(self.tokens) - 1 if self.prefill_len is None else self.prefill_len


class Step:
    """A batch of requests and its logits, for any number of samplers.

    Args:
        requests: the batch; each is named by its place.
        logits: `[num_logits, vocab]`, each request's draft rows, then its bonus row.
        draft_logits: `[num_reqs, steps, vocab]` of the batch's requests, or None.
        steps: the longest draft of the engine.

    Attributes:
        slots: of the requests; neither the identity nor in order, as after requests have come and
            gone.
        draft_logits: the same by slot.
    """

    def __init__(
        self,
        requests: list[Request],
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None = None,
        steps: int | None = None,
    ) -> None:
        self.requests, self.logits = requests, logits
        self.steps = steps or max(len(request.drafts) for request in requests)
        self.slots = np.arange(len(requests), dtype=np.intp)[::-1].copy() + 1
        self.draft_logits = None
        if draft_logits is not None:
            shape = len(requests) + 2, self.steps, draft_logits.shape[-1]
            self.draft_logits = draft_logits.new_zeros(shape)
            self.draft_logits[self.slots, : draft_logits.shape[1]] = draft_logits

    @property
    def strict_method(self) -> str:
        """Which of vLLM's rejection sample methods a strict request is verified as."""
        return "standard" if self.draft_logits is None else "block"

    def spec_config(self, method: str) -> Any:
        """A speculative config of vLLM's, with its defaults and no draft model."""
        from vllm.config import SpeculativeConfig

        config: Any = SpeculativeConfig.__new__(SpeculativeConfig)
        config.method = "eagle3"
        config.num_speculative_tokens = self.steps
        config.rejection_sample_method = method
        config.draft_sample_method = "greedy" if self.draft_logits is None else "probabilistic"
        return config

    def vllm_sampler(
        self, method: str, states: Any = None, logprobs_mode: str = "raw_logprobs"
    ) -> Any:
        """vLLM's rejection sampler of one of its methods, for the slots of a `RequestState`."""
        from vllm.v1.worker.gpu.sample.sampler import Sampler
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
        from vllm.v1.worker.gpu.states import RequestState

        vocab, device = self.logits.shape[1], self.logits.device
        if states is None:
            sizes = len(self.requests) + 2, MAX_MODEL_LEN, len(self.logits) + 8
            states = RequestState(*sizes, self.steps, vocab, device)
        sampler = Sampler(
            *(vllm_config(), states.max_num_reqs, vocab, device, states, logprobs_mode),
            num_speculative_tokens=self.steps,
        )
        return RejectionSampler(sampler, self.spec_config(method), device)

    def sampler(
        self,
        by: Any,
        *,
        protected: Iterable[int] = (),
        logprobs_mode: str = "raw_logprobs",
    ) -> Any:
        """A rejection sampler whose state holds the requests.

        Args:
            by: a `MarsConfig`, one of vLLM's methods, or None for `strict_method`.
            protected: tokens that keep their probability.
            logprobs_mode: as vLLM's engine option.
        """
        method = self.strict_method if by is None else by
        runner = RunnerV2(self, method, protected=protected, logprobs_mode=logprobs_mode)
        if not isinstance(method, str) and self.draft_logits is not None:
            # These drafts were drawn at the temperature itself.
            temperature = runner.sampler.sampling_states.temperature.gpu
            runner.rejection_sampler.requests.drawn_with[0].copy_(temperature)
        return runner.rejection_sampler

    def enter(self, sampler: Any, names: Iterable[str] | None = None) -> None:
        """Puts requests, by default all, into their slots, with what their prefill computed."""
        states = sampler.req_states
        for name in names or map(str, range(len(self.requests))):
            request, slot = self.requests[int(name)], int(self.slots[int(name)])
            states.free_indices = [slot]
            tokens = request.tokens[: request.filled]
            states.add_request(name, request.prompt_len, tokens, 0, MAX_MODEL_LEN)
            sampler.add_request(slot, request.sampling)
        states.apply_staged_writes()
        sampler.apply_staged_writes()

    def answer(self, sampler: Any) -> None:
        """Gives all requests the tokens behind their prefill, as the runner does in each step."""
        states = sampler.req_states
        for slot, request in zip(self.slots, self.requests, strict=True):
            begin, end = request.filled, len(request.tokens)
            own = torch.tensor(request.tokens[begin:], dtype=torch.int64)
            tokens = own.to(self.logits.device)
            states.all_token_ids.gpu[slot, begin:end] = tokens.int()
            counts = sampler.penalties_state.output_bin_counts[slot]
            counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=counts.dtype))
            states.total_len.gpu[slot] = end

    def batch(self) -> Any:
        """The step as the runner describes it to a sampler: an `InputBatch`."""
        from vllm.v1.worker.gpu.input_batch import InputBatch

        device, total = self.logits.device, len(self.logits)
        counts = np.array([len(request.drafts) + 1 for request in self.requests], dtype=np.int32)
        ends = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        lengths = np.array([len(request.tokens) for request in self.requests])
        places = np.arange(total) - ends[:-1].repeat(counts)
        inputs = [token for it in self.requests for token in (it.tokens[-1], *it.drafts)]
        seq_lens = torch.from_numpy(lengths + counts - 1).int()

        def there(values: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.as_tensor(values, dtype=dtype).to(device)

        given = {
            "req_ids": list(map(str, range(len(self.requests)))),
            "num_reqs": len(self.requests),
            "idx_mapping": there(self.slots, torch.int64),
            "idx_mapping_np": self.slots,
            "expanded_idx_mapping": there(self.slots.repeat(counts), torch.int64),
            "expanded_local_pos": there(places, torch.int32),
            "num_scheduled_tokens": counts,
            "num_tokens": total,
            "num_draft_tokens": total - len(self.requests),
            "num_draft_tokens_per_req": counts - 1,
            "seq_lens": seq_lens.to(device),
            "seq_lens_cpu_upper_bound": seq_lens,
            "input_ids": there(inputs, torch.int32),
            "positions": there((lengths - 1).repeat(counts) + places, torch.int64),
            "logits_indices": torch.arange(total, device=device),
            "cu_num_logits": there(ends, torch.int32),
            "cu_num_logits_np": ends,
        }
        # A sampler reads nothing else of it.
        unused = {field.name: None for field in dataclasses.fields(InputBatch)}
        return InputBatch(**{**unused, **given})

    def run(self, by: Any, *, invalid_drafts: torch.Tensor | None = None, **options: Any) -> Any:
        """Verifies with a new sampler and returns vLLM's SamplerOutput.

        Args:
            by, options: as `sampler` has them.
            invalid_drafts: bool `[num_logits]`, the input tokens that grammar forbids, or None.
        """
        sampler = self.sampler(by, **options)
        return sampler(self.logits.clone(), self.batch(), self.draft_logits, invalid_drafts)

    def verification(self, by: Any) -> Verify:
        """What Model Runner V2 calls on the rows, of MARS or of vLLM; `by` as `sampler` has it."""
        batch = self.batch()
        return functools.partial(
            self.sampler(by, protected=[2])._verify,
            self.logits,
            self.draft_logits,
            # vLLM passes slices, so these and the last are never the same object.
            batch.input_ids[:],
            batch.positions,
            batch.cu_num_logits,
            batch.idx_mapping,
            batch.idx_mapping_np,
            batch.expanded_idx_mapping,
            batch.expanded_local_pos,
            batch.seq_lens_cpu_upper_bound.numpy(),
            batch.input_ids[:],
        )


class Speculator:
    """Drafts nothing, without graphs. Its `propose` takes what vLLM's takes.

    Attributes:
        draft_logits: as in `Step`.
        given: temperatures and seeds of the last call.
    """

    draft_watermarker = None

    def __init__(self, draft_logits: Any) -> None:
        self.draft_logits = draft_logits
        self.given: tuple[Any, Any] | None = None

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Any,
        num_rejected: Any,
        last_sampled: Any,
        next_prefill_tokens: Any,
        temperature: Any,
        seeds: Any,
        **others: Any,
    ) -> None:
        """Notes what it draws with."""
        self.given = temperature, seeds

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing."""

    def capture(self) -> None:
        """Nothing."""


class RunnerV2:
    """Stands in for vLLM's `GPUModelRunner`, whose methods of these names it follows.

    Args:
        step: its inputs; all requests are in the batch.
        by: a `MarsConfig`, or one of vLLM's rejection sample methods.
        protected: tokens that keep their probability.
        logprobs_mode: as vLLM's engine option.

    Attributes:
        sampled: what the sampler gave last.
    """

    def __init__(
        self,
        step: Step,
        by: Any,
        *,
        protected: Iterable[int] = (2,),
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        self._step, self._logprobs_mode = step, logprobs_mode
        # There is no tokenizer that could name them.
        self._by = by if isinstance(by, str) else replace(by, protected_token_ids=tuple(protected))
        self.device = step.logits.device
        self.vllm_config = vllm_config()
        self.model_config = SimpleNamespace(skip_tokenizer_init=True)
        self.speculative_config = step.spec_config(by if isinstance(by, str) else "standard")
        self.speculator = Speculator(step.draft_logits)
        self.req_states: Any = None
        self.sampled: Any = None
        self.load_model()
        self._begin()

    def _begin(self) -> None:
        """All requests come, and answer."""
        self._step.enter(self.sampler)
        self._step.answer(self.sampler)
        self._batch = self._step.batch()

    def load_model(self) -> None:
        """Makes the samplers anew, whose slots must be free."""
        from vllm_mars.worker.sampler_v2 import install

        step = self._step
        self.rejection_sampler = step.vllm_sampler(
            self.speculative_config.rejection_sample_method, self.req_states, self._logprobs_mode
        )
        self.sampler = self.rejection_sampler.sampler
        self.req_states = self.sampler.req_states
        if not isinstance(self._by, str):
            # There is no parallel group.
            with mock.patch("vllm.distributed.get_tensor_model_parallel_rank", return_value=0):
                install(self, self._by)

    def reload(self) -> None:
        """As after a sleep: all requests end, the model is loaded again, and as many come."""
        self.finish_requests(_scheduled(self.req_states.req_id_to_index))
        self.load_model()
        self._begin()

    def step(self, finished: Sequence[str] = ()) -> None:
        """A step as the engine asks for it.

        Args:
            finished: ids of requests that have ended; others with the same ids come.
        """
        self.execute_model(_scheduled(finished))
        self.sample_tokens(None)

    def execute_model(self, scheduler_output: Any) -> None:
        """What comes before the model."""
        self.finish_requests(scheduler_output)
        if scheduler_output.finished_req_ids:
            self._step.enter(self.sampler, scheduler_output.finished_req_ids)
        # In each step, as vLLM does.
        self.sampler.apply_staged_writes()

    def finish_requests(self, scheduler_output: Any) -> None:
        """Frees the slots of requests."""
        for name in scheduler_output.finished_req_ids:
            self.req_states.remove_request(name)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """What comes behind the model; of vLLM's own output the object that is sent alone."""
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.worker.gpu.async_utils import AsyncOutput

        batch, states = self._batch, self.req_states
        self.sampled = self.rejection_sampler(
            self._step.logits, batch, self.speculator.draft_logits, None
        )
        # Without the stream of its constructor.
        output = AsyncOutput.__new__(AsyncOutput)
        output.model_runner_output = ModelRunnerOutput(batch.req_ids, {})
        sampling = self.sampler.sampling_states
        self.speculator.propose(
            *(batch, None, None, None, None, self.sampled.num_sampled, self.sampled.num_rejected),
            *(states.last_sampled_tokens, states.next_prefill_tokens),
            *(sampling.temperature.gpu, sampling.seeds.gpu),
            num_speculative_tokens=self.speculative_config.num_speculative_tokens,
            dp_sync_state=None,
            mm_inputs=None,
        )
        return output


def _scheduled(finished: Iterable[str]) -> Any:
    from vllm.v1.core.sched.output import SchedulerOutput

    scheduled = SchedulerOutput.make_empty()
    scheduled.finished_req_ids.update(finished)
    return scheduled


class Shape(NamedTuple):
    """A batch whose requests have `k` draft tokens each, and bfloat16 logits."""

    temperature: float
    is_drawn: bool
    batch: int
    k: int
    vocab: int

    def __str__(self) -> str:
        drafts = "probabilistic" if self.is_drawn else "fixed"
        return f"temperature {self.temperature:g}, {drafts} drafts, batch {self.batch}"


def step_of(shape: Shape, device: torch.device, params: Sequence[Any] | None = None) -> Step:
    """The inputs of one step, random and the same at each call.

    The draft's logits are near the target's. A draft token is drawn from them where drafts are
    drawn, else the target's first choice with probability 0.6, or its second or third.

    Args:
        params: a `SamplingParams` for each request; default: the shape's temperature.
    """
    from vllm import SamplingParams

    torch.manual_seed(0)
    temperature, is_drawn, batch, k, vocab = shape
    random = functools.partial(torch.rand, device=device)
    normal = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    logits, draft_logits = normal(batch * (k + 1), vocab) * 3, None
    of_drafts = logits.view(batch, k + 1, vocab)[:, :-1]
    if is_drawn:
        draft_logits = of_drafts + normal(batch, k, vocab) / 2
        noise = -random(batch, k, vocab).log().neg().log()
        drafts = (draft_logits / (temperature or 1) + noise).argmax(-1)
    else:
        rank = random(batch, k)
        rank = (rank > 0.6).long() + (rank > 0.85)
        drafts = of_drafts.topk(3).indices.gather(2, rank[..., None]).squeeze(2)
    # The meta device has no values.
    ids = [[0] * k] * batch if device.type == "meta" else drafts.tolist()
    answers = np.random.default_rng(0).integers(0, min(KINDS, vocab), (batch, ANSWER))
    # Without a seed of its own a request gets a random one.
    given = params or [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=MAX_MODEL_LEN)
        for seed in range(batch)
    ]
    requests = [
        Request(own, draft, PROMPT + answer, len(PROMPT), len(PROMPT))
        for own, draft, answer in zip(given, ids, answers.tolist(), strict=True)
    ]
    return Step(requests, logits, draft_logits, k)


def is_repeated(step: Step) -> bool:
    """Whether strict requests get the tokens of vLLM's `strict_method`.

    Not those of vLLM 0.32 by blocks: it compares with the same random numbers again in the next
    step, which MARS does not.
    """
    from vllm_mars.releases import draws_anew

    is_greedy = all(not request.sampling.temperature for request in step.requests)
    return is_greedy or step.strict_method == "standard" or draws_anew()


def tokens_of(verify: Verify) -> torch.Tensor:
    """The tokens of one call, `[batch, k + 1]` with -1 behind the last of a request."""
    _, tokens, count = verify()
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    return tokens.masked_fill(steps >= count[:, None], -1)
