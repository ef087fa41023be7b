"""The lock: a variable of the environment that forbids lossy verification on a machine."""

import os

LOCK_VARIABLE = "VLLM_MARS_LOCK"


def lock_is_on() -> bool:
    """Whether the environment forbids lossy verification on this machine."""
    return os.environ.get(LOCK_VARIABLE) == "strict"


def check_lock(lossy: str | None) -> None:
    """Refuses lossy verification where the environment locks the server to strict.

    Args:
        lossy: what is lossy about the server, in words, or None if nothing is.

    Raises:
        ValueError: the environment variable has an unknown value.
        RuntimeError: the lock is on and the server is lossy.
    """
    lock = os.environ.get(LOCK_VARIABLE, "")
    if lock not in ("", "strict"):
        raise ValueError(f"{LOCK_VARIABLE}={lock!r} is not 'strict'; unset it to allow relaxation.")
    if lock == "strict" and lossy is not None:
        raise RuntimeError(
            f"{LOCK_VARIABLE}=strict forbids lossy verification, but {lossy}; "
            "set mars_theta to 1 (or mars_price to 0), choose another method, or unset "
            f"{LOCK_VARIABLE}."
        )
