"""Compares two outputs of lm-eval by question, with the smallest loss that they can show.

A directory may hold several runs, such as one for each seed: a question's score is their mean.

python examples/evaluate/pairs.py DIRECTORY_STRICT DIRECTORY_MARS
"""

import json
import math
import sys
from pathlib import Path


def scores(directory: Path) -> dict[tuple[str, str], dict[str, float]]:
    """Reads the scores by task and metric, and by question, from `lm_eval --log_samples`.

    Raises:
        ValueError: there is no output of lm-eval.
    """
    runs: dict[tuple[str, str], dict[str, list[float]]] = {}
    for path in sorted(directory.rglob("samples_*.jsonl")):
        task = path.name.removeprefix("samples_").rpartition("_")[0]
        for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n"):
            sample = json.loads(line)
            for metric in sample["metrics"]:
                name = f"{metric}, {sample['filter']}"
                questions = runs.setdefault((task, name), {})
                questions.setdefault(sample["doc_hash"], []).append(float(sample[metric]))
    if not runs:
        raise ValueError(f"{directory} has no samples_*.jsonl; run lm_eval with --log_samples.")
    return {
        name: {question: sum(values) / len(values) for question, values in questions.items()}
        for name, questions in runs.items()
    }


def interval(differences: list[float]) -> tuple[float, float]:
    """Returns the mean of differences in [-1, 1], and half the width of its 95% interval.

    One added question for each side corrects it for few questions (Bonett and Price, 2012).
    """
    values = [*differences, 1.0, -1.0]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    return mean, 1.96 * math.sqrt(variance / len(values))


def main(strict: Path, mars: Path) -> None:
    """Prints a table with a line for each metric, and the smallest loss that it can show."""
    before, after = scores(strict), scores(mars)
    print("| task | metric | questions | strict | MARS | MARS - strict, points | changed |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    notes = []
    for (task, metric), old in before.items():
        new = after[task, metric]
        if old.keys() != new.keys():
            raise ValueError(
                f"{task}: the two asked different questions; run both with one --limit."
            )
        differences = [new[question] - old[question] for question in old]
        count = len(differences)
        mean, half = interval(differences)
        changed = sum(difference != 0 for difference in differences)
        means = [100 * sum(values) / count for values in (old.values(), new.values())]
        print(
            f"| {task} | {metric} | {count} | {means[0]:.1f} | {means[1]:.1f} "
            f"| {100 * mean:+.1f} ({100 * (mean - half):+.1f} to {100 * (mean + half):+.1f}) "
            f"| {changed} |"
        )
        notes.append(
            f"{task}, {metric}: {count} questions show a loss only if it is larger than about "
            f"{100 * half:.1f} points. To show one of 1 point it takes about "
            f"{math.ceil(count * (100 * half) ** 2):,}, if scores change as often."
        )
    print("", *notes, sep="\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
