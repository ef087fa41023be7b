"""Serves one model three times and asks: autoregressive, strict and margin-aware (MARS).

The three servers live side by side and take the prompts in small blocks, in rotating order, so that
a machine whose speed drifts changes all three alike. A vLLM server that waits uses about 1 % of a
core once it has settled.
"""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from vllm_mars.demo.chat import ChatClient
from vllm_mars.demo.options import MODES, DemoOptions
from vllm_mars.demo.progress import Forecast, ProgressLine
from vllm_mars.demo.results import Example, Record, Results
from vllm_mars.local.drafts import WITHOUT_FILES
from vllm_mars.local.packaged_model import ensure_model
from vllm_mars.local.prompts import Prompt, load_prompts
from vllm_mars.local.provenance import describe_run, vllm_device
from vllm_mars.local.result_file import require_writable
from vllm_mars.local.server import POLL_SECONDS, VllmServer
from vllm_mars.local.vllm_args import CPU_ARGS, CPU_ENV, SERVER_ARGS

# Repeats itself, so that drafts are made, verified and accepted.
WARM_UP = [{"role": "user", "content": "Say ten times: the red cat and the red dog."}]
WARM_UP_TOKENS = 32
SHORT_PROMPTS = 4
# The prompts that one server answers before the next takes its turn.
BLOCK = 8
# A server that has waited answers late at first, so each turn begins with an untimed request.
WAKE_TOKENS = 4
# Three servers share one GPU.
GPU_ARGS = ("--gpu-memory-utilization", "0.28")
# What the steps take with the packaged model on two cores, for the time that is left at the start:
# starting the servers, waking one at its turn, the first token of an answer, each further token.
START_GUESS = 60.0
TURN_GUESS = 0.5
FIRST_TOKEN_GUESS = 0.3
TOKEN_GUESSES = {"autoregressive": 0.055, "strict": 0.03, "mars": 0.026}


def run_demo(options: DemoOptions) -> Results:
    """Runs the three servers and asks each of them the prompts.

    No server outlives the call, whichever way it ends. A line on standard error says what is being
    done and how long the rest will take.

    Raises:
        ValueError: the prompts cannot be read, or the draft does not fit.
        RuntimeError: the result file could not be written, the model cannot be made, or a server
            failed; the message holds the end of its log.
    """
    from rich.console import Console

    console = Console(stderr=True)
    prompts = load_prompts(options.prompts)[: SHORT_PROMPTS if options.short else None]
    require_writable(options.output)
    device, gpu = vllm_device()
    model = options.model or str(ensure_model())
    options = options.resolved(model)
    results = Results(options, model, describe_run(gpu, model, options.draft))
    line = ProgressLine(console, forecast(options, prompts))
    with contextlib.ExitStack() as stack:
        stack.enter_context(line.live())
        clients = _start_servers(stack, results, device, line)
        _timed_passes(clients, prompts, results, line)
        _look_at_relaxed(clients["mars"], results, line)
        line.show("ending the servers")
    return results


def forecast(options: DemoOptions, prompts: Sequence[Prompt]) -> Forecast:
    """Returns the steps of a run: "start", each "turn", each mode's answers and the "example"."""
    answers = sum(len(prompt.turns) for prompt in prompts) * options.repeats
    turns = len(_turns(len(prompts), options.repeats))
    guesses = {
        mode: FIRST_TOKEN_GUESS + seconds * options.max_tokens
        for mode, seconds in TOKEN_GUESSES.items()
    }
    return Forecast(
        {"start": START_GUESS, "turn": TURN_GUESS, **guesses, "example": guesses["mars"]},
        {"start": 1, "turn": turns, **dict.fromkeys(MODES, answers), "example": 1},
    )


def _start_servers(
    stack: contextlib.ExitStack, results: Results, device: str, line: ProgressLine
) -> dict[str, ChatClient]:
    options = results.options
    on_cpu = device == "cpu"
    servers: dict[str, VllmServer] = {}
    begin = time.monotonic()
    line.show("starting three vLLM servers: none ready", since=begin)
    for mode in MODES:
        args = [*SERVER_ARGS, *(CPU_ARGS if on_cpu else GPU_ARGS), *options.server_args]
        speculative_config = options.speculative_config(mode)
        if speculative_config is not None:
            args += ["--speculative-config", json.dumps(speculative_config)]
        servers[mode] = stack.enter_context(
            VllmServer(
                results.model,
                args,
                log_path=options.output.parent / "demo-logs" / f"{mode}.log",
                env=_server_env(options, on_cpu),
                startup_timeout=options.startup_timeout,
                # On a GPU vLLM measures the free memory while it starts: one after the other.
                wait=not on_cpu,
            )
        )
    ready: list[str] = []
    while len(ready) < len(MODES):
        # All the others are asked, so that one that dies is noticed at once.
        ready = [mode for mode in MODES if mode in ready or servers[mode].is_ready()]
        line.show(f"starting three vLLM servers: {', '.join(ready) or 'none'} ready", since=begin)
        time.sleep(POLL_SECONDS)
    clients = {mode: ChatClient(server) for mode, server in servers.items()}
    for mode, client in clients.items():
        client.ask(WARM_UP, WARM_UP_TOKENS, tell_relaxed=mode == "mars")
    line.took("start", time.monotonic() - begin)
    return clients


def _server_env(options: DemoOptions, on_cpu: bool) -> dict[str, str]:
    """Returns variables for the servers, none of which the user has set."""
    env = dict(CPU_ENV) if on_cpu else {}
    draft = options.draft
    if draft is not None and draft not in WITHOUT_FILES and not Path(draft).is_dir():
        # A local model alone would keep the server from asking the hub for the draft model.
        env["HF_HUB_OFFLINE"] = "0"
    return {name: value for name, value in env.items() if name not in os.environ}


def _turns(prompts: int, repeats: int) -> list[tuple[int, int, str]]:
    """Returns who is asked when: the pass, the first prompt of the block, the mode."""
    return [
        (repeat, start, mode)
        for repeat in range(repeats)
        for index, start in enumerate(range(0, prompts, BLOCK), start=repeat)
        for mode in MODES[index % len(MODES) :] + MODES[: index % len(MODES)]
    ]


def _timed_passes(
    clients: dict[str, ChatClient],
    prompts: Sequence[Prompt],
    results: Results,
    line: ProgressLine,
) -> None:
    options = results.options
    answers = len(MODES) * options.repeats * sum(len(prompt.turns) for prompt in prompts)
    done = 0
    for repeat, start, mode in _turns(len(prompts), options.repeats):
        begin = time.monotonic()
        client = clients[mode]
        client.ask(WARM_UP, WAKE_TOKENS)
        line.took("turn", time.monotonic() - begin)
        for prompt in prompts[start : start + BLOCK]:
            messages: list[dict[str, str]] = []
            for turn, text in enumerate(prompt.turns):
                line.show(f"asking the three in turn: {done} of {answers} answers, now {mode}")
                messages.append({"role": "user", "content": text})
                answer = client.ask(messages, options.max_tokens, tell_relaxed=mode == "mars")
                results.records[mode].append(Record(prompt, turn, repeat, list(messages), answer))
                messages.append({"role": "assistant", "content": answer.text})
                line.took(mode, answer.seconds)
                done += 1


def _look_at_relaxed(client: ChatClient, results: Results, line: ProgressLine) -> None:
    """Gets, untimed, the relaxed tokens' texts and one answer with the target's first choices."""
    begin = time.monotonic()
    line.show("looking at the relaxed tokens")
    records = results.first_pass("mars")
    answers = [record.answer for record in records]
    relaxed = {it.token_ids[position] for it in answers for position in it.relaxed_positions}
    results.token_texts = client.token_texts(relaxed)
    record = max(records, key=lambda record: len(record.answer.relaxed_positions))
    if record.answer.relaxed_positions:
        scored = client.score(record.messages, results.options.max_tokens)
        results.example = Example(record, *scored)
    line.took("example", time.monotonic() - begin)
