"""All knowledge of vLLM releases: which are supported, and what is checked at start."""

import re

from vllm.logger import init_logger

SUPPORTED = ((0, 32), (0, 33))

logger = init_logger("vllm.vllm_mars.compat")


def check_version(version: str) -> None:
    """Refuses a vLLM that is too old and warns of one that is newer than any tested.

    Args:
        version: vLLM's version string, such as "0.32.0" or "0.33.1.dev3+cpu".

    Raises:
        RuntimeError: the version is below the oldest supported one, or cannot be read.
    """
    supported = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (release := (int(match[1]), int(match[2]))) < SUPPORTED[0]:
        raise RuntimeError(
            f"vLLM {version} is not supported by vllm-mars, which knows {supported}; "
            "install one of these or drop rejection_sample_method 'mars'."
        )
    if release > SUPPORTED[-1]:
        logger.warning_once(
            "vLLM %s is newer than the releases that vllm-mars knows (%s); "
            "look for a newer vllm-mars if this server fails to start.",
            version,
            supported,
        )
