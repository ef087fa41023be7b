"""An agent with tools, under each rule: does it reach its goal, in how many turns, tokens, seconds?

    python -m benchmarks.tasks.make build/tasks
    python -m benchmarks.tool_loop build/tasks/tools.jsonl --model MODEL --draft DRAFT \
        --rules strict theta=0.9 price=0.3,max_loss=0.02
    python -m benchmarks.tool_loop build/tasks/tools.jsonl --url NAME=http://HOST:PORT ...

Relaxed verification can make each message faster and the task slower, since a wrong call costs a
turn. The rules take turns, task by task, on a server for each metric that is strict unless a
request asks for more; servers of --url are asked as they are. Every rule is compared with the
first, paired over tasks; "to the goal" is of the tasks that both solve.
"""

import argparse
import contextlib
import json
import sys
import time
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.tasks.agent import Messages, Task, lead, read_task
from vllm_mars.config import OPTION_PREFIX, split_speculative_config
from vllm_mars.experiments.metrics import METRICS, OPTION
from vllm_mars.experiments.quality.intervals import estimate
from vllm_mars.experiments.sweep.bench_client import wake
from vllm_mars.local.drafts import CHOSEN_BY_REQUESTS, NGRAM, draft_name, speculative_config
from vllm_mars.local.packaged_model import ensure_model, sha256
from vllm_mars.local.prompts import read_json_lines
from vllm_mars.local.provenance import describe_run, vllm_device
from vllm_mars.local.result_file import require_writable, write_json
from vllm_mars.local.scrape import fetch
from vllm_mars.local.server import VllmServer
from vllm_mars.local.vllm_args import CPU_ENV, SETTLE_SECONDS, server_args

TIMEOUT = 600.0
MEASURES = ("turns", "output_tokens", "seconds")


@dataclass(frozen=True)
class Agent:
    """A rule, the server that follows it, and what each request carries for that."""

    rule: str
    url: str
    model: str
    xargs: Mapping[str, Any]
    args: argparse.Namespace

    def ask(self, messages: Messages) -> tuple[str, int]:
        """The next message and its tokens; raises RuntimeError where the server refuses."""
        body: dict[str, Any] = {"model": self.model, "messages": messages}
        body |= {"max_tokens": self.args.max_tokens, "temperature": self.args.temperature}
        body |= {"vllm_xargs": self.xargs} if self.xargs else {}
        try:
            answer = json.loads(fetch(f"{self.url}/v1/chat/completions", TIMEOUT, body))
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{self.rule}: {error.read().decode(errors='replace')}") from error
        text = answer["choices"][0]["message"]["content"]
        return text or "", answer["usage"]["completion_tokens"]


def request_options(rule: str) -> dict[str, Any]:
    """What requests of a rule carry: nothing for "strict", `mars_*` options for "price=0.3".

    Raises:
        ValueError: the rule cannot be read, or a value is out of range.
    """
    if rule == "strict":
        return {}
    try:
        pairs = (part.split("=") for part in rule.split(","))
        options = {OPTION_PREFIX + name: json.loads(value) for name, value in pairs}
        split_speculative_config({**CHOSEN_BY_REQUESTS[METRICS[metric_of(options)]], **options})
        return options
    except (ValueError, StopIteration) as error:
        raise ValueError(
            f"rules={rule!r}: {error}; write 'strict', or a theta, gap or price, such as theta=0.9 "
            "or price=0.3,max_loss=0.02."
        ) from error


def metric_of(options: Mapping[str, Any]) -> str:
    """By which metric a request's options choose."""
    return next(metric for metric, option in OPTION.items() if option in options)


def started(args: argparse.Namespace, on_cpu: bool, stack: contextlib.ExitStack) -> list[Agent]:
    """An agent for each of the rules, with a server for each of their metrics."""
    rules = {rule: request_options(rule) for rule in args.rules}
    args.model = args.model or str(ensure_model())
    chosen = {rule: metric_of(xargs) for rule, xargs in rules.items() if xargs}
    metrics = list(dict.fromkeys(chosen.values())) or ["ratio"]
    servers = {}
    for metric in metrics:
        config = speculative_config(args.draft, args.k, **CHOSEN_BY_REQUESTS[METRICS[metric]])
        servers[metric] = VllmServer(
            args.model,
            [
                *server_args(on_cpu, len(metrics)),
                *("--speculative-config", json.dumps(config), *args.server_args),
            ],
            log_path=args.output.with_name(f"tool-loop-{metric}.log"),
            env=CPU_ENV if on_cpu else None,
            wait=False,
        )
        stack.enter_context(servers[metric])
        if not on_cpu:
            # vLLM measures the GPU's free memory while it starts.
            servers[metric].wait_until_ready()
    for server in servers.values():
        server.wait_until_ready()
    urls = {rule: servers[chosen.get(rule, metrics[0])].base_url for rule in rules}
    return [Agent(rule, urls[rule], args.model, xargs, args) for rule, xargs in rules.items()]


def given(args: argparse.Namespace) -> list[Agent]:
    """An agent for each server of --url, with the model that it serves."""
    agents = []
    for name, _, url in (one.partition("=") for one in args.url):
        models = json.loads(fetch(f"{url}/v1/models", TIMEOUT))["data"]
        agents.append(Agent(name, url, models[0]["id"], {}, args))
    return agents


def measure(
    agents: Sequence[Agent], tasks: Sequence[Task], max_turns: int
) -> Iterator[list[dict[str, Any]]]:
    """Lets the agents take turns, task by task; each task begins with another one.

    Yields:
        the episodes so far, after each task.
    """
    episodes: list[dict[str, Any]] = []
    last = ""
    for number, task in enumerate(tasks):
        first = number % len(agents)
        for agent in (*agents[first:], *agents[:first]):
            if agent.url != last:
                # The other server still polls, and this one sleeps.
                time.sleep(SETTLE_SECONDS if last else 0)
                wake(agent.url, agent.model)
                last = agent.url
            found = {"rule": agent.rule, "task": task.id, **lead(task, agent.ask, max_turns)}
            episodes.append(found)
            outcome = "reached" if found["reached"] else "missed"
            print(f"{task.id}, {agent.rule}: {outcome}, {found['turns']} turns", flush=True)
        yield episodes


def compare(episodes: Sequence[Mapping[str, Any]], rules: Sequence[str]) -> dict[str, Any]:
    """Estimates by rule, beside the first rule; `recovery` is this rule's mean over that one's."""
    by_rule: dict[str, dict[str, Mapping[str, Any]]] = {rule: {} for rule in rules}
    for one in episodes:
        by_rule[one["rule"]][one["task"]] = one
    first = by_rule[rules[0]]
    found: dict[str, dict[str, Any]] = {}
    for rule, own in by_rule.items():
        solved = [task for task in own if own[task]["reached"] and first[task]["reached"]]
        columns = [(name, name, list(own)) for name in ("reached", *MEASURES)]
        columns += [(f"{name}_to_goal", name, solved) for name in MEASURES if solved]
        found[rule] = {}
        for column, name, tasks in columns:
            values, beside = ({t: float(of[t][name]) for t in tasks} for of in (own, first))
            measured = asdict(estimate(column, values, None if own is first else beside))
            found[rule][column] = {key: v for key, v in measured.items() if v is not None}
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("prompts", type=Path, help="tools.jsonl of benchmarks.tasks.make")
    add("--num-prompts", type=int, default=0, help="the first ones, of all kinds in turn; 0: all")
    add("--model", help="default: the packaged model")
    add("--draft", default=NGRAM, help="ngram, or a draft model or head; default ngram")
    add("--num-speculative-tokens", dest="k", type=int, default=4)
    add("--rules", nargs="+", default=["strict", "theta=0.9", "price=0.3,max_loss=0.02"])
    add("--url", nargs="+", metavar="NAME=URL", help="running servers, instead of --rules")
    add("--temperature", type=float, default=0.0)
    add("--max-turns", type=int, default=8)
    add("--max-tokens", type=int, default=96, help="of one message")
    add("--server-arg", dest="server_args", action="append", default=[], metavar="ARG")
    add("--output", type=Path, default=Path("build/tool-loop.json"), help="logs go beside it")
    args = parser.parse_args(arguments)
    require_writable(args.output)
    tasks = read_json_lines(args.prompts, read_task, option="prompts")[: args.num_prompts or None]
    # Of servers that somebody else started, nothing is known.
    device, gpu = ("", None) if args.url else vllm_device()
    with contextlib.ExitStack() as stack:
        agents = given(args) if args.url else started(args, device == "cpu", stack)
        result = {
            "schema": "vllm-mars/tool-loop/1",
            **describe_run(gpu, agents[0].model, args.draft),
            "model": Path(agents[0].model).name,
            "prompts": sha256(args.prompts),
            **{name: getattr(args, name) for name in ("temperature", "max_turns", "max_tokens")},
        }
        if not args.url:
            result |= {"draft": draft_name(args.draft), "num_speculative_tokens": args.k}
        for episodes in measure(agents, tasks, args.max_turns):
            rules = compare(episodes, [agent.rule for agent in agents])
            # After each task: what is interrupted keeps what it has.
            write_json(args.output, {**result, "rules": rules, "episodes": episodes})
    for rule, found in rules.items():
        means = ", ".join(f"{found[name]['value']:.1f} {name}" for name in MEASURES)
        share = found["reached"]
        print(f"{rule}: {share['value'] * share['samples']:.0f} of {len(tasks)} reached; {means}")
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
