"""Tables of the docs that are read from the cells of sweeps: rules, loads, tasks, drafts."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.frontier import by_server
from benchmarks.markdown import described
from vllm_mars.experiments.columns import Columns, Text, at, follow, pair, score
from vllm_mars.experiments.report.advice import conclusion
from vllm_mars.experiments.sweep.measured import Measured, beside, measure
from vllm_mars.experiments.sweep.record_file import read_cells
from vllm_mars.experiments.sweep.summary import ALL, Row, rows, together
from vllm_mars.local.drafts import NO_DRAFT

RESULTS = Path(__file__).with_name("results")


@cache
def raw(name: str) -> Any:
    """The content of a result file of JSON."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@cache
def sweep(name: str) -> list[Row]:
    """The rows of a sweep's file."""
    return rows(read_cells(RESULTS / f"{name}.jsonl"))


@cache
def by_dataset(name: str) -> dict[str, list[Row]]:
    """The rows of a sweep's file by prompt file, and of all prompts as `ALL`."""
    cells = read_cells(RESULTS / f"{name}.jsonl")
    found: dict[str, list[Row]] = {}
    for row in rows([*cells, *together(cells)]):
        found.setdefault(row.key.dataset, []).append(row)
    return found


@cache
def point(name: str, temperature: float = 0, concurrency: int = 1) -> list[Measured]:
    """The rules that were measured at one point of a sweep, beside strict decoding there."""
    found = [
        row
        for row in by_dataset(name)[ALL]
        if row.cells and (row.key.temperature, row.key.concurrency) == (temperature, concurrency)
    ]
    return sorted(measure(found), key=lambda it: looseness(it.row.key.rule))


GUARD, NO_GUARD = " repeat_guard 4", " repeat_guard 0"


def rule_name(rule: str) -> str:
    """A sweep's rule as the docs name it: "theta 0.9" for "mars 0.9 repeat_guard 4"."""
    name = rule.removeprefix("mars ").removesuffix(GUARD).replace(NO_GUARD, " unguarded")
    return f"theta {name}" if name[0].isdigit() else name


def looseness(rule: str) -> tuple[int, int, float]:
    """Sorts rules: strict ones, thetas, gaps, prices, each from strict to loose."""
    metric, *value = rule_name(rule).split()
    order = ("autoregressive", "standard", "theta", "gap", "price")
    number = float(value[0]) if value else 0.0
    return order.index(metric), len(value), -number if metric == "theta" else number


def done(name: str, row: str = "row") -> Text:
    """How many tasks were done."""

    def text(it: Any) -> str:
        found = follow(it, row).estimate(name)
        return f"{found.value * found.samples:.0f}"

    return text


def rule(row: str = "row") -> Columns:
    """The column with the rule's name."""
    return {"rule": lambda it: rule_name(follow(it, row).key.rule)}


def speeds(beside: str) -> Columns:
    """Speed, acceptance and length, beside the strict rule of this name."""
    return {
        "tokens/s, x autoregressive": at("row/speedup", ".2f"),
        f"tokens/s, x {beside}": at("speedup", ".2f"),
        f"answers sooner, x {beside}": at("sooner", ".2f"),
        "acceptance length": at("row/acceptance_length", ".2f"),
        "tokens per answer": score("output_tokens", ".1f"),
    }


NLL: Columns = {"NLL": score("nll", ".3f"), "its change": score("nll", "+.3f", "difference")}
GREEDY: Columns = {
    **{**rule(), **speeds("standard"), "nats lost per token": at("loss", ".3f"), **NLL},
    **{"answers that agree": score("agreement"), "ROUGE-L": score("rouge_l")},
    **{"functions, of 4": done("pass_at_1"), "JSON valid, of 3": done("json_valid")},
    "sums right, of 4": done("exact_match"),
}
SAMPLED: Columns = {**rule(), **speeds("theta 1"), **NLL}


def rules(name: str, columns: Columns, temperature: float = 0) -> list[str]:
    """The rules of a sweep, one request at a time."""
    return described(columns, point(name, temperature))


LOADS: Columns = {
    "requests at once": at("load"),
    "standard": at("standard/row/speedup", ".2f"),
    "theta 0.9": at("mars 0.9/row/speedup", ".2f"),
    "theta 0.9, x standard": at("mars 0.9/speedup", ".2f"),
    "theta 0.9, answers sooner, x standard": at("mars 0.9/sooner", ".2f"),
}


def under_load(name: str) -> list[str]:
    """Strict decoding and theta 0.9 by the number of requests at once."""
    loads = sorted({row.key.concurrency for row in sweep(name)})
    points = [{it.row.key.rule: it for it in point(name, 0, load)} for load in loads]
    items = [{"load": load, **found} for load, found in zip(loads, points, strict=True)]
    return described(LOADS, items)


AT_LOADS: Columns = {
    "requests at once": at("own/row/key/concurrency"),
    **rule("own/row"),
    "acceptance length": at("own/row/acceptance_length", ".2f"),
    "nats lost per token": at("own/loss/value", ".3f"),
    "ms to the first token": at("own/ttft/value", ".0f", 1000),
    "ms per further token": at("own/tpot/value", ".1f", 1000),
    "further tokens, x strict": at("own/faster", ".2f"),
    "further tokens, x no drafts": at("none/faster", ".2f"),
    "tokens/s, x no drafts": at("none/speedup", ".2f"),
    "answers sooner, x no drafts": at("none/sooner", ".2f"),
    "tokens per answer": at("own/length/value", ".1f"),
}


def at_loads(name: str) -> list[str]:
    """Each rule by the number of requests at once, beside strict verification and no drafts."""
    by_load: dict[int, list[Row]] = {}
    for row in by_dataset(name)[ALL]:
        by_load.setdefault(row.key.concurrency, []).append(row)
    items = []
    for _, found in sorted(by_load.items()):
        none = next(row for row in found if row.key.draft == NO_DRAFT)
        measured = sorted(by_server(found), key=lambda it: looseness(it.row.key.rule))
        items += [{"own": it, "none": beside(it.row, none)} for it in measured]
    return described(AT_LOADS, items)


TASKS: Columns = {
    **rule("code/row"),
    "GSM8K exact match, of 60": done("exact_match,marked", "math/row"),
    "recovery": score("exact_match,marked", of="recovery", row="math/row"),
    "HumanEval examples, of 46": done("pass_at_1", "code/row"),
    "its recovery": score("pass_at_1", of="recovery", row="code/row"),
    "NLL": score("nll", ".3f", row="code/row"),
    "tokens per answer": score("output_tokens", ".1f", row="code/row"),
    "answers that agree": score("agreement", row="code/row"),
    "acceptance length, GSM8K and HumanEval": pair(
        "math/row/acceptance_length", "code/row/acceptance_length", ".2f"
    ),
}


def solved(name: str, row: str) -> Text:
    """How many tasks were done, and what that shows beside decoding without drafts."""

    def text(it: Any) -> str:
        shows = conclusion(follow(it, row).estimate(name))
        return done(name, row)(it) + (shows and f", {shows}")

    return text


SENSITIVE: Columns = {
    **rule("all/row"),
    "JSON valid, of 120": solved("json_valid", "json/row"),
    "SQL rows right, of 70": solved("sql_rows", "sql/row"),
    "facts, of 107": solved("fact", "facts/row"),
    "functions, of 42": solved("pass_at_1", "functions/row"),
    "acceptance length": at("all/row/acceptance_length", ".2f"),
    "nats lost per token": at("all/loss", ".4f"),
    "tokens per answer, of facts": at("facts/length", ".1f"),
}


def task_scores(columns: Columns, name: str, **datasets: str) -> list[str]:
    """What each rule does to the tasks of some prompt files."""
    found = {
        short: {it.row.key.rule: it for it in measure(by_dataset(name)[dataset])}
        for short, dataset in datasets.items()
    }
    names = sorted(next(reversed(found.values())), key=looseness)
    return described(columns, [{short: of[rule] for short, of in found.items()} for rule in names])


# Of each draft the sweep with a file of prompts of each kind, and the draft's name in it.
BY_KIND = {
    "ngram": ("drafts-cpu", "ngram"),
    "suffix": ("drafts-suffix-cpu", "suffix"),
    "head": ("drafts-cpu", "smollm2-135m-eagle3"),
}
KINDS: Columns = {
    "kind": at("kind"),
    **{
        draft: pair(
            f"{draft}/strict/row/acceptance_length", f"{draft}/price/row/acceptance_length", ".2f"
        )
        for draft in BY_KIND
    },
}
DRAFTED: Columns = {
    "draft": at("draft"),
    "strict, x no drafts": at("strict/faster", ".2f"),
    "price 0.3, x strict": at("price/faster", ".2f"),
    "price 0.3, x no drafts": at("both/faster", ".2f"),
    "its answers sooner, x no drafts": at("both/sooner", ".2f"),
    "nats lost per token": at("price/loss", ".3f"),
    "tokens per answer, strict and price": pair("strict/length/value", "price/length/value", ".1f"),
}


def compared(found: list[Row], own_name: str, draft: str) -> dict[str, Any]:
    """A draft, by the name it has in a sweep: strict, with price 0.3, and without any."""
    of = {(row.key.draft, row.key.price): row for row in found}
    none, strict, price = of[NO_DRAFT, None], of[own_name, 0], of[own_name, 0.3]
    return {
        "draft": draft,
        "strict": beside(strict, none),
        "price": beside(price, strict),
        "both": beside(price, none),
    }


@cache
def by_kind() -> dict[str, dict[str, Any]]:
    """Each draft by kind of prompt; of all kinds as `ALL`."""
    found: dict[str, dict[str, Any]] = {}
    for draft, (name, own_name) in BY_KIND.items():
        for kind, of_kind in by_dataset(name).items():
            of = found.setdefault(kind, {"kind": kind.replace("_", " ")})
            of[draft] = compared(of_kind, own_name, draft)
    return dict(sorted(found.items(), key=lambda item: (item[0] == ALL, item[0])))


# From the worst draft to the best, by their names in a sweep.
RUNGS = {
    "random": "`random`: a head with random weights",
    "layers-4": "`layers-4`: the target's first 4 layers",
    "linear": "`linear`: the head before training",
    "smollm2-135m-eagle3": "the head",
    "ngram": "ngram",
}


def accepted(measured: Measured) -> str:
    """The share of steps that accept a draft at each position."""
    found = [cell.acceptance for cell in measured.row.cells if cell.acceptance is not None]
    positions = zip(*(of.accepted_by_position for of in found), strict=True)
    steps = sum(of.drafts for of in found)
    return " ".join(f"{sum(of) / steps:.2f}" for of in positions)


LADDER: Columns = {
    "draft": DRAFTED["draft"],
    "acceptance length, strict and price": pair(
        "strict/row/acceptance_length", "price/row/acceptance_length", ".2f"
    ),
    "strict, by position": lambda of: accepted(of["strict"]),
    **DRAFTED,
    "answers that agree": score("agreement", row="price/row"),
}


def ladder(name: str) -> list[str]:
    """Drafts of rising quality, those that were measured on all prompts of a sweep."""
    found = by_dataset(name)[ALL]
    measured = {row.key.draft for row in found}
    rungs = [rung for rung in RUNGS.items() if rung[0] in measured]
    return described(LADDER, [compared(found, *rung) for rung in rungs])
