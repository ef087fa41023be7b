"""Measures a group of cells: starts its servers, lets them take turns, ends them."""

import contextlib
import json
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_mars.config import METHOD
from vllm_mars.experiments.quality.task_client import acceptance_between, ask_task
from vllm_mars.experiments.sweep.bench_client import Asking, BenchClient, wake
from vllm_mars.experiments.sweep.datasets import Dataset
from vllm_mars.experiments.sweep.methods_here import Platform
from vllm_mars.experiments.sweep.plan import Group, ServerSpec, SweepOptions
from vllm_mars.experiments.sweep.records import Cell, CellKey, Settings, Status
from vllm_mars.local.provenance import describe_run, weights, without_directories
from vllm_mars.local.scrape import LOST_NATS
from vllm_mars.local.server import VllmServer
from vllm_mars.local.vllm_args import CPU_ARGS, CPU_ENV, SERVER_ARGS, SETTLE_SECONDS

GPU_MEMORY = 0.9


@dataclass(frozen=True)
class Sweep:
    """What all groups of a sweep share; plain data, so that Ray can send it.

    Attributes:
        options: what to measure.
        model: directory or name of the target.
        datasets: the prompts.
        settings: as the cells record them.
        command: the sweep's command line.
    """

    options: SweepOptions
    model: str
    datasets: tuple[Dataset, ...]
    settings: Settings
    command: tuple[str, ...]

    def cell(
        self, key: CellKey, status: Status, reason: str, head: dict[str, Any], **measured: Any
    ) -> Cell:
        """A cell of this sweep.

        Args:
            key, status, reason: of the cell.
            head: `describe_run` where it was measured.
            measured: its other fields.
        """
        about = {it: head[it] for it in ("git_commit", "versions", "hardware", "load_average")}
        return Cell(
            key=key,
            status=status,
            reason=reason,
            settings=self.settings,
            theta_set_by="request" if key.method == METHOD else None,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=self.command,
            **({"speed": None, "acceptance": None, "outputs": ()} | about | measured),
        )


@dataclass(frozen=True)
class Job:
    """A group of cells with all that a node needs to measure it."""

    group: Group
    sweep: Sweep


@dataclass
class _Live:
    """A server of a group; `unusable` is what its cells are then, and why."""

    spec: ServerSpec
    server: VllmServer
    unusable: tuple[Status, str] | None = None


@dataclass
class _Run:
    sweep: Sweep
    platform: Platform
    log_dir: Path
    head: dict[str, Any]

    def cell(self, key: CellKey, status: Status, reason: str, **measured: Any) -> Cell:
        return self.sweep.cell(key, status, reason, self.head, **measured)


def measure(job: Job, log_dir: Path, platform: Platform) -> Generator[Cell]:
    """Measures the cells of a group, one at a time, and yields each as soon as it is measured.

    A cell that fails is yielded as failed and the others go on. No process outlives the iterator,
    whichever way it ends: close it where it may be left early.

    Args:
        job: what to measure.
        log_dir: directory for the logs of servers and client.
        platform: what vLLM can do here.
    """
    with contextlib.ExitStack() as stack:
        run = _Run(job.sweep, platform, log_dir, describe_run(platform.gpu))
        client = BenchClient(log_dir / "bench-client.log")
        stack.callback(client.close)
        servers = job.group.servers
        lives = [_Live(spec, _server(run, spec, len(servers))) for spec in servers]
        for index, live in enumerate(lives):
            reasons = [
                platform.why_not(live.spec, key.temperature)
                for key, server in job.group.cells
                if server == index
            ]
            if all(reasons) and (reason := next(iter(reasons), None)):
                live.unusable = "unavailable", reason
                continue
            stack.callback(live.server.close)
            live.server.start()
        for live in lives:
            _wait(live, platform)
        last: _Live | None = None
        for key, index in job.group.cells:
            live = lives[index]
            if not live.unusable and last is not live:
                if last is not None:
                    # It polls for a second after its last step, which would slow the next one.
                    time.sleep(SETTLE_SECONDS)
                last = live
            yield _measure(run, client, live, key)


def failed(job: Job, key: CellKey, reason: str) -> Cell:
    """A cell that no node could measure."""
    return job.sweep.cell(key, "failed", reason, describe_run(None))


def server_of(sweep: Sweep, on_cpu: bool, log_path: Path, args: Sequence[str] = ()) -> VllmServer:
    """A server of the target, with what all servers of a sweep are given.

    Args:
        sweep: names the model and further arguments.
        on_cpu: whether vLLM is built for CPUs.
        log_path: of the server.
        args: further arguments, which those of the user follow.
    """
    options = sweep.options
    args = [*SERVER_ARGS, *(CPU_ARGS if on_cpu else ()), *args]
    for name, value in (
        ("--tensor-parallel-size", options.tensor_parallel),
        ("--pipeline-parallel-size", options.pipeline_parallel),
    ):
        args += [name, str(value)] if value > 1 else []
    return VllmServer(
        sweep.model,
        [*args, *options.server_args],
        log_path=log_path,
        env=CPU_ENV if on_cpu else None,
        startup_timeout=options.startup_timeout,
    )


def _server(run: _Run, spec: ServerSpec, count: int) -> VllmServer:
    """One of so many servers that run side by side."""
    on_cpu = run.platform.device == "cpu"
    args = ["--seed", str(run.sweep.options.seed)]
    if not on_cpu:
        args += ["--gpu-memory-utilization", f"{GPU_MEMORY / count:.2f}"]
    config = spec.speculative_config()
    if config is not None:
        args += ["--speculative-config", json.dumps(config)]
    return server_of(run.sweep, on_cpu, run.log_dir / f"{spec.label}.log", args)


def _wait(live: _Live, platform: Platform) -> None:
    """Waits for a server that was started; notes why it cannot be used."""
    if live.unusable:
        return
    try:
        live.server.wait_until_ready()
    except RuntimeError as error:
        live.unusable = "failed", str(error)
        return
    log = live.server.log_path.read_text(errors="replace")
    if reason := platform.why_not_in_log(live.spec, log):
        live.unusable = "unavailable", reason
        live.server.close()


def _measure(run: _Run, client: BenchClient, live: _Live, key: CellKey) -> Cell:
    if live.unusable:
        return run.cell(key, *live.unusable)
    unfit = run.platform.why_not(live.spec, key.temperature)
    if unfit:
        return run.cell(key, "unavailable", unfit)
    server, sweep = live.server, run.sweep
    dataset = next(d for d in sweep.datasets if d.name == key.dataset)
    try:
        _restart_if_dead(live, run.platform)
        wake(server.base_url, sweep.model)
        before = server.metrics()
        with tempfile.TemporaryDirectory(prefix="vllm-mars-") as directory:
            asking = Asking(
                key, dataset, sweep.options, sweep.model, server.base_url, Path(directory)
            )
            if dataset.task:
                measured = ask_task(asking, run.log_dir / "lm-eval.log")
            else:
                measured = client.ask(asking)
        after = server.metrics()
    except RuntimeError as error:
        reason = str(error)
        with contextlib.suppress(RuntimeError):
            server.check_alive("while it was measured")
            return run.cell(key, "failed", reason)
        return run.cell(key, "failed", f"{reason}\n{server.log_tail()}")
    if dataset.task:
        measured["acceptance"] = acceptance_between(before, after, key.k)
    if LOST_NATS in before:
        measured["lost_nats"] = after.get(LOST_NATS, 0.0) - before[LOST_NATS]
    measured["weights"] = weights(sweep.model, live.spec.draft)
    measured["server_command"] = server.command()
    for name in ("server_command", "client_command"):
        measured[name] = tuple(without_directories(measured[name]))
    return run.cell(key, "ok", "", **measured)


def _restart_if_dead(live: _Live, platform: Platform) -> None:
    try:
        live.server.check_alive()
    except RuntimeError:
        live.server.close()
        live.server.start()
        _wait(live, platform)
        if live.unusable:
            raise RuntimeError(live.unusable[1]) from None
