"""The lock: a variable of the environment that forbids what an operator does not want on a machine.

It holds words with commas between them: "strict" forbids lossy verification, "tested" a vLLM that
is newer than those that this package's tests run on.
"""

import os
from typing import Literal, get_args

LOCK_VARIABLE = "VLLM_MARS_LOCK"
Lock = Literal["strict", "tested"]


def lock_is_on(lock: Lock = "strict") -> bool:
    """Whether the environment has this lock on this machine."""
    return lock in os.environ.get(LOCK_VARIABLE, "").split(",")


def check_lock(lossy: str | None) -> None:
    """Refuses lossy verification where the environment locks the server to strict.

    Args:
        lossy: what is lossy about the server, in words, or None if nothing is.

    Raises:
        ValueError: the environment variable has an unknown value.
        RuntimeError: the lock is on and the server is lossy.
    """
    given = os.environ.get(LOCK_VARIABLE)
    if given and not set(given.split(",")) <= set(get_args(Lock)):
        raise ValueError(
            f"{LOCK_VARIABLE}={given!r} is not 'strict' (nothing lossy), 'tested' (no newer vLLM) "
            "or 'strict,tested'; unset it to lock nothing."
        )
    if lossy is not None and lock_is_on("strict"):
        raise RuntimeError(
            f"{LOCK_VARIABLE}=strict forbids lossy verification, but {lossy}; "
            f"set mars_max_loss to 0, choose another method, or unset {LOCK_VARIABLE}."
        )
