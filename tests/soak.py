"""Mixed load on a real server for a while: nothing leaks, no counter falls, SIGTERM ends it.

`make soak MINUTES=20 ARGS="--output benchmarks/results/soak.json"`, or `python tests/soak.py`.

Clients ask at once, each one request after the other, drawn from a seed: chat and completions,
streams and whole answers, greedy and sampled, a bound or a price of their own or none, structured
output, `mars_return`, streams that are dropped in the middle, and values that must be refused.
Checked every few seconds: the memory of the server's processes, and that no counter has fallen. At
the end no request may be left, and a second load is met by SIGTERM, after which no process may be
left.

The server runs with `--shutdown-timeout`: it then lets the requests end that it has. Those that do
not end in that time, all of them without the option, are never answered: vLLM, with or without
MARS, has then ended its engine and waits for their clients to hang up, however long that takes. So
the clients here do so after the timeout.
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import psutil

from engines import MARS, PET_FORMAT
from vllm_mars.local.server import VllmServer

SPECULATION = {
    **MARS,
    # The price follows what is left of it.
    "mars_max_loss": 0.5,
    "mars_strict_spans": [["<jupyter_code>", "<jupyter_output>"]],
}
SUBJECTS = ("a fox", "the days of the week", "a red boat", "rain in Spain", "two cats", "a list")
# Not true, of which vLLM makes 1.
REFUSED = ("x", [1], -0.5)
# Of the memory after the first half, what the second half may add.
MEMORY_GROWTH = 0.05
DRAIN_SECONDS = 60
# For the processes to end, behind the drain and again when the clients have hung up.
GRACE_SECONDS = 30.0
IDLE_SECONDS = 60.0
MODEL = "model"


class SoakError(Exception):
    """Something that must not happen did; the message says what."""


class Load:
    """Clients that ask without end.

    Args:
        base_url: address of the server.
        seed: of what is asked.
    """

    def __init__(self, base_url: str, seed: int) -> None:
        self.client = openai.AsyncOpenAI(
            base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=300
        )
        self.rng = random.Random(seed)
        self.done: Counter[str] = Counter()

    async def run(self, clients: int, until: float) -> None:
        """Asks until a time of the monotonic clock."""
        await asyncio.gather(*(self._client(until) for _ in range(clients)))

    async def _client(self, until: float) -> None:
        kinds = (self.chat, self.stream, self.completion, self.structured, self.drop, self.refuse)
        while time.monotonic() < until:
            kind = self.rng.choice(kinds)
            await kind()
            self.done[kind.__name__] += 1

    def _request(self, **xargs: Any) -> dict[str, Any]:
        if "mars_price" not in xargs and self.rng.random() < 0.7:
            option = self.rng.choice(("mars_price", "mars_max_loss"))
            xargs[option] = self.rng.choice((0, 0.05, 0.3))
        return {
            "model": MODEL,
            "temperature": self.rng.choice((0, 0, 0.8)),
            "max_tokens": self.rng.randint(4, 40),
            "extra_body": {"vllm_xargs": xargs} if xargs else {},
        }

    def _messages(self) -> list[dict[str, str]]:
        subject = self.rng.choice(SUBJECTS)
        return [{"role": "user", "content": f"Say twice, word for word: {subject}. Then explain."}]

    async def chat(self) -> None:
        """A whole answer, which tells what verification did."""
        request = self._request(mars_return=True)
        answer = await self.client.chat.completions.create(messages=self._messages(), **request)
        told = answer.model_extra["metrics"]["speculative_decoding"]["mars"]
        tokens = answer.usage.completion_tokens
        if "log_ratios" in told:
            is_whole = len(told["log_ratios"]) == tokens
        else:
            is_whole = len(told["relaxed_positions"]) == told["num_relaxed_tokens"] <= tokens
        if not is_whole:
            raise SoakError(f"mars_return does not fit an answer of {tokens} tokens: {told}")

    async def stream(self) -> None:
        """A stream to its end."""
        await self._stream(None)

    async def drop(self) -> None:
        """A stream that is left after a few chunks."""
        await self._stream(self.rng.randint(1, 5))

    async def _stream(self, most: int | None) -> None:
        stream = await self.client.chat.completions.create(
            messages=self._messages(), stream=True, **self._request()
        )
        chunks = 0
        async for _ in stream:
            chunks += 1
            if most is not None and chunks >= most:
                break
        await stream.close()

    async def completion(self) -> None:
        """The other endpoint."""
        await self.client.completions.create(prompt="one two three one two", **self._request())

    async def structured(self) -> None:
        """Constrained output; valid where it was not cut."""
        request = {**self._request(), "max_tokens": 60}
        answer = await self.client.chat.completions.create(
            messages=self._messages(), response_format=PET_FORMAT, **request
        )
        choice = answer.choices[0]
        if choice.finish_reason == "stop":
            json.loads(choice.message.content)

    async def refuse(self) -> None:
        """A bad value, which must be this client's error alone."""
        request = self._request(mars_price=self.rng.choice(REFUSED))
        try:
            await self.client.chat.completions.create(messages=self._messages(), **request)
        except openai.BadRequestError:
            return
        raise SoakError(f"{request['extra_body']} was not refused")


class Watch:
    """Memory and counters of a server, read every few seconds.

    Args:
        server: the server.
    """

    def __init__(self, server: VllmServer) -> None:
        self.server = server
        self.memory: list[int] = []
        self._counters: dict[str, float] = {}

    async def run(self, until: float, interval: float) -> None:
        """Reads until a time of the monotonic clock."""
        while time.monotonic() < until:
            await asyncio.to_thread(self.read)
            await asyncio.sleep(interval)

    def read(self) -> None:
        """Reads once; raises SoakError if a counter has fallen."""
        self.memory.append(sum(_resident(process) for process in processes(self.server)))
        counters = {
            name: value
            for name, value in self.server.metrics().items()
            if name.split("{")[0].endswith(("_total", "_sum", "_count"))
        }
        fallen = {
            n: (v, counters.get(n)) for n, v in self._counters.items() if counters.get(n, -1) < v
        }
        if fallen:
            raise SoakError(f"counters have fallen: {fallen}")
        self._counters = counters

    def growth(self) -> float:
        """Memory of the last quarter over that of the second one, less 1; by their medians."""
        quarter = max(1, len(self.memory) // 4)
        early = statistics.median(self.memory[quarter : 2 * quarter] or self.memory)
        return statistics.median(self.memory[-quarter:]) / early - 1


def processes(server: VllmServer) -> list[psutil.Process]:
    """The server's processes, its engine's and workers' too."""
    guard = psutil.Process(server.pid)
    return [guard, *guard.children(recursive=True)]


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def wait_until_idle(server: VllmServer) -> None:
    """Waits until no request runs or waits; raises SoakError if that does not come."""
    deadline = time.monotonic() + IDLE_SECONDS
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    while True:
        metrics = server.metrics()
        left = {name: metrics[name] for name in names}
        if not any(left.values()):
            return
        if time.monotonic() > deadline:
            raise SoakError(f"requests are left after {IDLE_SECONDS:g} s without load: {left}")
        time.sleep(0.5)


async def terminate_under_load(server: VllmServer, clients: int, seed: int) -> float:
    """Sends SIGTERM to the server's own process while clients ask; returns seconds until the end.

    Raises:
        SoakError: a process of the server is left, after its clients have hung up too.
    """
    load = Load(server.base_url, seed)
    asking = asyncio.ensure_future(load.run(clients, math.inf))
    await asyncio.sleep(3.0)
    all_of_it = processes(server)
    begin = time.monotonic()
    # The guard's only child is the server.
    all_of_it[1].send_signal(signal.SIGTERM)
    _, left = await asyncio.to_thread(psutil.wait_procs, all_of_it, DRAIN_SECONDS + GRACE_SECONDS)
    asking.cancel()
    # Clients see their connections end; that is no fault.
    await asyncio.gather(asking, return_exceptions=True)
    await load.client.close()
    _, left = await asyncio.to_thread(psutil.wait_procs, left, GRACE_SECONDS)
    seconds = time.monotonic() - begin
    if left:
        raise SoakError(f"processes are left {seconds:.0f} s after SIGTERM: {left}")
    return seconds


async def soak(server: VllmServer, minutes: float, clients: int, seed: int) -> dict[str, Any]:
    """Loads a server; returns what was seen.

    Raises:
        SoakError: something that must not happen did.
    """
    load, watch = Load(server.base_url, seed), Watch(server)
    until = time.monotonic() + minutes * 60
    await asyncio.gather(load.run(clients, until), watch.run(until, min(5.0, minutes * 3)))
    wait_until_idle(server)
    watch.read()
    metrics = server.metrics()
    gained = metrics["vllm:mars_gained_acceptance_total"]
    if not gained:
        raise SoakError("nothing was gained, so this load proves nothing")
    return {
        "minutes": minutes,
        "clients": clients,
        "seed": seed,
        "requests": dict(load.done),
        "gained_acceptance": gained,
        "memory_bytes": watch.memory,
        "memory_growth": watch.growth(),
    }


def main() -> int:
    """Runs it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="default: the packaged model")
    parser.add_argument("--output", type=Path, help="JSON file with what was seen")
    args = parser.parse_args()
    from vllm_mars.local.packaged_model import ensure_model
    from vllm_mars.local.provenance import describe_run

    options = [
        *("--enforce-eager", "--dtype", "float32", "--max-model-len", "512"),
        *("--max-num-seqs", "16", "--served-model-name", MODEL),
        *("--shutdown-timeout", str(DRAIN_SECONDS)),
        *("--speculative-config", json.dumps(SPECULATION)),
    ]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model = args.model or ensure_model()
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "server.log"
        with VllmServer(model, options, log_path=log) as server:
            try:
                seen = asyncio.run(soak(server, args.minutes, args.clients, args.seed))
                print(json.dumps({k: v for k, v in seen.items() if k != "memory_bytes"}))
                ending = terminate_under_load(server, args.clients, args.seed + 1)
                seen["seconds_after_sigterm"] = asyncio.run(ending)
            except SoakError as error:
                print(f"soak failed: {error}\n{server.log_tail()}", file=sys.stderr)
                return 1
    print(f"ended {seen['seconds_after_sigterm']:.1f} s after SIGTERM")
    if args.output:
        result = {"schema": "vllm-mars/soak/1", **describe_run(None), **seen}
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    # A short run still fills its caches.
    if args.minutes >= 5 and seen["memory_growth"] > MEMORY_GROWTH:
        print(f"soak failed: memory grew by {seen['memory_growth']:.1%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
