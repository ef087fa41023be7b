"""What a request may choose for itself, in `SamplingParams.extra_args`.

Over HTTP these are the body's `vllm_xargs`. The front end checks them when a request arrives, so a
bad value is that client's error 400 and no other request notices; the engine core and the workers
read them again when the request enters the schedule and the batch.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_mars.config import (
    LIMIT,
    METRICS,
    OPTION,
    OPTION_PREFIX,
    STRICT,
    MarsConfig,
    Threshold,
    check_max_loss,
    check_threshold,
    unknown_option,
)
from vllm_mars.lock import LOCK_VARIABLE, lock_is_on

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

# The metric that each threshold belongs to.
_THRESHOLDS = {option: metric for metric, option in OPTION.items()}
_MAX_LOSS = "mars_max_loss"
_RETURN = "mars_return"
_SPECULATE = "mars_speculate"
_KEYS = (*_THRESHOLDS, _MAX_LOSS, _RETURN, _SPECULATE)
# Where a request's parameters keep what was read of them.
_PARSED = "_mars_options"


class RequestOptions(NamedTuple):
    """What one request chose, or has from the server.

    Attributes:
        threshold: of its verification.
        is_structured: whether all of it is verified strictly, because its output is structured.
        wants_return: whether the client asked what was relaxed.
        max_loss: most that it may lose, in nats per output token; infinity for no bound.
        speculates: whether it is verified with drafts at all.
    """

    threshold: Threshold
    is_structured: bool = False
    wants_return: bool = False
    max_loss: float = math.inf
    speculates: bool = True


class _Parsed(NamedTuple):
    """What was read once of a request's parameters, and what it depends on."""

    config: MarsConfig
    own: dict[str, Any]
    is_constrained: bool
    options: RequestOptions


def options_of(params: "SamplingParams", config: MarsConfig) -> RequestOptions:
    """The options of one request, which are parsed once in a process and kept on its parameters.

    Args:
        params: the request's parameters; its `extra_args` may hold `mars_theta`, a number in (0, 1]
            where 1 is strict, `mars_gap` or `mars_price` where that is the server's metric,
            `mars_max_loss`, `mars_speculate`, and `mars_return`.
        config: the server's options. In shadow mode the threshold is checked, but nothing is
            relaxed.

    Raises:
        ValueError: an unknown `mars_*` key, a bad value, or one that the server does not allow.
    """
    own = {key: value for key, value in (params.extra_args or {}).items() if _is_ours(key)}
    is_constrained = params.structured_outputs is not None
    parsed: _Parsed | None = vars(params).get(_PARSED)
    # A caller may change parameters that have served a request, and use them for the next one.
    if parsed is None or parsed[:-1] != (config, own, is_constrained):
        options = RequestOptions(
            _threshold(own, config),
            is_constrained and config.structured == "strict",
            _boolean(own, _RETURN, False, "true adds what was relaxed to the answer"),
            _max_loss(own, config),
            _boolean(own, _SPECULATE, True, "false answers without drafts"),
        )
        parsed = _Parsed(config, own, is_constrained, options)
        setattr(params, _PARSED, parsed)
    return parsed.options


def refuse_locked(params: "SamplingParams") -> None:
    """Refuses a lossy choice of a request where the environment locks the server to strict.

    Args:
        params: parameters that `options_of` has read.

    Raises:
        ValueError: such a choice.
    """
    for key, value in (params.extra_args or {}).items():
        metric = _THRESHOLDS.get(key)
        if metric is not None and lock_is_on() and Threshold.of(metric, value) != STRICT:
            raise ValueError(
                f"{key}={value} is lossy, but this server is locked to strict verification "
                f"({LOCK_VARIABLE}=strict); choose {STRICT.value(metric):g} or leave it out."
            )


def in_force(options: RequestOptions, config: MarsConfig) -> dict[str, float]:
    """The threshold that verification follows, as `mars_return` reports it."""
    strict = options.is_structured or config.shadow
    threshold = STRICT if strict else options.threshold
    return {METRICS[config.metric]: threshold.value(config.metric)}


def _is_ours(key: object) -> bool:
    return isinstance(key, str) and key.startswith(OPTION_PREFIX)


def _threshold(own: dict[str, Any], config: MarsConfig) -> Threshold:
    """The threshold among a request's own options, else the server's."""
    for key in own:
        if key not in _KEYS:
            raise unknown_option(key, "a request", _KEYS)
    chosen = [key for key in own if key != _RETURN]
    if chosen and not config.client_control:
        raise ValueError(
            f"{', '.join(chosen)}: this server does not let requests choose their verification "
            "(mars_client_control is false); leave it out."
        )
    threshold = config.threshold
    for key in chosen:
        if key in _THRESHOLDS:
            threshold = _own_threshold(key, own[key], config)
    return threshold


def _own_threshold(key: str, value: Any, config: MarsConfig) -> Threshold:
    metric = _THRESHOLDS[key]
    check_threshold(metric, value)
    if metric != config.metric:
        raise ValueError(
            f"{key}={value} belongs to mars_metric={metric!r}, but this server's is "
            f"{config.metric!r}; choose {OPTION[config.metric]} or leave it out."
        )
    _check_limit(metric, value, config)
    # Where an engine alone is locked, what its front end let through is verified strictly.
    return STRICT if lock_is_on() else Threshold.of(metric, value)


def _check_limit(metric: str, value: float, config: MarsConfig) -> None:
    """Refuses what is looser than the server allows; that is its own threshold by default."""
    limit = config.limit
    if metric == "ratio":
        is_looser, where, allowed = value < limit, "below", f"[{limit}, 1]"
    else:
        is_looser, where, allowed = value > limit, "above", f"[0, {limit}]"
    if not is_looser:
        return
    given = f"{OPTION[metric]}={value} is {where} this server's"
    if limit == config.threshold.value(metric):
        raise ValueError(
            f"{given} own {limit}, but a request may only be stricter than its server; choose a "
            f"value in {allowed}, or have the server started with {LIMIT[metric]}."
        )
    raise ValueError(f"{given} limit of {limit}; choose a value in {allowed}.")


def _max_loss(own: dict[str, Any], config: MarsConfig) -> float:
    """The bound among a request's own options, else the server's."""
    most = math.inf if config.max_loss is None else config.max_loss
    if _MAX_LOSS not in own:
        return most
    value: float = own[_MAX_LOSS]
    check_max_loss(value)
    if value > most:
        raise ValueError(
            f"mars_max_loss={value} is above this server's bound of {most}; choose a value in "
            f"[0, {most}] or leave it out."
        )
    return value


def _boolean(own: dict[str, Any], key: str, default: bool, meaning: str) -> bool:
    value = own.get(key, default)
    # JSON's true arrives as 1.
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise ValueError(f"{key}={value!r} is not true or false; {meaning}.")
    return bool(value)
