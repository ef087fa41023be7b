"""The tables of what `benchmarks.text` has measured."""

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
# What the calls of one table have in common.
POINT = ("model", "draft", "max_tokens", "k", "temperature")
# With the formats of their numbers, and the tables that show them.
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

# Of kinds of tokens, which `kinds` explains.
OF_TOKENS: list[list[str | None]] = [
    ["kind of token", ""],
    ["came", "d"],
    ["% of tokens under the target", ".1f"],
    ["served / target, by reports", ".4f"],
    ["served / target, by a forward pass", ".3f"],
]


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of an output; a last one that was not written to its end is left out."""
    if not path.exists():
        return []
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in content.decode().split("\n")[:-1]]


def samples(calls: Calls, *, ended: bool = False) -> Samples:
    """The means of each prompt's answers, or of those that ended by themselves."""
    found: dict[str, list[dict[str, float]]] = {}
    for prompt, answer in answers_of(calls):
        if ended and not answer["ended"]:
            continue
        known = {**answer, "one": 1.0, "further": answer["tokens"] - 1.0}
        known |= {"points": 100 * answer["ended"], "grams": max(answer["tokens"] - 3, 0)}
        known["excess"] = answer["nll"] - answer["entropy"]
        found.setdefault(prompt, []).append(known)
    return {prompt: means_of(of) for prompt, of in found.items()}


def answers_of(calls: Calls) -> Iterable[tuple[str, dict[str, float]]]:
    """The answers of all calls, each with its prompt."""
    for call in calls:
        each = itertools.product(call["prompts"], call["seeds"])
        columns = call["answers"]
        for (prompt, _), *values in zip(each, *columns.values(), strict=True):
            yield prompt, dict(zip(columns, values, strict=True))


def cell(found: Interval | None) -> list[float] | float | None:
    """An interval as a file of figures has it."""
    if found is None:
        return None
    ends = [round(end, 5) for end in found if np.isfinite(end)]
    # One prompt has no interval, nor has what is the same of all.
    return ends if len(ends) == len(found) and len(set(ends)) > 1 else ends[0]


def row(calls: Calls, base: Calls) -> list[Any]:
    """The numbers of a rule, beside those of strict verification of the same prompts."""
    own, strict = samples(calls), samples(base)
    count = sum(len(call["answers"]["tokens"]) for call in calls)
    tokens = sum(sum(call["answers"]["tokens"]) for call in calls)
    mean = {
        name: float(np.mean([it[name] for it in own.values()])) for name in ("tokens", "points")
    }
    steps, repeated = ["further", "steps"], ["repeated", "grams"]
    sampled = calls[0]["temperature"] != 0
    lost = round(sum(call["lost"] for call in calls) / tokens, 5)
    return [
        len(own),
        count,
        cell(estimate(ratio_of_means, own, steps)),
        cell(compared(ratio_of_means, own, strict, steps)),
        # Loops and answers that are cut off are the easiest to draft.
        cell(
            compared(ratio_of_means, samples(calls, ended=True), samples(base, ended=True), steps)
        ),
        lost if sampled else cell(estimate(ratio_of_means, own, ["drift", "tokens"])),
        # Greedily the target says one thing alone.
        cell(estimate(ratio_of_means, own, ["weights", "tokens"])) if sampled else None,
        cell(estimate(ratio_of_means, own, ["drift", "tokens"])),
        cell(estimate(ratio_of_means, own, ["excess", "tokens"])) if sampled else None,
        cell(compared(ratio_of_means, own, strict, ["nll", "tokens"], np.subtract)),
        round(mean["tokens"], 1),
        cell(compared(ratio_of_means, own, strict, ["tokens", "one"])),
        round(mean["points"], 2),
        cell(compared(ratio_of_means, own, strict, ["points", "one"], np.subtract)),
        cell(estimate(ratio_of_means, own, repeated)),
        cell(compared(ratio_of_means, own, strict, repeated, np.subtract)),
    ]


def points(calls: Calls) -> dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]]:
    """The calls by what they have in common, and by rule, with a place for strict verification."""
    found: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    for call in calls:
        by_rule = found.setdefault(tuple(call[name] for name in POINT), {})
        by_rule.setdefault(call["name"], []).append(call)
    return dict(sorted(found.items()))


def report(calls: Calls) -> list[list[Any]]:
    """The rows of all rules; before those of a point stands what it has not in common with all."""
    rows: list[list[Any]] = []
    found = points(calls)
    for point, by_rule in found.items():
        model, draft, most, k, temperature = point
        parts = model, draft, f"{most} tokens", f"K {k}", temperature_label(temperature)
        differs = [len(set(of)) > 1 for of in zip(*found, strict=True)]
        title = ", ".join(itertools.compress(parts, differs))
        rows += [[title]] if title else []
        for name, own in by_rule.items():
            base = by_rule.get(STRICT, []) if name != STRICT else []
            rows.append([name, *row(own, base)])
    return rows


def report_by_kind(calls: Calls, rule: str) -> tuple[list[list[str | None]], list[list[Any]]]:
    """A rule's tokens per step over strict ones by kind of prompts: columns and rows."""
    kinds: dict[str, list[Any]] = {}
    found = points(calls)
    for at, by_rule in enumerate(found.values()):
        own, strict = (samples(by_rule.get(name, [])) for name in (rule, STRICT))
        for kind in dict.fromkeys(prompt.split("/")[1] for prompt in own):
            of = {prompt: it for prompt, it in own.items() if prompt.split("/")[1] == kind}
            cells = kinds.setdefault(kind, [[0] * len(found), *[None] * len(found)])
            cells[0][at] = len(set(of) & set(strict))
            cells[at + 1] = cell(compared(ratio_of_means, of, strict, ["further", "steps"]))
    equal = all(len(set(counts)) == 1 for counts, *_ in kinds.values())
    columns: list[list[str | None]] = [["kind", ""]]
    columns += [["prompts", "d"] if equal else ["prompts, by column", ""]]
    for *_, k, temperature in found:
        title = temperature_label(temperature)
        columns.append([f"K {k}, {title}", ".2f"])
    return columns, [
        [kind, counts[0] if equal else ", ".join(map(str, counts)), *cells]
        for kind, (counts, *cells) in kinds.items()
    ]


def report_of_tokens(calls: Calls, rule: str) -> list[list[Any]]:
    """Of each kind of tokens how often it came, over the target's own: the rows of `OF_TOKENS`."""
    rows: list[list[Any]] = []
    own_calls = [call for call in calls if call["name"] == rule]
    for (*_, k, temperature), by_rule in points(own_calls).items():
        for name, own in by_rule.items():
            found = samples(own)
            rows.append([f"{name}, K {k}, {temperature_label(temperature)}"])
            for kind in kinds.KINDS:
                served, by_reports, by_target = (f"{kind}, {which}" for which in kinds.SUMS)
                # A kind that was not looked at yet.
                if served not in own[0]["answers"]:
                    continue
                each = (it for _, it in answers_of(own))
                come, weighed, expected, tokens = np.sum(
                    [(it[served], it[by_reports], it[by_target], it["tokens"]) for it in each], 0
                )
                # Greedily there is nothing by reports.
                by_report = estimate(ratio_of_means, found, [served, by_reports])
                by_forward = estimate(ratio_of_means, found, [served, by_target])
                ratios = (
                    cell(by_report) if temperature and weighed else None,
                    cell(by_forward) if expected else None,
                )
                rows.append([kind, round(come), round(100 * expected / tokens, 3), *ratios])
    return rows


def read_all(paths: Iterable[Path]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The calls of outputs, and the runs that gave them."""
    calls, runs = [], []
    for path in paths:
        lines = read(path)
        runs += [{**it["run"], "raw": f"text/{path.name}"} for it in lines if "run" in it]
        calls += [it for it in lines if "run" not in it]
    return calls, runs


def show(columns: Any, rows: Any, runs: Any, path: Path | None) -> None:
    """Prints a table, and writes its file."""
    print("\n".join(figures.table_of(columns, rows)))
    if path:
        figures.write(path, {"columns": columns, "rows": rows, "runs": runs})


def tell(args: argparse.Namespace) -> None:
    """Prints the table of outputs, and writes its file."""
    calls, runs = read_all(args.report)
    if args.of:
        calls = [it for it in calls if it["prompts"][0].split("/")[0] == args.of]
    columns, rows = COLUMNS, report(calls)
    if args.by_kind:
        columns, rows = report_by_kind(calls, args.by_kind)
    elif args.of_tokens:
        columns, rows = OF_TOKENS, report_of_tokens(calls, args.of_tokens)
    show(columns, rows, runs, args.figures)
