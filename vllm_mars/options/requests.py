"""What a request may choose for itself, in `SamplingParams.extra_args`.

Over HTTP these are the body's `vllm_xargs`. The front end checks them when a request arrives, so a
bad value is that client's error 400 and no other request notices; the engine core and the workers
read them again when the request enters the schedule and the batch, and never raise, since not every
front end checks.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_mars.kernels.interface import MAX_STOP_IDS
from vllm_mars.kernels.rules import RULES, Rule
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

# The rule that each option names.
_RULES = {rule.option: rule for rule in RULES.values()}
_MAX_LOSS = "mars_max_loss"
RETURN = "mars_return"
_SCOPE = "mars_scope"
_KEYS = (*_RULES, _MAX_LOSS, RETURN, _SCOPE)
# Under this key the front end passes on to the workers what `vllm_mars.options.overrides` reads. It
# refuses the key from a client.
OVERRIDES = "mars_overrides"
# Under this one the engine core notes that it is not known what the request's prompt has opened.
UNKNOWN_PROMPT = "mars_unknown_prompt"
_NOTES = {OVERRIDES, UNKNOWN_PROMPT}
# Where a request's parameters keep what was read of them.
_PARSED = "_mars_options"
# What the log has said of a bad request.
_SAID: list[ValueError] = []


class RequestOptions(NamedTuple):
    """What one request chose, or has from the server.

    Attributes:
        value: of the server's rule; infinity for the price that `max_loss` sets.
        strict: what of the request makes its value strict, `structured_outputs`, more
            `stop_token_ids` than a record holds, or a `prompt` of which it is not known what it has
            opened; else empty.
        wants_return: whether the client asked what was relaxed.
        max_loss: most that it may lose, in nats per output token; infinity for no bound. Where it
            is 0 the value is strict.
        scope: what of the answer may be relaxed.
    """

    value: float
    strict: str = ""
    wants_return: bool = False
    max_loss: float = math.inf
    scope: Scope = "all"


class _Parsed(NamedTuple):
    """What was read once of a request's parameters, and what it depends on."""

    config: MarsConfig
    own: dict[str, Any]
    is_constrained: bool
    num_stops: int
    options: RequestOptions


def options_of(params: "SamplingParams", config: MarsConfig) -> RequestOptions:
    """The options of one request, checked or not; strict ones, and a line in the log, of a bad one.

    Args:
        params: the request's parameters.
        config: the server's options.
    """
    try:
        return _options(params, config)
    except ValueError as error:
        # The first one alone: a client could send many.
        if not _SAID:
            from vllm.logger import init_logger

            _SAID.append(error)
            init_logger("vllm.vllm_mars.options.requests").warning(
                "A bad request came past the front end: %s All such requests are verified "
                "strictly; vLLM's own front end in Python refuses them with HTTP 400.",
                error,
            )
        return RequestOptions(config.rule.strict)


def check_options(params: "SamplingParams", config: MarsConfig) -> None:
    """Refuses a request's options, in the front end.

    Raises:
        ValueError: an unknown `mars_*` key, a bad value, or one that the server does not allow; a
            key that is the server's own; a lossy choice where the environment forbids it.
    """
    own = params.extra_args or {}
    for key in own.keys() & _NOTES:
        raise unknown_option(key, "a request", _KEYS)
    _options(params, config)
    if not lock_is_on():
        return
    strict = {config.rule.option: config.rule.strict}
    if config.sets_price or config.max_loss == 0:
        strict[_MAX_LOSS] = 0.0
    for key, value in strict.items():
        if own.get(key, value) != value:
            raise ValueError(
                f"{key}={own[key]} is lossy, but this server is locked to strict verification "
                f"({LOCK_VARIABLE}=strict); choose {value:g} or leave it out."
            )


def _options(params: "SamplingParams", config: MarsConfig) -> RequestOptions:
    """The options, which are parsed once in a process and kept on the parameters."""
    own = {key: value for key, value in (params.extra_args or {}).items() if _is_ours(key)}
    num_stops = len(params.stop_token_ids or ())
    depends_on = config, own, params.structured_outputs is not None, num_stops
    parsed: _Parsed | None = vars(params).get(_PARSED)
    # A caller may change parameters that have served a request, and use them for the next one.
    if parsed is None or parsed[:-1] != depends_on:
        chosen = {key: value for key, value in own.items() if key not in _NOTES}
        overrides = check_overrides(own.get(OVERRIDES, {}), config)
        value, max_loss = _value(chosen, config), _max_loss(chosen, config)
        strict = "prompt" if UNKNOWN_PROMPT in own else ""
        if num_stops >= MAX_STOP_IDS:
            strict = "stop_token_ids"
        if params.structured_outputs is not None:
            strict = "structured_outputs"
        options = RequestOptions(
            _stricter(value, overrides.get(config.rule.option, value), config.rule),
            strict,
            _wants_return(own),
            min(max_loss, overrides.get(_MAX_LOSS, max_loss)),
            _scope(chosen, config),
        )
        # The lock may be that of an engine alone, whose front end let a lossy choice through.
        if strict or options.max_loss == 0 or lock_is_on():
            options = options._replace(value=config.rule.strict)
        parsed = _Parsed(*depends_on, options)
        setattr(params, _PARSED, parsed)
    return parsed.options


def ends_of(params: "SamplingParams") -> list[int]:
    """The tokens that end a request: its end of sequence and its stop tokens.

    Of a request that has more than a record holds none are told, since it is strict.
    """
    ends = {*(params.stop_token_ids or ()), params.eos_token_id} - {None}
    return sorted(ends) if len(ends) <= MAX_STOP_IDS else []


def check_overrides(given: object, config: MarsConfig) -> dict[str, float]:
    """What a file holds all requests to, checked like the options of one.

    Args:
        given: what the file says.
        config: the server's options.

    Raises:
        ValueError: it is no object, or has an unknown key, a bad value, or one that is looser than
            all that the server allows.
    """
    option = config.rule.option
    if not isinstance(given, dict):
        raise ValueError(f"{shown(given)} is not an object with {option} or {_MAX_LOSS}.")
    for key in given:
        if key not in (option, _MAX_LOSS):
            raise unknown_option(key, "the overrides", (option, _MAX_LOSS))
    if option in given:
        check_value(config.rule, given[option])
        if config.rule.is_looser(value := given[option], config.value):
            raise ValueError(
                f"{option}={value} is looser than this server's own {config.value:g}, but an "
                "override only makes requests stricter; leave it out."
            )
    _max_loss(given, config)
    return given


def in_force(options: RequestOptions, config: MarsConfig) -> dict[str, float | str]:
    """The rule and the value that verification follows, as `mars_return` reports it.

    Where a bound sets the price, that is named instead.
    """
    if options.strict:
        return {config.rule.name: config.rule.strict, "strict": options.strict}
    found: dict[str, float | str] = {config.rule.name: options.value}
    if options.value == math.inf:
        found = {"max_loss": options.max_loss}
    return found if options.scope == "all" else found | {"scope": options.scope}


def _is_ours(key: object) -> bool:
    return isinstance(key, str) and key.startswith(OPTION_PREFIX)


def _value(own: dict[str, Any], config: MarsConfig) -> float:
    """The rule's value among a request's own options, else the server's."""
    for key in own:
        if key not in _KEYS:
            raise unknown_option(key, "a request", _KEYS)
    for key in own.keys() & _RULES:
        check_value(rule := _RULES[key], own[key])
        if rule != config.rule:
            option = _MAX_LOSS if config.sets_price else config.rule.option
            raise ValueError(
                f"{key}={own[key]} names another rule than this server's; choose {option} or leave "
                "it out."
            )
    if config.rule.option not in own:
        return config.value
    value = float(own[config.rule.option])
    _check_stricter(value, config)
    if value != config.rule.strict and config.max_loss == 0 and _MAX_LOSS not in own:
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


def _stricter(one: float, other: float, rule: Rule) -> float:
    """The stricter one of two values of a rule."""
    return other if rule.is_looser(one, other) else one


def _check_stricter(value: float, config: MarsConfig) -> None:
    """Refuses what is looser than the server's own value."""
    if not config.rule.is_looser(value, own := config.value):
        return
    where, allowed = "below", f"[{own}, {config.rule.most}]"
    if value > own:
        where, allowed = "above", f"[0, {own}]"
    raise ValueError(
        f"{config.rule.option}={value} is {where} this server's own {own}, but a request may only "
        f"be stricter than its server; choose a value in {allowed} or leave it out."
    )


def _max_loss(own: dict[str, Any], config: MarsConfig) -> float:
    """The bound among a request's own options, else the server's."""
    if _MAX_LOSS not in own:
        return math.inf if config.max_loss is None else config.max_loss
    value: float = own[_MAX_LOSS]
    check_max_loss(value)
    if value > (most := config.most_max_loss):
        what = "bound" if most == config.max_loss else "limit"
        raise ValueError(
            f"mars_max_loss={value} is above this server's {what} of {most}; choose a value in "
            f"[0, {most}] or leave it out."
        )
    return value


def _scope(own: dict[str, Any], config: MarsConfig) -> Scope:
    """The scope among a request's own options, else the server's."""
    if _SCOPE not in own:
        return config.scope
    scope: Scope = own[_SCOPE]
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


def _wants_return(own: dict[str, Any]) -> bool:
    value = own.get(RETURN, False)
    # JSON's true arrives as 1.
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise ValueError(
            f"{RETURN}={shown(value)} is not true or false; true adds what was relaxed to the "
            "answer."
        )
    return bool(value)
