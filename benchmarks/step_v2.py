"""One verification step of Model Runner V2 without an engine: vLLM's real sampler and its state.

For `kernel` and `launches`, which time it, and for tests.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

MAX_MODEL_LEN = 1024
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
        from vllm_mars import MarsConfig, MarsRejectionSamplerV2
        from vllm_mars.report.counters import Counters
        from vllm_mars.report.worker import StepReports
        from vllm_mars.worker.requests_v2 import RequestsV2
        from vllm_mars.worker.terms import EngineTerms

        is_mars = isinstance(by, MarsConfig)
        method = self.strict_method if by is None or is_mars else by
        verifier = self.vllm_sampler(method, logprobs_mode=logprobs_mode)
        sampler, device = verifier.sampler, self.logits.device
        if is_mars:
            is_drawn = self.draft_logits is not None
            requests = RequestsV2(by, sampler.req_states, is_drawn=is_drawn)
            sampler.logits_processors.append(requests)
            reports = StepReports(Counters(self.steps, device), by.logprobs == "sampled")
            own = EngineTerms(by, list(protected)), reports, requests
            verifier = MarsRejectionSamplerV2(sampler, self.spec_config(method), device, *own)
        self.enter(sampler)
        if is_mars and is_drawn:
            # These drafts were drawn at the temperature itself.
            requests.drawn_with[0].copy_(sampler.sampling_states.temperature.gpu)
        self.answer(sampler)
        return verifier

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
