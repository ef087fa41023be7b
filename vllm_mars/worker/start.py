"""Startup check and log line of both samplers."""

from logging import Logger

from vllm_mars.options.config import MarsConfig
from vllm_mars.worker.engine_params import LazyEngineParams


def require_own_sampler(sampler: object, vllm_class: type) -> None:
    """Raises RuntimeError if a runner's rejection sampler is not of vLLM's class."""
    if type(sampler) is not vllm_class:
        raise RuntimeError(
            f"The rejection sampler is already {type(sampler).__module__}."
            f"{type(sampler).__qualname__}, not vLLM's own; only one extension can verify drafts, "
            "so disable the other one (VLLM_PLUGINS lists the plugins to load)."
        )


def log_start(engine_params: LazyEngineParams, logger: Logger, runner: str) -> None:
    """Logs the verification settings of an engine on its first tensor-parallel rank."""
    from vllm.distributed import get_tensor_model_parallel_rank

    if get_tensor_model_parallel_rank() != 0:
        return
    logger.info(
        "Margin-aware verification (MARS) is on: %s, %d protected tokens, model runner %s; %s",
        _settings(engine_params.config),
        len(engine_params.protected_token_ids),
        runner,
        _lossiness(engine_params.config),
    )


def _settings(config: MarsConfig) -> str:
    """Formats the rule and the bound as options."""
    unit = " nats per token" if config.rule.in_nats else ""
    rule = f"{config.rule.option}={config.value:g}{unit}"
    if config.sets_price:
        rule = "the bound sets the price"
    bound = "no mars_max_loss"
    if config.max_loss is not None:
        bound = f"mars_max_loss={config.max_loss:g} nats per token"
    if config.limit is not None:
        bound += f", mars_limit={config.limit:g}"
    scope = "" if config.scope == "all" else f", mars_scope={config.scope}"
    return f"{rule}, {bound}, mars_strict_opening={config.opening}{scope}"


def _lossiness(config: MarsConfig) -> str:
    if config.lossy:
        return "the output is LOSSY: it can differ from the target's own."
    if config.clients_may_relax:
        return "the output is lossless (strict) unless a request chooses otherwise."
    return "the output is lossless (strict)."
