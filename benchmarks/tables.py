"""The tables of figures in the docs: what stands in their columns, and of which raw file.

`TABLES` gives the lines of each by name; `benchmarks.figures` writes them into the pages.
"""

import statistics
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

from benchmarks import draft_length, tree_summary, validated
from benchmarks.draft import evaluate
from benchmarks.loss_tables import (
    FRONTIER,
    SPEEDS,
    at_equal_loss,
    bounded,
    frontier,
    simulated,
    simulated_at_equal_loss,
)
from benchmarks.markdown import described, transposed
from benchmarks.sweep_tables import (
    BY_KIND,
    DRAFTED,
    GREEDY,
    KINDS,
    NO_GUARD,
    RESULTS,
    RUNGS,
    SAMPLED,
    SENSITIVE,
    TASKS,
    at_loads,
    by_kind,
    ladder,
    looseness,
    raw,
    rule,
    rule_name,
    rules,
    sweep,
    task_scores,
    under_load,
)
from vllm_mars.experiments.columns import Columns, Text, at, pair, shown
from vllm_mars.experiments.sweep.measured import beside
from vllm_mars.experiments.sweep.summary import ALL
from vllm_mars.local.intervals import median

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


@cache
def heads(name: str) -> dict[str, list[str]]:
    """The tables of heads that were measured offline."""
    return evaluate.tables(raw(name))


# How long a draft.

CURVE_OF: Columns = {
    "draft": lambda of: RUNGS[of["draft"]],
    "requests at once": at("concurrency"),
    "rule": lambda of: rule_name(of["rule"]),
}
PEAKS: Columns = {
    **CURVE_OF,
    "fastest K": at("peak", "d"),
    "ms per further token": at("at_peak/tpot_seconds", ".1f", 1000),
    "ms to the first token": at("at_peak/ttft_seconds/value", ".0f", 1000),
    "seconds per answer": at("at_peak/seconds_per_answer/value", ".2f"),
    "tokens per answer": at("at_peak/tokens_per_answer/value", ".1f"),
}


@cache
def curves(name: str) -> list[dict[str, Any]]:
    """The rules of each draft and load, with the figures of each K by its name."""
    found: list[dict[str, Any]] = [
        {**of, "by": {f"K {at_k['k']}": at_k for at_k in of["by_k"]}}
        for of in draft_length.curves(sweep(name))
    ]
    found = [{**of, "at_peak": of["by"][f"K {of['peak']['value']}"]} for of in found]
    return sorted(found, key=lambda of: (of["draft"], of["concurrency"], looseness(of["rule"])))


def by_length(figure: str, form: str, found: Iterable[dict[str, Any]]) -> list[str]:
    """A figure of some curves by K."""
    found = list(found)
    columns = {k: at(f"by/{k}/{figure}", form) for k in found[0]["by"]}
    return described({**CURVE_OF, **columns}, found)


NEAR: Columns = {
    **rule(),
    "K": at("row/key/k"),
    "acceptance length": at("row/acceptance_length", ".2f"),
    "ms per further token": at("tpot", ".1f", 1000),
    "x K 4": at("faster", ".2f"),
    "answers sooner, x K 4": at("sooner", ".2f"),
    "tokens per answer": at("length", ".1f"),
}


def near(name: str) -> list[str]:
    """Lengths that were measured side by side, beside K 4."""
    found = {(row.key.rule, row.key.k): row for row in sweep(name)}
    order = sorted(found, key=lambda key: (looseness(key[0]), key[1]))
    return described(NEAR, [beside(found[key], found[key[0], 4]) for key in order])


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


AGENT: Columns = {
    "rule": at("rule"),
    "tasks done": lambda of: f"{of['reached']['value'] * of['reached']['samples']:.0f}",
    "turns": at("turns", ".1f"),
    "output tokens": at("output_tokens", ".0f"),
    "seconds": at("seconds", ".1f"),
    "turns more": at("more/turns", "+.1f"),
    "output tokens more": at("more/output_tokens", "+.0f"),
    "seconds more": at("more/seconds", "+.1f"),
}


def agent(name: str) -> list[str]:
    """An agent with tools, under each rule, and how much more it takes than under the first."""
    ends = {"value": "difference", "low": "difference_low", "high": "difference_high"}
    items = []
    for label, found in raw(name)["rules"].items():
        more = {
            measure: {end: of[key] for end, key in ends.items()}
            for measure, of in found.items()
            if "difference" in of
        }
        items.append({"rule": label, **found, "more": more})
    return described(AGENT, items)


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
NGRAM, NGRAM_K4 = (f"ngram, K {k}" for k in (8, 4))
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
    "draft.losses": lambda: heads("draft-losses-cpu")["rules"],
    "draft.by_head": lambda: heads("draft-losses-cpu")["heads"],
    "draft.ablations": lambda: heads("draft-ablations-cpu")["heads"],
    "draft.ladder": partial(ladder, "ladder-cpu"),
    "thetas.greedy": partial(rules, "sweep-cpu", GREEDY),
    "thetas.head": partial(rules, "sweep-eagle3-cpu", GREEDY),
    "thetas.load": partial(under_load, "sweep-cpu"),
    "load.head": partial(at_loads, "load-head-cpu"),
    "thetas.sampled": partial(rules, "sweep-cpu", SAMPLED, 1),
    "thetas.sampled_head": partial(rules, "sampled-head-cpu", SAMPLED, 1),
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
    "tasks.tools": partial(agent, "tool-loop-cpu"),
    "drafts.kinds": lambda: described(KINDS, by_kind().values()),
    "drafts.all": lambda: described(DRAFTED, map(by_kind()[ALL].get, BY_KIND)),
    "speed.rules": partial(frontier, SPEEDS, "speed-head-cpu", HEAD_K4),
    "speed.ngram": partial(frontier, SPEEDS, "speed-ngram-cpu", NGRAM_K4),
    "speed.gap": partial(frontier, SPEEDS, "speed-gap-cpu", HEAD_K4),
    "speed.recommended": partial(ladder, "recommended-cpu"),
    "speed.equal_loss": partial(at_equal_loss, "speed-head-cpu", HEAD_K4),
    "frontier.rules": partial(frontier, FRONTIER, "frontier-cpu", HEAD),
    "frontier.equal_loss": partial(at_equal_loss, "frontier-cpu", HEAD),
    "head.rules": partial(frontier, FRONTIER, "frontier-head-cpu", HEAD_K4),
    "head.equal_loss": partial(at_equal_loss, "frontier-head-cpu", HEAD_K4),
    "head.unguarded": partial(at_equal_loss, "frontier-head-cpu", HEAD_K4, NO_GUARD),
    "head.simulated": partial(simulated, "simulated-{}-cpu", "frontier-head-cpu", HEAD_K4),
    "head.simulated_equal_loss": partial(
        simulated_at_equal_loss,
        "simulated-{}-cpu",
        "frontier-head-cpu",
        HEAD_K4,
        (0.0075, 0.02, 0.03, 0.05, 0.065, 0.09),
    ),
    "head.bounded": partial(bounded, "frontier-head-bounds-cpu", HEAD_K4),
    "ngram.rules": partial(frontier, FRONTIER, "frontier-ngram-cpu", NGRAM),
    "ngram.equal_loss": partial(at_equal_loss, "frontier-ngram-cpu", NGRAM),
    "ngram.unguarded": partial(at_equal_loss, "frontier-ngram-cpu", NGRAM, NO_GUARD),
    "length.peaks": lambda: described(PEAKS, curves("length-cpu")),
    "length.gains": lambda: by_length(
        "strict_tpot_over_tpot",
        ".2f",
        (of for of in curves("length-cpu") if of["rule"] != "standard"),
    ),
    "length.near": partial(near, "length-near-cpu"),
    "length.accepted": lambda: by_length(
        "acceptance_length", ".2f", (of for of in curves("length-cpu") if of["concurrency"] == 1)
    ),
    "sampler": lambda: described(SAMPLERS, raw("sampler-cpu")["samplers"]),
    "load": partial(load, "load-cpu"),
    "kernel": partial(kernel, "kernel-resources"),
    **{f"trees.{name}": partial(trees, "trees-cpu", part) for name, part in (STUDY | MORE).items()},
    **{f"longer.{part}": partial(trees, "trees-longer-cpu", part) for part in STUDY},
    "sampled": partial(trees, "sampled-price-cpu", "sampled"),
    "times": partial(times, "ci-times"),
    # What `make gpu` measured.
    "validated": lambda: validated.table(
        raw(path.stem) for path in sorted(RESULTS.glob("gpu-*.json"))
    ),
}
