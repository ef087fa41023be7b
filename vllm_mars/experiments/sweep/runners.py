"""Measures and judges the cells of a sweep on this machine, or as a task of a Ray cluster does.

A group of cells is measured on servers that run at the same time and take turns.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_mars.experiments.quality.judge import Judge
from vllm_mars.experiments.quality.target_scores import TargetScorer
from vllm_mars.experiments.quality.task_client import ask_task
from vllm_mars.experiments.sweep.bench_client import Asking, BenchClient, acceptance_between, wake
from vllm_mars.experiments.sweep.methods_here import Platform, ask_platform
from vllm_mars.experiments.sweep.plan import Group, ServerSpec, Sweep
from vllm_mars.experiments.sweep.records import Cell, CellKey, Quality, Status
from vllm_mars.local.drafts import NO_DRAFT, WITHOUT_FILES
from vllm_mars.local.provenance import describe_run, weights, without_directories
from vllm_mars.local.scrape import LOST_NATS
from vllm_mars.local.server import VllmServer
from vllm_mars.local.vllm_args import CPU_ENV, SETTLE_SECONDS, server_args


@dataclass
class _Live:
    """A server of a group; `unusable` is what its cells are then, and why."""

    spec: ServerSpec
    server: VllmServer
    unusable: tuple[Status, str] | None = None


class LocalRunner:
    """Measures on this machine, one group after the other.

    Attributes:
        side_by_side: servers that a group may hold; 0 sets no limit.
    """

    def __init__(self, sweep: Sweep, log_dir: Path, platform: Platform | None = None) -> None:
        """Starts nothing yet, but asks vLLM what it can do here, unless `platform` tells.

        Raises:
            RuntimeError: vLLM cannot be imported.
        """
        self._sweep = sweep
        self._log_dir = log_dir
        self._platform = platform or ask_platform()
        self._on_cpu = self._platform.device == "cpu"
        self._head = describe_run(self._platform.gpu)
        self.side_by_side = sweep.options.side_by_side or (0 if self._on_cpu else 1)

    def run(self, groups: Sequence[Group]) -> Generator[Cell]:
        """Measures the groups' cells, one at a time, and yields each as soon as it is measured.

        A cell that fails is yielded as failed and the others go on. No process outlives the
        iterator, whichever way it ends: close it where it may be left early.
        """
        for group in groups:
            with contextlib.ExitStack() as stack:
                yield from self._measure_group(group, stack)

    def judge(self, cells: Sequence[Cell]) -> Generator[tuple[CellKey, Quality]]:
        """Judges the cells of a file that were not judged, by a server of the target if need be.

        The server ends with the iterator: close it where it may be left early.

        Raises:
            RuntimeError: the server does not start or fails.
        """
        sweep = self._sweep
        with contextlib.ExitStack() as stack:
            scorer = None
            if any(dataset.items for dataset in sweep.datasets):
                server = self._server(ServerSpec("autoregressive"), "judge")
                scorer = TargetScorer(stack.enter_context(server).base_url, sweep.model)
            margins = {it: getattr(sweep.options, it) for it in ("margin", "nll_margin")}
            yield from Judge(sweep.datasets, scorer=scorer, **margins).judge(cells)

    def _measure_group(self, group: Group, stack: contextlib.ExitStack) -> Generator[Cell]:
        client = BenchClient(self._log_dir / "bench-client.log")
        stack.callback(client.close)
        lives: dict[ServerSpec, _Live] = {}
        for spec in group.servers:
            server = self._server(spec, spec.label, len(group.servers))
            live = lives[spec] = _Live(spec, server)
            reasons = [
                self._platform.why_not(spec, key.temperature)
                for key, other in group.cells
                if other == spec
            ]
            if all(reasons) and reasons[0]:
                live.unusable = "unavailable", reasons[0]
                continue
            stack.callback(live.server.close)
            live.server.start()
            if not self._on_cpu:
                # vLLM measures the GPU's free memory while it starts.
                self._wait(live)
        for live in lives.values() if self._on_cpu else ():
            self._wait(live)
        last: _Live | None = None
        for key, spec in group.cells:
            live = lives[spec]
            if not live.unusable and last is not live:
                if last is not None:
                    # It polls for a second after its last step, which would slow the next one.
                    time.sleep(SETTLE_SECONDS)
                last = live
            yield self._measure(client, live, key)

    def _server(self, spec: ServerSpec, name: str, count: int = 1) -> VllmServer:
        """One of so many servers of the target that run side by side; the log is `name`'s."""
        options = self._sweep.options
        args = [*server_args(self._on_cpu, count), "--seed", str(options.seed)]
        if (config := spec.speculative_config()) is not None:
            args += ["--speculative-config", json.dumps(config)]
        return VllmServer(
            self._sweep.model,
            [*args, *self._sweep.server_args],
            log_path=self._log_dir / f"{name}.log",
            env=self._env(spec),
            startup_timeout=options.startup_timeout,
        )

    def _env(self, spec: ServerSpec) -> dict[str, str]:
        """Variables for a server, none of which the user has set."""
        env = dict(CPU_ENV) if self._on_cpu else {}
        if not (spec.draft in (NO_DRAFT, *WITHOUT_FILES) or Path(spec.draft).is_dir()):
            # A local model alone would keep the server from asking the hub for the draft model.
            env["HF_HUB_OFFLINE"] = "0"
        return {name: value for name, value in env.items() if name not in os.environ}

    def _wait(self, live: _Live) -> None:
        """Waits for a server that was started; notes why it cannot be used."""
        if live.unusable:
            return
        try:
            live.server.wait_until_ready()
        except RuntimeError as error:
            live.unusable = "failed", str(error)
            return
        log = live.server.log_path.read_text(errors="replace")
        if reason := self._platform.why_not_in_log(live.spec, log):
            live.unusable = "unavailable", reason
            live.server.close()

    def _measure(self, client: BenchClient, live: _Live, key: CellKey) -> Cell:
        def cell(status: Status, reason: str, **measured: Any) -> Cell:
            return self._sweep.cell(key, status, reason, self._head, **measured)

        if live.unusable:
            return cell(*live.unusable)
        if unfit := self._platform.why_not(live.spec, key.temperature):
            return cell("unavailable", unfit)
        server, sweep = live.server, self._sweep
        try:
            self._restart_if_dead(live)
            wake(server.base_url, sweep.model)
            before = server.metrics()
            with tempfile.TemporaryDirectory(prefix="vllm-mars-") as directory:
                asking = Asking(sweep, key, server.base_url, Path(directory))
                if asking.dataset.task:
                    measured = ask_task(asking, self._log_dir / "lm-eval.log")
                else:
                    measured = client.ask(asking)
            after = server.metrics()
        except RuntimeError as error:
            reason = str(error)
            with contextlib.suppress(RuntimeError):
                server.check_alive("while it was measured")
                return cell("failed", reason)
            return cell("failed", f"{reason}\n{server.log_tail()}")
        measured["acceptance"] = acceptance_between(before, after, key.k)
        if LOST_NATS in before:
            measured["lost_nats"] = after.get(LOST_NATS, 0.0) - before[LOST_NATS]
        measured["weights"] = weights(sweep.model, live.spec.draft)
        measured["server_command"] = server.command()
        for name in ("server_command", "client_command"):
            measured[name] = tuple(without_directories(measured[name]))
        return cell("ok", "", **measured)

    def _restart_if_dead(self, live: _Live) -> None:
        try:
            live.server.check_alive()
        except RuntimeError:
            live.server.close()
            live.server.start()
            self._wait(live)
            if live.unusable:
                raise RuntimeError(live.unusable[1]) from None
