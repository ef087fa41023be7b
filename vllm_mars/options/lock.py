"""Lock of a machine to strict verification: `VLLM_MARS_LOCK=strict` in its environment."""

import os

LOCK_VARIABLE = "VLLM_MARS_LOCK"


def lock_is_on() -> bool:
    """Whether this machine is locked; values that `check_lock` rejects also lock it."""
    return bool(os.environ.get(LOCK_VARIABLE))


def check_lock(lossy: str | None) -> None:
    """Raises RuntimeError if the machine is locked and `lossy` names a lossy setting."""
    value = os.environ.get(LOCK_VARIABLE)
    if value and value != "strict":
        raise ValueError(
            f"{LOCK_VARIABLE}={value!r} is not 'strict', which forbids lossy verification; unset "
            "it to lock nothing."
        )
    if lossy is not None and lock_is_on():
        raise RuntimeError(
            f"{LOCK_VARIABLE}=strict forbids lossy verification, but {lossy}; choose a lossless "
            "rejection_sample_method, such as 'mars' with mars_max_loss=0, or unset "
            f"{LOCK_VARIABLE}."
        )
