"""Measures the turns of a sweep as tasks on a Ray cluster.

A task is a group of turns with its servers. It asks for the GPUs of one server; on a cluster
without GPUs for all cores of a node, since two servers on one processor would disturb each other's
times. A task yields each turn as soon as it is measured. If its node is lost, Ray runs it again
elsewhere, and the driver takes only the turns that it has not got yet.
"""

import contextlib
import logging
import socket
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vllm_mars.lab.measure import LocalRunner, record
from vllm_mars.lab.plan import Group, Key, Sweep
from vllm_mars.lab.records import Record
from vllm_mars.models.packaged_model import ensure_model
from vllm_mars.requirements import require
from vllm_mars.servers.ray_nodes import check_nodes

CONNECT_SECONDS = 5.0
POLL_SECONDS = 1.0
# How often Ray runs a task again whose node was lost.
RETRIES = 3


class RayRunner:
    """Measures on a Ray cluster; the constructor checks that the cluster can."""

    def __init__(self, sweep: Sweep, address: str) -> None:
        """Connects to the cluster, which is "HOST:PORT", "ray://HOST:PORT" or "auto".

        Raises:
            RuntimeError: Ray is not installed, the address does not answer, the cluster has another
                version of Ray, Python, vLLM or this package, a node lacks the model or a draft, or
                no node has the GPUs that a group needs.
        """
        require("--ray", "ray", ["ray"])
        import ray

        self._ray: Any = ray
        self._sweep, options = sweep, sweep.options
        self.gpu: str | None = None
        # One server is one task: whichever node is free takes it.
        self.side_by_side = options.side_by_side or 1
        _check_reachable(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            # Ray names both versions where they differ.
            raise RuntimeError(f"ray={address}: {error}") from error
        try:
            nodes = [node for node in self._ray.nodes() if node["Alive"]]
            self._needed = _needed(options.gpus, [node["Resources"] for node in nodes])
            able = [
                node
                for node in nodes
                if all(node["Resources"].get(k, 0) >= v for k, v in self._needed.items())
            ]
            directories = [p for p in (options.model, *options.drafts) if p and Path(p).is_dir()]
            check_nodes(able, directories)
        except BaseException:
            ray.shutdown()
            raise

    def run(self, groups: Sequence[Group]) -> Generator[Record]:
        """Measures the groups' turns and yields each, once, as soon as the driver has it."""
        ray = self._ray
        remote = ray.remote(_measure).options(
            num_returns="streaming",
            max_retries=RETRIES,
            num_cpus=self._needed["CPU"],
            num_gpus=self._needed["GPU"],
        )
        tasks = {remote.remote(self._sweep, group): group for group in groups}
        taken: set[Key] = set()
        try:
            while tasks:
                ready, _ = ray.wait(list(tasks), timeout=POLL_SECONDS)
                for task in ready:
                    reason = "its task ended without this turn"
                    try:
                        found = ray.get(next(task))
                    except StopIteration:
                        pass
                    except ray.exceptions.RayTaskError as error:
                        reason = f"its Ray task failed: {error.cause!r}"
                    except ray.exceptions.RayError as error:
                        reason = f"its node was lost {RETRIES + 1} times: {error}"
                    else:
                        if found.key not in taken:
                            taken.add(found.key)
                            yield found
                        continue
                    _, turns = tasks.pop(task)
                    for turn in turns:
                        if turn.key not in taken:
                            yield record(turn, None, reason)
        finally:
            for task in tasks:
                # Raises KeyboardInterrupt in the task, which ends its servers.
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.cancel(task)

    def close(self) -> None:
        """Leaves the cluster."""
        self._ray.shutdown()


def _needed(gpus: int, nodes: Sequence[dict[str, float]]) -> dict[str, float]:
    """What a task asks for, as Ray names it, from the resources of each node."""
    most = {name: max((it.get(name, 0) for it in nodes), default=0) for name in ("GPU", "CPU")}
    if 0 < most["GPU"] < gpus or not any(most.values()):
        raise RuntimeError(
            f"a server needs {gpus} GPUs (--gpus), or the CPUs of a node, but the largest node of "
            f"this cluster has {most['GPU']:g} and {most['CPU']:g}; lower it or add a larger node."
        )
    # Without GPUs a smaller node would measure something else, and a larger one take two tasks.
    return {"GPU": gpus, "CPU": 1} if most["GPU"] else {"GPU": 0, "CPU": most["CPU"]}


def _measure(sweep: Sweep, group: Group) -> Generator[Record]:
    """The task of a group, with the packaged model of its node."""
    here = sweep if sweep.options.model else replace(sweep, model=str(ensure_model()))
    with tempfile.TemporaryDirectory(prefix="vllm-mars-") as logs:
        yield from LocalRunner(here, Path(logs)).run([group])


def _check_reachable(address: str) -> None:
    """Raises RuntimeError if nothing listens there; `ray.init` would wait long, and then exit."""
    if address == "auto":
        return
    try:
        url = urlsplit(address if "://" in address else f"//{address}")
        socket.create_connection((url.hostname or "", url.port or 0), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"ray={address} does not answer: {error}; write HOST:PORT, ray://HOST:PORT or auto. Is "
            "the head node running, and the port the one that `ray start --head` printed?"
        ) from error
