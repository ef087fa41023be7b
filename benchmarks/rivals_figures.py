"""The tables of `benchmarks.rivals`, with intervals over prompts.

    python -m benchmarks.rivals_figures build/rivals.jsonl [...]

rivals.json: by temperature what each rule gains over the best lossless setting, what it loses, and
what a price by blocks gains at that loss. rivals-blocks.json: what blocks add to a bound.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import RESULTS, SCHEMA, table_of
from benchmarks.rivals import GREEDY_PRICES, KNOBS, PLAIN
from benchmarks.text import cell, heat, read
from vllm_mars.experiments.rows import estimate
from vllm_mars.local.result_file import write_json

# By prompt steps, tokens and nats.
Sums = dict[str, list[float]]
KS, BOUNDS = (4, 8), (0.02, 0.05)
GREEDY = {
    "`fly`, its defaults": "fly {}",
    **{f"`fly`, window {it}": f"fly {it}" for it in (3, 2, 1)},
    "ASD (budget 8, local ratio 0.25, 2 mismatches)": "ASD",
    "AdaptiveSpec's first mismatch, p / p1 ≥ 0.61": "first",
    **{f"theta {it}": f"theta {it}" for it in (0.96, 0.9)},
}
FIXED = {
    "standard, fixed drafts": f"fly {PLAIN}",
    "`fly`, its defaults, fixed drafts": "fly {}",
    "`fly`, window 1, fixed drafts": "fly 1",
    **{f"theta {it}, fixed drafts": f"theta {it}" for it in (0.96, 0.9)},
}
DRAWN = {"standard": "price 0.0", "`fly`, its defaults": "fly {}", "`fly`, window 1": "fly 1"}
CURVES = {
    "mentored decoding": "mentored",
    "lenience": "lenience",
    "Cactus": "Cactus",
    "price, position by position": "price",
    "price, by blocks": "blocks",
}


def curve(sums: dict[str, Sums], name: str) -> list[Sums]:
    """A rule by its settings, from strict verification on."""
    values = KNOBS["price" if name == "blocks" else name]
    strict = [] if name in ("price", "blocks") else [sums["price 0.0"]]
    return [*strict, *(sums[f"{name} {value}"] for value in values)]


def told(own: Sequence[Sums], base: Sums, ours: Sequence[Sums] = (), at: float = -1) -> list[Any]:
    """Tokens per step over the base's, nats per token, and the same ratio of ours at that loss.

    A rule with settings is taken at a loss, between two of them.
    """
    both, size = [*own, base, *ours], len(own)
    of = {
        prompt: {str(i): it for i, it in enumerate(np.ravel([sums[prompt] for sums in both]))}
        for prompt in base
        if all(prompt in sums for sums in both)
    }

    def column(place: int) -> Any:
        def statistic(*values: np.ndarray, axis: int = -1) -> Any:
            steps, tokens, nats = np.moveaxis(
                np.array([it.sum(axis) for it in values]).reshape(len(both), 3, -1), 1, 0
            )
            # For a small price tokens rise with the root of what is lost.
            rates, roots, found = tokens / steps, np.sqrt(np.maximum(nats / tokens, 0)), []
            for rate, root in zip(rates.T, roots.T, strict=True):
                wanted = root[0] if at < 0 else math.sqrt(at)
                gained = np.interp(wanted, root[:size], rate[:size]) if at >= 0 else rate[0]
                theirs = np.nan
                if ours and wanted <= root[-1]:
                    theirs = np.interp(wanted, root[size + 1 :], rate[size + 1 :])
                found.append((gained / rate[size], wanted**2, theirs / rate[size])[place])
            return np.array(found).reshape(values[0].sum(axis).shape)

        return cell(estimate(statistic, of, [str(i) for i in range(3 * len(both))]))

    return [column(0), column(1) if at < 0 else at, column(2) if ours else None]


def main(paths: Sequence[str]) -> None:
    """Writes both files, and prints their tables."""
    lines = [line for path in paths for line in read(Path(path))]
    sums = {tuple(it[name] for name in ("k", "fixed", "temperature", "strict")): it for it in lines}
    runs = {it["run"]["created"]: it["run"] | {"raw": "text/rivals.jsonl.gz"} for it in lines}

    def default(name: str, k: int) -> str:
        return name.format(min(6, k - 1))

    rows: list[list[Any]] = []
    for temperature in (0.0, 0.7, 1.0):
        of = {k: sums[k, not temperature, temperature, True]["sums"] for k in KS}
        rows.append([heat(temperature)])
        if not temperature:
            ours = {k: [of[k][f"price {it}"] for it in GREEDY_PRICES] for k in KS}
            for label, name in GREEDY.items():
                own = [told([of[k][default(name, k)]], ours[k][0], ours[k]) for k in KS]
                rows.append([label, *own[0], *own[1]])
            continue
        ours = {k: curve(of[k], "blocks") for k in KS}
        fixed = {k: sums[k, True, temperature, True]["sums"] for k in KS}
        for names, given in ((FIXED, fixed), (DRAWN, of)):
            for label, name in names.items():
                beside = {k: ours[k] if names is FIXED and name[-2:] != "99" else () for k in KS}
                own = [told([given[k][default(name, k)]], ours[k][0], beside[k]) for k in KS]
                if names is DRAWN and "fly" in label:
                    own = [[gain, None, None] for gain, *_ in own]
                rows.append([label, *own[0], *own[1]])
        for label, name in CURVES.items():
            for bound in BOUNDS:
                beside = {k: () if name == "blocks" else ours[k] for k in KS}
                own = [told(curve(of[k], name), ours[k][0], beside[k], bound) for k in KS]
                rows.append([f"{label}, {bound} nats", *own[0], *own[1]])
    told_of = [
        ("tokens per step", ".3f"),
        ("nats per token", ".4f"),
        ("a price at this loss", ".3f"),
    ]
    columns = [["rule", "", "k4 k8"]]
    columns += [[f"K {k}: {name}", form, f"k{k}"] for k in KS for name, form in told_of]
    write(rows, columns, "rivals", runs)
    rows = []
    for temperature, k in ((t, k) for t in (1.0, 0.7) for k in KS):
        of_point = sums[k, False, temperature, False]["sums"]
        base = of_point["price 0.0"]
        row: list[Any] = [f"{heat(temperature)}, K {k}", sum(int(it[0]) for it in base.values())]
        row.append(told([of_point["blocks 0.0"]], base)[0])
        for bound in BOUNDS:
            row += [told(curve(of_point, it), base, (), bound)[0] for it in ("price", "blocks")]
        rows.append(row)
    ways = "position by position", "by blocks"
    columns = [["", ""], ["steps", "d"], ["strict, by blocks", ".3f"]]
    columns += [[f"{bound} nats, {way}", ".3f"] for bound in BOUNDS for way in ways]
    write(rows, columns, "rivals-blocks", runs)


def write(rows: list[list[Any]], columns: list[list[str]], name: str, runs: dict[str, Any]) -> None:
    print("\n".join([*table_of(columns, rows), ""]))
    content = {"schema": SCHEMA, "columns": columns, "rows": rows, "runs": [*runs.values()]}
    write_json(RESULTS / f"{name}.json", content)


if __name__ == "__main__":
    main(sys.argv[1:])
