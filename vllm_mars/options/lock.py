"""The lock: `VLLM_MARS_LOCK=strict` in a machine's environment forbids lossy verification there."""

import os

LOCK_VARIABLE = "VLLM_MARS_LOCK"


def lock_is_on() -> bool:
    """Whether this machine is locked; so it is by a value that `check_lock` refuses, too."""
    return bool(os.environ.get(LOCK_VARIABLE))


def check_lock(lossy: str | None) -> None:
    """Refuses lossy verification where the environment locks the server to strict.

    Args:
        lossy: what is lossy about the server, in words, or None if nothing is.

    Raises:
        ValueError: the environment variable has an unknown value.
        RuntimeError: the lock is on and the server is lossy.
    """
    given = os.environ.get(LOCK_VARIABLE)
    if given and given != "strict":
        raise ValueError(
            f"{LOCK_VARIABLE}={given!r} is not 'strict', which forbids lossy verification; unset "
            "it to lock nothing."
        )
    if lossy is not None and lock_is_on():
        raise RuntimeError(
            f"{LOCK_VARIABLE}=strict forbids lossy verification, but {lossy}; choose a lossless "
            "rejection_sample_method, such as 'mars' with mars_max_loss=0, or unset "
            f"{LOCK_VARIABLE}."
        )
