"""The tables of figures in the docs: what stands in their columns, and of which raw file.

`TABLES` gives the lines of each by name; `benchmarks.figures` writes them into the pages.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks import tree_summary, validated
from benchmarks.markdown import Columns, Text, at, described, follow, pair, shown, transposed
from vllm_mars.config import METRICS
from vllm_mars.experiments.report.advice import verdict
from vllm_mars.experiments.report.measured import Measured, beside, measure
from vllm_mars.experiments.sweep.record_file import read_cells
from vllm_mars.experiments.sweep.summary import Row, rows
from vllm_mars.local.drafts import NO_DRAFT
from vllm_mars.local.intervals import median

RESULTS = Path(__file__).with_name("results")


@cache
def raw(name: str) -> Any:
    """The content of a result file of JSON."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@cache
def sweep(name: str) -> list[Row]:
    """The rows of a sweep's file."""
    return rows(read_cells(RESULTS / f"{name}.jsonl"))


ALL = "all"


@cache
def by_dataset(name: str) -> dict[str, list[Row]]:
    """The rows of a sweep's file by prompt file, and of all prompts as `ALL`."""
    cells = read_cells(RESULTS / f"{name}.jsonl")
    cells += [replace(cell, key=replace(cell.key, dataset=ALL)) for cell in cells]
    found: dict[str, list[Row]] = {}
    for row in rows(cells):
        found.setdefault(row.key.dataset, []).append(row)
    return found


@cache
def point(name: str, temperature: float = 0, concurrency: int = 1) -> list[Measured]:
    """The rules that were measured at one point of a sweep, beside strict decoding there."""
    found = [
        row
        for row in sweep(name)
        if row.cells and (row.key.temperature, row.key.concurrency) == (temperature, concurrency)
    ]
    return sorted(measure(found), key=lambda it: looseness(it.row.key.rule))


BOUND = " max_loss "
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


def score(name: str, form: str = ".2f", of: str = "value", row: str = "row") -> Text:
    """The text of a row's score, or of its "difference" from or "recovery" of the reference's."""

    def text(it: Any) -> str:
        found = follow(it, row).estimate(name)
        if (value := getattr(found, of, None)) is None:
            return ""
        if of == "value":
            return format(value, form)
        return shown(value, getattr(found, f"{of}_low"), getattr(found, f"{of}_high"), form=form)

    return text


def done(name: str, row: str = "row") -> Text:
    """How many tasks were done."""

    def text(it: Any) -> str:
        found = follow(it, row).estimate(name)
        return f"{found.value * found.samples:.0f}"

    return text


def rule(row: str = "row") -> Columns:
    """The column with the rule's name."""
    return {"rule": lambda it: rule_name(follow(it, row).key.rule)}


# The demo and drafts.

LENGTH = "mean_acceptance_length"
MODES = {"autoregressive": "autoregressive", "strict": "strict", "mars": "MARS"}
DEMO: Columns = {
    "ms to the first token, median": at("ttft_seconds", ".0f", 1000),
    "ms per further token, median": at("tpot_seconds", ".1f", 1000),
    "seconds per answer": at("seconds_per_answer", ".2f"),
    "tokens per answer": at("tokens_per_answer", ".1f"),
    "mean acceptance length": at(LENGTH, ".2f"),
    "nats lost per token": at("loss_nats_per_token", ".3f"),
    "answers equal to the autoregressive ones": lambda mode: (
        f"{mode['equal_answers']} of {len(mode['answers'])}"
    ),
}


def sooner(run: dict[str, Any]) -> str:
    """Strict verification's seconds over MARS's, median over the answers."""
    pairs = zip(run["strict"]["answers"], run["mars"]["answers"], strict=True)
    return shown(*median(strict["seconds"] / mars["seconds"] for strict, mars in pairs))


def kept(run: dict[str, Any]) -> str:
    """How many answers MARS left as they were."""
    pairs = zip(run["autoregressive"]["answers"], run["mars"]["answers"], strict=True)
    return f"{sum(own['text'] == mars['text'] for own, mars in pairs)}"


DEMOS: Columns = {
    "draft": lambda run: f"{run['config']['draft']}, K {run['config']['num_speculative_tokens']}",
    "prompts, most tokens": lambda run: (
        f"{len(run['mars']['answers'])}, {run['config']['max_tokens']}"
    ),
    "tokens per answer, strict and MARS": pair(
        "strict/tokens_per_answer", "mars/tokens_per_answer", ".1f"
    ),
    "acceptance length, strict and MARS": pair(f"strict/{LENGTH}", f"mars/{LENGTH}", ".2f"),
    "tokens/s, x strict": at("comparison/mars_over_strict", ".2f"),
    "answers sooner, x strict": sooner,
    "answers kept": kept,
    "commit": lambda run: run["git_commit"][:7],
}
SERVED: Columns = {
    "strict: mean acceptance length (goal: 2.2)": at(f"strict/{LENGTH}", ".2f"),
    "strict: tokens/s, x autoregressive": at("comparison/strict_over_autoregressive", ".2f"),
    "MARS, theta 0.9: mean acceptance length": at(f"mars/{LENGTH}", ".2f"),
    "MARS: tokens/s, x autoregressive (goal: 1.8)": at(
        "comparison/mars_over_autoregressive", ".2f"
    ),
    "MARS: tokens/s, x strict (goal: 1.15)": at("comparison/mars_over_strict", ".2f"),
    "MARS: answers sooner, x strict": sooner,
    "output tokens that were relaxed, %": at("mars/relaxed_share", ".1f", 100),
}


def accepted(path: str = "") -> Text:
    """Acceptance by position."""
    return lambda draft: " ".join(
        f"{share:.2f}" for share in follow(draft, f"{path}acceptance_by_position")
    )


HEADS = {"half": "after half of the steps", "head": "trained"}
OFFLINE: Columns = {
    "head": at("name"),
    "mean acceptance length": at(LENGTH, ".2f"),
    "accepted by position": accepted(),
}
DRAFTS = {
    "random": "`random`: a head with random weights",
    "layers-4": "`layers-4`: the target's first 4 layers",
    "linear": "`linear`: the head before training",
    "half": "`half`: after half of the steps",
    "trained": "`trained`",
    "ngram": "`ngram`",
}
LADDER: Columns = {
    "draft": at("name"),
    "strict": at(f"strict/{LENGTH}", ".2f"),
    "strict, by position": accepted("strict/"),
    "MARS": at(f"relaxed/{LENGTH}", ".2f"),
    "MARS, by position": accepted("relaxed/"),
    "MARS / strict": lambda of: f"{of['relaxed'][LENGTH] / of['strict'][LENGTH]:.2f}",
}


def drafts(name: str, what: str, names: Mapping[str, str], columns: Columns) -> list[str]:
    """Drafts of a file, with these names."""
    found = raw(name)[what]
    return described(columns, [{**found[key], "name": text} for key, text in names.items()])


# Sweeps.


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
        shows = verdict(follow(it, row).estimate(name))
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


@cache
def by_kind() -> dict[str, dict[str, Any]]:
    """Each draft, strict and with price 0.3, by kind of prompt; of all kinds as `ALL`."""
    found: dict[str, dict[str, Any]] = {}
    for draft, (name, own_name) in BY_KIND.items():
        for kind, of_kind in by_dataset(name).items():
            of = {(row.key.draft, row.key.price): row for row in of_kind}
            none, strict, price = of[NO_DRAFT, None], of[own_name, 0], of[own_name, 0.3]
            found.setdefault(kind, {"kind": kind.replace("_", " ")})[draft] = {
                "draft": draft,
                "strict": beside(strict, none),
                "price": beside(price, strict),
                "both": beside(price, none),
            }
    return dict(sorted(found.items(), key=lambda item: (item[0] == ALL, item[0])))


FRONTIER: Columns = {
    "rule": lambda of: rule_name(of["rule"]),
    "acceptance length": at("acceptance_length", ".2f"),
    "above strict, %": at("extra_acceptance", ".1f", 100),
    "nats lost per token": at("loss", ".4f"),
    "tokens per answer": at("tokens_per_answer", ".1f"),
    "repeated 4-grams": at("repeated_4grams", ".3f"),
}
SPEEDS: Columns = {
    **{name: FRONTIER[name] for name in ("rule", "acceptance length")},
    "nats lost per token": at("loss/value", ".3f"),
    "ms to the first token": at("ttft_seconds/value", ".0f", 1000),
    "ms per further token": at("tpot_seconds/value", ".1f", 1000),
    "speed of further tokens, x strict": at("strict_tpot_over_tpot", ".2f"),
    "seconds per answer": at("seconds_per_answer/value", ".2f"),
    **{name: FRONTIER[name] for name in ("tokens per answer", "repeated 4-grams")},
}


def drafted(name: str, draft: str) -> dict[str, Any]:
    """A comparison at equal loss, of one draft and K."""
    found: dict[str, Any] = raw(name)["drafts"][draft]
    return found


def frontier(columns: Columns, name: str, draft: str) -> list[str]:
    """Each rule of a comparison at equal loss."""
    found = drafted(name, draft)["rules"]
    return described(columns, sorted(found, key=lambda of: looseness(of["rule"])))


def bounded(name: str, draft: str) -> list[str]:
    """The rules of a comparison with a bound on the loss, each below itself without one."""
    parts = {of["rule"]: rule_name(of["rule"]).split(BOUND) for of in drafted(name, draft)["rules"]}
    rules = {rule for rule, *bound in parts.values() if bound}

    def order(of: dict[str, Any]) -> tuple[Any, ...]:
        rule, *bound = parts[of["rule"]]
        return *looseness(rule), -float(*bound or ["inf"])

    found = [of for of in drafted(name, draft)["rules"] if parts[of["rule"]][0] in rules]
    return described(FRONTIER, sorted(found, key=order))


def at_equal_loss(name: str, draft: str, options: str = GUARD) -> list[str]:
    """What each metric accepts at a loss, with the same further options."""
    found = drafted(name, draft)
    metrics = [metric for metric in METRICS if f"{metric}{options}" in found["curves"]]
    columns = {"nats per token": at("loss")}
    for metric in metrics:
        extra = at(f"extra_acceptance/{metric}{options}/value", ".1f", 100)
        columns[f"{METRICS[metric]}, %"] = extra
    for metric in metrics:
        if metric != "price":
            over = at(f"price_over/{metric}{options}", ".2f")
            columns[f"price / {METRICS[metric]}"] = over
    return described(columns, found["at_equal_loss"])


# Parts.


def counting(of: dict[str, Any]) -> str:
    """A counting sampler's time over vLLM's, median over the pairs."""
    pairs = zip(of["mars_counting"]["runs_ms"], of["vllm"]["runs_ms"], strict=True)
    return f"{statistics.median(one / other for one, other in pairs):.2f}"


SAMPLERS: Columns = {
    "requests": lambda of: f"{of['batch']}, {of['requests']}",
    "vLLM": at("vllm/median_ms", ".2f"),
    "MARS": at("mars/median_ms", ".2f"),
    "counting": at("mars_counting/median_ms", ".2f"),
    "counting / vLLM": counting,
}
GAINS: Columns = {
    "requests at a time": at("strict/concurrency"),
    "strict: measured": at("strict/measured_gain", ".2f"),
    "strict: model": at("strict/predicted_gain", ".2f"),
    "MARS: measured": at("mars/measured_gain", ".2f"),
    "MARS: model": at("mars/predicted_gain", ".2f"),
    "MARS / strict": lambda of: (
        f"{of['mars']['measured_gain'] / of['strict']['measured_gain']:.2f}"
    ),
}


def load(name: str) -> list[str]:
    """The gain of speculation by load, measured and by the model."""
    loads: dict[int, dict[str, Any]] = {}
    for cell in raw(name)["cells"]:
        loads.setdefault(cell["concurrency"], {})[cell["mode"]] = cell
    return described(GAINS, loads.values())


CUDA = ("sm_80", "sm_90", "sm_100")
BUILDS = (
    *(("bf16", CUDA), ("fp16", CUDA), ("fp32", CUDA), ("bf16, odd stride", CUDA)),
    *(("bf16", ("gfx942",)), ("bf16, z1 alone", CUDA)),
)


def kernel(name: str) -> list[str]:
    """What `top2_kernel` compiles to."""
    found = {(row["variant"], row["target"]): row for row in raw(name)["kernels"]}

    def each(key: str, form: str = "") -> Text:
        return lambda build: " / ".join(
            at(key, form)(found[f"top2, rows by index, {build[0]}", target]) or "not counted"
            for target in build[1]
        )

    columns: Columns = {
        "`top2_kernel`, rows by index": lambda build: f"{build[0]}, {' / '.join(build[1])}",
        "registers": each("registers"),
        "16-byte loads": each("wide_loads"),
        "instructions for each logit": each("loop_instructions_per_logit", ".1f"),
    }
    return described(columns, BUILDS)


def trees(name: str, part: str) -> list[str]:
    """A table of the study of trees."""
    return tree_summary.tables(raw(name))[part]


# Calibrations and tests.

CURVE: Columns = {
    "theta": at("threshold", "g"),
    "predicted cost, nats per token": at("cost", ".4f"),
    "predicted relaxed tokens, %": at("relaxed", ".1f", 100),
    "predicted acceptance length": at("acceptance_length", ".2f"),
}
TRIES: Columns = {
    "theta": at("threshold", "g"),
    "cost": at("cost", ".4f"),
    "NLL increase": at("nll_increase", "+.4f"),
    "samples within 0.01, %": lambda of: (
        f"{100 * min(of[name]['kept_share'] for name in ('cost', 'nll_increase')):.0f}"
    ),
}
BY_TASK: Columns = {
    "theta": at("threshold", "g"),
    "share of strict tasks done": at("recovery", ".2f"),
}


def calibration(name: str, part: str, columns: Columns, only: Iterable[float] = ()) -> list[str]:
    """Thresholds of a calibration."""
    found = [of for of in raw(name)[part] if not only or of["threshold"] in only]
    return described(columns, sorted(found, key=lambda of: -of["threshold"]))


TIMES: Columns = {
    "": at("name"),
    "time": lambda of: "{} min {} s".format(*divmod(round(of["wall_seconds"]), 60)),
    "tests": at("tests", ","),
    "failed": lambda of: f"{of['failures'] + of['errors']}",
    "commit": lambda of: of["git_commit"][:7],
}


def times(name: str) -> list[str]:
    """How long the tests take."""
    runs = raw(name)
    own = {"git_commit": runs["git_commit"]}
    names = {"day": "by day", "night": "only at night"}
    found = [{**own, "name": names[run], **runs[run]} for run in names if run in runs]
    return described(TIMES, found)


HEAD, HEAD_K4 = (f"smollm2-135m-eagle3, K {k}" for k in (5, 4))
NGRAM = "ngram, K 8"
THETA_DEMOS = [
    f"demo-{name}" for name in ("eagle3-24-cpu", "eagle3-k3-cpu", "eagle3-k4-cpu", "cpu", "cpu-2")
]
THETAS = (1, 0.975, 0.96, 0.9, 0.84)
MORE = {"ranks": "ranks", "h100": "H100 by data sheet", "cpu": "2 cores by measured steps"}
STUDY = {part: part for part in ("length", "spent", "over_chains", "equal_loss")}
TABLES: dict[str, Callable[[], list[str]]] = {
    "demo": lambda: transposed(DEMO, MODES.values(), map(raw("demo-price-cpu").get, MODES)),
    "demo.earlier": lambda: described(DEMOS, map(raw, THETA_DEMOS)),
    "draft.served": lambda: transposed(SERVED, ("K 3", "K 4"), map(raw, THETA_DEMOS[1:3])),
    "draft.offline": partial(drafts, "draft-offline-cpu", "heads", HEADS, OFFLINE),
    "draft.ladder": partial(drafts, "draft-ladder-cpu", "drafts", DRAFTS, LADDER),
    "thetas.greedy": partial(rules, "sweep-cpu", GREEDY),
    "thetas.head": partial(rules, "sweep-eagle3-cpu", GREEDY),
    "thetas.load": partial(under_load, "sweep-cpu"),
    "thetas.sampled": partial(rules, "sweep-cpu", SAMPLED, 1),
    "tasks": partial(
        task_scores,
        TASKS,
        "sweep-tasks-cpu",
        math="lm-eval-gsm8k",
        code="humaneval-examples",
    ),
    "tasks.sensitive": partial(
        task_scores,
        SENSITIVE,
        "sensitive-head-cpu",
        **{name: name for name in ("json", "sql", "facts", "functions")},
        all=ALL,
    ),
    "drafts.kinds": lambda: described(KINDS, by_kind().values()),
    "drafts.all": lambda: described(DRAFTED, map(by_kind()[ALL].get, BY_KIND)),
    "speed.rules": partial(frontier, SPEEDS, "speed-head-cpu", HEAD_K4),
    "speed.equal_loss": partial(at_equal_loss, "speed-head-cpu", HEAD_K4),
    "frontier.rules": partial(frontier, FRONTIER, "frontier-cpu", HEAD),
    "frontier.equal_loss": partial(at_equal_loss, "frontier-cpu", HEAD),
    "head.rules": partial(frontier, FRONTIER, "frontier-head-cpu", HEAD_K4),
    "head.equal_loss": partial(at_equal_loss, "frontier-head-cpu", HEAD_K4),
    "head.unguarded": partial(at_equal_loss, "frontier-head-cpu", HEAD_K4, NO_GUARD),
    "head.bounded": partial(bounded, "frontier-head-bounds-cpu", HEAD_K4),
    "ngram.rules": partial(frontier, FRONTIER, "frontier-ngram-cpu", NGRAM),
    "ngram.equal_loss": partial(at_equal_loss, "frontier-ngram-cpu", NGRAM),
    "ngram.unguarded": partial(at_equal_loss, "frontier-ngram-cpu", NGRAM, NO_GUARD),
    "sampler": lambda: described(SAMPLERS, raw("sampler-cpu")["samplers"]),
    "load": partial(load, "load-cpu"),
    "kernel": partial(kernel, "kernel-resources"),
    **{f"trees.{name}": partial(trees, "trees-cpu", part) for name, part in (STUDY | MORE).items()},
    **{f"longer.{part}": partial(trees, "trees-longer-cpu", part) for part in STUDY},
    "sampled": partial(trees, "sampled-price-cpu", "sampled"),
    "calibration.curve": partial(calibration, "calibration-cpu", "curve", CURVE, THETAS),
    "calibration.tried": partial(calibration, "calibration-cpu", "confirmations", TRIES),
    "calibration.task": partial(calibration, "calibration-task-cpu", "confirmations", BY_TASK),
    "times": partial(times, "ci-times"),
    # What `make gpu` measured.
    "validated": lambda: validated.table(
        raw(path.stem) for path in sorted(RESULTS.glob("gpu-*.json"))
    ),
}
