"""Measures the turns of a sweep as tasks on a Ray cluster.

A task measures a group of turns with its servers and yields each record. It requests the GPUs of
one server or, on a cluster without GPUs, all cores of a node, because two servers on one processor
would disturb each other's times. If its node is lost, Ray runs the task again on another one, and
the driver skips the turns that it already has.
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
# Retries of a task whose node was lost.
RETRIES = 3


class RayRunner:
    def __init__(self, sweep: Sweep, address: str) -> None:
        """Connects to the cluster at "HOST:PORT", "ray://HOST:PORT" or "auto".

        Raises RuntimeError if Ray is missing, if the cluster cannot be reached, if its versions or
        directories differ, or if no node has enough GPUs for a server.
        """
        require("--ray", "ray", ["ray"])
        import ray

        self._ray: Any = ray
        self._sweep = sweep
        options = sweep.options
        self.gpu: str | None = None
        # One server per task, so that any free node can take it.
        self.side_by_side = options.side_by_side or 1
        _check_reachable(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            # Ray's message names both versions if they differ.
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
                        measured = ray.get(next(task))
                    except StopIteration:
                        pass
                    except ray.exceptions.RayTaskError as error:
                        reason = f"its Ray task failed: {error.cause!r}"
                    except ray.exceptions.RayError as error:
                        reason = f"its node was lost {RETRIES + 1} times: {error}"
                    else:
                        if measured.key not in taken:
                            taken.add(measured.key)
                            yield measured
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
        self._ray.shutdown()


def _needed(gpus: int, nodes: Sequence[dict[str, float]]) -> dict[str, float]:
    most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in ("GPU", "CPU")}
    if 0 < most["GPU"] < gpus or not any(most.values()):
        raise RuntimeError(
            f"a server needs {gpus} GPUs (--gpus), or the CPUs of a node, but the largest node of "
            f"this cluster has {most['GPU']:g} and {most['CPU']:g}; lower it or add a larger node."
        )
    # Without GPUs: all cores of the largest nodes, since smaller ones would measure other times.
    return {"GPU": gpus, "CPU": 1} if most["GPU"] else {"GPU": 0, "CPU": most["CPU"]}


def _measure(sweep: Sweep, group: Group) -> Generator[Record]:
    """Runs a group as a Ray task; the packaged model is in its node's cache."""
    local = sweep if sweep.options.model else replace(sweep, model=str(ensure_model()))
    with tempfile.TemporaryDirectory(prefix="vllm-mars-") as logs:
        yield from LocalRunner(local, Path(logs)).run([group])


def _check_reachable(address: str) -> None:
    """Raises RuntimeError if nothing listens; `ray.init` would wait for long and then exit."""
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
