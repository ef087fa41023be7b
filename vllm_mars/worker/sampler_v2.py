"""Margin-aware rejection sampler for vLLM's Model Runner V2."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.logger import init_logger
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    _flatten_sampled_kernel,
)

from vllm_mars.kernels import fused
from vllm_mars.kernels.account.fused import add_log_ratios
from vllm_mars.kernels.step import Draws, Sampling
from vllm_mars.options.config import MarsConfig
from vllm_mars.options.protection import protected_token_ids
from vllm_mars.report.counters import Counters
from vllm_mars.report.worker import StepReports
from vllm_mars.worker.draft_sampling_v2 import wrap_speculator
from vllm_mars.worker.requests_v2 import Asks, RequestsV2
from vllm_mars.worker.start import log_start, require_own_sampler
from vllm_mars.worker.terms import EngineTerms
from vllm_mars.worker.warmup import warm_up

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

logger = init_logger("vllm.vllm_mars.worker.sampler_v2")

# The attribute of a runner with what makes its sampler.
_SAMPLER = "_vllm_mars_sampler"


# A member of a flag takes the host a microsecond.
_LOGITS, _SAMPLES, _DIVIDES = (int(ask) for ask in (Asks.LOGITS, Asks.SAMPLES, Asks.DIVIDES))
# Whose changes of the logits a request's own parameters tell.
_PROCESSORS = {LogitBiasState, PenaltiesState, BadWordsState, RequestsV2}


class MarsRejectionSamplerV2(RejectionSampler):
    """vLLM's V2 rejection sampler with the margin-aware rule.

    The logits are verified as vLLM's processors leave them: the raw rows if nothing changes them.
    Requests that sample are verified losslessly against the distribution that is served, with the
    random numbers of vLLM's own sampler.

    Args:
        sampler: vLLM's V2 sampler.
        spec_config: vLLM's speculative config.
        device: device of the logits.
        terms: of the engine, by the Triton kernels.
        reports: where its steps are written down.
        requests: the requests in the runner's slots.
        seeds_change: whether the seeds of drafts are to change with each step.

    Attributes:
        divides: whether the kernels divide the logits by the temperature, where that is all that
            the requests of a batch ask of them.
    """

    def __init__(
        self,
        sampler: Sampler,
        spec_config: "SpeculativeConfig",
        device: torch.device,
        terms: EngineTerms,
        reports: StepReports,
        requests: RequestsV2,
        seeds_change: bool = True,
    ) -> None:
        super().__init__(sampler, spec_config, device)
        self._seeds_change = seeds_change
        self.terms = terms
        self.reports = reports
        self.requests = requests
        # Of other processors nobody knows what they change, and the processed logits can be wanted.
        self.divides = (
            type(sampler) is Sampler
            and {*map(type, sampler.logits_processors)} <= _PROCESSORS
            and sampler.logprobs_mode not in PROCESSED_LOGPROBS_MODES
            and not sampler.return_sampling_mask
        )
        self._is_warm = False
        # Most tokens that a request of the step names for their logprobs.
        self._num_named = 0
        # Of the chunk that was verified last: slot of each row and of each request, and the table
        # of `Account` where it goes into logprobs.
        self._slots: tuple[torch.Tensor, torch.Tensor]
        self._table: torch.Tensor | None = None

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: "InputBatch",
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> "SamplerOutput":
        """vLLM's; arguments and result are the same."""
        self._num_named = 0
        if self.requests.naming:
            named = self.sampler.logprob_token_ids_state
            self._num_named = named.max_num_token_ids(input_batch.idx_mapping_np)
        output = super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        self.reports.copy_to_host()
        return output

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Verifies one chunk; arguments and result as in vLLM's `RejectionSampler._verify`.

        Args:
            logits: `[num_logits, vocab]`, each request's draft rows, then its bonus row.
            draft_logits: `[max_num_reqs, num_speculative_steps, vocab]` or None.
            draft_sampled: `[num_logits]`, the input token of each row, so that a row's draft token
                is the entry after it.
            pos: `[num_logits]` positions, which seed the random numbers.
            cu_num_logits: `[num_reqs + 1]` int32, exclusive prefix sum.
            idx_mapping: `[num_reqs]` request state of each request.
            idx_mapping_np: the same on the host.
            expanded_idx_mapping: `[num_logits]` request state of each row.
            expanded_local_pos: `[num_logits]` position of each row within its request.
            seq_lens_upper_bound_np: `[num_reqs]` on the host.
            verify_draft_sampled: `draft_sampled`, but -1 for drafts that the grammar of their
                request has not looked at: see `hooks.grammar`.

        Returns:
            The processed logits, the sampled tokens `[num_reqs, num_speculative_steps + 1]` and
            their number per request.
        """
        if not self._is_warm:
            shared = _shared(logits, draft_logits)
            own = self.terms, self.reports, shared, draft_logits
            warm_up(*own, self.sampler.use_fp64_gumbel, self.requests.fills)
            self._is_warm = True
        states = self.sampler.sampling_states
        asks = self.requests.asks(idx_mapping_np)
        if self.divides and not asks & _LOGITS:
            # vLLM would make a float32 copy of them.
            processed, divides = logits, bool(asks & _DIVIDES)
        else:
            # Without a request that needs it, this is the logits themselves, as they are.
            divides = False
            processed = self.sampler.apply_sampling_params(
                logits,
                expanded_idx_mapping,
                idx_mapping,
                idx_mapping_np,
                pos,
                draft_sampled,
                expanded_local_pos,
                seq_lens_upper_bound_np,
            )
        samples = bool(asks & _SAMPLES)
        returns = self.requests.returns(idx_mapping_np)
        account = self.reports.account(len(idx_mapping_np), logits.device, returns)
        temperature = states.temperature.gpu
        shared = _shared(processed, draft_logits)
        step, guard = self.requests.step(
            logits=shared,
            input_ids=verify_draft_sampled,
            cu_num_logits=cu_num_logits[1:],
            slots=idx_mapping,
            temperature=temperature,
            num_speculative_tokens=self.num_speculative_steps,
        )
        draws = None
        if samples:
            sampling = Sampling(temperature, states.seeds.gpu)
            if draft_logits is not None:
                drawn_at, next_seeds = self.requests.drawn_with
                sampling = sampling._replace(
                    draft_logits=draft_logits,
                    drawn_at=drawn_at,
                    next_seeds=next_seeds if self._seeds_change else None,
                )
            draws = Draws(
                sampling=sampling,
                pos=pos,
                row_slots=expanded_idx_mapping,
                row_places=expanded_local_pos,
                use_fp64=self.sampler.use_fp64_gumbel,
                divides=divides,
            )
        output = fused.verify(step, self.terms.on(shared), guard, account, draws)
        self._slots = expanded_idx_mapping, idx_mapping
        is_told = samples and self.terms.config.logprobs == "sampled"
        self._table = account.table if is_told else None
        return processed, output.output_token_ids, output.num_emitted

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> "LogprobsTensors | None":
        """vLLM's, of the chunk that was verified last; arguments and result are the same.

        Those of the tokens that a request names are among them, which vLLM's own leaves out.
        """
        found: LogprobsTensors | None
        slots_of_rows, slots = self._slots
        if self._num_named:
            # As vLLM's own does.
            tokens = sampled.new_zeros(logits.shape[0])
            own = tokens, sampled, sampled.stride(0), num_sampled, cu_num_logits
            _flatten_sampled_kernel[(len(num_sampled),)](*own, num_warps=1)
            counts: torch.Tensor | list[int] | None = None
            if logits.shape[0] != len(num_sampled):
                # Where adaptive verification cuts drafts, the host does not know their lengths.
                is_cut = self.enable_adaptive_verification
                counts = cu_num_logits.clone() if is_cut else cu_num_logits_np.tolist()
            found = compute_topk_scores(
                logits,
                max(max_num_logprobs, 0),
                tokens,
                counts,
                logprob_token_ids_state=self.sampler.logprob_token_ids_state,
                expanded_idx_mapping=slots_of_rows,
                max_per_req_token_ids=self._num_named,
                logits_mode=self.sampler.logprobs_mode.endswith("logits"),
            )
        else:
            found = super()._get_logprobs_tensors(
                sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs
            )
        if found is not None and self._table is not None:
            temperature = self.sampler.sampling_states.temperature.gpu
            add_log_ratios(
                *(found.logprobs, found.logprob_token_ids, self._table),
                *(temperature, slots, cu_num_logits),
            )
        return found


def _shared(logits: torch.Tensor, draft_logits: torch.Tensor | None) -> torch.Tensor:
    """The logits of the tokens that target and draft share, which vLLM looks at."""
    if draft_logits is None or draft_logits.shape[-1] == logits.shape[1]:
        return logits
    return logits[:, : draft_logits.shape[-1]]


def install(runner: Any, config: MarsConfig) -> None:
    """Puts a `MarsRejectionSamplerV2` into a V2 model runner.

    Args:
        runner: vLLM's V2 `GPUModelRunner`, each time that it has loaded a model, with which vLLM
            makes new samplers; as it is where it has no rejection sampler.
        config: the options.

    Raises:
        RuntimeError: the model or another extension brings a rejection sampler of its own, or
            drafts cannot be drawn as the options say.
    """
    own = runner.rejection_sampler
    if own is None:
        return
    require_own_sampler(own, RejectionSampler)
    if not hasattr(runner, _SAMPLER):
        setattr(runner, _SAMPLER, _attach(runner, config))
    runner.rejection_sampler = getattr(runner, _SAMPLER)(own.sampler)


def _attach(runner: Any, config: MarsConfig) -> Callable[[Sampler], MarsRejectionSamplerV2]:
    """Wraps what a runner calls in each step, once; gives what makes a sampler out of vLLM's."""
    spec_config = runner.speculative_config
    # vLLM's drafts the last token again where nothing matches, to be rejected.
    fills = spec_config.method == "ngram"
    is_drawn = spec_config.draft_sample_method == "probabilistic"
    requests = RequestsV2(config, runner.req_states, fills, is_drawn)
    counters = Counters(spec_config.num_speculative_tokens, runner.device)
    terms = EngineTerms(config, protected_token_ids(config, runner.vllm_config))
    reports = StepReports(counters, config.logprobs == "sampled")
    seeds_change = wrap_speculator(runner, config, requests)
    finish_requests = runner.finish_requests

    def leave_and_finish(scheduler_output: Any) -> None:
        preempted = scheduler_output.preempted_req_ids or ()
        requests.leave(preempted, scheduler_output.finished_req_ids, counters)
        finish_requests(scheduler_output)

    def renewed(sampler: Sampler) -> MarsRejectionSamplerV2:
        sampler.logits_processors.append(requests)
        own = terms, reports, requests, seeds_change
        return MarsRejectionSamplerV2(sampler, spec_config, runner.device, *own)

    runner.finish_requests = leave_and_finish
    reports.leave_with_outputs(runner)
    log_start(terms, logger, "V2")
    if (draft_logits := getattr(runner.speculator, "draft_logits", None)) is not None:
        logger.info(
            "vLLM keeps the logits of probabilistic drafts: %.1f MiB of this device (%s: "
            "max_num_seqs, num_speculative_tokens, vocabulary).",
            draft_logits.nbytes / 2**20,
            " x ".join(map(str, draft_logits.shape)),
        )
    return renewed
