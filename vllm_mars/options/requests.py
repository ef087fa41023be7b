"""Options of a request, in `SamplingParams.extra_args`.

Over HTTP these are the body's `vllm_xargs`. The front end checks them when a request arrives, so a
bad value is an HTTP 400 for that client and affects no other request. The engine core and the
workers parse them again, when the request enters the schedule and the batch, and never raise,
because not every front end checks.
"""

import logging
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_mars.kernels.interface import MAX_STOP_IDS
from vllm_mars.kernels.rules import RULES
from vllm_mars.options.config import (
    OPTION_PREFIX,
    MarsConfig,
    Scope,
    check_max_loss,
    check_scope,
    check_value,
    shown,
    unknown_option,
)
from vllm_mars.options.lock import LOCK_VARIABLE, lock_is_on

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

logger = logging.getLogger(f"vllm.{__name__}")

# Rule of each option.
_RULES = {rule.option: rule for rule in RULES.values()}
_MAX_LOSS = "mars_max_loss"
RETURN = "mars_return"
_SCOPE = "mars_scope"
_KEYS = (*_RULES, _MAX_LOSS, RETURN, _SCOPE)
# Key by which the front end passes the file's overrides to the workers; clients may not set it.
OVERRIDES = "mars_overrides"
# Key by which the engine core flags requests whose prompts may have unknown open markers.
UNKNOWN_PROMPT = "mars_unknown_prompt"
_INTERNAL_KEYS = {OVERRIDES, UNKNOWN_PROMPT}
# Attribute of SamplingParams that caches the `_Inputs` and the parsed options.
_PARSED = "_mars_options"
# The error of the bad request that was logged.
_SAID: list[ValueError] = []


class RequestOptions(NamedTuple):
    # The value of the server's rule; infinity if `max_loss` sets the price.
    value: float
    # Why the value is strict: `structured_outputs`, `stop_token_ids` (more than a record holds) or
    # `prompt` (its open markers are unknown); else empty.
    strict: str = ""
    wants_return: bool = False
    # Nats per output token; infinity for no bound. At 0 the value is strict.
    max_loss: float = math.inf
    scope: Scope = "all"


class _Inputs(NamedTuple):
    """Everything that the options of a request depend on."""

    config: MarsConfig
    extra_args: dict[str, Any]
    is_constrained: bool
    num_stops: int


def options_of(params: "SamplingParams", config: MarsConfig) -> RequestOptions:
    """Returns a request's options; a bad request gets strict ones, and the first is logged."""
    try:
        return _options(params, config)
    except ValueError as error:
        # Only the first: a client could send many.
        if not _SAID:
            _SAID.append(error)
            logger.warning(
                "A bad request came past the front end: %s All such requests are verified "
                "strictly; vLLM's own front end in Python refuses them with HTTP 400.",
                error,
            )
        return RequestOptions(config.rule.strict)


def check_options(params: "SamplingParams", config: MarsConfig) -> None:
    """Raises ValueError if the options of a request are bad or not allowed; for the front end."""
    extra_args = params.extra_args or {}
    for key in extra_args.keys() & _INTERNAL_KEYS:
        raise unknown_option(key, "a request", _KEYS)
    _options(params, config)
    if not lock_is_on():
        return
    strict = {config.rule.option: config.rule.strict}
    if config.sets_price or config.max_loss == 0:
        strict[_MAX_LOSS] = 0.0
    for key, value in strict.items():
        if extra_args.get(key, value) != value:
            raise ValueError(
                f"{key}={extra_args[key]} is lossy, but this server is locked to strict "
                f"verification ({LOCK_VARIABLE}=strict); choose {value:g} or leave it out."
            )


def _options(params: "SamplingParams", config: MarsConfig) -> RequestOptions:
    """Returns the options of a request, parsed once per process and cached on its parameters."""
    inputs = _Inputs(
        config=config,
        # A key with dashes is not dropped but refused, like a misspelt one.
        extra_args={
            key: value
            for key, value in (params.extra_args or {}).items()
            if isinstance(key, str) and key.replace("-", "_").startswith(OPTION_PREFIX)
        },
        is_constrained=params.structured_outputs is not None,
        num_stops=len(params.stop_token_ids or ()),
    )
    parsed: tuple[_Inputs, RequestOptions] | None = vars(params).get(_PARSED)
    # Callers may modify the parameters of an earlier request and reuse them.
    if parsed is None or parsed[0] != inputs:
        parsed = inputs, _parse(inputs)
        setattr(params, _PARSED, parsed)
    return parsed[1]


def _parse(inputs: _Inputs) -> RequestOptions:
    config = inputs.config
    chosen = {key: v for key, v in inputs.extra_args.items() if key not in _INTERNAL_KEYS}
    overrides = check_overrides(inputs.extra_args.get(OVERRIDES, {}), config)
    value = _value(chosen, config)
    override = overrides.get(config.rule.option, value)
    max_loss = _max_loss(chosen, config)
    strict = "prompt" if UNKNOWN_PROMPT in inputs.extra_args else ""
    if inputs.num_stops >= MAX_STOP_IDS:
        strict = "stop_token_ids"
    if inputs.is_constrained:
        strict = "structured_outputs"
    options = RequestOptions(
        value=override if config.rule.is_looser(value, override) else value,
        strict=strict,
        wants_return=_wants_return(chosen),
        max_loss=min(max_loss, overrides.get(_MAX_LOSS, max_loss)),
        scope=_scope(chosen, config),
    )
    # Only the engine may be locked, so the front end may have accepted a lossy value.
    if strict or options.max_loss == 0 or lock_is_on():
        options = options._replace(value=config.rule.strict)
    return options


def ends_of(params: "SamplingParams") -> list[int]:
    """Returns the end and stop tokens; none if a record cannot hold them, which forces strict."""
    ends = {*(params.stop_token_ids or ()), params.eos_token_id} - {None}
    return sorted(ends) if len(ends) <= MAX_STOP_IDS else []


def check_overrides(overrides: object, config: MarsConfig) -> dict[str, float]:
    """Returns overrides that were checked like the options of a request."""
    option = config.rule.option
    if not isinstance(overrides, dict):
        raise ValueError(f"{shown(overrides)} is not an object with {option} or {_MAX_LOSS}.")
    for key in overrides:
        if key not in (option, _MAX_LOSS):
            raise unknown_option(key, "the overrides", (option, _MAX_LOSS))
    if option in overrides:
        check_value(config.rule, overrides[option])
        if config.rule.is_looser(value := overrides[option], config.value):
            raise ValueError(
                f"{option}={value} is looser than this server's own {config.value:g}, but an "
                "override only makes requests stricter; leave it out."
            )
    _max_loss(overrides, config)
    return overrides


def in_force(options: RequestOptions, config: MarsConfig) -> dict[str, float | str]:
    """Returns the rule's value, or the bound that sets it, as `mars_return` reports them."""
    if options.strict:
        return {config.rule.name: config.rule.strict, "strict": options.strict}
    report: dict[str, float | str] = {config.rule.name: options.value}
    if options.value == math.inf:
        report = {"max_loss": options.max_loss}
    return report if options.scope == "all" else report | {"scope": options.scope}


def _value(chosen: dict[str, Any], config: MarsConfig) -> float:
    """Returns a request's value of the rule, by default the server's."""
    for key in chosen:
        if key not in _KEYS:
            raise unknown_option(key, "a request", _KEYS)
    for key in chosen.keys() & _RULES:
        check_value(rule := _RULES[key], chosen[key])
        if rule != config.rule:
            option = _MAX_LOSS if config.sets_price else config.rule.option
            raise ValueError(
                f"{key}={chosen[key]} names another rule than this server's; choose {option} or "
                "leave it out."
            )
    if config.rule.option not in chosen:
        return config.value
    value = float(chosen[config.rule.option])
    if config.rule.is_looser(value, config.value):
        where = "above"
        allowed = f"[0, {config.value}]"
        if value < config.value:
            where = "below"
            allowed = f"[{config.value}, {config.rule.most}]"
        raise ValueError(
            f"{config.rule.option}={value} is {where} this server's own {config.value}, but a "
            f"request may only be stricter than its server; choose a value in {allowed} or leave "
            "it out."
        )
    if value != config.rule.strict and config.max_loss == 0 and _MAX_LOSS not in chosen:
        way_out = "leave it out"
        if config.most_max_loss > 0:
            way_out = (
                f"name a mars_max_loss as well, up to {config.most_max_loss:g}, or leave "
                f"{config.rule.option} out"
            )
        raise ValueError(
            f"{config.rule.option}={value} is given, but this server's mars_max_loss=0 is strict; "
            f"{way_out}."
        )
    return value


def _max_loss(chosen: dict[str, Any], config: MarsConfig) -> float:
    if _MAX_LOSS not in chosen:
        return math.inf if config.max_loss is None else config.max_loss
    value: float = chosen[_MAX_LOSS]
    check_max_loss(value)
    if value > (most := config.most_max_loss):
        what = "bound" if most == config.max_loss else "limit"
        raise ValueError(
            f"mars_max_loss={value} is above this server's {what} of {most}; choose a value in "
            f"[0, {most}] or leave it out."
        )
    return value


def _scope(chosen: dict[str, Any], config: MarsConfig) -> Scope:
    if _SCOPE not in chosen:
        return config.scope
    scope: Scope = chosen[_SCOPE]
    check_scope(scope)
    if config.scope not in ("all", scope):
        raise ValueError(
            f"mars_scope={scope!r} relaxes what this server's own {config.scope!r} does not, but a "
            "request may only be stricter than its server; leave it out."
        )
    if scope != "all" and config.thinking_start is None:
        raise ValueError(
            f"mars_scope={scope!r} needs the markers of the thinking section, but this server "
            "does not know them; leave it out, or have the server started with --reasoning-parser "
            "or --reasoning-config."
        )
    return scope


def _wants_return(chosen: dict[str, Any]) -> bool:
    value = chosen.get(RETURN, False)
    # JSON's true arrives as 1.
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise ValueError(
            f"{RETURN}={shown(value)} is not true or false; true adds the relaxed tokens to the "
            "answer."
        )
    return bool(value)
