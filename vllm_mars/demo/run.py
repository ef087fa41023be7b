"""Serves one model three times and compares: autoregressive, strict and margin-aware (MARS).

The three servers live side by side and take the prompts in small blocks, in rotating order, so that
a machine whose speed drifts changes all three alike. A vLLM server that waits uses about 1 % of a
core once it has settled.
"""

import contextlib
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_mars.config import METHOD, MarsConfig, check_lock, lossy_reason
from vllm_mars.demo.chat import Answer, ChatClient, ScoredToken
from vllm_mars.local.draft_head import check_head, is_head, packaged_head
from vllm_mars.local.drafts import NGRAM, draft_config, draft_name
from vllm_mars.local.packaged_model import ensure_model
from vllm_mars.local.prompts import PACKAGED, Prompt, load_prompts
from vllm_mars.local.provenance import describe_run, vllm_device
from vllm_mars.local.result_file import require_writable, write_json
from vllm_mars.local.server import POLL_SECONDS, VllmServer
from vllm_mars.local.vllm_args import CPU_ARGS, CPU_ENV, SERVER_ARGS, SETTLE_SECONDS

SCHEMA = 1
MODES = ("autoregressive", "strict", "mars")
# Repeats itself, so that drafts are made, verified and accepted.
WARM_UP = [{"role": "user", "content": "Say ten times: the red cat and the red dog."}]
WARM_UP_TOKENS = 32
# Draft tokens per step where neither the user nor the draft says how many.
NUM_SPECULATIVE_TOKENS = 4
# The prompts that one server answers before the next takes its turn.
BLOCK = 4
# The first answer after a change of server was seen to start 0.9 s late, so each turn begins with
# an untimed request.
WAKE_TOKENS = 4
# Three servers share one GPU.
GPU_ARGS = ("--gpu-memory-utilization", "0.28")


@dataclass(frozen=True)
class DemoOptions:
    """What to run.

    Attributes:
        model: directory or name of the model; None takes the packaged one.
        draft: "ngram", or a draft model's directory or name; None takes the packaged model's
            EAGLE-3 head where there is one, else ngram.
        theta: mars_theta of the MARS server, in (0, 1].
        num_speculative_tokens: draft tokens per step, at least 1; None takes what the head names
            as its best, else 4.
        prompts: prompt file.
        max_tokens: longest answer, at least 1.
        repeats: timed passes over the prompts, at least 1; of each answer's times the median
            counts.
        output: the JSON file; the servers' logs go beside it.
        server_args: further arguments of `vllm serve`, for all three.
        startup_timeout: seconds that each server may take to start.

    Raises:
        ValueError: a number is out of range.
        RuntimeError: the environment forbids lossy verification.
    """

    model: str | None = None
    draft: str | None = None
    theta: float = 0.9
    num_speculative_tokens: int | None = None
    prompts: Path = PACKAGED
    max_tokens: int = 128
    repeats: int = 1
    output: Path = Path("build/demo.json")
    server_args: tuple[str, ...] = ()
    startup_timeout: float = 600.0

    def __post_init__(self) -> None:
        config = MarsConfig(theta=self.theta)
        check_lock(lossy_reason(config, METHOD))
        for name in ("num_speculative_tokens", "max_tokens", "repeats"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is below 1; give a positive number.")
        if self.startup_timeout <= 0:
            raise ValueError(
                f"startup_timeout={self.startup_timeout} is not above 0; give seconds, such as 600."
            )

    def resolved(self, model: str) -> "DemoOptions":
        """Returns the options with what None stands for, once the model is known.

        Raises:
            ValueError: the draft is a head that is damaged or made for another target.
        """
        draft = self.draft
        if draft is None:
            head = packaged_head() if self.model is None else None
            draft = NGRAM if head is None else str(head)
        tokens = self.num_speculative_tokens or NUM_SPECULATIVE_TOKENS
        if draft != NGRAM and is_head(Path(draft)):
            checked = check_head(Path(draft), Path(model))
            tokens = self.num_speculative_tokens or checked.num_speculative_tokens
        return replace(self, draft=draft, num_speculative_tokens=tokens)

    @property
    def draft_name(self) -> str:
        """The draft's name without the directories it lies in, for tables and files."""
        return draft_name(self.draft or NGRAM)

    def speculative_config(self, mode: str) -> dict[str, Any] | None:
        """Returns vLLM's speculative config of a mode; None for autoregressive decoding."""
        if mode == "autoregressive":
            return None
        tokens = self.num_speculative_tokens or NUM_SPECULATIVE_TOKENS
        config = {"num_speculative_tokens": tokens, **draft_config(self.draft or NGRAM)}
        if mode == "mars":
            config |= {"rejection_sample_method": METHOD, "mars_theta": self.theta}
        return config


@dataclass(frozen=True)
class Record:
    """One answer of one server.

    Attributes:
        prompt: the conversation it belongs to.
        turn: index of the turn.
        repeat: index of the pass over the prompts.
        messages: what was sent.
        answer: what came back, with its measurements.
    """

    prompt: Prompt
    turn: int
    repeat: int
    messages: list[dict[str, str]]
    answer: Answer

    def to_json(self) -> dict[str, Any]:
        """Returns the record as plain JSON values, without the messages."""
        return {
            "id": self.prompt.id,
            "category": self.prompt.category,
            "turn": self.turn,
            "repeat": self.repeat,
            **self.answer.to_json(),
        }


@dataclass(frozen=True)
class Scored:
    """A MARS answer from the second, untimed pass.

    Attributes:
        record: the timed answer to the same messages.
        text: the text of the second answer.
        tokens: its tokens, each beside the target's first choice.
    """

    record: Record
    text: str
    tokens: list[ScoredToken]

    @property
    def relaxed(self) -> int:
        """Number of tokens that only the margin accepted."""
        return sum(token.relaxed for token in self.tokens)


@dataclass
class Results:
    """Everything measured, by mode, and the head of the result file."""

    options: DemoOptions
    model: str
    run: dict[str, Any]
    records: dict[str, list[Record]] = field(default_factory=lambda: {m: [] for m in MODES})
    scored: list[Scored] = field(default_factory=list)

    def summary(self, mode: str) -> dict[str, Any]:
        """Returns the figures of one mode, as docs/demo.md describes them."""
        records = self.records[mode]
        first = [record.answer for record in records if record.repeat == 0]
        drafts = sum(answer.drafts for answer in first)
        accepted = sum(answer.accepted_tokens for answer in first)
        output_tokens = sum(answer.output_tokens for answer in first)
        # At temperature 0 a repeat gives the same answer: only its time differs.
        times: dict[tuple[str, int], list[float]] = {}
        for record in records:
            times.setdefault((record.prompt.id, record.turn), []).append(record.answer.seconds)
        seconds = sum(statistics.median(values) for values in times.values())
        figures: dict[str, Any] = {
            "tokens_per_second": output_tokens / seconds,
            "seconds_per_answer": seconds / len(first),
            "tokens_per_answer": output_tokens / len(first),
            "output_tokens": output_tokens,
            "mean_acceptance_length": 1 + accepted / drafts if drafts else 1.0,
            "verified_tokens": sum(answer.draft_tokens for answer in first),
            "accepted_tokens": accepted,
        }
        if mode == "mars":
            relaxed = sum(scored.relaxed for scored in self.scored)
            scored_tokens = sum(len(scored.tokens) for scored in self.scored)
            figures |= {
                "theta": self.options.theta,
                "relaxed_tokens": relaxed,
                "relaxed_share": relaxed / scored_tokens if scored_tokens else 0.0,
                "second_pass_same_text": [s.text for s in self.scored]
                == [s.record.answer.text for s in self.scored],
            }
        return figures

    def comparison(self) -> dict[str, Any]:
        """Returns the ratios between the modes and the prompts whose strict text differs."""
        speed = {mode: self.summary(mode)["tokens_per_second"] for mode in MODES}
        plain, strict = self.records["autoregressive"], self.records["strict"]
        differing = {
            one.prompt.id
            for one, other in zip(plain, strict, strict=True)
            if one.answer.text != other.answer.text
        }
        return {
            "strict_over_autoregressive": speed["strict"] / speed["autoregressive"],
            "mars_over_autoregressive": speed["mars"] / speed["autoregressive"],
            "mars_over_strict": speed["mars"] / speed["strict"],
            "strict_text_equals_autoregressive": not differing,
            "differing_prompts": sorted(differing),
        }

    def example(self) -> Scored:
        """Returns the answer with the most relaxed tokens."""
        return max(self.scored, key=lambda scored: scored.relaxed)

    def _named_config(self, mode: str) -> dict[str, Any] | None:
        """Returns a mode's speculative config with the draft's name for its path."""
        config = self.options.speculative_config(mode)
        if config is not None and "model" in config:
            config["model"] = self.options.draft_name
        return config

    def to_json(self) -> dict[str, Any]:
        """Returns the result file's content (docs/demo.md)."""
        options = self.options
        content: dict[str, Any] = {
            "schema": SCHEMA,
            **self.run,
            "config": {
                "model": Path(self.model).name,
                "draft": options.draft_name,
                "num_speculative_tokens": options.num_speculative_tokens,
                "max_tokens": options.max_tokens,
                "repeats": options.repeats,
                "prompts": options.prompts.name,
                "speculative_config": {m: self._named_config(m) for m in MODES},
                "server_args": list(options.server_args),
            },
            "comparison": self.comparison(),
        }
        for mode in MODES:
            content[mode] = self.summary(mode)
            content[mode]["answers"] = [record.to_json() for record in self.records[mode]]
        content["mars"]["relaxed"] = [
            {
                "id": scored.record.prompt.id,
                "turn": scored.record.turn,
                "tokens": [
                    {"position": i, **vars(token)}
                    for i, token in enumerate(scored.tokens)
                    if token.relaxed
                ],
            }
            for scored in self.scored
        ]
        return content


def run_demo(options: DemoOptions) -> Results:
    """Runs the three servers, prints the comparison and writes the result file.

    No server outlives the call, whichever way it ends.

    Args:
        options: what to run.

    Returns:
        What was measured.

    Raises:
        ValueError: the prompts cannot be read.
        RuntimeError: the model cannot be made, or a server failed; the message holds the end of
            its log.
    """
    from rich.console import Console

    from vllm_mars.demo.report import print_report

    console = Console(stderr=True)
    prompts = load_prompts(options.prompts)
    require_writable(options.output)
    device, gpu = vllm_device()
    model = options.model or str(ensure_model())
    options = options.resolved(model)
    results = Results(options, model, describe_run(gpu))
    with contextlib.ExitStack() as stack:
        clients = _start_servers(stack, options, model, device, console)
        _timed_passes(clients, prompts, options, results, console)
        _scored_pass(clients["mars"], options, results, console)
    print_report(results, Console())
    write_json(options.output, results.to_json())
    console.print(f"wrote {options.output}", soft_wrap=True)
    return results


def _start_servers(
    stack: contextlib.ExitStack,
    options: DemoOptions,
    model: str,
    device: str,
    console: Any,
) -> dict[str, ChatClient]:
    on_cpu = device == "cpu"
    servers: dict[str, VllmServer] = {}
    with console.status("starting three vLLM servers"):
        for mode in MODES:
            args = [*SERVER_ARGS, *(CPU_ARGS if on_cpu else GPU_ARGS), *options.server_args]
            speculative_config = options.speculative_config(mode)
            if speculative_config is not None:
                args += ["--speculative-config", json.dumps(speculative_config)]
            servers[mode] = stack.enter_context(
                VllmServer(
                    model,
                    args,
                    log_path=options.output.parent / "demo-logs" / f"{mode}.log",
                    env=_server_env(options, on_cpu),
                    startup_timeout=options.startup_timeout,
                    # On a GPU vLLM measures the free memory while it starts: one after the other.
                    wait=not on_cpu,
                )
            )
        waiting = dict(servers)
        while waiting:
            # All are asked, so that one that dies is noticed at once.
            for mode, server in list(waiting.items()):
                if server.is_ready():
                    console.print(f"{mode} server ready on port {server.port}")
                    del waiting[mode]
            time.sleep(POLL_SECONDS)
    clients = {mode: ChatClient(server) for mode, server in servers.items()}
    for client in clients.values():
        client.ask(WARM_UP, WARM_UP_TOKENS)
    return clients


def _server_env(options: DemoOptions, on_cpu: bool) -> dict[str, str]:
    """Returns variables for the servers, none of which the user has set."""
    env = dict(CPU_ENV) if on_cpu else {}
    if options.draft not in (None, NGRAM) and not Path(options.draft).is_dir():
        # A local model alone would keep the server from asking the hub for the draft model.
        env["HF_HUB_OFFLINE"] = "0"
    return {name: value for name, value in env.items() if name not in os.environ}


def _timed_passes(
    clients: dict[str, ChatClient],
    prompts: Sequence[Prompt],
    options: DemoOptions,
    results: Results,
    console: Any,
) -> None:
    from rich.progress import track

    starts = range(0, len(prompts), BLOCK)
    turns = [
        (repeat, start, mode)
        for repeat in range(options.repeats)
        for index, start in enumerate(starts, start=repeat)
        for mode in MODES[index % len(MODES) :] + MODES[: index % len(MODES)]
    ]
    for repeat, start, mode in track(turns, "asking the three in turn", console=console):
        time.sleep(SETTLE_SECONDS)
        client = clients[mode]
        client.ask(WARM_UP, WAKE_TOKENS)
        for prompt in prompts[start : start + BLOCK]:
            messages: list[dict[str, str]] = []
            for turn, text in enumerate(prompt.turns):
                messages.append({"role": "user", "content": text})
                answer = client.ask(messages, options.max_tokens)
                results.records[mode].append(Record(prompt, turn, repeat, list(messages), answer))
                messages.append({"role": "assistant", "content": answer.text})


def _scored_pass(client: ChatClient, options: DemoOptions, results: Results, console: Any) -> None:
    """Asks the MARS server again, untimed, for the target's first choice at each token."""
    from rich.progress import track

    first_pass = [record for record in results.records["mars"] if record.repeat == 0]
    for record in track(first_pass, "counting relaxed tokens", console=console):
        text, tokens = client.score(record.messages, options.max_tokens)
        results.scored.append(Scored(record, text, tokens))
