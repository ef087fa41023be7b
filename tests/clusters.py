"""Ray clusters of virtual nodes on one machine, which always end."""

import contextlib
import importlib.util
import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest

ON_RAY = Path(__file__).parent / "on_ray"
# For Ray's executor on a CPU and the extension of workers. Child processes inherit it.
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(ON_RAY), str(ON_RAY.parent.parent), os.environ.get("PYTHONPATH")])
    ),
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would kill tasks if other programs filled the memory.
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray's default gives workers the lowest priority.
    "RAY_worker_niceness": "0",
    # Idle workers end soon; each holds half a gigabyte of imports.
    "RAY_num_workers_soft_limit": "1",
}
OBJECT_STORE_BYTES = 200 * 2**20
# Imported by Ray's LLM module, which `vllm_mars.ray_serve` requires.
_NEEDED = Path(importlib.util.find_spec("vllm").origin, "../entrypoints/launchers/cli_args.py")
needs_ray_serve = pytest.mark.skipif(
    not Path(os.path.normpath(_NEEDED)).exists(), reason="Ray 2.60 cannot serve this vLLM"
)


@contextlib.contextmanager
def cluster(*nodes, **environment):
    """Starts a node for each dict of Ray's options, such as `{"num_gpus": 1}`.

    Yields Ray's `Cluster`. The first node is the head. Workers of a node inherit its `env_vars`.
    """
    import ray
    from ray.cluster_utils import Cluster

    with (
        # A short path for Ray's sockets.
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory,
        mock.patch.dict(os.environ, {**ENVIRONMENT, "RAY_TMPDIR": directory, **environment}),
    ):
        # Ray writes the newest cluster's address here; only `ray start` creates the directory.
        (Path(directory) / "ray").mkdir()
        started = Cluster()
        try:
            for options in nodes:
                started.add_node(
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    temp_dir=directory,
                    **options,
                )
            yield started
        finally:
            # The driver first, or the cluster refuses to end.
            ray.shutdown()
            started.shutdown()
