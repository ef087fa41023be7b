"""Checks at start that the installed vLLM has the interfaces that this project hooks into.

They cover changes that would fail late or silently: a hook that never runs, an override that vLLM
no longer calls, an argument at another position. Other changes of a release fail at start, or in
`tests/conformance`.
"""

import importlib.util
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_mars.hooks.plugin import HOOKS
from vllm_mars.releases import KNOWN

# An optional feature of vLLM, which truncates drafts on the device.
ADAPTIVE = "adaptive verification"
# The option to drop if an optional part is missing.
_DROP = {ADAPTIVE: "enable_adaptive_verification"}

_CHAT = "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat"
_COMPLETION = "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion"
_RESPONSES = "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_GPU = "vllm.v1.worker.gpu"
_RUNNER_V2 = f"{_GPU}.model_runner:GPUModelRunner"
_SPECULATOR = f"{_GPU}.spec_decode.speculator:BaseSpeculator"

# By part of a server: functions that are wrapped or called, with the parameters that are used: the
# first ones after self, passed by position, and after "..." those passed by name.
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
        f"{_CHAT}.chat_completion_full_generator": "request, result_generator",
        f"{_CHAT}.chat_completion_stream_generator": "request, result_generator",
        f"{_COMPLETION}.request_output_to_completion_response": "final_res_batch, request",
        f"{_COMPLETION}.completion_stream_generator": "request, engine_inputs, result_generator",
        f"{_RESPONSES}._generate_with_builtin_tools": "..., sampling_params",
    },
    "engine core": {
        f"{_SCHEDULER}.add_request": "request",
        f"{_SCHEDULER}.get_grammar_bitmask": "scheduler_output",
        f"{_SCHEDULER}.has_unfinished_requests": "",
        f"{_SCHEDULER}.make_stats": "",
        f"{_SCHEDULER}.schedule": "",
        f"{_SCHEDULER}.update_draft_token_ids": "draft_token_ids",
        f"{_SCHEDULER}.update_draft_token_ids_in_output": "draft_token_ids, scheduler_output",
        f"{_SCHEDULER}.update_from_output": "scheduler_output, model_runner_output",
        "vllm.v1.metrics.stats:RequestSpecDecodeMetrics.new": "num_spec_tokens",
    },
    "V1": {
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._sample_from_logits": (
            "logits, sampling_metadata"
        ),
        f"{_RUNNER_V1}.execute_model": "",
        f"{_RUNNER_V1}.propose_draft_token_ids": "scheduler_output, sampled_token_ids",
        f"{_RUNNER_V1}.sample_tokens": "",
    },
    "V2": {
        "vllm.config.speculative:SpeculativeConfig": "..., enable_adaptive_verification",
        f"{_RUNNER_V2}.execute_model": "",
        f"{_RUNNER_V2}.finish_requests": "scheduler_output",
        f"{_RUNNER_V2}.load_model": "",
        f"{_RUNNER_V2}.sample_tokens": "",
        "vllm.v1.watermarking.spec_decode:DraftWatermarker.sample": (
            "logits, idx_mapping, ..., logits_cache_col"
        ),
        f"{_GPU}.sample.gumbel:gumbel_sample": (
            "logits, expanded_idx_mapping, ..., logits_cache_col"
        ),
        f"{_GPU}.sample.penalties:apply_penalties": (
            "logits, expanded_idx_mapping, token_ids, expanded_local_pos, repetition_penalty, "
            "frequency_penalty, presence_penalty, prompt_bin_mask, output_bin_counts"
        ),
        f"{_SPECULATOR}.capture": "",
        f"{_SPECULATOR}.init_cudagraph_manager": "cudagraph_mode",
        f"{_SPECULATOR}.propose": "input_batch, ..., temperature, seeds, is_profile",
        f"{_GPU}.states:RequestState.add_request": "req_id, prompt_len, all_token_ids",
    },
    # The truncated lengths, and the estimator that learns from accepted drafts.
    ADAPTIVE: {
        f"{_GPU}.spec_decode.acceptance_estimator:OnlineAcceptanceEstimator.step": (
            "idx_mapping, num_sampled, num_rejected"
        ),
        f"{_GPU}.spec_decode.adaptive_verification:AdaptiveVerificationManager.reallocate_drafts": (
            "req_ids, idx_mapping"
        ),
    },
}
# Our subclasses of vLLM's classes, and the methods that they override.
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
    """Checks a part of a server, a key of `NEEDED`; a RuntimeError names all differences."""
    if differences := list(_differences(part)):
        import vllm

        drop = _DROP.get(part, "rejection_sample_method 'mars'")
        raise RuntimeError(
            f"vLLM {vllm.__version__} has other interfaces than vllm-mars needs ({part}): "
            f"{'; '.join(differences)}. Install a vLLM that it knows ({KNOWN}), look for a newer "
            f"vllm-mars, leave out a plugin that replaced a function, or drop {drop}."
        )


def check_adaptive(runner: Any, _: object) -> None:
    """Checks the interfaces of adaptive verification if a V2 runner's server enables it."""
    if runner.vllm_config.speculative_config.enable_adaptive_verification:
        check_interfaces(ADAPTIVE)


def _differences(part: str) -> Iterator[str]:
    # If a module is gone its hook never runs.
    for module in HOOKS if part == "front end" else ():
        try:
            exists = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            exists = False
        if not exists:
            yield f"{module} is missing"
    for name, needed in NEEDED[part].items():
        try:
            function = pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            yield f"{name} is missing ({error})"
            continue
        if not _takes(function, needed):
            actual = ", ".join(_parameters(function))
            yield f"{name} takes ({actual}), but ({needed}) come first here{_replacement(function)}"
    for name, methods in _OVERRIDES.get(part, {}).items():
        try:
            ours = pkgutil.resolve_name(name)
            for method in methods:
                theirs = getattr(ours.__base__, method)
                expected = ", ".join(_parameters(getattr(ours, method)))
                actual = ", ".join(_parameters(theirs))
                if expected != actual and not _takes_anything(theirs):
                    full_name = f"{ours.__base__.__name__}.{method}"
                    replaced = _replacement(theirs)
                    yield f"{full_name} takes ({actual}), but ({expected}) here{replaced}"
        except (ImportError, AttributeError) as error:
            yield str(error)


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: parameter for name, parameter in parameters.items() if name != "self"}


def _takes(function: Any, needed: str) -> bool:
    """Whether a function has the parameters of an entry of `NEEDED`.

    A wrapper of another plugin that passes on `*args` and `**kwargs` counts as having them.
    """
    first, _, last = needed.partition("...")
    by_position = [name for name in first.split(", ") if name]
    by_name = [name for name in last.split(", ") if name]
    parameters = _parameters(function)
    positional = [
        name
        for name, parameter in parameters.items()
        if parameter.kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    if _takes_anything(function):
        return positional[: len(by_position)] == by_position[: len(positional)]
    return positional[: len(by_position)] == by_position and parameters.keys() >= set(by_name)


def _takes_anything(function: Any) -> bool:
    kinds = {parameter.kind for parameter in _parameters(function).values()}
    return {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds


def _replacement(function: Any) -> str:
    """Names the module of another plugin that replaced vLLM's function; "" for vLLM's."""
    module = getattr(function, "__module__", None) or "an unknown module"
    return "" if module.partition(".")[0] == "vllm" else f" ({module} replaced it)"
