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

from vllm_mars.kernels import naive
from vllm_mars.kernels.accept.naive import Chance
from vllm_mars.kernels.account.naive import log_ratios, of_sampled
from vllm_mars.options.config import MarsConfig
from vllm_mars.options.protection import protected_token_ids
from vllm_mars.report.counters import Counters
from vllm_mars.report.worker import StepReports
from vllm_mars.worker.constraints import constrain
from vllm_mars.worker.cut_prompts import spare_cut_prompts
from vllm_mars.worker.draft_sampling_v1 import wrap_drafter
from vllm_mars.worker.requests_v1 import RequestsV1
from vllm_mars.worker.start import log_start, require_own_sampler
from vllm_mars.worker.terms import EngineTerms

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig

logger = init_logger("vllm.vllm_mars.worker.sampler_v1")


class MarsRejectionSampler(RejectionSampler):
    """vLLM's V1 rejection sampler with the margin-aware rule.

    The logits are verified as vLLM's processors leave them: the raw rows if nothing changes them.
    Requests that sample are verified losslessly against the distribution that is served: strict
    ones with fixed drafts with the random numbers of vLLM's own sampler.

    Args:
        sampler: vLLM's sampler, for bonus tokens.
        spec_config: vLLM's speculative config.
        device: device of the logits.
        terms: of the engine.
        reports: where its steps are written down.
        requests: the requests of the runner's batch.
    """

    def __init__(
        self,
        sampler: Sampler,
        spec_config: "SpeculativeConfig",
        device: torch.device,
        terms: EngineTerms,
        reports: StepReports,
        requests: RequestsV1,
    ) -> None:
        super().__init__(sampler, spec_config, device)
        self.terms = terms
        self.reports = reports
        self.requests = requests

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Verifies one step's drafts; arguments and result as in vLLM's `RejectionSampler.forward`.

        Args:
            metadata: draft tokens and row indices of the step.
            draft_probs: `[num_draft, vocab]` float32, or None where the draft has none.
            logits: `[num_draft + batch, vocab]` raw target logits.
            sampling_metadata: the requests' sampling parameters.

        Returns:
            vLLM's SamplerOutput: `sampled_token_ids` is `[batch, max_spec_len + 1]` int32, -1 after
            the last emitted token.
        """
        is_greedy = sampling_metadata.all_greedy
        leaves_rows = leaves_logits(sampling_metadata)
        if leaves_rows and is_greedy:
            output_token_ids, _ = self._verify(metadata, logits)
            return SamplerOutput(sampled_token_ids=output_token_ids, logprobs_tensors=None)
        named = sampling_metadata.logprob_token_ids
        wants_logprobs = sampling_metadata.max_num_logprobs is not None or bool(named)
        bonus = self.sampler(
            logits=logits[metadata.bonus_logits_indices],
            # -1 asks for the bonus rows themselves, which the logprobs below are made from.
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
        rows = raw = logits
        temperature = None if is_greedy else sampling_metadata.temperature
        if not leaves_rows:
            processed = logits[metadata.target_logits_indices].to(torch.float32)
            processed = self.apply_logits_processors(processed, sampling_metadata, metadata)
            processed = constrain(processed, metadata.num_draft_tokens, sampling_metadata)
            temperature = None if temperature is None else temperature.sign()
            rows = torch.empty_like(logits, dtype=torch.float32)
            rows[metadata.target_logits_indices] = processed
        chance = None
        if temperature is not None:
            own = metadata, sampling_metadata, rows.shape[1], draft_probs
            chance = self._chance(temperature, *own)
        output_token_ids, table = self._verify(metadata, rows, chance, bonus.sampled_token_ids)
        logprobs = None
        if wants_logprobs:
            ratios = None
            if chance is not None and self.terms.config.logprobs == "sampled":
                ratios = log_ratios(table, chance.temperature)
            if not self.is_processed_logprobs_mode:
                rows = raw.to(torch.float32, copy=True)
            rows[metadata.bonus_logits_indices] = bonus.logprobs_tensors.logprobs.float()
            begins = metadata.cu_num_sampled_tokens.roll(1)
            begins[0] = 0
            logprobs = self._logprobs(rows, begins, output_token_ids, sampling_metadata, ratios)
        return SamplerOutput(sampled_token_ids=output_token_ids, logprobs_tensors=logprobs)

    def _logprobs(
        self,
        rows: torch.Tensor,
        begins: torch.Tensor,
        output_token_ids: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        ratios: torch.Tensor | None,
    ) -> LogprobsTensors:
        """The logprobs of a step's tokens, as vLLM's `RejectionSampler` gives them.

        Those of the tokens that a request names are among them, which vLLM's own fails at.

        Args:
            rows: float32 `[num_logits, vocab]`, what the logprobs are made from.
            begins: `[batch]`, the first row of each request.
            output_token_ids: `[batch, width]`, -1 behind the last token.
            sampling_metadata: what the requests ask for.
            ratios: `[batch, at least width]`, added to the logprobs of the tokens; or None.

        Returns:
            `[batch * width, 1 + columns]`: a place's token, then what its request asks for.
        """
        width = output_token_ids.shape[1]
        places = begins[:, None] + torch.arange(width, device=rows.device)
        logprobs = rows[places.flatten().clamp(max=len(rows) - 1)]
        if not self.is_logits_logprobs_mode:
            logprobs = self.sampler.compute_logprobs(logprobs)
        named = sampling_metadata.logprob_token_ids or {}
        tokens = output_token_ids.flatten().clamp(min=0).long()
        most = sampling_metadata.max_num_logprobs or 0
        found = self.sampler.gather_logprobs(logprobs, most, tokens)
        padding = (0, max([0, *(len(ids) - most for ids in named.values())]))
        ids = torch.nn.functional.pad(found.logprob_token_ids, padding)
        values = torch.nn.functional.pad(found.logprobs, padding, value=-torch.inf)
        for place, own in named.items():
            own_rows = slice(place * width, (place + 1) * width)
            ids[own_rows, 1:], values[own_rows, 1:] = 0, -torch.inf
            columns = slice(1, 1 + len(own))
            ids[own_rows, columns] = torch.tensor(own, dtype=ids.dtype, device=ids.device)
            values[own_rows, columns] = logprobs[own_rows][:, own]
        if ratios is not None:
            values += of_sampled(ids, ratios[:, :width].flatten())
        return found._replace(logprob_token_ids=ids, logprobs=values)

    def _verify(
        self,
        metadata: SpecDecodeMetadata,
        logits: torch.Tensor,
        chance: Chance | None = None,
        bonus: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """The tokens of a step, and what is written down of them: see `Account`."""
        reports, lengths = self.reports, metadata.num_draft_tokens
        batch = len(lengths)
        drafts = [own.tolist() for own in metadata.draft_token_ids.split(lengths)]
        step, guard = self.requests.step(logits, drafts, reports.num_speculative_tokens)
        account = reports.account(batch, logits.device, self.requests.returns(batch))
        output = naive.verify(step, self.terms.on(logits), guard, account, chance, bonus)
        tokens = output.output_token_ids[:, : metadata.max_spec_len + 1].contiguous()
        return tokens, account.table

    def _chance(
        self,
        temperature: torch.Tensor,
        metadata: SpecDecodeMetadata,
        sampling_metadata: SamplingMetadata,
        vocab: int,
        draft_probs: torch.Tensor | None,
    ) -> Chance:
        """The random numbers of a step.

        Those of strict requests with fixed drafts are drawn as vLLM's own `rejection_sample` draws
        them, so that they emit what vLLM's requests emit. That takes an exponential number for each
        token of the vocabulary, of all requests at once, which others need not.
        """
        lengths, generators = metadata.num_draft_tokens, sampling_metadata.generators
        device = metadata.draft_token_ids.device
        uniform = generate_uniform_probs(sum(lengths), lengths, generators, device)
        noise: dict[int, torch.Tensor] = {}
        is_strict = self.requests.is_strict(len(lengths))
        if draft_probs is None and (is_strict & (temperature != 0)).any():
            dtype = torch.float64 if self.use_fp64_gumbel else torch.float32
            shared = torch.empty((len(lengths), vocab), dtype=dtype, device=device).exponential_()
            for place in is_strict.nonzero()[:, 0].tolist():
                if lengths[place] > 0 and place in generators:
                    shared[place].exponential_(generator=generators[place])
                noise[place] = shared[place].reciprocal_()
        return Chance(temperature, uniform.numpy(), draft_probs, generators, noise)


def leaves_logits(sampling_metadata: SamplingMetadata) -> bool:
    """Whether nothing but a temperature changes or reports the logits in this step."""
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
    """Whether a logits processor has no request to act on; one that is not known counts as busy."""
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    if isinstance(processor, LogitBiasLogitsProcessor):
        return not processor.biases
    return False


def install(runner: Any, config: MarsConfig) -> None:
    """Puts a `MarsRejectionSampler` into a V1 model runner.

    Args:
        runner: vLLM's `GPUModelRunner`, or a subclass of it, once built. Only that of the last
            pipeline stage has a rejection sampler; another stays as it is.
        config: the options.

    Raises:
        RuntimeError: another extension has already replaced vLLM's rejection sampler, or drafts
            cannot be drawn as the options say.
    """
    own = getattr(runner, "rejection_sampler", None)
    if own is None:
        return
    require_own_sampler(own, RejectionSampler)
    if not current_platform.is_cpu():
        raise NotImplementedError(
            f"rejection_sample_method='mars' needs vLLM's Model Runner V2 on "
            f"{current_platform.device_name}, but this engine runs V1, which MARS serves on CPUs "
            "alone; set VLLM_USE_V2_MODEL_RUNNER=1, or drop what V2 does not serve."
        )
    spare_cut_prompts(runner)
    spec_config = runner.speculative_config
    counters = Counters(spec_config.num_speculative_tokens, runner.device)
    terms = EngineTerms(config, protected_token_ids(config, runner.vllm_config))
    reports = StepReports(counters, config.logprobs == "sampled")
    requests = RequestsV1(
        config,
        runner.max_num_reqs,
        runner.max_model_len,
        lambda: runner.input_batch.req_ids,
        lambda: runner.requests,
        counters.add_ended,
        spec_config.draft_sample_method == "probabilistic",
    )
    wrap_drafter(runner, config, requests.draft_shares)
    runner.input_batch.logitsprocs.argmax_invariant.append(requests)
    runner.rejection_sampler = MarsRejectionSampler(
        own.sampler, spec_config, runner.device, terms, reports, requests
    )
    reports.leave_with_outputs(runner)
    log_start(terms, logger, "V1")
