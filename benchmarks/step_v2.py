"""One verification step of Model Runner V2 without an engine, for `kernel`, `launches` and tests.

vLLM's real sampler and request states verify random or given rows, in a minimal runner without a
model, a drafter and the copies of vLLM's output.
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
# Prompt, number of output tokens and of distinct ones of a random request: few enough that n-grams
# repeat.
PROMPT, ANSWER, KINDS = [5, 7], 512, 1_000
# Returns processed logits, tokens `[batch, k + 1]` and their number `[batch]`.
Verify = Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@functools.cache
def vllm_config() -> Any:
    from vllm.config import VllmConfig

    return VllmConfig()


@dataclass
class Request:
    """A request in the middle of its answer."""

    sampling: Any  # `SamplingParams`
    drafts: list[int]
    # Prompt and answer so far; the last token is the input of the first row.
    tokens: list[int] = dataclasses.field(default_factory=lambda: [3, 1, 4, 1, 5])
    prompt_len: int = 3
    # Tokens that the last prefill computed; None for all but the last. Drafts are placeholders if
    # nothing was sampled since.
    prefill_len: int | None = None

    @property
    def filled(self) -> int:
        return len(self.tokens) - 1 if self.prefill_len is None else self.prefill_len


class Step:
    """A batch of requests and its logits, for any number of samplers.

    Args:
        requests: the batch; request ids are indices.
        logits: `[num_logits, vocab]`, each request's draft rows, then its bonus row.
        draft_logits: `[num_reqs, steps, vocab]`, or None.
        steps: the engine's number of draft tokens; None for the longest draft.

    Attributes:
        slots: slot of each request, not in order, as after requests have come and gone.
        draft_logits: `[num_slots, steps, vocab]`, or None.
    """

    def __init__(
        self,
        requests: list[Request],
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None = None,
        steps: int | None = None,
    ) -> None:
        self.requests = requests
        self.logits = logits
        self.steps = steps or max(len(request.drafts) for request in requests)
        self.slots = np.arange(len(requests), dtype=np.intp)[::-1].copy() + 1
        self.draft_logits = None
        if draft_logits is not None:
            shape = len(requests) + 2, self.steps, draft_logits.shape[-1]
            self.draft_logits = draft_logits.new_zeros(shape)
            self.draft_logits[self.slots, : draft_logits.shape[1]] = draft_logits

    @property
    def strict_method(self) -> str:
        """vLLM's rejection sample method that strict requests are equivalent to."""
        return "standard" if self.draft_logits is None else "block"

    def spec_config(self, method: str) -> Any:
        """Returns vLLM's default speculative config without a draft model."""
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
        """Returns vLLM's rejection sampler for `states`, a `RequestState`, by default a new one."""
        from vllm.v1.worker.gpu.sample.sampler import Sampler
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
        from vllm.v1.worker.gpu.states import RequestState

        vocab, device = self.logits.shape[1], self.logits.device
        if states is None:
            states = RequestState(
                max_num_reqs=len(self.requests) + 2,
                max_model_len=MAX_MODEL_LEN,
                max_num_batched_tokens=len(self.logits) + 8,
                num_speculative_steps=self.steps,
                vocab_size=vocab,
                device=device,
            )
        sampler = Sampler(
            vllm_config=vllm_config(),
            max_num_reqs=states.max_num_reqs,
            vocab_size=vocab,
            device=device,
            req_states=states,
            logprobs_mode=logprobs_mode,
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
        """Returns a rejection sampler with the requests in its slots.

        Args:
            by: a `MarsConfig`, one of vLLM's methods, or None for `strict_method`.
            protected: preserved tokens.
        """
        method = self.strict_method if by is None else by
        runner = RunnerV2(self, method, protected=protected, logprobs_mode=logprobs_mode)
        if not isinstance(method, str) and self.draft_logits is not None:
            # These drafts were sampled at the request's temperature.
            temperature = runner.sampler.sampling_states.temperature.gpu
            runner.rejection_sampler.requests.draft_sampling[0].copy_(temperature)
        return runner.rejection_sampler

    def enter(self, sampler: Any, names: Iterable[str] | None = None) -> None:
        """Adds requests, by default all, with their prefilled tokens to their slots."""
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
        """Adds the tokens after the prefill, as the runner does in each step."""
        states = sampler.req_states
        for slot, request in zip(self.slots, self.requests, strict=True):
            begin, end = request.filled, len(request.tokens)
            tokens = torch.tensor(request.tokens[begin:], dtype=torch.int64)
            tokens = tokens.to(self.logits.device)
            states.all_token_ids.gpu[slot, begin:end] = tokens.int()
            counts = sampler.penalties_state.output_bin_counts[slot]
            counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=counts.dtype))
            states.total_len.gpu[slot] = end

    def batch(self) -> Any:
        from vllm.v1.worker.gpu.input_batch import InputBatch

        device = self.logits.device
        total = len(self.logits)
        counts = np.array([len(request.drafts) + 1 for request in self.requests], dtype=np.int32)
        ends = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        lengths = np.array([len(request.tokens) for request in self.requests])
        local_pos = np.arange(total) - ends[:-1].repeat(counts)
        inputs = [
            token for request in self.requests for token in (request.tokens[-1], *request.drafts)
        ]
        seq_lens = torch.from_numpy(lengths + counts - 1).int()

        def on_device(values: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.as_tensor(values, dtype=dtype).to(device)

        fields = {
            "req_ids": list(map(str, range(len(self.requests)))),
            "num_reqs": len(self.requests),
            "idx_mapping": on_device(self.slots, torch.int64),
            "idx_mapping_np": self.slots,
            "expanded_idx_mapping": on_device(self.slots.repeat(counts), torch.int64),
            "expanded_local_pos": on_device(local_pos, torch.int32),
            "num_scheduled_tokens": counts,
            "num_tokens": total,
            "num_draft_tokens": total - len(self.requests),
            "num_draft_tokens_per_req": counts - 1,
            "seq_lens": seq_lens.to(device),
            "seq_lens_cpu_upper_bound": seq_lens,
            "input_ids": on_device(inputs, torch.int32),
            "positions": on_device((lengths - 1).repeat(counts) + local_pos, torch.int64),
            "logits_indices": torch.arange(total, device=device),
            "cu_num_logits": on_device(ends, torch.int32),
            "cu_num_logits_np": ends,
        }
        # Samplers read no other fields.
        unused = {field.name: None for field in dataclasses.fields(InputBatch)}
        return InputBatch(**{**unused, **fields})

    def run(self, by: Any, *, invalid_drafts: torch.Tensor | None = None, **options: Any) -> Any:
        """Verifies with a new `sampler` and returns vLLM's SamplerOutput.

        Args:
            invalid_drafts: bool `[num_logits]`, true for input tokens that a grammar forbids.
        """
        sampler = self.sampler(by, **options)
        return sampler(self.logits.clone(), self.batch(), self.draft_logits, invalid_drafts)

    def verification(self, by: Any) -> Verify:
        batch = self.batch()
        return functools.partial(
            self.sampler(by, protected=[2])._verify,
            self.logits,
            self.draft_logits,
            # Slices, as in vLLM: the first and the last input ids are different objects.
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
    """Stub of a speculator with the interface of vLLM's."""

    draft_watermarker = None

    def __init__(self, draft_logits: Any) -> None:
        self.draft_logits = draft_logits
        # Temperatures and seeds of the last call.
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
        self.given = temperature, seeds

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        pass

    def capture(self) -> None:
        pass


class RunnerV2:
    """Minimal version of vLLM's `GPUModelRunner`, with methods of the same names.

    Args:
        by: a `MarsConfig`, or one of vLLM's rejection sample methods.
        protected: preserved tokens.
    """

    def __init__(
        self,
        step: Step,
        by: Any,
        *,
        protected: Iterable[int] = (2,),
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        self._step = step
        self._logprobs_mode = logprobs_mode
        # By id, because there is no tokenizer.
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
        self._step.enter(self.sampler)
        self._step.answer(self.sampler)
        self._batch = self._step.batch()

    def load_model(self) -> None:
        """Creates the samplers; all slots must be free."""
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
        """Ends all requests, loads the model again, as after a sleep, and adds new requests."""
        self.finish_requests(_scheduled(self.req_states.req_id_to_index))
        self.load_model()
        self._begin()

    def step(self, finished: Sequence[str] = ()) -> None:
        """Runs a step, in which new requests replace those with `finished` ids."""
        self.execute_model(_scheduled(finished))
        self.sample_tokens(None)

    def execute_model(self, scheduler_output: Any) -> None:
        self.finish_requests(scheduler_output)
        if scheduler_output.finished_req_ids:
            self._step.enter(self.sampler, scheduler_output.finished_req_ids)
        # In each step, as in vLLM.
        self.sampler.apply_staged_writes()

    def finish_requests(self, scheduler_output: Any) -> None:
        for name in scheduler_output.finished_req_ids:
            self.req_states.remove_request(name)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Runs the part after the model; the output lacks vLLM's copies to the host."""
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.worker.gpu.async_utils import AsyncOutput

        batch = self._batch
        states = self.req_states
        self.sampled = self.rejection_sampler(
            self._step.logits, batch, self.speculator.draft_logits, None
        )
        # Without the stream of its constructor.
        output = AsyncOutput.__new__(AsyncOutput)
        output.model_runner_output = ModelRunnerOutput(batch.req_ids, {})
        sampling = self.sampler.sampling_states
        self.speculator.propose(
            batch,
            None,  # attn_metadata
            None,  # slot_mappings
            None,  # last_hidden_states
            None,  # aux_hidden_states
            self.sampled.num_sampled,
            self.sampled.num_rejected,
            states.last_sampled_tokens,
            states.next_prefill_tokens,
            sampling.temperature.gpu,
            sampling.seeds.gpu,
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
    """A batch with `k` draft tokens per request and bfloat16 logits."""

    temperature: float
    is_probabilistic: bool
    batch: int
    k: int
    vocab: int

    def __str__(self) -> str:
        drafts = "probabilistic" if self.is_probabilistic else "fixed"
        return f"temperature {self.temperature:g}, {drafts} drafts, batch {self.batch}"


def step_of(shape: Shape, device: torch.device, params: Sequence[Any] | None = None) -> Step:
    """Returns random inputs of a step, the same at each call.

    Draft logits are near the target's. Probabilistic drafts are sampled from them; fixed drafts are
    the target's argmax with probability 0.6, else its second or third token.

    Args:
        params: a `SamplingParams` for each request; None for the shape's temperature.
    """
    from vllm import SamplingParams

    torch.manual_seed(0)
    temperature, is_probabilistic, batch, k, vocab = shape
    random = functools.partial(torch.rand, device=device)
    normal = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    logits = normal(batch * (k + 1), vocab) * 3
    draft_logits = None
    # [batch, k, vocab]
    target_logits = logits.view(batch, k + 1, vocab)[:, :-1]
    if is_probabilistic:
        draft_logits = target_logits + normal(batch, k, vocab) / 2
        noise = -random(batch, k, vocab).log().neg().log()
        drafts = (draft_logits / (temperature or 1) + noise).argmax(-1)
    else:
        rank = random(batch, k)
        rank = (rank > 0.6).long() + (rank > 0.85)
        drafts = target_logits.topk(3).indices.gather(2, rank[..., None]).squeeze(2)
    # The meta device has no values.
    ids = [[0] * k] * batch if device.type == "meta" else drafts.tolist()
    answers = np.random.default_rng(0).integers(0, min(KINDS, vocab), (batch, ANSWER))
    # Without seeds vLLM would choose random ones.
    sampling = params or [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=MAX_MODEL_LEN)
        for seed in range(batch)
    ]
    requests = [
        Request(
            sampling=request_params,
            drafts=draft,
            tokens=PROMPT + answer,
            prompt_len=len(PROMPT),
            prefill_len=len(PROMPT),
        )
        for request_params, draft, answer in zip(sampling, ids, answers.tolist(), strict=True)
    ]
    return Step(requests, logits, draft_logits, k)


def is_repeated(step: Step) -> bool:
    """Whether strict requests get the tokens of vLLM's `strict_method`.

    They do not for `block` of vLLM 0.32, which reuses random numbers in the next step.
    """
    from vllm_mars.releases import draws_anew

    is_greedy = all(not request.sampling.temperature for request in step.requests)
    return is_greedy or step.strict_method == "standard" or draws_anew()


def tokens_of(verify: Verify) -> torch.Tensor:
    """Returns the tokens of one call, `[batch, k + 1]`, padded with -1."""
    _, tokens, count = verify()
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    return tokens.masked_fill(steps >= count[:, None], -1)
