"""One cell's task, asked and scored by lm-eval: the evaluation harness of EleutherAI."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_mars.experiments.sweep.bench_client import Asking
from vllm_mars.experiments.sweep.records import TaskAnswer
from vllm_mars.local.scrape import NO_PROXY
from vllm_mars.local.server import tail

CONFIG = "lm-eval.json"


def ask_task(asking: Asking, log_path: Path) -> dict[str, Any]:
    """Lets lm-eval ask and score; returns the fields of the cell that this gives."""
    key, task, options = asking.key, asking.dataset.task, asking.sweep.options
    config = {
        "model": "local-chat-completions",
        "model_args": {
            "model": asking.sweep.model,
            "base_url": f"{asking.base_url}/v1/chat/completions",
            "num_concurrent": key.concurrency,
            "max_retries": 1,
            "tokenized_requests": False,
        },
        "tasks": [task],
        "limit": asking.dataset.count or None,
        "apply_chat_template": True,
        "gen_kwargs": {
            "max_gen_toks": options.max_tokens,
            "temperature": key.temperature,
            "do_sample": key.temperature > 0,
            # lm-eval gives all requests one seed, so that they draw the same random numbers.
            "seed": None,
            **asking.body,
        },
        "log_samples": True,
        "output_path": str(asking.directory),
    }
    run_task(config, asking.directory, log_path, options.cell_timeout)
    # The configuration is written out: the file that the command names is gone by then.
    written = json.dumps(config | {"tasks": [Path(task).name]})
    return {
        "task_answers": read_answers(asking.directory),
        "client_command": ["python", "-m", "lm_eval", "run", "--config", written],
    }


def run_task(config: dict[str, Any], directory: Path, log_path: Path, timeout: float) -> None:
    """Runs lm-eval with this configuration in a directory that takes it and the results.

    Raises:
        RuntimeError: it failed or took longer than `timeout` seconds; no process of it is left.
    """
    path = directory / CONFIG
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "lm_eval", "run", "--config", str(path)]
    environment = {**os.environ, **NO_PROXY}
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        status = process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"lm-eval took longer than cell_timeout={timeout:g} s; give it more with "
            "--cell-timeout."
        ) from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status:
        raise RuntimeError(f"lm-eval ended with status {status}.\n{tail(log_path)}")


def read_answers(directory: Path) -> tuple[TaskAnswer, ...]:
    """Reads the samples that lm-eval saved in a directory.

    Returns:
        One answer for each document, with every metric of which more is better and which is a
        number for each document (BLEU, for example, is not), named as lm-eval does:
        "exact_match,strict-match" is exact_match after the filter strict-match.

    Raises:
        RuntimeError: there are none, or they have another format.
    """
    try:
        results = json.loads(next(directory.rglob("results_*.json")).read_text(encoding="utf-8"))
        texts: dict[str, str] = {}
        scores: dict[str, dict[str, float]] = {}
        for task, better in results["higher_is_better"].items():
            for path in sorted(directory.rglob(f"samples_{task}_2*.jsonl")):
                # Not splitlines, which also cuts at characters that JSON allows within a text.
                for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n"):
                    sample = json.loads(line)
                    name = f"{task}/{sample['doc_id']}"
                    texts[name] = str(sample["resps"][0][0])
                    for metric in sample["metrics"]:
                        score = sample[metric]
                        if better.get(metric) and isinstance(score, (int, float)):
                            named = f"{metric},{sample['filter']}"
                            scores.setdefault(name, {})[named] = float(score)
    except (OSError, StopIteration, ValueError, KeyError, IndexError, TypeError) as error:
        raise RuntimeError(
            f"{directory} holds no samples of lm-eval: {error!r}; does its format differ?"
        ) from error
    if not scores:
        raise RuntimeError(
            "lm-eval gave no document a number of which more is better; take a task with such a "
            "metric."
        )
    return tuple(TaskAnswer(name, texts[name], scores[name]) for name in scores)
