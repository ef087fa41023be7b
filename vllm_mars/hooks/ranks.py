"""Every rank of a server verifies alike, with the same version and options, or start-up fails.

A server's processes may run on many machines, each with packages of its own. vLLM skips a plugin
that a machine lacks, and the ranks there would silently verify strictly. Two checks:

- The options travel with the version that wrote them. Wherever vLLM's config is unpickled, before a
  model is loaded, another version is an error, and a missing one is Python's ModuleNotFoundError.
- Once the workers are up, the executor asks each of them what it verifies with. That reaches
  workers with a command line of their own too, such as those of further nodes under `mp`, whose
  options and lock may differ.
"""

import socket
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vllm_mars import __version__
from vllm_mars.options.config import CONFIG_KEY, OPTION_PREFIX, MarsConfig
from vllm_mars.options.lock import LOCK_VARIABLE, lock_is_on


class TravellingOptions(str):
    """The options in vLLM's `additional_config`.

    vLLM hashes that as JSON for the key of its compile cache. As JSON this is a constant, since the
    options change no graph: with another price the compiled model is found again.

    Attributes:
        config: the options.
    """

    config: MarsConfig

    def __new__(cls, config: MarsConfig) -> "TravellingOptions":
        """Carries these options."""
        carrier = super().__new__(cls, "margin-aware verification")
        carrier.config = config
        return carrier

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (__version__, self.config.to_json())


def unpack(version: str, options: Mapping[str, Any]) -> TravellingOptions:
    """What unpickling calls, in every process that the options reach by pickle.

    It also leaves the hooks, so that a process whose plugins are filtered verifies as asked.

    Args:
        version: the version that pickled the options.
        options: the options as plain JSON.

    Raises:
        RuntimeError: this process has another version of the extension.
    """
    if version != __version__:
        raise RuntimeError(
            f"vllm-mars {__version__} is installed on the node {socket.gethostname()}, but the "
            f"server's options come from vllm-mars {version}; install {version} there."
        )
    from vllm_mars.hooks.plugin import register

    register()
    return TravellingOptions(MarsConfig(**options))


class Rank(NamedTuple):
    """What one worker says of itself.

    Attributes:
        rank: its global rank.
        node: its host name.
        version: the extension that is loaded there, or None.
        sampler: module and class of its rejection sampler, or None where the rank has none, as on
            every pipeline stage but the last.
        options: those of its vLLM config, as plain JSON; None where it has none.
        is_locked: whether its environment forbids lossy verification.
    """

    rank: int
    node: str
    version: str | None
    sampler: str | None
    options: dict[str, Any] | None
    is_locked: bool


def question() -> Callable[[Any], tuple[Any, ...]]:
    """A function for each worker to run, which answers with the fields of its `Rank`.

    It is defined inside another one so that cloudpickle ships it by value, also to a worker that
    could not import this module.
    """
    key, lock = CONFIG_KEY, LOCK_VARIABLE

    def answer(worker: Any) -> tuple[Any, ...]:
        import os
        import socket
        import sys

        sampler = getattr(worker.model_runner, "rejection_sampler", None)
        kind = type(sampler)
        carrier = worker.model_runner.vllm_config.additional_config.get(key)
        return (
            worker.rank,
            socket.gethostname(),
            # Not the package alone: it may be imported where its plugin is filtered.
            getattr(sys.modules.get("vllm_mars"), "__version__", None)
            if "vllm_mars.hooks.plugin" in sys.modules
            else None,
            None if sampler is None else f"{kind.__module__}.{kind.__qualname__}",
            None if carrier is None else carrier.config.to_json(),
            bool(os.environ.get(lock)),
        )

    return answer


def require_same_everywhere(executor: Any, config: MarsConfig) -> None:
    """Refuses a server of which a rank verifies otherwise than this process was told.

    Args:
        executor: vLLM's executor, its workers loaded. On an error it is shut down.
        config: the options that every rank must have.

    Raises:
        RuntimeError: the message names each such rank, its node, and what is there.
    """
    # On further nodes of one engine only the first can ask, and it asks all of them.
    if executor.parallel_config.node_rank_within_dp != 0:
        return
    ranks = [Rank(*answer) for answer in executor.collective_rpc(question())]
    faults = [fault for rank in ranks if (fault := _fault(rank, config))]
    if not faults and all(rank.sampler is None for rank in ranks):
        faults = ["no rank has a rejection sampler"]
    if faults:
        executor.shutdown()
        raise RuntimeError(
            f"margin-aware verification is asked for, but {'; '.join(faults)}. Install vllm-mars "
            f"{__version__} on every node, start every node's vLLM with the same speculative "
            f"config and {LOCK_VARIABLE}, and include 'mars' in VLLM_PLUGINS where it is set."
        )


def _fault(rank: Rank, config: MarsConfig) -> str | None:
    where = f"rank {rank.rank} on the node {rank.node}"
    if rank.version is None:
        return f"{where} has no vllm-mars loaded"
    if rank.version != __version__:
        return f"{where} has vllm-mars {rank.version}, not {__version__}"
    if rank.sampler is not None and not rank.sampler.startswith("vllm_mars."):
        return f"{where} verifies with {rank.sampler}"
    given = rank.options or {}
    for name, value in config.to_json().items():
        if given.get(name) != value:
            return f"{where} has {OPTION_PREFIX}{name}={given.get(name)!r}, not {value!r}"
    if rank.is_locked and not lock_is_on() and config.clients_may_relax:
        return f"{where} has {LOCK_VARIABLE}=strict, but requests may relax here"
    return None
