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
from vllm_mars.kernels.counters.fused import add_log_ratios
from vllm_mars.kernels.interface import SamplingInputs, SamplingTensors
from vllm_mars.options.config import MarsConfig
from vllm_mars.options.protection import protected_token_ids
from vllm_mars.report.counters import Counters
from vllm_mars.report.worker import StepReports
from vllm_mars.worker.draft_sampling_v2 import wrap_speculator
from vllm_mars.worker.engine_params import LazyEngineParams
from vllm_mars.worker.requests_v2 import RequestFeatures, RequestsV2
from vllm_mars.worker.start import log_start, require_own_sampler
from vllm_mars.worker.warmup import warm_up

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

logger = init_logger("vllm.vllm_mars.worker.sampler_v2")

# Attribute of a runner that holds its sampler factory.
_FACTORY = "_vllm_mars_sampler_factory"

# As ints: reading a Flag member costs 1 us.
_LOGITS = int(RequestFeatures.LOGITS)
_SAMPLES = int(RequestFeatures.SAMPLES)
_APPLY_TEMPERATURE = int(RequestFeatures.APPLY_TEMPERATURE)
# Logits processors whose effect `RequestFeatures.LOGITS` covers.
_PROCESSORS = {LogitBiasState, PenaltiesState, BadWordsState, RequestsV2}


class MarsRejectionSamplerV2(RejectionSampler):
    """vLLM's V2 rejection sampler with the margin-aware rule.

    It verifies the logits as processed by vLLM, or the raw rows if nothing changes them. Sampled
    requests are verified losslessly against the served distribution, with the random numbers of
    vLLM's sampler.

    Args:
        seeds_change: whether each step must give the drafter new seeds.

    Attributes:
        apply_temperature: whether the kernels may apply the temperature, if nothing else changes
            the logits of a batch.
    """

    def __init__(
        self,
        sampler: Sampler,
        spec_config: "SpeculativeConfig",
        device: torch.device,
        engine_params: LazyEngineParams,
        reports: StepReports,
        requests: RequestsV2,
        seeds_change: bool = True,
    ) -> None:
        super().__init__(sampler, spec_config, device)
        self._seeds_change = seeds_change
        self.engine_params = engine_params
        self.reports = reports
        self.requests = requests
        # Other processors may change any logits, and vLLM may need the processed logits.
        self.apply_temperature = (
            type(sampler) is Sampler
            and {*map(type, sampler.logits_processors)} <= _PROCESSORS
            and sampler.logprobs_mode not in PROCESSED_LOGPROBS_MODES
            and not sampler.return_sampling_mask
        )
        self._is_warm = False
        # Largest number of `logprob_token_ids` of a request in the step.
        self._num_named = 0
        # The last verified chunk: slot of each row and of each request, and the table of
        # `StepCounters` if logprobs include the log-ratios.
        self._row_slots: torch.Tensor
        self._slots: torch.Tensor
        self._table: torch.Tensor | None = None

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: "InputBatch",
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> "SamplerOutput":
        """Verifies one step's drafts, as vLLM's `RejectionSampler.__call__`."""
        self._num_named = 0
        if self.requests.naming:
            token_ids_state = self.sampler.logprob_token_ids_state
            self._num_named = token_ids_state.max_num_token_ids(input_batch.idx_mapping_np)
        output = super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        self.reports.copy_to_host()
        return output

    def _verify(
        self,
        # [num_logits, vocab]; for each request its draft rows, then its bonus row
        logits: torch.Tensor,
        # [max_num_reqs, num_speculative_steps, vocab]
        draft_logits: torch.Tensor | None,
        # [num_logits], input token of each row; entry i + 1 is row i's draft token
        draft_sampled: torch.Tensor,
        # [num_logits], positions, which key each row's RNG
        pos: torch.Tensor,
        # [num_reqs + 1], int32, exclusive prefix sum
        cu_num_logits: torch.Tensor,
        # [num_reqs], slots
        idx_mapping: torch.Tensor,
        # [num_reqs]
        idx_mapping_np: np.ndarray,
        # [num_logits], slots
        expanded_idx_mapping: torch.Tensor,
        # [num_logits], position within the request
        expanded_local_pos: torch.Tensor,
        # [num_reqs]
        seq_lens_upper_bound_np: np.ndarray,
        # [num_logits], `draft_sampled` with -1 for drafts that the grammar has not validated
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Verifies one chunk, as vLLM's `RejectionSampler._verify`."""
        if not self._is_warm:
            warm_up(
                engine_params=self.engine_params,
                reports=self.reports,
                logits=_shared(logits, draft_logits),
                draft_logits=draft_logits,
                use_fp64=self.sampler.use_fp64_gumbel,
                pads_with_last_token=self.requests.pads_with_last_token,
            )
            self._is_warm = True
        states = self.sampler.sampling_states
        features = self.requests.features(idx_mapping_np)
        if self.apply_temperature and not features & _LOGITS:
            # This avoids vLLM's float32 copy.
            processed = logits
            apply_temperature = bool(features & _APPLY_TEMPERATURE)
        else:
            # If no request needs processing, vLLM returns the logits without a copy.
            apply_temperature = False
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
        is_sampled = bool(features & _SAMPLES)
        returns = self.requests.returns(idx_mapping_np)
        step_counters = self.reports.step_counters(len(idx_mapping_np), logits.device, returns)
        temperature = states.temperature.gpu
        shared = _shared(processed, draft_logits)
        step, constraint_inputs = self.requests.step(
            logits=shared,
            input_ids=verify_draft_sampled,
            cu_num_logits=cu_num_logits[1:],
            slots=idx_mapping,
            temperature=temperature,
            num_speculative_tokens=self.num_speculative_steps,
        )
        sampling_inputs = None
        if is_sampled:
            sampling = SamplingTensors(temperature=temperature, seeds=states.seeds.gpu)
            if draft_logits is not None:
                draft_temperature, next_seeds = self.requests.draft_sampling
                sampling = sampling._replace(
                    draft_logits=draft_logits,
                    draft_temperature=draft_temperature,
                    next_seeds=next_seeds if self._seeds_change else None,
                )
            sampling_inputs = SamplingInputs(
                sampling=sampling,
                pos=pos,
                expanded_idx_mapping=expanded_idx_mapping,
                expanded_local_pos=expanded_local_pos,
                use_fp64=self.sampler.use_fp64_gumbel,
                apply_temperature=apply_temperature,
            )
        output = fused.verify(
            step,
            self.engine_params.on(shared),
            constraints=constraint_inputs,
            step_counters=step_counters,
            sampling_inputs=sampling_inputs,
        )
        self._row_slots = expanded_idx_mapping
        self._slots = idx_mapping
        returns_ratios = is_sampled and self.engine_params.config.logprobs == "sampled"
        self._table = step_counters.table if returns_ratios else None
        # Tokens [num_reqs, num_speculative_steps + 1], and their number per request.
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
        """Computes the logprobs of the last verified chunk, as vLLM's method."""
        logprobs: LogprobsTensors | None
        if self._num_named:
            # vLLM's method leaves these logprobs out; otherwise this is the same.
            tokens = sampled.new_zeros(logits.shape[0])
            _flatten_sampled_kernel[(len(num_sampled),)](
                tokens,
                sampled,
                sampled.stride(0),
                num_sampled,
                cu_num_logits,
                num_warps=1,
            )
            row_counts: torch.Tensor | list[int] | None = None
            if logits.shape[0] != len(num_sampled):
                # Adaptive verification truncates drafts on the device only.
                if self.enable_adaptive_verification:
                    row_counts = cu_num_logits.clone()
                else:
                    row_counts = cu_num_logits_np.tolist()
            logprobs = compute_topk_scores(
                logits,
                max(max_num_logprobs, 0),
                tokens,
                row_counts,
                logprob_token_ids_state=self.sampler.logprob_token_ids_state,
                expanded_idx_mapping=self._row_slots,
                max_per_req_token_ids=self._num_named,
                logits_mode=self.sampler.logprobs_mode.endswith("logits"),
            )
        else:
            logprobs = super()._get_logprobs_tensors(
                sampled,
                num_sampled,
                logits,
                cu_num_logits,
                cu_num_logits_np,
                max_num_logprobs,
            )
        if logprobs is not None and self._table is not None:
            add_log_ratios(
                logprobs=logprobs.logprobs,
                token_ids=logprobs.logprob_token_ids,
                table=self._table,
                temperature=self.sampler.sampling_states.temperature.gpu,
                slots=self._slots,
                cu_num_logits=cu_num_logits,
            )
        return logprobs


def _shared(logits: torch.Tensor, draft_logits: torch.Tensor | None) -> torch.Tensor:
    """Cuts the logits to the draft's vocabulary, as vLLM does."""
    if draft_logits is None or draft_logits.shape[-1] == logits.shape[1]:
        return logits
    return logits[:, : draft_logits.shape[-1]]


def install(runner: Any, config: MarsConfig) -> None:
    """Replaces the rejection sampler of a V2 runner, if it has one, after a model was loaded."""
    vllm_sampler = runner.rejection_sampler
    if vllm_sampler is None:
        return
    require_own_sampler(vllm_sampler, RejectionSampler)
    if not hasattr(runner, _FACTORY):
        setattr(runner, _FACTORY, _attach(runner, config))
    runner.rejection_sampler = getattr(runner, _FACTORY)(vllm_sampler.sampler)


def _attach(runner: Any, config: MarsConfig) -> Callable[[Sampler], MarsRejectionSamplerV2]:
    """Wraps a runner's methods, which must happen once, and returns a sampler factory."""
    spec_config = runner.speculative_config
    # If no n-gram matches, vLLM drafts copies of the last token, to be rejected.
    pads_with_last_token = spec_config.method == "ngram"
    is_probabilistic = spec_config.draft_sample_method == "probabilistic"
    requests = RequestsV2(config, runner.req_states, pads_with_last_token, is_probabilistic)
    counters = Counters(spec_config.num_speculative_tokens, runner.device)
    engine_params = LazyEngineParams(config, protected_token_ids(config, runner.vllm_config))
    reports = StepReports(counters, config.logprobs == "sampled")
    seeds_change = wrap_speculator(runner, config, requests)
    finish_requests = runner.finish_requests

    def leave_and_finish(scheduler_output: Any) -> None:
        preempted = scheduler_output.preempted_req_ids or ()
        requests.leave(preempted, scheduler_output.finished_req_ids, counters)
        finish_requests(scheduler_output)

    def make_sampler(sampler: Sampler) -> MarsRejectionSamplerV2:
        sampler.logits_processors.append(requests)
        return MarsRejectionSamplerV2(
            sampler=sampler,
            spec_config=spec_config,
            device=runner.device,
            engine_params=engine_params,
            reports=reports,
            requests=requests,
            seeds_change=seeds_change,
        )

    runner.finish_requests = leave_and_finish
    reports.attach_to_runner(runner)
    log_start(engine_params, logger, "V2")
    if (draft_logits := getattr(runner.speculator, "draft_logits", None)) is not None:
        logger.info(
            "vLLM keeps the logits of probabilistic drafts: %.1f MiB of this device (%s: "
            "max_num_seqs, num_speculative_tokens, vocabulary).",
            draft_logits.nbytes / 2**20,
            " x ".join(map(str, draft_logits.shape)),
        )
    return make_sampler
