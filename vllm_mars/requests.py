"""What a request may choose for itself, in `SamplingParams.extra_args`.

Over HTTP these are the body's `vllm_xargs`. The front end checks them when a request arrives, so a
bad value is that client's error 400 and no other request notices; the workers read them again when
the request enters their batch.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_mars.config import (
    LOCK_VARIABLE,
    OPTION_PREFIX,
    MarsConfig,
    check_gap,
    check_theta,
    lock_is_on,
    unknown_option,
)

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

_THRESHOLDS = ("mars_theta", "mars_gap")
_RETURN = "mars_return"
_KEYS = (*_THRESHOLDS, _RETURN)


class RequestOptions(NamedTuple):
    """What one request chose, or has from the server.

    Attributes:
        theta: of the comparison `z2 > theta * z1 - gap`.
        gap: of the same.
        is_structured: whether all of it is verified strictly, because its output is structured.
        wants_return: whether the client asked what was relaxed.
    """

    theta: float
    gap: float
    is_structured: bool = False
    wants_return: bool = False

    @property
    def thresholds(self) -> tuple[float, float]:
        """(theta, gap)."""
        return self.theta, self.gap


def options_of(params: "SamplingParams", config: MarsConfig) -> RequestOptions:
    """The options of one request.

    Args:
        params: the request's parameters; its `extra_args` may hold `mars_theta`, a number in (0, 1]
            where 1 is strict, `mars_gap` where the server's metric is "gap", and `mars_return`.
        config: the server's options. In shadow mode the thresholds are checked, but nothing is
            relaxed.

    Raises:
        ValueError: an unknown `mars_*` key, a bad value, or one that the server does not allow.
    """
    theta, gap = config.thresholds
    own = {key: value for key, value in (params.extra_args or {}).items() if _is_ours(key)}
    if own:
        _check_allowed(own, config)
    if "mars_theta" in own:
        theta = _own_theta(own["mars_theta"], config)
    if "mars_gap" in own:
        gap = _own_gap(own["mars_gap"], config)
    return RequestOptions(
        theta,
        gap,
        config.structured == "strict" and params.structured_outputs is not None,
        _wants_return(own.get(_RETURN, False)),
    )


def in_force(options: RequestOptions, config: MarsConfig) -> dict[str, float]:
    """The threshold that verification follows, as `mars_return` reports it."""
    strict = options.is_structured or config.shadow
    if config.metric == "gap":
        return {"gap": 0.0 if strict else options.gap}
    return {"theta": 1.0 if strict else options.theta}


def _is_ours(key: object) -> bool:
    return isinstance(key, str) and key.startswith(OPTION_PREFIX)


def _check_allowed(own: dict[str, Any], config: MarsConfig) -> None:
    for key in own:
        if key not in _KEYS:
            raise unknown_option(key, "a request", _KEYS)
    thresholds = [key for key in own if key in _THRESHOLDS]
    if thresholds and not config.client_control:
        raise ValueError(
            f"{', '.join(thresholds)}: this server does not let requests choose their verification "
            "(mars_client_control is false); leave it out."
        )


def _own_theta(theta: object, config: MarsConfig) -> float:
    check_theta(theta)
    assert isinstance(theta, float | int), "checked above"
    if config.metric != "ratio":
        raise ValueError("mars_theta belongs to metric 'ratio', but this server's is 'gap'.")
    if theta < config.theta_min:
        raise ValueError(
            f"mars_theta={theta} is below this server's limit of {config.theta_min}; choose a "
            f"value in [{config.theta_min}, 1]."
        )
    if theta < 1 and lock_is_on():
        raise ValueError(
            f"mars_theta={theta} is lossy, but this server is locked to strict verification "
            f"({LOCK_VARIABLE}=strict); choose 1 or leave it out."
        )
    return float(theta)


def _own_gap(gap: object, config: MarsConfig) -> float:
    check_gap(gap)
    assert isinstance(gap, float | int), "checked above"
    if config.metric != "gap":
        raise ValueError("mars_gap belongs to metric 'gap', but this server's is 'ratio'.")
    if config.gap_max is not None and gap > config.gap_max:
        raise ValueError(
            f"mars_gap={gap} is above this server's limit of {config.gap_max}; choose a value in "
            f"[0, {config.gap_max}]."
        )
    if gap > 0 and lock_is_on():
        raise ValueError(
            f"mars_gap={gap} is lossy, but this server is locked to strict verification "
            f"({LOCK_VARIABLE}=strict); choose 0 or leave it out."
        )
    return float(gap)


def _wants_return(value: object) -> bool:
    # JSON's true arrives as 1.
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise ValueError(
            f"{_RETURN}={value!r} is not true or false; true adds what was relaxed to the answer."
        )
    return bool(value)
