"""Ray clusters on one machine, for tests: of pretended nodes, and always ended."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from processes import MARK, kill, wait_until
from vllm_mars.local.server import free_port

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
# Of Ray's LLM module, which `vllm_mars.serve` refuses to do without.
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


@contextlib.contextmanager
def two_hosts(mark, log_dir):
    """A cluster of two nodes, of a core and a pretended GPU each, with only a network in common.

    The second one is in a network namespace, with an address and shared memory of its own. The
    processes of both are marked so and log to `log_dir`. Yields the environment that a driver on
    the first one needs; on exit processes, link and namespace are gone.
    """
    # Of this run alone.
    name, subnet = f"mars{os.getpid()}", f"198.18.{os.getpid() % 256}"
    head, second = f"{subnet}.1", f"{subnet}.2"
    port, processes = free_port(), []
    with (
        # A short path: Ray's sockets lie below it.
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory,
        _namespace(name, head, second),
    ):
        environment = {
            **ENVIRONMENT,
            MARK: mark,
            # With a token in the home directory Ray would ask for it.
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": directory,
            "GLOO_SOCKET_IFNAME": name,
        }

        def start(node, *role, place=()):
            log = log_dir / f"{node}.log"
            ray = [
                *(Path(sys.executable).with_name("ray"), "start", "--block", *role),
                *(f"--node-ip-address={node}", "--num-cpus=1", "--num-gpus=1"),
                *(
                    f"--object-store-memory={OBJECT_STORE_BYTES}",
                    f"--temp-dir={directory}/{node[-1]}",
                ),
            ]
            with log.open("wb") as out:
                process = subprocess.Popen(
                    [*place, *ray],
                    env={**os.environ, **environment, "VLLM_HOST_IP": node},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                )
            processes.append(process)
            wait_until(
                lambda: "Ray runtime started" in log.read_text() or process.poll() is not None,
                *(60, f"Ray starts on {node}"),
            )
            assert process.poll() is None, log.read_text()

        own_memory = ("sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
        try:
            start(head, "--head", f"--port={port}", "--include-dashboard=false")
            start(
                second,
                f"--address={head}:{port}",
                place=("ip", "netns", "exec", name, *own_memory),
            )
            yield {**environment, "VLLM_HOST_IP": head, "RAY_ADDRESS": f"{head}:{port}"}
        finally:
            kill(mark)
            for process in processes:
                process.wait()


@contextlib.contextmanager
def _namespace(name, here, there):
    """A network namespace with a link to it, called so at both ends; skips where none can be."""
    try:
        for command in (
            f"ip netns add {name}",
            f"ip link add {name} type veth peer name {name} netns {name}",
            f"ip address add {here}/30 dev {name}",
            f"ip link set {name} up",
            f"ip -n {name} address add {there}/30 dev {name}",
            f"ip -n {name} link set {name} up",
            f"ip -n {name} link set lo up",
        ):
            subprocess.run(command.split(), check=True, capture_output=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        _delete_namespace(name)
        pytest.skip(
            "needs a network namespace, so root's rights (in a container, --privileged) and the "
            f"command `ip` of iproute2: {getattr(error, 'stderr', None) or error}"
        )
    try:
        yield
    finally:
        _delete_namespace(name)


def _delete_namespace(name):
    """With what is in it: processes, and one end of the link and so the link."""
    with contextlib.suppress(FileNotFoundError):
        inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        # Ray's agents write their titles over the environment in which they were marked.
        for pid in inside.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    wait_until(lambda: not Path(f"/sys/class/net/{name}").exists(), 30, f"the link {name} goes")
