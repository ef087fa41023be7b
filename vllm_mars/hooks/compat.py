"""Whether the installed vLLM has what this project hooks into.

Looked for is what would be missed late or in silence: a hook that never runs, an override that vLLM
no longer calls, an argument in another place. Whatever else a release changes fails at start, or in
`tests/conformance`. Nothing here runs while tokens are generated.
"""

import importlib.util
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_mars.hooks.plugin import HOOKS
from vllm_mars.releases import KNOWN

# The part of a server that cuts drafts on the device.
ADAPTIVE = "adaptive verification"
# How to do without a part that not every server has.
_DROP = {ADAPTIVE: "enable_adaptive_verification"}

# By the part of a server in whose process they are: methods that are wrapped or read, and the first
# parameters behind self, which are taken by their place; behind "..." those taken by name.
NEEDED: Mapping[str, Mapping[str, str]] = {
    "front end": {
        "vllm.engine.arg_utils:EngineArgs.create_speculative_config": "target_model_config",
        "vllm.engine.arg_utils:EngineArgs.from_cli_args": "args",
        "vllm.renderers.hf:load_chat_template": "chat_template",
        "vllm.renderers.hf:safe_apply_chat_template": "model_config, tokenizer, conversation",
        "vllm.tokenizers.registry:tokenizer_args_from_config": "config",
        "vllm.v1.engine.async_llm:AsyncLLM.generate": "prompt, sampling_params",
        "vllm.v1.engine.input_processor:InputProcessor._validate_params": "params",
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs": "",
        "vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests": "",
        "vllm.v1.metrics.loggers:LoggingStatLogger.log": "",
        "vllm.v1.metrics.loggers:LoggingStatLogger.record": "scheduler_stats, iteration_stats",
        "vllm.v1.metrics.loggers:PrometheusStatLogger.record": "scheduler_stats",
    },
    "API server": {
        f"vllm.entrypoints.{where}": parameters
        for where, parameters in {
            "openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator": (
                "request, result_generator"
            ),
            "openai.chat_completion.serving:OpenAIServingChat.chat_completion_stream_generator": (
                "request, result_generator"
            ),
            "openai.completion.serving:OpenAIServingCompletion."
            "request_output_to_completion_response": "final_res_batch, request",
            "openai.completion.serving:OpenAIServingCompletion.completion_stream_generator": (
                "request, engine_inputs, result_generator"
            ),
            "openai.responses.serving:OpenAIServingResponses._generate_with_builtin_tools": (
                "..., sampling_params"
            ),
        }.items()
    },
    "engine core": {
        "vllm.v1.core.sched.scheduler:Scheduler.add_request": "request",
        "vllm.v1.core.sched.scheduler:Scheduler.get_grammar_bitmask": "scheduler_output",
        "vllm.v1.core.sched.scheduler:Scheduler.has_requests": "",
        "vllm.v1.core.sched.scheduler:Scheduler.make_stats": "",
        "vllm.v1.core.sched.scheduler:Scheduler.schedule": "",
        "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids": "draft_token_ids",
        "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids_in_output": (
            "draft_token_ids, scheduler_output"
        ),
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": (
            "scheduler_output, model_runner_output"
        ),
        "vllm.v1.metrics.stats:RequestSpecDecodeMetrics.new": "num_spec_tokens",
    },
    "V1": {
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._sample_from_logits": (
            "logits, sampling_metadata"
        ),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": "",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids": (
            "scheduler_output, sampled_token_ids"
        ),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens": "",
    },
    "V2": {
        "vllm.config.speculative:SpeculativeConfig": "..., enable_adaptive_verification",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model": "",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.finish_requests": "scheduler_output",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model": "",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens": "",
        "vllm.v1.watermarking.spec_decode:DraftWatermarker.sample": (
            "logits, idx_mapping, ..., logits_cache_col"
        ),
        "vllm.v1.worker.gpu.sample.gumbel:gumbel_sample": (
            "logits, expanded_idx_mapping, ..., logits_cache_col"
        ),
        "vllm.v1.worker.gpu.sample.penalties:apply_penalties": (
            "logits, expanded_idx_mapping, token_ids, expanded_local_pos, repetition_penalty, "
            "frequency_penalty, presence_penalty, prompt_bin_mask, output_bin_counts"
        ),
        "vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator.capture": "",
        "vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator.init_cudagraph_manager": (
            "cudagraph_mode"
        ),
        "vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator.propose": (
            "input_batch, ..., temperature, seeds, is_profile"
        ),
        "vllm.v1.worker.gpu.states:RequestState.add_request": "req_id, prompt_len, all_token_ids",
    },
    # What gives the lengths of cut drafts, and what learns from those that stay.
    ADAPTIVE: {
        f"vllm.v1.worker.gpu.spec_decode.{method}": parameters
        for method, parameters in {
            "acceptance_estimator:OnlineAcceptanceEstimator.step": (
                "idx_mapping, num_sampled, num_rejected"
            ),
            "adaptive_verification:AdaptiveVerificationManager.reallocate_drafts": (
                "req_ids, idx_mapping"
            ),
        }.items()
    },
}
# Classes of ours, and the methods that vLLM calls instead of its own.
_OVERRIDES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "V1": {
        "vllm_mars.worker.requests_v1:RequestsV1": ("apply", "update_state"),
        "vllm_mars.worker.sampler_v1:MarsRejectionSampler": ("forward",),
    },
    "V2": {
        "vllm_mars.worker.requests_v2:RequestsV2": ("add_request", "apply", "apply_staged_writes"),
        "vllm_mars.worker.sampler_v2:MarsRejectionSamplerV2": (
            "__call__",
            "_get_logprobs_tensors",
            "_verify",
        ),
    },
}


def check_interfaces(part: str) -> None:
    """Refuses an installed vLLM that lacks what a part of a server needs.

    Args:
        part: a key of `NEEDED`; its modules are imported if they are not yet.

    Raises:
        RuntimeError: the message names all that is missing or has other parameters.
    """
    if found := list(_differences(part)):
        import vllm

        way_out = f"Install a vLLM that it knows ({KNOWN}), look for a newer vllm-mars"
        if all(module for _, module in found):
            others = ", ".join(sorted({module for _, module in found}))
            way_out = f"Leave out the plugin that replaces vLLM's own there ({others})"
        drop = _DROP.get(part, "rejection_sample_method 'mars'")
        raise RuntimeError(
            f"vLLM {vllm.__version__} has other interfaces than vllm-mars needs ({part}): "
            f"{'; '.join(text for text, _ in found)}. {way_out}, or drop {drop}."
        )


def check_options(runner: Any, _: object) -> None:
    """`check_interfaces` of adaptive verification if the server of a V2 runner enables it."""
    if runner.vllm_config.speculative_config.enable_adaptive_verification:
        check_interfaces(ADAPTIVE)


def _differences(part: str) -> Iterator[tuple[str, str]]:
    """What is missing or has other parameters, in words, and whose it is if it is not vLLM's."""
    # A hook would never run if its module were gone.
    for module in HOOKS if part == "front end" else ():
        try:
            is_there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            is_there = False
        if not is_there:
            yield f"{module} is missing", ""
    for name, needed in NEEDED[part].items():
        try:
            found = pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            yield f"{name} is missing ({error})", ""
            continue
        if not _takes(found, needed):
            given = ", ".join(_parameters(found))
            yield f"{name} takes ({given}), but ({needed}) come first here", _owner(found)
    for name, methods in _OVERRIDES.get(part, {}).items():
        try:
            ours = pkgutil.resolve_name(name)
            for method in methods:
                theirs = getattr(ours.__base__, method)
                own, given = (
                    ", ".join(_parameters(function)) for function in (getattr(ours, method), theirs)
                )
                if own != given and not _takes_anything(theirs):
                    what = f"{ours.__base__.__name__}.{method}"
                    yield f"{what} takes ({given}), but ({own}) here", _owner(theirs)
        except (ImportError, AttributeError) as error:
            yield str(error), ""


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    found = inspect.signature(function).parameters
    return {name: parameter for name, parameter in found.items() if name != "self"}


def _takes(function: Any, needed: str) -> bool:
    """Whether a function has the parameters of an entry of `NEEDED`, or may have them.

    Another plugin's wrapper that hands on whatever it gets hides vLLM's.
    """
    first, _, last = needed.partition("...")
    places, named = ([it for it in part.split(", ") if it] for part in (first, last))
    found = _parameters(function)
    by_place = [name for name, it in found.items() if it.kind <= it.POSITIONAL_OR_KEYWORD]
    if _takes_anything(function):
        return by_place[: len(places)] == places[: len(by_place)]
    return by_place[: len(places)] == places and found.keys() >= set(named)


def _takes_anything(function: Any) -> bool:
    kinds = {parameter.kind for parameter in _parameters(function).values()}
    return {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds


def _owner(function: Any) -> str:
    """The module that has put a function in the place of vLLM's; none if it is vLLM's own."""
    module = getattr(function, "__module__", None) or "an unknown module"
    return "" if module.partition(".")[0] == "vllm" else module
