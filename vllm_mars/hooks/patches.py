"""Hooks that run when vLLM imports a module, and wrap methods of its classes.

Without MARS a wrapped method does the same as vLLM's. docs/coupling.md gives an overview.
"""

import functools
import logging
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from vllm_mars.options.config import config_of

logger = logging.getLogger(f"vllm.{__name__}")

_MARKER = "_vllm_mars_patched"

Hook = Callable[[ModuleType], None]


def _once(hook: Hook) -> Hook:
    """Makes a hook patch its module only once, even if it is registered again."""

    @functools.wraps(hook)
    def patch(module: ModuleType) -> None:
        if getattr(module, _MARKER, False):
            return
        setattr(module, _MARKER, True)
        try:
            hook(module)
        except AttributeError as error:
            # Without MARS the server keeps running; with MARS `hooks.compat` refuses to start.
            logger.warning(
                "vllm-mars cannot hook into %s (%s), so this vLLM can serve only without "
                "rejection_sample_method 'mars'.",
                module.__name__,
                error,
            )

    return patch


def _after(module: ModuleType, method: str, *acts: str, needs: str = "") -> None:
    """Wraps a method to call functions after it if the server uses MARS.

    Args:
        method: "Class.method" of a class whose instances have a `vllm_config`.
        acts: "module:function" each; called with the instance and the server's options.
        needs: key of `hooks.compat.NEEDED` whose interfaces are checked first.
    """

    @wrapt.patch_function_wrapper(module, method)
    def call_and_act(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        config = config_of(instance.vllm_config)
        if config is not None:
            if needs:
                from vllm_mars.hooks.compat import check_interfaces

                check_interfaces(needs)
            for act in acts:
                pkgutil.resolve_name(act)(instance, config)
        return result


def _validate(module: ModuleType, method: str, name: str, position: int = 0) -> None:
    """Wraps a method to validate a request's options first, given by name or position."""

    @wrapt.patch_function_wrapper(module, method)
    def validate_and_call(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        from vllm_mars.hooks.arguments import check_request

        owner = getattr(instance, "engine_client", instance)
        check_request(kwargs[name] if name in kwargs else args[position], owner.vllm_config)
        return wrapped(*args, **kwargs)


# Why: vLLM has a fixed set of rejection sample methods, and its config classes forbid extra fields.
# Until: a plugin can add a rejection sample method with its options.
@_once
def patch_engine_args(module: ModuleType) -> None:
    """Extracts the options from the engine arguments, and makes drafts probabilistic by default."""

    @wrapt.patch_function_wrapper(module, "EngineArgs.from_cli_args")
    def from_cli_args(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        engine_args = wrapped(*args, **kwargs)
        if engine_args.speculative_config is not None:
            from vllm_mars.options.markers import remember_arguments

            remember_arguments(engine_args, kwargs["args"] if "args" in kwargs else args[0])
        return engine_args

    @wrapt.patch_function_wrapper(module, "EngineArgs.create_speculative_config")
    def create_speculative_config(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if instance.speculative_config is None:
            return wrapped(*args, **kwargs)
        from vllm_mars.hooks.arguments import extract_config, resolve_draft_sampling

        extract_config(instance, kwargs.get("target_model_config") or args[0])
        speculative_config = wrapped(*args, **kwargs)
        resolve_draft_sampling(instance, speculative_config)
        return speculative_config


# Why: a bad per-request option must be that client's HTTP 400. The validation hook of logits
# processors would do, but the V1 runner refuses custom ones with speculative decoding.
# Until: a plugin can validate `extra_args`.
@_once
def patch_input_processor(module: ModuleType) -> None:
    """Validates per-request options in the front end, and applies the operator's overrides."""
    _after(module, "InputProcessor.__init__", "vllm_mars.options.overrides:read_at_start")
    _validate(module, "InputProcessor._validate_params", "params")

    @wrapt.patch_function_wrapper(module, "InputProcessor.process_inputs")
    def process_inputs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        request = wrapped(*args, **kwargs)
        config = config_of(instance.vllm_config)
        if config is not None:
            from vllm_mars.options.overrides import override

            override(request, config)
        return request


# Why: the server sends status 200 for a streaming request before `_validate_params` runs.
# Until: vLLM validates before it streams.
@_once
def patch_async_llm(module: ModuleType) -> None:
    _validate(module, "AsyncLLM.generate", "sampling_params", position=1)


# Why and until: as for `AsyncLLM`, for responses that stream or run in the background.
@_once
def patch_responses(module: ModuleType) -> None:
    _validate(module, "OpenAIServingResponses._generate_with_builtin_tools", "sampling_params")


# Why: vLLM carries a fixed set of statistics from the workers to the front end, and truncates
# probabilistic drafts if a grammar forbids a token.
# Until: a worker can add to `SchedulerStats`, and vLLM no longer truncates these drafts.
@_once
def patch_scheduler(module: ModuleType) -> None:
    """Forwards the workers' counts and reports, and keeps forbidden draft tokens."""
    _after(
        module,
        "Scheduler.__init__",
        "vllm_mars.hooks.grammar:keep_forbidden_drafts",
        "vllm_mars.report.core:forward_reports",
        "vllm_mars.options.prompts:flag_unknown_prompts",
        needs="engine core",
    )


# Why: messages between vLLM's processes carry only the fields of its dataclasses.
# Until: a worker can add to `SchedulerStats`.
@_once
def patch_stats(module: ModuleType) -> None:
    from vllm_mars.report.carrier import declare_fields

    # vLLM builds its decoders later. Without MARS the fields are never set and never sent.
    declare_fields(module)


# Why: an `LLM` stops reading before the step without tokens that carries the last counts.
# Until: it reads until its engine is idle.
@_once
def patch_llm_engine(module: ModuleType) -> None:
    _after(module, "LLMEngine.__init__", "vllm_mars.report.metrics:drain_counts")


# Why: vLLM sends a request's metrics with its last tokens, after a stop string has ended it.
# Until: a sampler can add to each step's output of a request.
@_once
def patch_output_processor(module: ModuleType) -> None:
    from vllm_mars.report.answers import collect_rows

    collect_rows(module.RequestState)


def _attach_reports(module: ModuleType, method: str) -> None:
    """Adds the reports that requests want to a method's responses."""
    from vllm_mars.hooks.compat import NEEDED

    names = NEEDED["API server"][f"{module.__name__}:{method}"].split(", ")

    @wrapt.patch_function_wrapper(module, method)
    def answer_and_attach(*call: Any) -> Any:
        from vllm_mars.report.answers import attach_reports

        return attach_reports(names, *call)


# Why: vLLM's response has one field for metrics, and omits it if there are several choices.
# Until: each choice has metrics.
@_once
def patch_chat(module: ModuleType) -> None:
    """Adds reports to chat completions, and checks the interfaces of the API server."""

    @wrapt.patch_function_wrapper(module, "OpenAIServingChat.__init__")
    def init_and_check(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        if config_of(instance.engine_client.vllm_config) is not None:
            from vllm_mars.hooks.compat import check_interfaces

            check_interfaces("API server")

    _attach_reports(module, "OpenAIServingChat.chat_completion_full_generator")
    _attach_reports(module, "OpenAIServingChat.chat_completion_stream_generator")


@_once
def patch_completions(module: ModuleType) -> None:
    _attach_reports(module, "OpenAIServingCompletion.request_output_to_completion_response")
    _attach_reports(module, "OpenAIServingCompletion.completion_stream_generator")


# Why: a stat logger plugin would switch on statistics that are off, and vLLM unregisters its
# metrics when it creates those of vLLM. Until: neither is the case.
@_once
def patch_stat_loggers(module: ModuleType) -> None:
    _after(module, "PrometheusStatLogger.__init__", "vllm_mars.report.metrics:add_metrics")
    _after(module, "LoggingStatLogger.__init__", "vllm_mars.report.metrics:add_log_line")


# Why: the V1 runner's rejection sampler class is hard-coded.
# Until: the V1 runner is gone, or gets the class from the platform or a plugin.
@_once
def patch_runner_v1(module: ModuleType) -> None:
    _after(module, "GPUModelRunner.__init__", "vllm_mars.worker.sampler_v1:install", needs="V1")


# Why and until: as for V1. The V2 runner builds its samplers after it has loaded the model.
@_once
def patch_runner_v2(module: ModuleType) -> None:
    # Checked here, since loading the model can take minutes.
    _after(module, "GPUModelRunner.__init__", "vllm_mars.hooks.compat:check_adaptive", needs="V2")
    _after(module, "GPUModelRunner.load_model", "vllm_mars.worker.sampler_v2:install")
