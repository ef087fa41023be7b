"""The vLLM plugin: takes the options in the front end and puts the samplers into the model runners.

vLLM calls `register` in every process (API server, engine core, workers) before the worker class is
imported. It only leaves import hooks, which run when, and if, vLLM imports the module concerned; so
a process pays for nothing that it does not use. Each patch wraps one method, calls it unchanged
where MARS is not asked for, and is listed in docs/coupling.md with the reason and when it can go.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import wrapt

from vllm_mars.config import (
    METHOD,
    MarsConfig,
    check_lock,
    lossy_reason,
    split_speculative_config,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.sampling_params import SamplingParams

# The key in vLLM's `additional_config` under which the options travel to the workers.
CONFIG_KEY = METHOD

_MARKER = "_vllm_mars_patched"


def register() -> None:
    """Entry point in the group `vllm.general_plugins`; idempotent, silent, and cheap."""
    for module, hook in (
        ("vllm.engine.arg_utils", _patch_engine_args),
        ("vllm.v1.engine.async_llm", _patch_async_llm),
        ("vllm.v1.engine.input_processor", _patch_input_processor),
        ("vllm.v1.core.sched.scheduler", _patch_scheduler),
        ("vllm.v1.metrics.loggers", _patch_stat_loggers),
        ("vllm.v1.metrics.stats", _patch_stats),
        ("vllm.v1.executor.abstract", _patch_executor),
        ("vllm.v1.worker.gpu_model_runner", _patch_runner_v1),
        ("vllm.v1.worker.gpu.model_runner", _patch_runner_v2),
    ):
        wrapt.register_post_import_hook(functools.partial(_once, hook), module)


def _once(hook: Callable[[ModuleType], None], module: ModuleType) -> None:
    if getattr(module, _MARKER, False):
        return
    setattr(module, _MARKER, True)
    try:
        hook(module)
    except AttributeError as error:
        # A server that does not ask for MARS goes on; one that does is refused by a check.
        from vllm.logger import init_logger

        init_logger("vllm.vllm_mars.plugin").warning(
            "vllm-mars cannot hook into %s (%s); it is of no use to this vLLM.",
            module.__name__,
            error,
        )


# Why: vLLM knows a fixed set of rejection sample methods and its config classes forbid other
# fields. Until: vLLM lets a plugin add a rejection sample method with options of its own.
def _patch_engine_args(module: ModuleType) -> None:
    def from_cli_args(
        wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        engine_args = wrapped(*args, **kwargs)
        if engine_args.speculative_config is not None:
            from vllm_mars.engine.markers import remember_tool_parser

            remember_tool_parser(engine_args, kwargs["args"] if "args" in kwargs else args[0])
        return engine_args

    def create_speculative_config(
        wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if instance.speculative_config is not None:
            take_options(instance, kwargs.get("target_model_config") or args[0])
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, "EngineArgs.from_cli_args", from_cli_args)
    wrapt.wrap_function_wrapper(
        module, "EngineArgs.create_speculative_config", create_speculative_config
    )


# Why: a request's own options are checked where a bad value is that client's error 400; the V1
# runner takes no logits processors beside speculation, whose validation hook would serve.
# Until: vLLM lets a plugin validate `extra_args`.
def _patch_input_processor(module: ModuleType) -> None:
    def init(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]) -> None:
        wrapped(*args, **kwargs)
        if config_of(instance.vllm_config) is not None:
            from vllm_mars.engine.compat import check_interfaces

            check_interfaces("requests")

    def validate_params(
        wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        result = wrapped(*args, **kwargs)
        check_request(kwargs["params"] if "params" in kwargs else args[0], instance.vllm_config)
        return result

    wrapt.wrap_function_wrapper(module, "InputProcessor.__init__", init)
    wrapt.wrap_function_wrapper(module, "InputProcessor._validate_params", validate_params)


# Why: the server answers a streaming request with status 200 before `_validate_params` sees it.
# Until: vLLM validates before it streams.
def _patch_async_llm(module: ModuleType) -> None:
    def generate(
        wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        params = kwargs["sampling_params"] if "sampling_params" in kwargs else args[1]
        check_request(params, instance.vllm_config)
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, "AsyncLLM.generate", generate)


# Why: vLLM carries a fixed set of statistics from the workers to the front end.
# Until: a worker can add to `SchedulerStats`.
def _patch_scheduler(module: ModuleType) -> None:
    def init(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]) -> None:
        wrapped(*args, **kwargs)
        config = config_of(instance.vllm_config)
        if config is not None:
            from vllm_mars.engine.compat import check_interfaces
            from vllm_mars.engine.returned import collect_relaxed, is_supported
            from vllm_mars.engine.transport import carry_counts

            check_interfaces("scheduler")
            carry_counts(instance)
            if is_supported():
                check_interfaces("return")
                collect_relaxed(instance, config)

    wrapt.wrap_function_wrapper(module, "Scheduler.__init__", init)


# Why: the messages between vLLM's processes carry the fields of its dataclasses and nothing else.
# Until: as for the scheduler.
def _patch_stats(module: ModuleType) -> None:
    from vllm_mars.engine.transport import declare_field

    # For decoders, which are made later; without MARS the fields are never set and never sent.
    declare_field(module.SchedulerStats)
    if hasattr(module, "RequestSpecDecodeMetrics"):
        from vllm_mars.engine.returned import declare_request_field

        declare_request_field(module.RequestSpecDecodeMetrics)


# Why: a stat logger plugin of vLLM's own kind would switch statistics on where they are off, and
# its metrics are unregistered again when vLLM makes its own. Until: neither is so.
def _patch_stat_loggers(module: ModuleType) -> None:
    def init_prometheus(
        wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]
    ) -> None:
        wrapped(*args, **kwargs)
        if config_of(instance.vllm_config) is not None:
            from vllm_mars.engine.compat import check_interfaces
            from vllm_mars.engine.metrics import add_metrics

            check_interfaces("metrics")
            add_metrics(instance)

    def init_logging(
        wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]
    ) -> None:
        wrapped(*args, **kwargs)
        if config_of(instance.vllm_config) is not None:
            from vllm_mars.engine.compat import check_interfaces
            from vllm_mars.engine.metrics import add_log_line

            check_interfaces("metrics")
            add_log_line(instance)

    wrapt.wrap_function_wrapper(module, "PrometheusStatLogger.__init__", init_prometheus)
    wrapt.wrap_function_wrapper(module, "LoggingStatLogger.__init__", init_logging)


# Why: vLLM skips a plugin that a worker's machine lacks, and that rank would verify strictly.
# Until: vLLM compares the plugins of its processes.
def _patch_executor(module: ModuleType) -> None:
    def init(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]) -> None:
        wrapped(*args, **kwargs)
        if config_of(instance.vllm_config) is None:
            return
        from vllm_mars.engine.compat import check_interfaces

        check_interfaces("executor")
        # On further nodes of one engine only the first can ask, and it asks all of them.
        if instance.parallel_config.node_rank_within_dp == 0:
            from vllm_mars.engine.ranks import require_same_everywhere

            require_same_everywhere(instance)

    wrapt.wrap_function_wrapper(module, "Executor.__init__", init)


# Why: the V1 runner names its rejection sampler class and offers no place for another.
# Until: the V1 runner is gone, or asks the platform or a plugin for the class.
def _patch_runner_v1(module: ModuleType) -> None:
    def init(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]) -> None:
        wrapped(*args, **kwargs)
        config = config_of(instance.vllm_config)
        if config is None:
            return
        from vllm.platforms import current_platform

        from vllm_mars.engine.compat import check_interfaces

        check_interfaces("V1")
        if current_platform.is_cpu():
            check_interfaces("cpu")
        # Only the last pipeline stage samples.
        if hasattr(instance, "rejection_sampler"):
            from vllm_mars.runner.sampler_v1 import install

            install(instance, config)

    wrapt.wrap_function_wrapper(module, "GPUModelRunner.__init__", init)


# Why and until: as for V1. The V2 runner builds its samplers once the model is loaded.
def _patch_runner_v2(module: ModuleType) -> None:
    def init(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]) -> None:
        wrapped(*args, **kwargs)
        if config_of(instance.vllm_config) is not None:
            from vllm_mars.engine.compat import check_interfaces

            # Before the model is loaded, which can take minutes.
            check_interfaces("V2")

    def load_model(
        wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        result = wrapped(*args, **kwargs)
        config = config_of(instance.vllm_config)
        if config is not None and instance.rejection_sampler is not None:
            from vllm_mars.runner.sampler_v2 import install

            install(instance, config)
        return result

    wrapt.wrap_function_wrapper(module, "GPUModelRunner.__init__", init)
    wrapt.wrap_function_wrapper(module, "GPUModelRunner.load_model", load_model)


def take_options(engine_args: Any, model_config: "ModelConfig") -> None:
    """Moves this project's options from the speculative config to `additional_config`.

    Args:
        engine_args: vLLM's `EngineArgs`. Its `speculative_config` and `additional_config` are
            replaced, not changed in place, and only if all checks pass.
        model_config: the target model's configuration.

    Raises:
        ValueError: a bad option, or token ids outside the vocabulary.
        NotImplementedError: MARS together with a feature that it cannot serve.
        RuntimeError: an unsupported vLLM, or the environment forbids lossy verification.
    """
    from vllm.logger import init_logger

    from vllm_mars.calibration import resolve_auto

    given, notes = resolve_auto(engine_args.speculative_config, model_config)
    for note in notes:
        init_logger("vllm.vllm_mars.plugin").warning("%s", note)
    config, speculative_config = split_speculative_config(given)
    method = speculative_config.get("rejection_sample_method", "standard")
    check_lock(lossy_reason(config, method))
    if config is None:
        return

    import vllm

    from vllm_mars.engine.compat import check_interfaces, check_version
    from vllm_mars.engine.ranks import TravellingOptions

    check_version(vllm.__version__)
    check_interfaces("options")
    _check_served(engine_args, speculative_config, config)
    vocab = model_config.get_vocab_size()
    outside = [token for token in config.protected_token_ids or () if token >= vocab]
    if outside:
        raise ValueError(
            f"mars_protected_token_ids={outside} is outside the model's vocabulary [0, {vocab})."
        )
    from vllm_mars.engine.markers import resolve_markers

    check_interfaces("markers")
    config = resolve_markers(config, engine_args, model_config)
    engine_args.speculative_config = speculative_config
    engine_args.additional_config = {
        **engine_args.additional_config,
        CONFIG_KEY: TravellingOptions(config.to_json()),
    }


def check_request(params: "SamplingParams", vllm_config: "VllmConfig") -> None:
    """Refuses a request whose own options are bad or not allowed.

    Args:
        params: the request's parameters; those of a pooling request hold no options.
        vllm_config: the server's configuration.

    Raises:
        VLLMValidationError: vLLM's error that the server answers with HTTP 400.
    """
    if not getattr(params, "extra_args", None):
        return
    config = config_of(vllm_config)
    if config is None:
        return
    from vllm.exceptions import VLLMValidationError

    from vllm_mars.requests import options_of

    try:
        if options_of(params, config).wants_return:
            from vllm_mars.engine.returned import is_supported

            if not is_supported():
                raise ValueError("mars_return needs vLLM 0.32 or newer here; leave it out.")
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None


def config_of(vllm_config: "VllmConfig") -> MarsConfig | None:
    """The options that travelled with vLLM's config, or None where MARS is not asked for."""
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or CONFIG_KEY not in additional:
        return None
    config = MarsConfig.from_json(additional[CONFIG_KEY])
    # The lock may be set on the worker's node alone.
    check_lock(lossy_reason(config, METHOD))
    return config


def _check_served(engine_args: Any, speculative_config: dict[str, Any], config: MarsConfig) -> None:
    from vllm.platforms import current_platform

    def refuse(what: str, reason: str, way_out: str) -> None:
        raise NotImplementedError(
            f"rejection_sample_method='mars' cannot serve {what}: {reason}; {way_out}."
        )

    if speculative_config.get("method") == "extract_hidden_states":
        refuse(
            "method='extract_hidden_states'",
            "it drafts nothing that could be verified",
            "drop rejection_sample_method",
        )
    if speculative_config.get("enable_adaptive_verification"):
        refuse(
            "enable_adaptive_verification",
            "it cuts drafts by an estimate of strict acceptance",
            "switch it off",
        )
    is_sharded = getattr(engine_args, "enable_batch_sharded_sampling", False)
    if config.max_relaxed_share < 1 and is_sharded:
        refuse(
            "mars_max_relaxed_share with enable_batch_sharded_sampling",
            "a request's rank, and with it what was relaxed of it, changes from step to step",
            "drop one of them",
        )
    if getattr(engine_args, "watermark_config", None) is not None:
        refuse(
            "a watermark_config",
            "relaxed tokens carry no watermark",
            "drop the watermark or set another rejection_sample_method",
        )
    if not isinstance(engine_args.additional_config, dict):
        refuse(
            "an additional_config that is no dict",
            "the options travel in it",
            "pass a dict",
        )
    if not (
        current_platform.is_cpu() or current_platform.is_cuda_alike() or current_platform.is_xpu()
    ):
        refuse(
            f"the platform {current_platform.device_name}",
            "its model runner is not vLLM's own",
            "serve on CPU, CUDA, ROCm or XPU",
        )
