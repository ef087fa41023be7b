"""Measures a group of cells: starts its servers, lets them take turns, ends them."""

import contextlib
import json
import socket
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_mars.experiments.quality.task_client import (
    acceptance_between,
    read_answers,
    run_task,
    task_config,
)
from vllm_mars.experiments.sweep.bench_client import (
    BenchClient,
    bench_args,
    read_result,
    wake,
    write_requests,
)
from vllm_mars.experiments.sweep.datasets import Dataset
from vllm_mars.experiments.sweep.methods_here import Platform, ask_platform
from vllm_mars.experiments.sweep.plan import Group, ServerSpec, SweepOptions
from vllm_mars.experiments.sweep.records import Acceptance, Cell, CellKey, Settings, Status
from vllm_mars.local.drafts import draft_name
from vllm_mars.local.provenance import describe_run
from vllm_mars.local.server import VllmServer
from vllm_mars.local.vllm_args import CPU_ARGS, CPU_ENV, SERVER_ARGS, SETTLE_SECONDS

GPU_MEMORY = 0.9


@dataclass(frozen=True)
class Job:
    """A group with all that a node needs to measure it; plain data, so that Ray can send it.

    Attributes:
        group: the cells and their servers.
        options: of the sweep.
        model: directory or name of the target.
        datasets: the prompts.
        settings: as the cells record them.
        command: the sweep's command line.
    """

    group: Group
    options: SweepOptions
    model: str
    datasets: tuple[Dataset, ...]
    settings: Settings
    command: tuple[str, ...]


@dataclass
class _Live:
    """A server of a group; `problem` is why it cannot be had."""

    spec: ServerSpec
    server: VllmServer
    problem: str | None = None
    status: Status = "failed"


@dataclass
class _Run:
    job: Job
    platform: Platform
    log_dir: Path
    work_dir: Path
    head: dict[str, Any]

    def cell(self, key: CellKey, status: Status, reason: str, **measured: Any) -> Cell:
        node = socket.gethostname()
        return _cell(self.job, key, status, reason, node, self.head, **measured)


def _cell(
    job: Job,
    key: CellKey,
    status: Status,
    reason: str,
    node: str,
    head: dict[str, Any],
    **measured: Any,
) -> Cell:
    nothing: dict[str, Any] = {"speed": None, "acceptance": None, "outputs": ()}
    return Cell(
        key=key,
        status=status,
        reason=reason,
        settings=job.settings,
        theta_set_by="request" if key.method == "mars" else None,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        node=node,
        git_commit=head["git_commit"],
        versions=head["versions"],
        hardware=head["hardware"],
        command=job.command,
        **(nothing | measured),
    )


def measure(
    job: Job, log_dir: Path, platform: Platform | None = None
) -> Generator[Cell, None, None]:
    """Measures the cells of a group, one at a time, and yields each as soon as it is measured.

    A cell that fails is yielded as failed and the others go on. No process outlives the iterator,
    whichever way it ends: close it where it may be left early.

    Args:
        job: what to measure.
        log_dir: directory for the logs of servers and client.
        platform: what vLLM can do here; asked if None.

    Raises:
        RuntimeError: vLLM cannot be imported.
    """
    platform = platform or ask_platform()
    with contextlib.ExitStack() as stack:
        work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-mars-")))
        run = _Run(job, platform, log_dir, work_dir, describe_run(platform.gpu))
        client = stack.enter_context(BenchClient(log_dir / "bench-client.log"))
        lives = [_Live(spec, _server(run, spec)) for spec in job.group.servers]
        for live in lives:
            live.problem = platform.why_not(live.spec)
            if live.problem:
                live.status = "unavailable"
                continue
            stack.callback(live.server.close)
            live.server.start()
        for live in lives:
            _wait(live, platform)
        last: _Live | None = None
        for key, index in job.group.cells:
            live = lives[index]
            if not live.problem and last is not live:
                if last is not None:
                    # It polls for a second after its last step, which would slow the next one.
                    time.sleep(SETTLE_SECONDS)
                last = live
            yield _measure(run, client, live, key)


def failed(job: Job, key: CellKey, reason: str, node: str = "") -> Cell:
    """A cell that no node could measure."""
    return _cell(job, key, "failed", reason, node or socket.gethostname(), describe_run(None))


def _server(run: _Run, spec: ServerSpec) -> VllmServer:
    options, on_cpu = run.job.options, run.platform.device == "cpu"
    args = [*SERVER_ARGS, "--seed", str(options.seed)]
    if on_cpu:
        args += CPU_ARGS
    else:
        args += ["--gpu-memory-utilization", f"{GPU_MEMORY / len(run.job.group.servers):.2f}"]
    for name, value in (
        ("--tensor-parallel-size", options.tensor_parallel),
        ("--pipeline-parallel-size", options.pipeline_parallel),
    ):
        if value > 1:
            args += [name, str(value)]
    args += options.server_args
    config = spec.speculative_config()
    if config is not None:
        args += ["--speculative-config", json.dumps(config)]
    return VllmServer(
        run.job.model,
        args,
        log_path=run.log_dir / f"{spec.label}.log",
        env=CPU_ENV if on_cpu else None,
        startup_timeout=options.startup_timeout,
    )


def _wait(live: _Live, platform: Platform) -> None:
    """Waits for a server that was started; notes why it cannot be had."""
    if live.problem:
        return
    try:
        live.server.wait_until_ready()
    except RuntimeError as error:
        live.problem = str(error)
        return
    log = live.server.log_path.read_text(errors="replace")
    live.problem = platform.why_not_in_log(live.spec, log)
    if live.problem:
        live.status = "unavailable"
        live.server.close()


def _measure(run: _Run, client: BenchClient, live: _Live, key: CellKey) -> Cell:
    if live.problem:
        return run.cell(key, live.status, live.problem)
    unfit = run.platform.why_not_at(live.spec, key.temperature)
    if unfit:
        return run.cell(key, "unavailable", unfit)
    server = live.server
    dataset = next(d for d in run.job.datasets if d.name == key.dataset)
    try:
        _restart_if_dead(live, run.platform)
        wake(server.base_url, run.job.model)
        if dataset.task:
            measured = _ask_task(run, server, dataset, key)
        else:
            measured = _ask_bench(run, client, server, dataset, key)
    except RuntimeError as error:
        reason = str(error)
        with contextlib.suppress(RuntimeError):
            server.check_alive("while it was measured")
            return run.cell(key, "failed", reason)
        return run.cell(key, "failed", f"{reason}\n{server.log_tail()}")
    shorten = _Shorten(run.job.model, run.work_dir, run.job.options.drafts)
    for name, command in (
        ("server_command", server.command()),
        ("client_command", measured["client_command"]),
    ):
        measured[name] = shorten(command)
    return run.cell(key, "ok", "", **measured)


def _ask_bench(
    run: _Run, client: BenchClient, server: VllmServer, dataset: Dataset, key: CellKey
) -> dict[str, Any]:
    """Lets `vllm bench serve` ask; returns the fields of the cell that this gives."""
    options = run.job.options
    requests, result = run.work_dir / "requests.jsonl", run.work_dir / "result.json"
    ids = write_requests(dataset, key.concurrency, requests) if dataset.items else []
    args = bench_args(
        key,
        dataset,
        base_url=server.base_url,
        model=run.job.model,
        requests=requests,
        result=result,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    result.unlink(missing_ok=True)
    client.run(args, options.cell_timeout)
    speed, acceptance, outputs = read_result(result, ids, options.max_tokens)
    if acceptance is None and key.k:
        # vLLM leaves its counters out where nothing was drafted, as ngram may in short answers.
        acceptance = Acceptance(0, 0, 0, ())
    return {
        "speed": speed,
        "acceptance": acceptance,
        "outputs": outputs,
        "client_command": ["python", "-m", "vllm_mars.vllm_cli", "bench", "serve", *args],
    }


def _ask_task(run: _Run, server: VllmServer, dataset: Dataset, key: CellKey) -> dict[str, Any]:
    """Lets lm-eval ask and score; returns the fields of the cell that this gives."""
    options = run.job.options
    with tempfile.TemporaryDirectory(dir=run.work_dir) as name:
        directory = Path(name)
        config = task_config(
            key,
            dataset,
            base_url=server.base_url,
            model=run.job.model,
            directory=directory,
            max_tokens=options.max_tokens,
        )
        before = server.metrics()
        run_task(config, directory, run.log_dir / "lm-eval.log", options.cell_timeout)
        acceptance = acceptance_between(before, server.metrics(), key.k)
        return {
            "acceptance": acceptance,
            "task_answers": read_answers(directory),
            # The configuration is written out: the file that the command names is gone by then.
            "client_command": [
                *("python", "-m", "lm_eval", "run", "--config"),
                json.dumps(config | {"tasks": [Path(dataset.task).name]}),
            ],
        }


def _restart_if_dead(live: _Live, platform: Platform) -> None:
    try:
        live.server.check_alive()
    except RuntimeError:
        live.server.close()
        live.server.start()
        _wait(live, platform)
        if live.problem:
            raise RuntimeError(live.problem) from None


@dataclass(frozen=True)
class _Shorten:
    """Takes this machine's directories out of a command line."""

    model: str
    work_dir: Path
    drafts: tuple[str, ...]

    def __call__(self, command: list[str] | tuple[str, ...]) -> tuple[str, ...]:
        names = {draft: draft_name(draft) for draft in self.drafts}
        names |= {self.model: Path(self.model).name}
        names |= {f"{self.work_dir}/": "", str(self.work_dir): "."}
        short = []
        for argument in command:
            argument = "python" if argument == sys.executable else argument
            for long, name in names.items():
                argument = argument.replace(long, name)
            short.append(argument)
        return tuple(short)
