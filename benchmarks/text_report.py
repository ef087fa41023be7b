"""Tables of the results of `benchmarks.text`."""

import argparse
import gzip
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import figures, kinds
from vllm_mars.lab.rows import (
    Interval,
    Samples,
    compared,
    estimate,
    means_of,
    ratio_of_means,
    temperature_label,
)

Calls = Sequence[dict[str, Any]]

STRICT = "strict"
# Keys that the calls of one table share.
POINT = ("model", "draft", "max_tokens", "k", "temperature")
# Titles, formats and views.
COLUMNS: list[list[str | None]] = [
    ["rule", "", "gain text ends likely"],
    ["prompts", "d", "gain"],
    ["answers", "d", "ends"],
    ["tokens per step", ".2f", "gain"],
    ["tokens per step x strict", ".3f", "gain"],
    ["where answers ended", ".3f", "gain"],
    ["nats lost per token", ".4f", "gain"],
    ["mean weight of a token", ".4f", "likely"],
    ["drift", "+.4f", ""],
    ["NLL less entropy", "+.3f", "likely"],
    ["NLL less strict's", "+.3f", "likely"],
    ["tokens per answer", ".0f", "ends"],
    ["length x strict", ".3f", "text ends"],
    ["ended, %", ".1f", "ends"],
    ["ended less strict's, points", "+.1f", "text ends"],
    ["repeated 4-grams", ".3f", "text"],
    ["repeated 4-grams less strict's", "+.3f", "text"],
]

# Columns of the table of kinds of tokens (see `kinds`).
OF_TOKENS: list[list[str | None]] = [
    ["kind of token", ""],
    ["came", "d"],
    ["% of tokens under the target", ".1f"],
    ["served / target, by reports", ".4f"],
    ["served / target, by a forward pass", ".3f"],
]


def read(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of an output without an incomplete last one."""
    if not path.exists():
        return []
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in content.decode().split("\n")[:-1]]


def samples(calls: Calls, *, ended: bool = False) -> Samples:
    """Returns the means of each prompt's answers, or only of those that ended."""
    by_prompt: dict[str, list[dict[str, float]]] = {}
    for prompt, answer in answers_of(calls):
        if ended and not answer["ended"]:
            continue
        values = {
            **answer,
            "one": 1.0,
            "further": answer["tokens"] - 1.0,
            "points": 100 * answer["ended"],
            "grams": max(answer["tokens"] - 3, 0),
            "excess": answer["nll"] - answer["entropy"],
        }
        by_prompt.setdefault(prompt, []).append(values)
    return {prompt: means_of(answers) for prompt, answers in by_prompt.items()}


def answers_of(calls: Calls) -> Iterable[tuple[str, dict[str, float]]]:
    for call in calls:
        each = itertools.product(call["prompts"], call["seeds"])
        columns = call["answers"]
        for (prompt, _), *values in zip(each, *columns.values(), strict=True):
            yield prompt, dict(zip(columns, values, strict=True))


def cell(interval: Interval | None) -> list[float] | float | None:
    """Rounds an interval for a file of figures."""
    if interval is None:
        return None
    ends = [round(end, 5) for end in interval if np.isfinite(end)]
    # Only the value, if there is one prompt or if all have the same value.
    return ends if len(ends) == len(interval) and len(set(ends)) > 1 else ends[0]


def row(calls: Calls, base: Calls) -> list[Any]:
    """Returns a rule's cells, compared with strict answers to the same prompts."""
    answers, strict = samples(calls), samples(base)
    ended, strict_ended = samples(calls, ended=True), samples(base, ended=True)
    count = sum(len(call["answers"]["tokens"]) for call in calls)
    tokens = sum(sum(call["answers"]["tokens"]) for call in calls)
    mean_tokens, mean_points = (
        float(np.mean([values[name] for values in answers.values()]))
        for name in ("tokens", "points")
    )
    steps, repeated = ["further", "steps"], ["repeated", "grams"]
    sampled = calls[0]["temperature"] != 0
    lost = round(sum(call["lost"] for call in calls) / tokens, 5)
    return [
        len(answers),
        count,
        cell(estimate(ratio_of_means, answers, steps)),
        cell(compared(ratio_of_means, answers, strict, steps)),
        # Loops and cut-off answers are the easiest to draft.
        cell(compared(ratio_of_means, ended, strict_ended, steps)),
        lost if sampled else cell(estimate(ratio_of_means, answers, ["drift", "tokens"])),
        # Weights and entropy have no meaning for greedy requests.
        cell(estimate(ratio_of_means, answers, ["weights", "tokens"])) if sampled else None,
        cell(estimate(ratio_of_means, answers, ["drift", "tokens"])),
        cell(estimate(ratio_of_means, answers, ["excess", "tokens"])) if sampled else None,
        cell(compared(ratio_of_means, answers, strict, ["nll", "tokens"], np.subtract)),
        round(mean_tokens, 1),
        cell(compared(ratio_of_means, answers, strict, ["tokens", "one"])),
        round(mean_points, 2),
        cell(compared(ratio_of_means, answers, strict, ["points", "one"], np.subtract)),
        cell(estimate(ratio_of_means, answers, repeated)),
        cell(compared(ratio_of_means, answers, strict, repeated, np.subtract)),
    ]


def points(calls: Calls) -> dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]]:
    """Groups calls by `POINT` and rule."""
    groups: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    for call in calls:
        by_rule = groups.setdefault(tuple(call[name] for name in POINT), {})
        by_rule.setdefault(call["name"], []).append(call)
    return dict(sorted(groups.items()))


def report(calls: Calls) -> list[list[Any]]:
    """Returns the rows of all rules, below headings with the parameters that differ."""
    rows: list[list[Any]] = []
    groups = points(calls)
    differs = [len(set(values)) > 1 for values in zip(*groups, strict=True)]
    # The model implies its draft, unless it has several.
    differs[1] = len({point[:2] for point in groups}) > len({point[0] for point in groups})
    for point, by_rule in groups.items():
        model, draft, max_tokens, k, temperature = point
        parts = model, draft, f"{max_tokens} tokens", f"K {k}", temperature_label(temperature)
        title = ", ".join(itertools.compress(parts, differs))
        rows += [[title]] if title else []
        for name, rule_calls in by_rule.items():
            base = by_rule.get(STRICT, []) if name != STRICT else []
            rows.append([name, *row(rule_calls, base)])
    return rows


def report_of_tokens(calls: Calls, rule: str) -> list[list[Any]]:
    """Returns the rows of `OF_TOKENS`: frequencies of kinds relative to the target's."""
    rows: list[list[Any]] = []
    calls = [call for call in calls if call["name"] == rule]
    for (*_, k, temperature), by_rule in points(calls).items():
        for name, rule_calls in by_rule.items():
            answers = samples(rule_calls)
            rows.append([f"{name}, K {k}, {temperature_label(temperature)}"])
            for kind in kinds.KINDS:
                served, by_reports, by_target = (f"{kind}, {which}" for which in kinds.SUMS)
                # Outputs of earlier versions lack some kinds.
                if served not in rule_calls[0]["answers"]:
                    continue
                names = (served, by_reports, by_target, "tokens")
                values = [[answer[name] for name in names] for _, answer in answers_of(rule_calls)]
                count, weighted, expected, tokens = np.sum(values, 0)
                # Weights have no meaning for greedy requests.
                by_report = estimate(ratio_of_means, answers, [served, by_reports])
                by_forward = estimate(ratio_of_means, answers, [served, by_target])
                rows.append(
                    [
                        kind,
                        round(count),
                        round(100 * expected / tokens, 3),
                        cell(by_report) if temperature and weighted else None,
                        cell(by_forward) if expected else None,
                    ]
                )
    return rows


def read_all(paths: Iterable[Path]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    calls, runs = [], []
    for path in paths:
        lines = read(path)
        runs += [{**line["run"], "raw": f"text/{path.name}"} for line in lines if "run" in line]
        calls += [line for line in lines if "run" not in line]
    return calls, runs


def show(columns: Any, rows: Any, runs: Any, path: Path | None) -> None:
    print("\n".join(figures.table_of(columns, rows)))
    if path:
        figures.write(path, {"columns": columns, "rows": rows, "runs": runs})


def tell(args: argparse.Namespace) -> None:
    calls, runs = read_all(args.report)
    columns, rows = COLUMNS, report(calls)
    if args.of_tokens:
        columns, rows = OF_TOKENS, report_of_tokens(calls, args.of_tokens)
    show(columns, rows, runs, args.figures)
