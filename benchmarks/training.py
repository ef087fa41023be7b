"""The figures of examples/grpo_trl.py: a table of rules, and the rewards of each step as a picture.

    python -m benchmarks.training       # benchmarks/results/training.json and docs/reward.svg

Runs are the files of benchmarks/results/training, RULE-SEED.jsonl each, as the example writes them
(docs/rollouts.md has the command). A table's brackets are the least and the largest of the seeds.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.figures import RESULTS, SCHEMA
from benchmarks.pictures import DOCS, MARGIN, WIDTH, Picture

RAW = RESULTS / "training"
# Steps at the end of a run, whose rewards a table has.
ENDS = 5
COLUMNS = {
    f"reward, last {ENDS} steps": ("reward", ".2f", slice(-ENDS, None)),
    "tokens per step": ("tokens_per_step", ".2f", slice(None)),
    "nats lost per token": ("nats_per_token", ".4f", slice(None)),
    "mean weight": ("sampling/importance_sampling_ratio/mean", ".4f", slice(None)),
}
COLOURS = {"strict": "quiet", "mars": "good", "unweighted": "bad"}

Runs = dict[str, list[list[dict[str, Any]]]]


def read(directory: Path) -> tuple[Runs, list[dict[str, Any]]]:
    """Rule -> the steps of each seed, and what ran.

    Raises:
        ValueError: there is no run, or one has other steps than the rest.
    """
    found: Runs = {}
    heads = []
    for path in sorted(directory.glob("*-*.jsonl")):
        head, *steps = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        found.setdefault(path.stem.rpartition("-")[0], []).append(steps)
        heads.append({**head["run"], "raw": f"{directory.name}/{path.name}"})
    lengths = sorted({len(steps) for runs in found.values() for steps in runs})
    if len(lengths) != 1:
        raise ValueError(
            f"{directory} has runs of {lengths} steps; give each the same --steps, to its end."
        )
    return {rule: found[rule] for rule in COLOURS if rule in found}, heads


def table(runs: Runs) -> dict[str, Any]:
    """Columns and rows of a file of figures: of each rule the mean over seeds, and both ends."""
    rows = []
    for rule, seeds in runs.items():
        row: list[Any] = [rule, len(seeds)]
        for name, _, which in COLUMNS.values():
            means = [
                statistics.fmean(step[name] for step in steps[which])
                for steps in seeds
                if name in steps[0]
            ]
            row.append([statistics.fmean(means), min(means), max(means)] if means else None)
        rows.append(row)
    columns = [["rollouts", ""], ["seeds", ""], *([it, of[1]] for it, of in COLUMNS.items())]
    return {"columns": columns, "rows": rows}


def reward(directory: Path) -> Picture:
    """The reward of each step: a line for each seed, in the colour of its rule."""
    runs, _ = read(directory)
    steps = max(len(seed) for seeds in runs.values() for seed in seeds)
    top, bottom, left, right = 64, 300, MARGIN + 34, WIDTH - MARGIN
    picture = Picture(352, "The reward of each step of training, by what verified the rollouts")
    picture.text(MARGIN, 28, "share of short words", bold=True)
    x = float(MARGIN)
    for rule in runs:
        picture.text(x, 50, rule, COLOURS[rule], bold=True)
        x += 20 + 9 * len(rule)
    for tick in (0.4, 0.6, 0.8, 1.0):
        at = bottom + (top - bottom) * (tick - 0.4) / 0.6
        picture.line([(left, at), (right, at)], "edge", width=1)
        picture.text(left - 8, at + 5, f"{tick:g}", "quiet", size=14, anchor="end")
    for rule, seeds in runs.items():
        for seed in seeds:
            rewards = [step["reward"] for step in seed]
            points = [
                (
                    left + (right - left) * at / max(steps - 1, 1),
                    bottom + (top - bottom) * (max(value, 0.4) - 0.4) / 0.6,
                )
                for at, value in enumerate(rewards)
            ]
            picture.line(points, COLOURS[rule], width=1.5)
    for at in (1, steps):
        anchor = "start" if at == 1 else "end"
        picture.text(left if at == 1 else right, 322, f"{at}", "quiet", size=14, anchor=anchor)
    picture.text((left + right) / 2, 340, "step", "quiet", size=14, anchor="middle")
    return picture


def main() -> None:
    """Writes the file of figures and the picture."""
    runs, heads = read(RAW)
    figures = {"schema": SCHEMA, **table(runs), "runs": heads}
    (RESULTS / "training.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (DOCS / "reward.svg").write_text(str(reward(RAW)), encoding="utf-8")


if __name__ == "__main__":
    main()
