"""One verification step of Model Runner V2 without an engine: vLLM's real sampler and its state.

Imported in processes whose Triton is the interpreter (see `tests/interpreted`).
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# vLLM's CPU worker puts its stand-ins for pinned memory and streams in place, before the V2 modules
# take them.
import vllm.v1.worker.cpu.shm  # noqa: F401  # isort: skip
from vllm import SamplingParams
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.states import RequestState

from vllm_mars import MarsConfig, MarsRejectionSamplerV2
from vllm_mars.report.counters import Counters
from vllm_mars.report.worker import StepReports
from vllm_mars.worker.engine_rule import EngineRule
from vllm_mars.worker.requests_v2 import RequestsV2

CPU = torch.device("cpu")
MAX_MODEL_LEN = 512


@dataclass
class Request:
    """A request in the middle of its answer.

    Attributes:
        sampling: its parameters.
        drafts: the draft tokens to verify.
        tokens: prompt and answer so far; the last one is the input of the first row.
        prompt_len: how many of `tokens` are the prompt.
        prefill_len: how many of `tokens` the last prefill computed; by default all but the last.
            Drafts of a request that has sampled nothing since are placeholders.
    """

    sampling: SamplingParams
    drafts: list[int]
    tokens: list[int] = dataclasses.field(default_factory=lambda: [3, 1, 4, 1, 5])
    prompt_len: int = 3
    prefill_len: int | None = None


class Step:
    """A batch of requests and its logits, for any number of samplers.

    Args:
        requests: the batch.
        logits: `[num_logits, vocab]`, each request's draft rows, then its bonus row.
        draft_logits: `[num_reqs, steps, vocab]` of the batch's requests, or None.
        steps: the longest draft of the engine.
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
        # Neither the identity nor in order, as after requests have come and gone.
        self.states = np.arange(len(requests), dtype=np.intp)[::-1].copy() + 1
        self.draft_logits = None
        if draft_logits is not None:
            self.draft_logits = draft_logits.new_zeros(
                len(requests) + 2, self.steps, draft_logits.shape[-1]
            )
            self.draft_logits[self.states, : draft_logits.shape[1]] = draft_logits

    def run(
        self,
        config: MarsConfig | None,
        *,
        protected: tuple[int, ...] = (),
        logprobs_mode: str = "raw_logprobs",
        invalid_drafts: torch.Tensor | None = None,
    ):
        """Verifies with a new sampler and returns vLLM's SamplerOutput.

        Args:
            config: the options of MARS, or None for vLLM's own sampler.
            protected: tokens at which MARS stays strict.
            logprobs_mode: as vLLM's engine option.
            invalid_drafts: bool `[num_logits]`, the input tokens that grammar forbids, or None.
        """
        sampler = self.sampler(config, protected=protected, logprobs_mode=logprobs_mode)
        return sampler(self.logits.clone(), self.batch(), self.draft_logits, invalid_drafts)

    def sampler(self, config, *, protected=(), logprobs_mode="raw_logprobs"):
        """vLLM's rejection sampler or ours, whose state holds the requests."""
        vocab = self.logits.shape[1]
        states = RequestState(
            max_num_reqs=len(self.requests) + 2,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=len(self.logits) + 8,
            num_speculative_steps=self.steps,
            vocab_size=vocab,
            device=CPU,
        )
        sampler = Sampler(
            VllmConfig(),
            states.max_num_reqs,
            vocab,
            CPU,
            states,
            logprobs_mode,
            num_speculative_tokens=self.steps,
        )
        if config is not None:
            requests = RequestsV2(config, states, is_drawn=self.draft_logits is not None)
            sampler.logits_processors.append(requests)
        for state, request in zip(self.states, self.requests, strict=True):
            states.free_indices = [int(state)]
            filled = self._prefill_len(request)
            states.add_request(
                str(state), request.prompt_len, request.tokens[:filled], 0, MAX_MODEL_LEN
            )
            sampler.add_request(int(state), request.sampling)
        states.apply_staged_writes()
        sampler.apply_staged_writes()
        if config is not None and self.draft_logits is not None:
            # These drafts were drawn at the temperature itself.
            requests.drawn_with[0].copy_(sampler.sampling_states.temperature.gpu)
        for state, request in zip(self.states, self.requests, strict=True):
            # What the runner does after each step.
            for position in range(self._prefill_len(request), len(request.tokens)):
                token = request.tokens[position]
                states.all_token_ids.gpu[state, position] = token
                sampler.penalties_state.output_bin_counts[state, token] += 1
            states.total_len.gpu[state] = len(request.tokens)
        # What MARS is, of vLLM's own, for strict requests.
        method = "standard" if self.draft_logits is None else "block"
        spec_config = SpeculativeConfig(
            method="ngram", num_speculative_tokens=self.steps, rejection_sample_method=method
        )
        if config is None:
            return RejectionSampler(sampler, spec_config, CPU)
        rule, counters = EngineRule(config, list(protected)), Counters(self.steps, CPU)
        reports = StepReports(counters, config.logprobs == "sampled")
        return MarsRejectionSamplerV2(sampler, spec_config, CPU, rule, reports, requests)

    @staticmethod
    def _prefill_len(request):
        return len(request.tokens) - 1 if request.prefill_len is None else request.prefill_len

    def batch(self) -> InputBatch:
        """The step as the runner describes it to a sampler."""
        counts = np.array([len(request.drafts) + 1 for request in self.requests], dtype=np.int32)
        ends = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        total = int(ends[-1])
        local = torch.cat([torch.arange(count) for count in counts.tolist()])
        start = torch.tensor([len(request.tokens) - 1 for request in self.requests])
        states = torch.from_numpy(self.states)
        expanded = torch.from_numpy(counts).long()
        seq_lens = torch.tensor([len(r.tokens) + len(r.drafts) for r in self.requests]).int()
        given = {
            "req_ids": [str(state) for state in self.states],
            "num_reqs": len(self.requests),
            "idx_mapping": states,
            "idx_mapping_np": self.states,
            "expanded_idx_mapping": states.repeat_interleave(expanded),
            "expanded_local_pos": local.int(),
            "num_scheduled_tokens": counts,
            "num_tokens": total,
            "num_draft_tokens": total - len(self.requests),
            "num_draft_tokens_per_req": counts - 1,
            "seq_lens": seq_lens,
            "seq_lens_cpu_upper_bound": seq_lens,
            "input_ids": torch.tensor(
                [token for r in self.requests for token in (r.tokens[-1], *r.drafts)]
            ).int(),
            "positions": start.repeat_interleave(expanded) + local,
            "logits_indices": torch.arange(total),
            "cu_num_logits": torch.from_numpy(ends),
            "cu_num_logits_np": ends,
        }
        # A sampler reads nothing else of it.
        unused = {field.name: None for field in dataclasses.fields(InputBatch)}
        return InputBatch(**{**unused, **given})


def random_step(
    seed, samplings, lengths, *, vocab=97, with_draft_logits=False, ranks=(0, 0, 0, 1, 2), near=0.9
):
    """Random logits and drafts.

    A share `near` of the drafts are the target's tokens of a rank drawn from `ranks` (0 is its
    first choice); the rest are any tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = sum(lengths) + len(lengths)
    logits = torch.randn(rows, vocab, generator=generator) * 3 + 2
    steps = max(lengths)
    requests, row = [], 0
    for sampling, length in zip(samplings, lengths, strict=True):
        best = logits[row : row + length].topk(max(ranks) + 1, dim=-1).indices
        rank = torch.tensor(ranks)[torch.randint(len(ranks), (length, 1), generator=generator)]
        drafts = best.gather(1, rank).squeeze(1)
        elsewhere = torch.rand(length, generator=generator) > near
        drafts[elsewhere] = torch.randint(0, vocab, (int(elsewhere.sum()),), generator=generator)
        requests.append(Request(sampling, drafts.tolist()))
        row += length + 1
    draft_logits = None
    if with_draft_logits:
        draft_logits = torch.randn(len(lengths), steps, vocab, generator=generator) * 2
        for index, request in enumerate(requests):
            # A draft token is one that the draft model finds likely.
            draft_logits[index, torch.arange(len(request.drafts)), request.drafts] += 8
    return Step(requests, logits, draft_logits, steps)


def emitted(output) -> list[list[int]]:
    """The tokens of each request; what vLLM leaves after them is undefined."""
    return [
        row[:count].tolist()
        for row, count in zip(output.sampled_token_ids, output.num_sampled.tolist(), strict=True)
    ]


def lost_by_ended(requests: RequestsV2, preempted, finished) -> tuple[int, int]:
    """Of requests that leave: how many end, and what these lost."""
    counters = Counters(1, CPU)
    requests.leave(preempted, finished, counters)
    counts, layout = counters.device_counts, counters.layout
    return int(counts[layout.ended].sum()), int(counts[layout.ended_lost].sum())


class Allocated(TorchDispatchMode):
    """The tensors that are made inside."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.found += [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        return result

    def throw_away(self):
        for tensor in self.found:
            tensor.fill_(7)
