"""The options as they travel with vLLM's config, by pickle, to each of a server's processes.

vLLM skips a plugin that a machine lacks, and a rank there would silently verify strictly.
Unpickling prevents that before a model is loaded: it registers the hooks, another version or a lock
of that machine alone is an error, and a missing vllm_mars is Python's ModuleNotFoundError.
"""

import socket
from collections.abc import Mapping
from typing import Any

from vllm_mars import __version__
from vllm_mars.options.config import MarsConfig
from vllm_mars.options.lock import LOCK_VARIABLE, lock_is_on


class PickledConfig(str):
    """The options in vLLM's `additional_config`.

    vLLM hashes that as JSON for the key of its compile cache. As JSON this is a constant, since the
    options change no graph: with another price the compiled model is found again.

    Attributes:
        config: the options.
    """

    config: MarsConfig

    def __new__(cls, config: MarsConfig) -> "PickledConfig":
        """Carries these options."""
        carrier = super().__new__(cls, "margin-aware verification")
        carrier.config = config
        return carrier

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (__version__, self.config.to_json(), lock_is_on())


def unpack(version: str, options: Mapping[str, Any], is_locked: bool) -> PickledConfig:
    """What unpickling calls, in every process that the options reach by pickle.

    Args:
        version: the version that pickled the options.
        options: the options as plain JSON.
        is_locked: whether the lock was on where they were pickled.

    Raises:
        RuntimeError: this process has another version of the extension, or a lock that would keep
            requests strict here and nowhere else.
    """
    node = f"the node {socket.gethostname()}"
    if version != __version__:
        raise RuntimeError(
            f"vllm-mars {__version__} is installed on {node}, but the server's options come from "
            f"vllm-mars {version}; install {version} there."
        )
    config = MarsConfig(**options)
    if lock_is_on() and not is_locked and config.clients_may_relax:
        raise RuntimeError(
            f"{LOCK_VARIABLE}=strict is set on {node}, but not where the server was started, which "
            "lets requests relax; set it there as well, or unset it on the node."
        )
    from vllm_mars.hooks.plugin import register

    register()
    return PickledConfig(config)
