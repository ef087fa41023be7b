"""Ray clusters on one machine, for tests: of pretended nodes, and always ended."""

import contextlib
import importlib.util
import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest

ON_RAY = Path(__file__).parent / "on_ray"
# The executor on a CPU, what workers are asked, and no reports to the outside. Children inherit it.
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(ON_RAY), str(ON_RAY.parent.parent), os.environ.get("PYTHONPATH")])
    ),
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would end tasks where other programs fill the memory.
    "RAY_memory_monitor_refresh_ms": "0",
    # Not behind everything else that runs, as Ray has it.
    "RAY_worker_niceness": "0",
    # Idle workers end soon; each holds half a gigabyte of imports.
    "RAY_num_workers_soft_limit": "1",
}
OBJECT_STORE_BYTES = 200 * 2**20
# Of Ray's LLM module, which `vllm_mars.ray_serve` refuses to do without.
_NEEDED = Path(importlib.util.find_spec("vllm").origin, "../entrypoints/launchers/cli_args.py")
needs_ray_serve = pytest.mark.skipif(
    not Path(os.path.normpath(_NEEDED)).exists(), reason="Ray 2.60 cannot serve this vLLM"
)


@contextlib.contextmanager
def cluster(*nodes, **environment):
    """A cluster with a node for each dict of Ray's options, such as `{"num_gpus": 1}`.

    The first is the head. The options take `env_vars`, which that node's workers inherit. Yields
    Ray's `Cluster`; on exit all of its processes are gone.
    """
    import ray
    from ray.cluster_utils import Cluster

    with (
        # A short path: Ray's sockets lie below it.
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory,
        mock.patch.dict(os.environ, {**ENVIRONMENT, "RAY_TMPDIR": directory, **environment}),
    ):
        # Ray notes its newest cluster below this, and makes it only where `ray start` is called.
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
