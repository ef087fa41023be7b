"""Margin-aware rejection sampler for vLLM's V1 model runner, which serves on CPUs."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler, generate_uniform_probs
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_mars.kernels import reference
from vllm_mars.kernels.accept.naive import CpuSamplingInputs
from vllm_mars.kernels.counters.naive import log_ratios, of_sampled
from vllm_mars.options.config import MarsConfig
from vllm_mars.options.protection import protected_token_ids
from vllm_mars.report.counters import Counters
from vllm_mars.report.worker import StepReports
from vllm_mars.worker.constraints import constrain
from vllm_mars.worker.draft_sampling_v1 import wrap_drafter
from vllm_mars.worker.engine_params import LazyEngineParams
from vllm_mars.worker.prefill_seeds import exclude_prefill_seeds
from vllm_mars.worker.requests_v1 import RequestsV1
from vllm_mars.worker.start import log_start, require_own_sampler

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig

logger = init_logger("vllm.vllm_mars.worker.sampler_v1")


class MarsRejectionSampler(RejectionSampler):
    """vLLM's V1 rejection sampler with the margin-aware rule.

    It verifies the logits as processed by vLLM, or the raw rows if nothing changes them. Sampled
    requests are verified losslessly against the served distribution; strict ones with fixed drafts
    use the random numbers of vLLM's sampler.
    """

    def __init__(
        self,
        sampler: Sampler,
        spec_config: "SpeculativeConfig",
        device: torch.device,
        engine_params: LazyEngineParams,
        reports: StepReports,
        requests: RequestsV1,
    ) -> None:
        super().__init__(sampler, spec_config, device)
        self.engine_params = engine_params
        self.reports = reports
        self.requests = requests

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        # [num_draft, vocab], float32; None for fixed drafts
        draft_probs: torch.Tensor | None,
        # [num_draft + batch, vocab], raw target logits
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Verifies one step's drafts, as vLLM's `RejectionSampler.forward`.

        `sampled_token_ids` is int32 `[batch, max_spec_len + 1]`, padded with -1.
        """
        is_greedy = sampling_metadata.all_greedy
        leaves_rows = leaves_logits(sampling_metadata)
        if leaves_rows and is_greedy:
            output_token_ids, _ = self._verify(metadata, logits)
            return SamplerOutput(sampled_token_ids=output_token_ids, logprobs_tensors=None)
        wants_logprobs = sampling_metadata.max_num_logprobs is not None or bool(
            sampling_metadata.logprob_token_ids
        )
        bonus = self.sampler(
            logits=logits[metadata.bonus_logits_indices],
            # -1 returns whole bonus rows, from which the logprobs below are computed.
            sampling_metadata=replace(
                sampling_metadata,
                max_num_logprobs=-1 if wants_logprobs else None,
                logprob_token_ids=None,
            ),
            predict_bonus_token=True,
            logprobs_mode_override=(
                "processed_logits" if self.is_processed_logprobs_mode else "raw_logits"
            ),
        )
        rows = logits
        temperature = None if is_greedy else sampling_metadata.temperature
        if not leaves_rows:
            processed = logits[metadata.target_logits_indices].to(torch.float32)
            processed = self.apply_logits_processors(processed, sampling_metadata, metadata)
            processed = constrain(processed, metadata.num_draft_tokens, sampling_metadata)
            temperature = None if temperature is None else temperature.sign()
            rows = torch.empty_like(logits, dtype=torch.float32)
            rows[metadata.target_logits_indices] = processed
        sampling_inputs = None
        if temperature is not None:
            sampling_inputs = self._sampling_inputs(
                temperature=temperature,
                metadata=metadata,
                sampling_metadata=sampling_metadata,
                vocab=rows.shape[1],
                draft_probs=draft_probs,
            )
        output_token_ids, table = self._verify(
            metadata, rows, sampling_inputs, bonus.sampled_token_ids
        )
        logprobs = None
        if wants_logprobs:
            ratios = None
            if sampling_inputs is not None and self.engine_params.config.logprobs == "sampled":
                ratios = log_ratios(table, sampling_inputs.temperature)
            if not self.is_processed_logprobs_mode:
                rows = logits.to(torch.float32, copy=True)
            rows[metadata.bonus_logits_indices] = bonus.logprobs_tensors.logprobs.float()
            first_rows = metadata.cu_num_sampled_tokens.roll(1)
            first_rows[0] = 0
            logprobs = self._logprobs(
                rows=rows,
                first_rows=first_rows,
                output_token_ids=output_token_ids,
                sampling_metadata=sampling_metadata,
                ratios=ratios,
            )
        return SamplerOutput(sampled_token_ids=output_token_ids, logprobs_tensors=logprobs)

    def _logprobs(
        self,
        # [num_logits, vocab], float32
        rows: torch.Tensor,
        # [batch], first row of each request
        first_rows: torch.Tensor,
        # [batch, width], padded with -1
        output_token_ids: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        # [batch, >= width], log m - log p of each token
        ratios: torch.Tensor | None,
    ) -> LogprobsTensors:
        """Computes logprobs `[batch * width, 1 + columns]`, the sampled token's first.

        They include `logprob_token_ids`, at which vLLM's method fails.
        """
        width = output_token_ids.shape[1]
        row_indices = first_rows[:, None] + torch.arange(width, device=rows.device)
        logprobs = rows[row_indices.flatten().clamp(max=len(rows) - 1)]
        if not self.is_logits_logprobs_mode:
            logprobs = self.sampler.compute_logprobs(logprobs)
        requested = sampling_metadata.logprob_token_ids or {}
        tokens = output_token_ids.flatten().clamp(min=0).long()
        num_logprobs = sampling_metadata.max_num_logprobs or 0
        top = self.sampler.gather_logprobs(logprobs, num_logprobs, tokens)
        max_num_requested = max(map(len, requested.values()), default=0)
        padding = (0, max(max_num_requested - num_logprobs, 0))
        ids = torch.nn.functional.pad(top.logprob_token_ids, padding)
        values = torch.nn.functional.pad(top.logprobs, padding, value=-torch.inf)
        for req_idx, token_ids in requested.items():
            request_rows = slice(req_idx * width, (req_idx + 1) * width)
            ids[request_rows, 1:] = 0
            values[request_rows, 1:] = -torch.inf
            columns = slice(1, 1 + len(token_ids))
            ids[request_rows, columns] = torch.tensor(token_ids, dtype=ids.dtype, device=ids.device)
            values[request_rows, columns] = logprobs[request_rows][:, token_ids]
        if ratios is not None:
            values += of_sampled(ids, ratios[:, :width].flatten())
        return top._replace(logprob_token_ids=ids, logprobs=values)

    def _verify(
        self,
        metadata: SpecDecodeMetadata,
        logits: torch.Tensor,
        sampling_inputs: CpuSamplingInputs | None = None,
        bonus: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Returns the token ids of a step and the table of its `StepCounters`."""
        lengths = metadata.num_draft_tokens
        batch = len(lengths)
        drafts = [draft.tolist() for draft in metadata.draft_token_ids.split(lengths)]
        step, constraints = self.requests.step(logits, drafts, self.reports.num_speculative_tokens)
        step_counters = self.reports.step_counters(
            batch, logits.device, self.requests.returns(batch)
        )
        output = reference.verify(
            step,
            self.engine_params.on(logits),
            constraints=constraints,
            step_counters=step_counters,
            sampling_inputs=sampling_inputs,
            bonus=bonus,
        )
        tokens = output.output_token_ids[:, : metadata.max_spec_len + 1].contiguous()
        return tokens, step_counters.table

    def _sampling_inputs(
        self,
        temperature: torch.Tensor,
        metadata: SpecDecodeMetadata,
        sampling_metadata: SamplingMetadata,
        vocab: int,
        draft_probs: torch.Tensor | None,
    ) -> CpuSamplingInputs:
        lengths = metadata.num_draft_tokens
        generators = sampling_metadata.generators
        device = metadata.draft_token_ids.device
        uniform = generate_uniform_probs(sum(lengths), lengths, generators, device)
        noise: dict[int, torch.Tensor] = {}
        is_strict = self.requests.is_strict(len(lengths))
        # Strict requests with fixed drafts emit the same tokens as with vLLM's `rejection_sample`,
        # which draws an exponential number for each token of the vocabulary, for all requests at
        # once. Other requests do not need them.
        if draft_probs is None and (is_strict & (temperature != 0)).any():
            dtype = torch.float64 if self.use_fp64_gumbel else torch.float32
            shared = torch.empty((len(lengths), vocab), dtype=dtype, device=device).exponential_()
            for req_idx in is_strict.nonzero()[:, 0].tolist():
                if lengths[req_idx] > 0 and req_idx in generators:
                    shared[req_idx].exponential_(generator=generators[req_idx])
                noise[req_idx] = shared[req_idx].reciprocal_()
        return CpuSamplingInputs(
            temperature=temperature,
            uniform=uniform.numpy(),
            draft_probs=draft_probs,
            generators=generators,
            noise=noise,
        )


def leaves_logits(sampling_metadata: SamplingMetadata) -> bool:
    """Whether only the temperature changes the logits in this step, and no logprobs are needed."""
    thinking = sampling_metadata.thinking_budget_state_holder
    return (
        sampling_metadata.top_k is None
        and sampling_metadata.top_p is None
        and sampling_metadata.max_num_logprobs is None
        and not sampling_metadata.logprob_token_ids
        and sampling_metadata.no_penalties
        and sampling_metadata.allowed_token_ids_mask is None
        and not sampling_metadata.bad_words_token_ids
        and (thinking is None or not thinking.has_tracked_requests())
        and all(map(_is_idle, sampling_metadata.logitsprocs.non_argmax_invariant))
    )


def _is_idle(processor: Any) -> bool:
    """Whether a logits processor has no request to act on; unknown ones count as busy."""
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    if isinstance(processor, LogitBiasLogitsProcessor):
        return not processor.biases
    return False


def install(runner: Any, config: MarsConfig) -> None:
    """Replaces the rejection sampler of a V1 runner, which only the last pipeline stage has."""
    vllm_sampler = getattr(runner, "rejection_sampler", None)
    if vllm_sampler is None:
        return
    require_own_sampler(vllm_sampler, RejectionSampler)
    if not current_platform.is_cpu():
        raise NotImplementedError(
            f"rejection_sample_method='mars' needs vLLM's Model Runner V2 on "
            f"{current_platform.device_name}, but this engine runs V1, which MARS serves only on "
            "CPUs; set VLLM_USE_V2_MODEL_RUNNER=1, or drop what V2 does not serve."
        )
    exclude_prefill_seeds(runner)
    spec_config = runner.speculative_config
    counters = Counters(spec_config.num_speculative_tokens, runner.device)
    engine_params = LazyEngineParams(config, protected_token_ids(config, runner.vllm_config))
    reports = StepReports(counters, config.logprobs == "sampled")
    requests = RequestsV1(
        config,
        max_num_reqs=runner.max_num_reqs,
        max_model_len=runner.max_model_len,
        request_ids=lambda: runner.input_batch.req_ids,
        unfinished=lambda: runner.requests,
        ended=counters.add_ended,
        is_probabilistic=spec_config.draft_sample_method == "probabilistic",
    )
    wrap_drafter(runner, config, requests.draft_shares)
    runner.input_batch.logitsprocs.argmax_invariant.append(requests)
    runner.rejection_sampler = MarsRejectionSampler(
        sampler=vllm_sampler.sampler,
        spec_config=spec_config,
        device=runner.device,
        engine_params=engine_params,
        reports=reports,
        requests=requests,
    )
    reports.attach_to_runner(runner)
    log_start(engine_params, logger, "V1")
