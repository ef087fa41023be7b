"""Soak test of a real server under a hostile client: `make soak MINUTES=20`.

Checks every few seconds that no counter falls, and at the end that memory has not grown and that no
request is left. SIGTERM under a second load must end all processes.

The server runs with `--shutdown-timeout`, within which running requests may end. vLLM never answers
those that do not: with or without MARS it waits until their clients disconnect, as these clients do
after the timeout.
"""

import argparse
import asyncio
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from engines import BOUNDED, open_server
from hostile import Client, HarmError
from vllm_mars.servers.server import VllmServer

SPECULATION = {
    **BOUNDED,
    "mars_strict_spans": [["<jupyter_code>", "<jupyter_output>"]],
}
# Share by which memory may grow.
MEMORY_GROWTH = 0.05
DRAIN_SECONDS = 60
# Time for the processes to end, after the drain and again after the clients disconnect.
GRACE_SECONDS = 30.0


class Watch:
    """Memory and counters of a server, read every few seconds."""

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
        """Reads once; raises HarmError if a counter has fallen."""
        self.memory.append(sum(_resident(process) for process in processes(self.server)))
        counters = {
            name: value
            for name, value in self.server.metrics().items()
            if name.split("{")[0].endswith(("_total", "_sum", "_count"))
            # vLLM #49135: negative times of a request that ends before it is scheduled.
            and "_time_seconds_sum" not in name
        }
        fallen = {
            n: (v, counters.get(n)) for n, v in self._counters.items() if counters.get(n, -1) < v
        }
        if fallen:
            raise HarmError(f"counters have fallen: {fallen}")
        self._counters = counters

    def growth(self) -> float:
        """Growth of the median memory from the second to the last quarter."""
        quarter = max(1, len(self.memory) // 4)
        early = statistics.median(self.memory[quarter : 2 * quarter] or self.memory)
        return statistics.median(self.memory[-quarter:]) / early - 1


def processes(server: VllmServer) -> list[psutil.Process]:
    """Processes of the server, its engine and its workers."""
    process = psutil.Process(server.pid)
    return [process, *process.children(recursive=True)]


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


async def terminate_under_load(server: VllmServer, client: Client) -> float:
    """Sends SIGTERM to a server under load; returns the seconds until it has ended.

    Raises:
        HarmError: a process is left after the clients have disconnected.
    """
    await client.begin()
    asking = asyncio.ensure_future(client.run(math.inf))
    await asyncio.sleep(3.0)
    running = processes(server)
    begin = time.monotonic()
    running[0].send_signal(signal.SIGTERM)
    _, left = await asyncio.to_thread(psutil.wait_procs, running, DRAIN_SECONDS + GRACE_SECONDS)
    asking.cancel()
    # Connection errors of the clients are expected.
    await asyncio.gather(asking, return_exceptions=True)
    await client.http.aclose()
    _, left = await asyncio.to_thread(psutil.wait_procs, left, GRACE_SECONDS)
    seconds = time.monotonic() - begin
    if left:
        raise HarmError(f"processes are left {seconds:.0f} s after SIGTERM: {left}")
    return seconds


async def soak(server: VllmServer, minutes: float, client: Client) -> dict[str, Any]:
    """Loads a server and returns its measurements; raises HarmError."""
    watch = Watch(server)
    until = time.monotonic() + minutes * 60
    await client.begin()
    await asyncio.gather(client.run(until), watch.run(until, min(5.0, minutes * 3)))
    await client.look_for_leaks()
    watch.read()
    gained = server.metrics()["vllm:mars_gained_acceptance_total"]
    if not gained:
        raise HarmError("nothing was gained, so this load proves nothing")
    return {
        "minutes": minutes,
        "requests": client.counts(),
        "gained_acceptance": gained,
        "memory_growth": watch.growth(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from vllm_mars.models.packaged_model import ensure_model

    options = ("--shutdown-timeout", str(DRAIN_SECONDS))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as directory:
        with open_server(ensure_model(), SPECULATION, Path(directory), *options) as server:
            try:
                seen = asyncio.run(soak(server, args.minutes, Client(server, args.seed)))
                print(json.dumps(seen))
                ending = terminate_under_load(server, Client(server, args.seed + 1))
                print(f"ended {asyncio.run(ending):.1f} s after SIGTERM")
            except HarmError as error:
                print(f"soak failed: {error}\n{server.log_tail()}", file=sys.stderr)
                return 1
    # Caches still fill during a short run.
    if args.minutes >= 5 and seen["memory_growth"] > MEMORY_GROWTH:
        print(f"soak failed: memory grew by {seen['memory_growth']:.1%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
