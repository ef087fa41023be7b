"""A `vllm serve` child process."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from vllm_mars.servers.scrape import fetch, totals

LOG_TAIL_LINES = 40
POLL_SECONDS = 0.2
GRACE_SECONDS, KILL_SECONDS = 15.0, 5.0
METRICS_SECONDS = 30.0
# Used unless the user sets them: a small KV cache on CPU, and no usage reports.
ENV_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}

_taken_ports: set[int] = set()


def free_port() -> int:
    """Returns a free loopback port that this process has not used before."""
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        # The kernel may offer a port again until the server binds it, seconds later.
        if port not in _taken_ports:
            _taken_ports.add(port)
            return port


class VllmServer:
    """Runs `vllm serve MODEL` on a free loopback port, also as a context manager.

    The server leads a session and process group, which `close` ends with all engine processes. It
    outlives this process only after a SIGKILL.
    """

    def __init__(
        self,
        model: str | Path,
        args: Sequence[str] = (),
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        startup_timeout: float = 600.0,
    ) -> None:
        """Describes the server without starting it.

        Args:
            args: further arguments of `vllm serve`, without `--host` and `--port`.
            log_path: file for the server's output, replaced if it exists.
            env: variables that override the inherited environment.
            startup_timeout: in seconds.
        """
        self.model = str(model)
        self.args = list(args)
        self.log_path = log_path
        self.startup_timeout = startup_timeout
        self.port = 0
        # The hub is offline by default if the model is a directory.
        offline = {"HF_HUB_OFFLINE": "1"} if Path(self.model).is_dir() else {}
        self._env = {**ENV_DEFAULTS, **offline, **os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0

    @property
    def base_url(self) -> str:
        """Address of the server, without `/v1`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the server, which is also its process group and session."""
        if self._process is None:
            raise RuntimeError("the server is not running; call start() first.")
        return self._process.pid

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "vllm_mars.cli.serve", "serve", self.model]
        return [*command, "--host", "127.0.0.1", "--port", str(self.port), *self.args]

    def start(self) -> None:
        if self._process is not None:
            raise RuntimeError(f"the server is running already (pid {self.pid}); call close().")
        self.port = free_port()
        self._deadline = time.monotonic() + self.startup_timeout
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Waits until the server answers `/health`.

        Raises RuntimeError with the end of the log if it ended or did not answer within
        `startup_timeout` seconds after its start; then no process of it is left.
        """
        while True:
            self.check_alive("while starting")
            with contextlib.suppress(OSError):
                fetch(f"{self.base_url}/health", 5.0)
                return
            if time.monotonic() > self._deadline:
                self.close()
                raise RuntimeError(
                    f"vLLM did not answer within startup_timeout={self.startup_timeout:g} s; "
                    f"give it more time or see the log.\n{self.log_tail()}"
                )
            time.sleep(POLL_SECONDS)

    def check_alive(self, when: str = "unexpectedly") -> None:
        """Raises RuntimeError, with the end of the log, if the server's process has ended."""
        if self._process is None:
            raise RuntimeError("the server is not running; call start() first.")
        code = self._process.poll()
        if code is not None:
            self.close()
            # Shell convention for signals.
            status = code if code >= 0 else 128 - code
            raise RuntimeError(
                f"vLLM ended {when} with exit status {status}; see the log.\n{self.log_tail()}"
            )

    def log_tail(self) -> str:
        """Returns the last lines of the log, after a line that names the file."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join([f"--- the end of {self.log_path} ---", *lines[-LOG_TAIL_LINES:]])

    def metrics(self) -> dict[str, float]:
        """Returns `scrape.totals`, or raises RuntimeError if the server does not answer."""
        self.check_alive()
        url = f"{self.base_url}/metrics"
        try:
            return totals(url, METRICS_SECONDS)
        except OSError as error:
            raise RuntimeError(f"{url} does not answer: {error}\n{self.log_tail()}") from error

    def close(self) -> None:
        """Ends the server and waits for its processes; does nothing if repeated."""
        process = self._process
        self._process = None
        if process is None:
            return
        # The API server ends its engine, unless it waits for clients or was killed.
        process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        finally:
            # Until the group is gone; zombies remain in it if no init process reaps orphans.
            deadline = time.monotonic() + KILL_SECONDS
            with contextlib.suppress(ProcessLookupError):
                while time.monotonic() < deadline:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.poll()
                    time.sleep(POLL_SECONDS)
            process.wait()

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
