"""Checks that the nodes of a Ray cluster match this process."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

PROBE_SECONDS = 60.0


def check_nodes(nodes: Iterable[dict[str, Any]], directories: Sequence[str] = ()) -> None:
    """Raises RuntimeError if a node has other versions than this process, or lacks a directory.

    `nodes` are entries of `ray.nodes()`; this process must be connected to their cluster.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    describe = _node_probe()
    probe = ray.remote(num_cpus=0, max_retries=0)(describe)
    answers = []
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        answer = probe.options(scheduling_strategy=strategy).remote(list(directories))
        name = f"{node['NodeID'][:8]} ({node['NodeManagerHostname']}, {node['NodeManagerAddress']})"
        answers.append((f"Ray node {name}", answer))
    expected = describe([])["versions"]
    for name, answer in answers:
        try:
            report = ray.get(answer, timeout=PROBE_SECONDS)
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"{name} does not report its versions: {error}") from error
        for package, version in expected.items():
            if report["versions"][package] != version:
                raise RuntimeError(
                    f"{name} has {package} {report['versions'][package]}, but {version} is here; "
                    "install the same on all nodes."
                )
        if report["missing"]:
            raise RuntimeError(
                f"{name} lacks the directory {report['missing'][0]}; copy it there or use a shared "
                "file system."
            )


def _node_probe() -> Callable[[list[str]], dict[str, Any]]:

    # Ray pickles a nested function by value, so that nodes without this package can run it. Its
    # annotations must not refer to this package either.
    def describe(directories: list[str]) -> dict[str, Any]:
        import os

        import ray

        try:
            from vllm_mars.servers.provenance import versions

            installed = versions()
        except ModuleNotFoundError:
            installed = {}
        return {
            # This package first, since without it vLLM's version is unknown.
            "versions": {
                "vllm-mars": installed.get("vllm_mars"),
                "vLLM": installed.get("vllm"),
                "Ray": ray.__version__,
            },
            "missing": [path for path in directories if not os.path.isdir(path)],
        }

    return describe
