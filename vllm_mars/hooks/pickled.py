"""Options that travel by pickle with vLLM's config to each process of a server.

vLLM skips a plugin that is not installed on a node, so ranks there would silently verify strictly.
Instead, unpickling registers the hooks before a model is loaded, and fails if vllm_mars is missing
(ModuleNotFoundError), has another version, or is locked only on that node.
"""

import dataclasses
import socket
from collections.abc import Mapping
from typing import Any

from vllm_mars import __version__
from vllm_mars.options.config import MarsConfig
from vllm_mars.options.lock import LOCK_VARIABLE, lock_is_on


class PickledConfig(str):
    """Options in vLLM's `additional_config`.

    vLLM hashes that dict as JSON into its compile cache key. As JSON this object is a constant,
    since the options change no graph: the compiled model is reused if only the price differs.
    """

    config: MarsConfig

    def __new__(cls, config: MarsConfig) -> "PickledConfig":
        carrier = super().__new__(cls, "margin-aware verification")
        carrier.config = config
        return carrier

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (__version__, dataclasses.asdict(self.config), lock_is_on())


def unpack(version: str, options: Mapping[str, Any], is_locked: bool) -> PickledConfig:
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
