"""Whether the nodes of a Ray cluster have what this process has; each node is asked itself."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

PROBE_SECONDS = 60.0


def check_nodes(nodes: Iterable[dict[str, Any]], directories: Sequence[str] = ()) -> None:
    """Compares nodes with this process, which is connected to their cluster.

    Args:
        nodes: entries of `ray.nodes()`.
        directories: that every node must have.

    Raises:
        RuntimeError: a node has another version of Ray, vLLM or this package, lacks a directory, or
            does not answer within PROBE_SECONDS; the message names it.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = _look()
    probe = ray.remote(num_cpus=0, max_retries=0)(look)
    asked = []
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        answer = probe.options(scheduling_strategy=there).remote(list(directories))
        name = f"{node['NodeID'][:8]} ({node['NodeManagerHostname']}, {node['NodeManagerAddress']})"
        asked.append((f"Ray node {name}", answer))
    own = look([])["versions"]
    for name, answer in asked:
        try:
            found = ray.get(answer, timeout=PROBE_SECONDS)
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"{name} cannot be asked for its versions: {error}") from error
        for package, version in own.items():
            if found["versions"][package] != version:
                raise RuntimeError(
                    f"{name} has {package} {found['versions'][package]}, but {version} is here; "
                    "install the same on all nodes."
                )
        if found["missing"]:
            raise RuntimeError(
                f"{name} lacks the directory {found['missing'][0]}; copy it there or use a shared "
                "file system."
            )


def _look() -> Callable[[list[str]], dict[str, Any]]:
    """Returns what a node runs: it gives the versions by package and the directories it lacks."""

    # Ray sends a nested function by value, so that a node without this package can run it; not even
    # its annotations may name something of this package.
    def look(directories: list[str]) -> dict[str, Any]:
        import os

        import ray

        try:
            from vllm_mars.servers.provenance import versions

            found = versions()
        except ModuleNotFoundError:
            found = {}
        return {
            # In this order: a node without this package cannot tell vLLM's.
            "versions": {
                "vllm-mars": found.get("vllm_mars"),
                "vLLM": found.get("vllm"),
                "Ray": ray.__version__,
            },
            "missing": [path for path in directories if not os.path.isdir(path)],
        }

    return look
