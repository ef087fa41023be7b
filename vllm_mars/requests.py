"""What a request may choose for itself, in `SamplingParams.extra_args`.

Over HTTP these are the body's `vllm_xargs`. The front end checks them when a request arrives, so a
bad value is that client's error 400 and no other request notices; the workers read them again when
the request enters their batch.
"""

from typing import TYPE_CHECKING, Any

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

_KEYS = ("mars_theta", "mars_gap")


def thresholds_of(params: "SamplingParams", config: MarsConfig) -> tuple[float, float]:
    """(theta, gap) in force for one request.

    Args:
        params: the request's parameters; its `extra_args` may hold `mars_theta`, a number in (0, 1]
            where 1 is strict, or `mars_gap` where the server's metric is "gap".
        config: the server's options.

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
    if config.structured == "strict" and params.structured_outputs is not None:
        return 1.0, 0.0
    return theta, gap


def _is_ours(key: object) -> bool:
    return isinstance(key, str) and key.startswith(OPTION_PREFIX)


def _check_allowed(own: dict[str, Any], config: MarsConfig) -> None:
    for key in own:
        if key not in _KEYS:
            raise unknown_option(key, "a request", _KEYS)
    if not config.client_control:
        raise ValueError(
            f"{', '.join(own)}: this server does not let requests choose their verification "
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
