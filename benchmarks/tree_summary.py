"""What the cells of `benchmarks.tree` say: figures with intervals, and a model of the cost.

Intervals are 95 %, by the bootstrap over prompts; two cells are compared on the same prompts.
The cost of a step with n rows is floor + slope * n, as in `benchmarks.load`; drafting is left out.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.load import StepTime
from benchmarks.markdown import described, table
from vllm_mars.experiments.columns import Columns, at, shown
from vllm_mars.kernels.terms import LOSS_BITS
from vllm_mars.local.intervals import interval, resamples

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
# H100 SXM, data sheet: 989 TFLOP/s of dense bf16 over 3.35 TB/s, at 2 bytes and 2 operations for
# each weight, so that about so many rows take as long as reading the weights once.
GPU_ROWS_OF_A_FLOOR = 295
# Nats per token at which trees and chains are compared.
LOSSES = (0.01, 0.03, 0.06)
# Of each answer, beside its tokens; the others of requests that sample.
COUNTS = ("steps", "relaxed", "lost", "repeated")
SAMPLED_COUNTS = ("nll", "beyond_two")
# What differs between the runs that one study is made of; older ones have no load.
RUN = ("git_commit", "load_average")
Figures = dict[str, NDArray[np.float64]]
EQUAL_LOSS: Columns = {
    "by price, at equal loss": lambda of: f"{of['tree']} over {of['chain']}",
    "nats lost per token": at("nats_per_token"),
    "chain": at("chain_length", ".2f"),
    "tree": at("tree_length", ".2f"),
    "tree over chain": at("length_ratio", ".2f"),
}
SAMPLED: Columns = {
    "rule, temperature": at("rule"),
    "tokens per step": at("length", ".2f"),
    "NLL of a token, nats": at("nll", ".2f"),
    "accepted without a draw": at("relaxed_share", ".2f"),
    "though neither drawn nor one of the two largest": at("beyond_two/value", ".3f"),
}


def summary(lines: list[dict[str, Any]], load: dict[str, Any] | None) -> dict[str, Any]:
    """The result file's content.

    Args:
        lines: the cells, as `benchmarks.tree run` writes them.
        load: a result of `benchmarks.load` with the time of a step, or None.
    """
    draws = resamples(len(lines[0]["tokens"]))
    figures = {(line["rule"], line["shape"]): figures_of(line, draws) for line in lines}
    cells = []
    for line in lines:
        found = figures[line["rule"], line["shape"]]
        cells.append(
            {
                **{name: line[name] for name in ("rule", "shape", "nodes", "seconds")},
                **{name: line[name] for name in RUN if name in line},
                "rows": line["nodes"] + 1,
                **{name: with_interval(values) for name, values in found.items()},
                "ranks": _ranks(line["ranks"]) if line["shape"].startswith("chain") else None,
                "raw": _counts(line),
            }
        )
    result = {
        **{name: lines[0][name] for name in ("schema", "created", "command", "versions")},
        **{name: lines[0][name] for name in ("hardware", "threads", "config")},
        **{name: lines[0][name] for name in RUN if name in lines[0]},
        "cells": cells,
        "trees_over_chains": list(_comparisons(figures)),
        "by_price_at_equal_loss": list(_at_equal_loss(figures)),
    }
    steps = {"H100 by data sheet": StepTime(GPU_ROWS_OF_A_FLOOR, 1.0)}
    if load is not None:
        # A file of one sweep's model holds it by itself.
        step_time = load.get("fits", [load])[0]["step_time"]
        steps["2 cores by measured steps"] = StepTime(**step_time)
        result["step_time_from"] = {name: load[name] for name in ("git_commit", "hardware")}
    result["costs"] = [_cost(name, step, cells) for name, step in steps.items()]
    return result


def _counts(line: dict[str, Any]) -> dict[str, list[float]]:
    names = ("tokens", *COUNTS, *SAMPLED_COUNTS)
    return {name: line[name] for name in names if name in line}


def figures_of(line: dict[str, Any], draws: NDArray[np.int64]) -> Figures:
    """Each figure over all prompts, then over each resample."""
    counts = {**_counts(line), "4grams": [max(n - 2, 0) for n in line["tokens"]]}
    # The first "resample" has each prompt once.
    draws = np.vstack([np.arange(draws.shape[1]), draws])
    sums = {name: np.array(of, np.float64)[draws].sum(1) for name, of in counts.items()}
    length = sums["tokens"] / sums["steps"]
    return {
        "length": length,
        "length_per_row": length / (line["nodes"] + 1),
        "nats_per_token": sums["lost"] / 2**LOSS_BITS / sums["tokens"],
        "relaxed_share": sums["relaxed"] / sums["tokens"],
        "repeated_4grams": sums["repeated"] / sums["4grams"],
        **{name: sums[name] / sums["tokens"] for name in SAMPLED_COUNTS if name in sums},
    }


def with_interval(values: NDArray[np.float64]) -> dict[str, float]:
    low, high = interval(values[1:])
    return {"value": round(values[0], 5), "low": round(low, 5), "high": round(high, 5)}


def _ranks(ranks: list[int]) -> dict[str, int]:
    """How often the target's choice had which rank among the head's; 1 where a row ended early."""
    edges = (1, 2, 3, 4, 8, 16, 64, 4096)
    counts = {"not drafted": ranks.count(0)}
    for low, high in zip((0, *edges), edges, strict=False):
        name = str(high) if high - low == 1 else f"{low + 1} to {high}"
        counts[name] = sum(low < rank <= high for rank in ranks)
    return counts


def _pairs(figures: dict[tuple[str, str], Figures], rule: str) -> Iterator[tuple[str, str]]:
    """Each tree of a rule and the longest chain that was measured of no more nodes."""
    shapes = [shape.split() for named, shape in figures if named == rule]
    chains = sorted(int(nodes) for kind, nodes in shapes if kind == "chain")
    for kind, nodes in shapes:
        shorter = [chain for chain in chains if chain <= int(nodes)]
        if kind == "tree" and shorter:
            yield f"tree {nodes}", f"chain {shorter[-1]}"


def _comparisons(figures: dict[tuple[str, str], Figures]) -> Iterator[dict[str, Any]]:
    """Each tree beside a chain, by the same rule."""
    for rule in dict.fromkeys(rule for rule, _ in figures):
        for tree, chain in _pairs(figures, rule):
            ratio = figures[rule, tree]["length"] / figures[rule, chain]["length"]
            yield {
                **{"rule": rule, "tree": tree, "chain": chain},
                "length_ratio": with_interval(ratio),
            }


def _at_equal_loss(figures: dict[tuple[str, str], Figures]) -> Iterator[dict[str, Any]]:
    """Each tree beside a chain, by those prices at which both lose as much."""
    for tree, chain in _pairs(figures, "strict"):
        for loss, own, other in both_by_loss(figures, tree, chain):
            yield {
                **{"tree": tree, "chain": chain, "nats_per_token": loss},
                **{"tree_length": with_interval(own), "chain_length": with_interval(other)},
                "length_ratio": with_interval(own / other),
            }


def both_by_loss(
    figures: dict[tuple[str, str], Figures], one: str, other: str
) -> Iterator[tuple[float, NDArray[np.float64], NDArray[np.float64]]]:
    """Each of `LOSSES` that two shapes reach, with the tokens per step `[resamples]` of both."""
    lengths = (lengths_by_loss(figures, shape) for shape in (one, other))
    for loss, *both in zip(LOSSES, *lengths, strict=True):
        if not np.isnan(both).any():
            yield loss, both[0], both[1]


def lengths_by_loss(figures: dict[tuple[str, str], Figures], shape: str) -> NDArray[np.float64]:
    """Tokens per step at each of `LOSSES`, `[losses, resamples]`, NaN beyond the largest price.

    Between two prices, and between strict decoding and the smallest, the line through both.
    """
    curve = [
        found
        for (rule, other), found in figures.items()
        if other == shape and rule.split()[0] in ("strict", "price")
    ]
    curve.sort(key=lambda found: found["nats_per_token"][0])
    losses, lengths = (
        np.stack([found[name] for found in curve]) for name in ("nats_per_token", "length")
    )
    return np.stack(
        [np.interp(LOSSES, *pair, right=np.nan) for pair in zip(losses.T, lengths.T, strict=True)],
        axis=1,
    )


def _cost(name: str, step: StepTime, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """The best chain and the best tree of each rule, by batch."""
    found = []
    rules = dict.fromkeys(cell["rule"] for cell in cells)
    for rule, batch in itertools.product(rules, BATCHES):
        best: dict[str, Any] = {"rule": rule, "batch": batch}
        for kind in ("chain", "tree"):
            gains = [
                (step.gain(batch, cell["length"]["value"], cell["rows"]), cell["shape"])
                for cell in cells
                if cell["rule"] == rule and cell["shape"].startswith(kind)
            ]
            if gains:
                gain, shape = max(gains)
                best[kind] = {"gain": round(gain, 3), "shape": shape}
        found.append(best)
    return {"name": name, "floor": step.floor, "slope": step.slope, "best": found}


def tables(result: dict[str, Any]) -> dict[str, list[str]]:
    """The lines of each table of a result, by name: chains and trees, or requests that sample."""
    if "nll" in result["cells"][0]:
        by_temperature = sorted(result["cells"], key=lambda of: of["rule"].rpartition(" ")[2])
        return {"sampled": described(SAMPLED, by_temperature)}
    cells = {(cell["rule"], cell["shape"]): cell for cell in result["cells"]}
    rules = sorted({rule for rule, _ in cells}, key=_by_metric)
    rows = {shape: cell["rows"] for (_, shape), cell in cells.items()}
    shapes = {shape: (shape, str(rows[shape])) for shape in sorted(rows, key=rows.__getitem__)}
    length = {key: shown(**cell["length"]) for key, cell in cells.items()}
    spent = {
        key: f"{cell['length_per_row']['value']:.2f}, {cell['nats_per_token']['value']:.3f}"
        for key, cell in cells.items()
    }
    ratios = {
        (found["rule"], f"{found['tree']} over {found['chain']}"): shown(**found["length_ratio"])
        for found in result["trees_over_chains"]
    }
    pairs = {pair: (pair,) for _, pair in sorted(ratios, key=lambda key: int(key[1].split()[1]))}
    at_equal_loss = sorted(result["by_price_at_equal_loss"], key=lambda of: rows[of["tree"]])
    over_chains = ("a tree over a chain, tokens per step",)
    named = {
        "length": _matrix(("tokens per step", "rows"), shapes, rules, length),
        "spent": _matrix(("tokens per row, nats lost per token", "rows"), shapes, rules, spent),
        "over_chains": _matrix(over_chains, pairs, rules, ratios),
        "equal_loss": described(EQUAL_LOSS, at_equal_loss),
    }
    named |= {cost["name"]: _costs(cost, rules) for cost in result["costs"]}
    if ("strict", "chain 8") in cells:
        named["ranks"] = _rejected(cells["strict", "chain 8"]["ranks"])
    return named


def _rejected(ranks: dict[str, int]) -> list[str]:
    """The ranks of the target's choice where what stood first was rejected."""
    names = [name for name in ranks if name != "1"]
    total = sum(ranks[name] for name in names)
    # Those that no tree can draft come last.
    names.append(names.pop(names.index("not drafted")))
    return table(
        (f"rank, of {total:,}", *names),
        [("share", *(f"{100 * ranks[name] / total:.0f} %" for name in names))],
    )


def _costs(cost: dict[str, Any], rules: list[str]) -> list[str]:
    lines: list[tuple[str, ...]] = []
    for rule in rules:
        best = [found for found in cost["best"] if found["rule"] == rule]
        lines += [
            (f"{rule}, best {kind}", *(f"{found[kind]['gain']:.2f}" for found in best))
            for kind in ("chain", "tree")
            if kind in best[0]
        ]
    return table((f"{cost['name']}, batch", *map(str, BATCHES)), lines)


def _by_metric(rule: str) -> tuple[int, float]:
    metric, *value = rule.split()
    return ("strict", "theta", "gap", "price").index(metric), float(*value or (0,))


def _matrix(
    names: Sequence[str],
    lines: Mapping[str, Sequence[str]],
    rules: Sequence[str],
    texts: Mapping[tuple[str, str], str],
) -> list[str]:
    """A table with a column for each rule, empty where it was not measured.

    Args:
        names: of the first columns.
        lines: what stands in these, by the line's name.
        rules: the further columns.
        texts: by rule and line.
    """
    rows = [
        (*first, *(texts.get((rule, line), "") for rule in rules)) for line, first in lines.items()
    ]
    return table((*names, *rules), rows)
