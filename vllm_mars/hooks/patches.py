"""The hooks in vLLM's modules, which run when vLLM imports them.

Each wraps methods of a class. A wrapped method does what it did where MARS is not asked for.
docs/coupling.md lists every hook with the reason and when it can go.
"""

import functools
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from vllm_mars.options.config import config_of

_MARKER = "_vllm_mars_patched"

Hook = Callable[[ModuleType], None]


def _once(hook: Hook) -> Hook:
    """A hook that patches a module once, however often it is registered."""

    @functools.wraps(hook)
    def patch(module: ModuleType) -> None:
        if getattr(module, _MARKER, False):
            return
        setattr(module, _MARKER, True)
        try:
            hook(module)
        except AttributeError as error:
            # A server that does not ask for MARS goes on; one that does is refused by a check.
            from vllm.logger import init_logger

            init_logger("vllm.vllm_mars.hooks.patches").warning(
                "vllm-mars cannot hook into %s (%s), so this vLLM can serve only without "
                "rejection_sample_method 'mars'.",
                module.__name__,
                error,
            )

    return patch


def _after(module: ModuleType, method: str, *acts: str, needs: str = "") -> None:
    """Wraps a method: vLLM's own call, and more behind it if the server asks for MARS.

    Args:
        module: of the class.
        method: "Class.method"; its instances have a `vllm_config`.
        acts: "module:function" each, called with the instance and the server's options.
        needs: the part of a server whose interfaces are checked first.
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


# Why: vLLM knows a fixed set of rejection sample methods and its config classes forbid other
# fields. Until: vLLM lets a plugin add a rejection sample method with options of its own.
@_once
def patch_engine_args(module: ModuleType) -> None:
    """Takes the options out of the engine's arguments, and has drafts drawn by default."""

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


# Why: a request's own options are checked where a bad value is that client's error 400; the V1
# runner takes no logits processors beside speculation, whose validation hook would serve.
# Until: vLLM lets a plugin validate `extra_args`.
@_once
def patch_input_processor(module: ModuleType) -> None:
    """Checks a request's own options when the front end validates its parameters.

    What it hands to the engine is held to the overrides of whoever runs the server.
    """
    _after(module, "InputProcessor.__init__", "vllm_mars.options.overrides:read_at_start")

    @wrapt.patch_function_wrapper(module, "InputProcessor._validate_params")
    def validate_params(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        from vllm_mars.hooks.arguments import check_request

        result = wrapped(*args, **kwargs)
        check_request(kwargs["params"] if "params" in kwargs else args[0], instance.vllm_config)
        return result

    @wrapt.patch_function_wrapper(module, "InputProcessor.process_inputs")
    def process_inputs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        request = wrapped(*args, **kwargs)
        config = config_of(instance.vllm_config)
        if config is not None:
            from vllm_mars.options.overrides import override

            override(request, config)
        return request


# Why: the server answers a streaming request with status 200 before `_validate_params` sees it.
# Until: vLLM validates before it streams.
@_once
def patch_async_llm(module: ModuleType) -> None:
    """Checks a request's own options before its answer begins."""

    @wrapt.patch_function_wrapper(module, "AsyncLLM.generate")
    def generate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        from vllm_mars.hooks.arguments import check_request

        params = kwargs["sampling_params"] if "sampling_params" in kwargs else args[1]
        check_request(params, instance.vllm_config)
        return wrapped(*args, **kwargs)


# Why and until: as for `AsyncLLM`, of a response that streams, or that is made in the background
# after it has been answered.
@_once
def patch_responses(module: ModuleType) -> None:
    """Checks a request's own options before its response begins."""

    @wrapt.patch_function_wrapper(module, "OpenAIServingResponses._generate_with_builtin_tools")
    def generate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        from vllm_mars.hooks.arguments import check_request

        check_request(kwargs["sampling_params"], instance.engine_client.vllm_config)
        return wrapped(*args, **kwargs)


# Why: vLLM carries a fixed set of statistics from the workers to the front end, and cuts drawn
# drafts where a grammar forbids a token. Until: a worker can add to `SchedulerStats`; vLLM leaves
# the length of a drawn draft alone.
@_once
def patch_scheduler(module: ModuleType) -> None:
    """Passes the workers' counts and reports on, keeps drawn drafts."""
    _after(
        module,
        "Scheduler.__init__",
        "vllm_mars.hooks.grammar:keep_forbidden_drafts",
        "vllm_mars.report.core:forward_reports",
        "vllm_mars.options.prompts:flag_unknown_prompts",
        needs="engine core",
    )


# Why: the messages between vLLM's processes carry the fields of its dataclasses and nothing else.
# Until: as for the scheduler.
@_once
def patch_stats(module: ModuleType) -> None:
    """Gives the classes that cross the processes' border a field more."""
    from vllm_mars.report.carrier import declare_fields

    # For decoders, which are made later; without MARS the fields are never set and never sent.
    declare_fields(module)


# Why: an `LLM` stops reading before the step without tokens that brings the last counts. Until: it
# reads on until its engine is idle.
@_once
def patch_llm_engine(module: ModuleType) -> None:
    """Has an `LLM` read all counts."""
    _after(module, "LLMEngine.__init__", "vllm_mars.report.metrics:drain_counts")


# Why: vLLM sends a request's metrics with its last tokens, after a stop string has ended it.
# Until: vLLM carries what a sampler adds to each step of a request.
@_once
def patch_output_processor(module: ModuleType) -> None:
    """Puts what the steps did to a request together in the front end."""
    from vllm_mars.report.answers import collect_rows

    collect_rows(module.RequestState)


def _attach_reports(module: ModuleType, method: str) -> None:
    """Adds the reports that requests ask for to what a method answers."""
    from vllm_mars.hooks.compat import NEEDED

    names = NEEDED["API server"][f"{module.__name__}:{method}"].split(", ")

    @wrapt.patch_function_wrapper(module, method)
    def answer_and_attach(*call: Any) -> Any:
        from vllm_mars.report.answers import attach_reports

        return attach_reports(names, *call)


# Why: vLLM's response has one place for metrics, and leaves it out where there are several choices.
# Until: a choice has metrics of its own.
@_once
def patch_chat(module: ModuleType) -> None:
    """Adds the reports to chat completions, and has a server check all that it answers with."""

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
    """Adds the reports to completions."""
    _attach_reports(module, "OpenAIServingCompletion.request_output_to_completion_response")
    _attach_reports(module, "OpenAIServingCompletion.completion_stream_generator")


# Why: a stat logger plugin of vLLM's own kind would switch statistics on where they are off, and
# its metrics are unregistered again when vLLM makes its own. Until: neither is so.
@_once
def patch_stat_loggers(module: ModuleType) -> None:
    """Exports and logs the counts."""
    export, log = (f"vllm_mars.report.metrics:{name}" for name in ("add_metrics", "add_log_line"))
    _after(module, "PrometheusStatLogger.__init__", export)
    _after(module, "LoggingStatLogger.__init__", log)


# Why: the V1 runner names its rejection sampler class and offers no place for another.
# Until: the V1 runner is gone, or asks the platform or a plugin for the class.
@_once
def patch_runner_v1(module: ModuleType) -> None:
    """Replaces the rejection sampler of the V1 runner."""
    _after(module, "GPUModelRunner.__init__", "vllm_mars.worker.sampler_v1:install", needs="V1")


# Why and until: as for V1. The V2 runner builds its samplers once the model is loaded.
@_once
def patch_runner_v2(module: ModuleType) -> None:
    """Replaces the rejection sampler of the V2 runner."""
    # The check comes before the model is loaded, which can take minutes.
    check = "vllm_mars.hooks.compat:check_options"
    _after(module, "GPUModelRunner.__init__", check, needs="V2")
    _after(module, "GPUModelRunner.load_model", "vllm_mars.worker.sampler_v2:install")
