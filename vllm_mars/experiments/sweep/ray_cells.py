"""Measures the cells of a sweep as tasks on a Ray cluster.

A task is a group of cells with its servers. It asks for the GPUs that its servers need, tensor
parallel times pipeline parallel each; on a cluster without GPUs for all cores of a node, since two
servers on one processor would disturb each other's times. A task yields each cell as soon as it is
measured. If its node is lost, Ray runs it again elsewhere, and the driver gets only the cells that
it has not got yet.
"""

import contextlib
import logging
import socket
import tempfile
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vllm_mars.experiments.sweep.plan import Group, Sweep, SweepOptions
from vllm_mars.experiments.sweep.records import Cell, CellKey, Quality
from vllm_mars.experiments.sweep.runners import LocalRunner
from vllm_mars.local.packaged_model import ensure_model
from vllm_mars.local.ray_nodes import check_nodes
from vllm_mars.local.requirements import require

CONNECT_SECONDS = 5.0
POLL_SECONDS = 1.0
# How often Ray runs a task again whose node was lost.
RETRIES = 3


class RayRunner:
    """Measures on a Ray cluster; the constructor checks that the cluster can."""

    def __init__(self, sweep: Sweep, address: str) -> None:
        """Connects and checks, within seconds.

        Args:
            sweep: whose cells are measured.
            address: of the cluster, as `ray.init` takes it: "HOST:PORT", "ray://HOST:PORT", or
                "auto" for the cluster that runs on this machine.

        Raises:
            RuntimeError: Ray is not installed, the address does not answer, the cluster has another
                version of Ray, Python, vLLM or this package, a node lacks the model or a draft, or
                no node has the GPUs that a group needs.
        """
        require("--ray", "ray", ["ray"])
        import ray

        self._ray: Any = ray
        self._sweep, options = sweep, sweep.options
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
            self._resources = needed = _needed(options, [node["Resources"] for node in nodes])
            able = [
                node
                for node in nodes
                if node["Resources"].get("CPU", 0) >= needed["num_cpus"]
                and node["Resources"].get("GPU", 0) >= needed["num_gpus"]
            ]
            directories = [p for p in (options.model, *options.drafts) if p and Path(p).is_dir()]
            check_nodes(able, directories)
        except BaseException:
            ray.shutdown()
            raise

    def run(self, groups: Sequence[Group]) -> Generator[Cell]:
        """Measures the groups' cells and yields each, once, as soon as the driver has it."""
        ray = self._ray
        remote = ray.remote(_measure).options(
            num_returns="streaming", max_retries=RETRIES, **self._resources
        )
        # By task, with the cells that the driver has not got yet.
        left = {remote.remote(self._sweep, group): group for group in groups}
        try:
            while left:
                ready, _ = ray.wait(list(left), timeout=POLL_SECONDS)
                for task in ready:
                    reason = "its task ended without this cell"
                    try:
                        cell = ray.get(next(task))
                    except StopIteration:
                        pass
                    except ray.exceptions.RayTaskError as error:
                        reason = f"its Ray task failed: {error.cause!r}"
                    except ray.exceptions.RayError as error:
                        reason = f"its node was lost {RETRIES + 1} times: {error}"
                    else:
                        yield cell
                        left[task] = left[task].without({cell.key})
                        continue
                    for key, _ in left.pop(task).cells:
                        yield self._sweep.failed(key, reason)
        finally:
            for task in left:
                # Raises KeyboardInterrupt in the task, which ends its servers.
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.cancel(task)

    def judge(self, cells: Sequence[Cell]) -> Generator[tuple[CellKey, Quality]]:
        """Judges the cells that were not judged yet, in one task."""
        remote = self._ray.remote(_judge).options(max_retries=RETRIES, **self._resources)
        try:
            yield from self._ray.get(remote.remote(self._sweep, list(cells)))
        except self._ray.exceptions.RayError as error:
            raise RuntimeError(f"the Ray task that judges failed: {error}") from error

    def close(self) -> None:
        """Leaves the cluster."""
        self._ray.shutdown()


def _needed(options: SweepOptions, nodes: Sequence[dict[str, float]]) -> dict[str, float]:
    """`num_cpus` and `num_gpus` of a task, from the resources of each node."""
    per_server = options.tensor_parallel * options.pipeline_parallel
    most = max((resources.get("GPU", 0) for resources in nodes), default=0)
    if most:
        # Servers side by side share the memory of the same GPUs.
        if most < per_server:
            raise RuntimeError(
                f"a cell needs {per_server} GPUs (tensor parallel {options.tensor_parallel} x "
                f"pipeline parallel {options.pipeline_parallel}), but the largest node of this "
                f"cluster has {most:g}; lower them or add a larger node."
            )
        return {"num_cpus": 1, "num_gpus": per_server}
    cores = [resources["CPU"] for resources in nodes if resources.get("CPU", 0) >= 1]
    if not cores:
        raise RuntimeError(
            "this Ray cluster has neither GPUs nor CPUs; start nodes with --num-cpus."
        )
    # A smaller node would measure something else, and a larger one would take two tasks at once.
    return {"num_cpus": max(cores), "num_gpus": 0}


def _measure(sweep: Sweep, group: Group) -> Generator[Cell]:
    """The task of a group."""
    with _runner(sweep) as runner:
        yield from runner.run([group])


def _judge(sweep: Sweep, cells: list[Cell]) -> list[tuple[CellKey, Quality]]:
    with _runner(sweep) as runner:
        return list(runner.judge(cells))


@contextlib.contextmanager
def _runner(sweep: Sweep) -> Iterator[LocalRunner]:
    """That of this node, with the packaged model where this node has it."""
    here = sweep if sweep.options.model else replace(sweep, model=str(ensure_model()))
    with tempfile.TemporaryDirectory(prefix="vllm-mars-") as logs:
        yield LocalRunner(here, Path(logs))


def _check_reachable(address: str) -> None:
    """Raises RuntimeError if nothing listens at "HOST:PORT"; `ray.init` would wait long."""
    url = urlsplit(address if "://" in address else f"//{address}")
    if address == "auto":
        return
    try:
        host, port = url.hostname, url.port
    except ValueError:
        host, port = None, None
    if not host or port is None:
        raise RuntimeError(
            f"ray={address!r} is not an address; write HOST:PORT, ray://HOST:PORT or auto."
        )
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as error:
        raise RuntimeError(
            f"ray={address} does not answer: {error}; is the head node running, and the port the "
            "one that `ray start --head` printed?"
        ) from error
