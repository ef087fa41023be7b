"""Measures the turns of a sweep on this machine, also as a task of a Ray cluster.

The servers of a group run at the same time and take turns.
"""

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_mars.lab.client import send_requests
from vllm_mars.lab.plan import Group, Sweep, Turn
from vllm_mars.lab.records import Answer, Measured, Piece, Record
from vllm_mars.options.config import METHOD
from vllm_mars.servers.provenance import hardware, vllm_device, without_directories
from vllm_mars.servers.scrape import (
    ACCEPTED_TOKENS,
    DRAFTS,
    DRIFT_DOWN,
    DRIFT_UP,
    GENERATED_TOKENS,
    LOST_NATS,
    fetch,
)
from vllm_mars.servers.server import VllmServer
from vllm_mars.servers.vllm_args import CPU_ENV, SETTLE_SECONDS, server_args

WAKE_TOKENS = 4
REQUEST_TIMEOUT = 120.0
MINUTE = 60.0
# The counts of the last step arrive shortly after its tokens.
POLL_SECONDS = 0.1
COUNTED_SECONDS = 60.0
CPU_SAMPLES = (
    "vLLM's CPU kernels give wrong tokens to sampled requests under speculation, and only a server "
    "with MARS does not use them; take --method strict, which verifies as vLLM does."
)


class LocalRunner:
    """Measures on this machine, one group after the other.

    Attributes:
        side_by_side: maximum number of servers of a group; 0 is no limit.
    """

    def __init__(
        self, sweep: Sweep, log_dir: Path, say: Callable[[str], None] = lambda _: None
    ) -> None:
        """Starts no server, but raises RuntimeError if vLLM cannot be imported."""
        device, self.gpu = vllm_device()
        self._on_cpu = device == "cpu"
        self._sweep = sweep
        self._log_dir = log_dir
        self._say = say
        self.side_by_side = sweep.options.side_by_side or (0 if self._on_cpu else 1)

    def run(self, groups: Sequence[Group]) -> Generator[Record]:
        """Measures the groups' turns and yields a record after each, also of failed turns.

        No process outlives the iterator; close it if it may be left early.
        """
        for servers, turns in groups:
            with contextlib.ExitStack() as stack:
                yield from self._measure_group(servers, turns, stack)

    def _measure_group(
        self, configs: Sequence[str], turns: Sequence[Turn], stack: contextlib.ExitStack
    ) -> Generator[Record]:
        servers: dict[str, VllmServer] = {}
        problems: dict[str, str] = {}

        due = [config for config in configs if any(turn.server == config for turn in turns)]
        began = time.monotonic()
        measuring: float | None = None
        number = 0

        def doing() -> str:
            now = time.monotonic()
            if measuring is None:
                return f"servers have been starting for {now - began:.0f} s"
            return f"turn {number} of {len(turns)}, measuring for {now - measuring:.0f} s"

        stack.enter_context(_each_minute(self._say, doing))

        def wait(config: str) -> None:
            name = f"server {due.index(config) + 1} of {len(due)}"
            try:
                servers[config].wait_until_ready()
                self._say(f"{name} answers, {time.monotonic() - began:.0f} s after the start")
            except RuntimeError as error:
                self._say(f"{name} failed")
                problems[config] = str(error)

        self._say(f"waiting for {len(due)} servers to start")
        for config in due:
            server = servers[config] = self._server(config, configs.index(config), len(configs))
            stack.callback(server.close)
            server.start()
            if not self._on_cpu:
                # vLLM measures the GPU's free memory while it starts.
                wait(config)
        for config in servers if self._on_cpu else ():
            wait(config)
        self._say(f"measuring {len(turns)} turns of {self._sweep.options.block} prompts or fewer")
        last = None
        measuring = time.monotonic()
        for number, turn in enumerate(turns, 1):  # noqa: B007 - read by `doing`
            problem = problems.get(turn.server) or self._refused(turn)
            if problem:
                yield self._record(turn, None, problem)
                continue
            if last not in (None, turn.server):
                time.sleep(SETTLE_SECONDS)
            last = turn.server
            server = servers[turn.server]
            try:
                yield self._record(turn, self._measure(server, turn))
            except RuntimeError as error:
                reason = str(error)
                try:
                    server.check_alive("while it was measured")
                except RuntimeError as ended:
                    problems[turn.server] = reason = f"{error}\n{ended}"
                yield self._record(turn, None, reason)

    def _record(self, turn: Turn, measured: Measured | None, reason: str = "") -> Record:
        return record(turn, measured, reason, hardware(self.gpu))

    def _refused(self, turn: Turn) -> str:
        """Returns why this turn would not measure its cell, or ""."""
        config = turn.cell.config
        is_mars = config is not None and config.get("rejection_sample_method") == METHOD
        is_sampled = turn.cell.temperature > 0 and config is not None
        return CPU_SAMPLES if self._on_cpu and is_sampled and not is_mars else ""

    def _server(self, config: str, number: int, count: int) -> VllmServer:
        """Returns server `number` of `count` that run at the same time."""
        options = self._sweep.options
        args = [*server_args(self._on_cpu, count), "--seed", str(options.seed)]
        speculative = json.loads(config)
        if speculative is not None:
            args += ["--speculative-config", config]
        env = dict(CPU_ENV) if self._on_cpu else {}
        draft = (speculative or {}).get("model")
        if draft and not Path(draft).is_dir():
            # A local target sets offline mode, but this draft model may come from the hub.
            env["HF_HUB_OFFLINE"] = "0"
        return VllmServer(
            self._sweep.model,
            [*args, *options.server_args],
            log_path=self._log_dir / f"server-{number}.log",
            # The user's variables take precedence.
            env={name: value for name, value in env.items() if name not in os.environ},
            startup_timeout=options.startup_timeout,
        )

    def _measure(self, server: VllmServer, turn: Turn) -> Measured:
        sweep = self._sweep
        options = sweep.options
        prompts = list(sweep.block(turn.block))
        # Repeated until they fill the concurrency.
        prompts *= math.ceil(turn.cell.concurrency / len(prompts))
        server.check_alive()
        # The first request after a pause is slow.
        wake = {"model": sweep.model, "prompt": "Hi", "max_tokens": WAKE_TOKENS, "temperature": 0}
        self._asked(server, "completions", wake)
        before = settled(server)
        body: dict[str, Any] = {"temperature": turn.cell.temperature, **turn.body}
        if options.ignore_eos:
            body["ignore_eos"] = True
        first = sweep.seed(turn)
        seconds, outputs = send_requests(
            server.base_url,
            sweep.model,
            [
                (prompt.turns[0], body | {"seed": first + number})
                for number, prompt in enumerate(prompts)
            ],
            max_tokens=options.max_tokens,
            concurrency=turn.cell.concurrency,
            timeout=options.turn_timeout,
        )
        generated = sum(output.output_tokens for output in outputs)
        after = settled(server, before.get(GENERATED_TOKENS, 0) + generated)
        rise = {name: value - before.get(name, 0) for name, value in after.items()}
        up, down = rise.get(DRIFT_UP), rise.get(DRIFT_DOWN)
        return Measured(
            seconds=seconds,
            drafts=int(rise.get(DRAFTS, 0)),
            accepted=int(rise.get(ACCEPTED_TOKENS, 0)),
            lost_nats=rise.get(LOST_NATS),
            answers=tuple(
                Answer(
                    prompt=prompt.id,
                    text=output.generated_text,
                    tokens=output.output_tokens,
                    ttft=output.ttft,
                    seconds=output.latency,
                    pieces=self._pieces(server, turn, prompt.turns[0]),
                )
                for prompt, output in zip(prompts, outputs, strict=True)
            ),
            drift_nats=None if up is None or down is None else up - down,
        )

    def _pieces(self, server: VllmServer, turn: Turn, prompt: str) -> tuple[Piece, ...]:
        """Asks for the answer again, to get its relaxed tokens; () unless examples are on."""
        options, cell = self._sweep.options, turn.cell
        if not options.examples or cell.lossy_reason is None or cell.temperature > 0:
            return ()
        body = {
            "model": self._sweep.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": options.max_tokens,
            "temperature": 0,
            "logprobs": True,
            "vllm_xargs": {**turn.body.get("vllm_xargs", {}), "mars_return": True},
        }
        return pieces(self._asked(server, "chat/completions", body))

    def _asked(self, server: VllmServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
        url = f"{server.base_url}/v1/{path}"
        try:
            answer: dict[str, Any] = json.loads(fetch(url, REQUEST_TIMEOUT, body))
        except (OSError, ValueError) as error:
            raise RuntimeError(f"{url} does not answer: {error}") from error
        return answer


@contextlib.contextmanager
def _each_minute(say: Callable[[str], None], doing: Callable[[], str]) -> Iterator[None]:
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(MINUTE):
            say(doing())

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def record(
    turn: Turn, measured: Measured | None, reason: str, where: dict[str, Any] | None = None
) -> Record:
    """Returns a turn's record, without directories of this machine."""
    (config,) = without_directories([json.dumps(turn.cell.config)])
    return Record(
        *turn.cell._replace(config=json.loads(config)),
        repeat=turn.repeat,
        block=turn.block,
        measured=measured,
        reason=reason,
        node=os.uname().nodename if where else "",
        hardware=where or {},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def settled(server: VllmServer, generated: float = 0) -> dict[str, float]:
    """Returns the server's metrics after they reached `generated` tokens and stopped changing."""
    until = time.monotonic() + COUNTED_SECONDS
    before: dict[str, float] = {}
    while time.monotonic() < until:
        # Process and HTTP metrics never stop changing.
        metrics = server.metrics().items()
        now = {name: value for name, value in metrics if name.startswith("vllm:")}
        if now == before and now.get(GENERATED_TOKENS, 0) >= generated:
            return now
        before = now
        time.sleep(POLL_SECONDS)
    raise RuntimeError(
        f"{server.base_url}/metrics still change, or count {before.get(GENERATED_TOKENS, 0):g} "
        f"generated tokens, not {generated:g}, {COUNTED_SECONDS:g} s after the last answer; does "
        "another client use this server?"
    )


def pieces(answer: dict[str, Any]) -> tuple[Piece, ...]:
    """Splits a chat completion with logprobs and `mars_return` at its relaxed tokens."""
    choice = answer["choices"][0]
    (report,) = (answer.get("metrics") or {}).get("mars") or [{}]
    lost = dict(zip(report.get("relaxed_positions", ()), report.get("loss_nats", ()), strict=True))
    tokens = (choice["logprobs"] or {}).get("content") or []
    if choice["finish_reason"] == "stop":
        # The end token has no text.
        tokens = tokens[:-1]
    merged: list[Piece] = []
    for position, token in enumerate(tokens):
        if position not in lost and merged and merged[-1].lost is None:
            merged[-1] = Piece(merged[-1].text + token["token"])
        else:
            merged.append(Piece(token["token"], lost.get(position)))
    return tuple(merged)
