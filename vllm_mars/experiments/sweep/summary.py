"""Rows of a sweep's results: one for each rule at each point of the grid, over its repeats."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_mars.experiments.quality.judge import estimates, mean_scores, reference_cell
from vllm_mars.experiments.quality.scores import TASK_SCORES, is_task_score
from vllm_mars.experiments.sweep.records import Cell, CellKey, Estimate

# The name of several datasets as one.
ALL = "all"


@dataclass(frozen=True)
class Row:
    """One rule at one point of the grid.

    Attributes:
        key: of its first repeat, of all prompts where these were asked in blocks.
        cells: its measured repeats, of each block; empty where none was.
        problem: status of a cell that is missing and why, "" where none is.
        tokens_per_second: median over the cells; None for a task of lm-eval, which is not timed.
        speedup: median over the cells of the ratio to the autoregressive one of the same repeat and
            block; None where there is none.
        over_standard: the same beside "standard" with the same draft and K.
        acceptance_length: over all cells; None without speculation.
        estimates: quality over all cells: each prompt's scores are averaged first.
    """

    key: CellKey
    cells: tuple[Cell, ...]
    problem: str
    tokens_per_second: float | None
    speedup: float | None
    over_standard: float | None
    acceptance_length: float | None
    estimates: tuple[Estimate, ...]

    @property
    def repeats(self) -> int:
        """How often each block was measured, at most."""
        return len({cell.key.repeat for cell in self.cells})

    def estimate(self, name: str) -> Estimate | None:
        """The estimate of a score, None where it was not measured."""
        return next((item for item in self.estimates if item.name == name), None)

    def value(self, name: str) -> float | None:
        """The mean of a score, None where it was not measured."""
        found = self.estimate(name)
        return None if found is None else found.value


def rows(cells: Sequence[Cell], margin: float = 0.05, nll_margin: float = 0.05) -> list[Row]:
    """Summarises cells, judged or not, over their repeats; margins as for `judge.estimates`."""
    measured = [cell for cell in cells if cell.status == "ok"]
    by_rule: dict[CellKey, list[Cell]] = {}
    for cell in cells:
        key = replace(cell.key, repeat=0, dataset=cell.key.prompts)
        by_rule.setdefault(key, []).append(cell)
    found = []
    for key, group in by_rule.items():
        ok = tuple(cell for cell in group if cell.status == "ok")
        lengths = [cell.acceptance for cell in ok if cell.acceptance is not None]
        drafts = sum(item.drafts for item in lengths)
        found.append(
            Row(
                key=key,
                cells=ok,
                problem=next(
                    (f"{cell.status}: {cell.reason}" for cell in group if cell.status != "ok"), ""
                ),
                tokens_per_second=_median(c.speed.tokens_per_second for c in ok if c.speed),
                speedup=_ratio(ok, measured, "autoregressive"),
                over_standard=_ratio(ok, measured, "standard"),
                acceptance_length=(
                    1 + sum(item.accepted_tokens for item in lengths) / drafts if drafts else None
                ),
                estimates=tuple(_pooled(ok, measured, margin, nll_margin)),
            )
        )
    return found


def together(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of several datasets as blocks of one, `ALL`.

    As blocks, so that a cell finds the others of its own prompts.
    """
    datasets = sorted({cell.key.dataset for cell in cells})
    blocks = {dataset: f"{ALL}#{number}" for number, dataset in enumerate(datasets)}
    return [
        replace(cell, key=replace(cell.key, dataset=blocks[cell.key.dataset])) for cell in cells
    ]


def all_rows(cells: Sequence[Cell]) -> list[Row]:
    """Rows of each dataset, with the margins that a sweep judged with, else the defaults.

    Before them those of all datasets as one, if the same rules answered different prompts there.
    """
    timed = [cell for cell in cells if cell.outputs]
    as_one = together(timed) if _differ_in_prompts_alone(timed) else []
    return rows([*as_one, *cells], **_margins(cells))


def _differ_in_prompts_alone(cells: Iterable[Cell]) -> bool:
    """Whether there are several datasets, of which no prompt stands in two."""
    asked: dict[str, set[str]] = {}
    rules: dict[str, set[CellKey]] = {}
    for cell in cells:
        dataset = cell.key.prompts
        asked.setdefault(dataset, set()).update(output.prompt_id for output in cell.outputs)
        rules.setdefault(dataset, set()).add(replace(cell.key, dataset=ALL, repeat=0))
    if len(asked) < 2 or ALL in asked or len(set(map(frozenset, rules.values()))) > 1:
        return False
    return sum(map(len, asked.values())) == len(set().union(*asked.values()))


def _margins(cells: Iterable[Cell]) -> dict[str, float]:
    """Those of the tests in the cells, as arguments of `rows`."""
    found: dict[str, float] = {}
    for cell in cells:
        for of in cell.quality.estimates if cell.quality else ():
            if of.margin is not None and of.name == "nll":
                found["nll_margin"] = of.margin
            elif of.margin is not None and of.reference:
                found["margin"] = of.margin / of.reference
    return found


def _ratio(cells: Iterable[Cell], measured: Iterable[Cell], method: str) -> float | None:
    """Speed beside the cells of a method, with the same draft where it has one."""
    drafted = method != "autoregressive"
    others = {
        _point(cell.key, drafted): cell.speed for cell in measured if cell.key.method == method
    }
    return _median(
        cell.speed.tokens_per_second / other.tokens_per_second
        for cell in cells
        if cell.speed is not None and (other := others.get(_point(cell.key, drafted))) is not None
    )


def _point(key: CellKey, drafted: bool) -> tuple[Any, ...]:
    draft = (key.draft, key.k) if drafted else ()
    return (key.model, *draft, key.dataset, key.temperature, key.concurrency, key.repeat)


def _pooled(
    cells: tuple[Cell, ...], measured: Sequence[Cell], margin: float, nll_margin: float
) -> list[Estimate]:
    judged = [cell for cell in cells if cell.quality is not None]
    references = [reference_cell(cell.key, measured) for cell in judged]
    unique = {cell.key: cell for cell in references if cell is not None}
    own = any(cell.key.method == "autoregressive" for cell in judged)
    other = mean_scores(unique.values()) if unique and not own else None
    return estimates(mean_scores(judged), other, margin, nll_margin)


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def print_rows(found: Sequence[Row], console: Any) -> None:
    """Prints a table for each dataset, temperature and concurrency."""
    from rich.table import Column, Table

    points: dict[tuple[str, str, float, int], list[Row]] = {}
    for row in found:
        key = row.key
        point = (key.model, key.dataset, key.temperature, key.concurrency)
        points.setdefault(point, []).append(row)
    for (model, dataset, temperature, concurrency), group in points.items():
        table = Table(
            "rule",
            "draft",
            *(Column(name, justify="right") for name in _FIGURES),
            title=f"{model}, {dataset}, temperature {temperature:g}, concurrency {concurrency}",
        )
        for row in group:
            draft = f"{row.key.draft} K{row.key.k}" if row.key.k else ""
            measured = [
                "" if (value := figure(row)) is None else format(value, form)
                for form, figure in _FIGURES.values()
            ]
            # A row without figures says why.
            told = measured if row.cells else [row.problem.split(":")[0]]
            table.add_row(row.key.rule, draft, *told)
        console.print(table)


def _task_score(row: Row) -> float | None:
    """The mean over all prompts with a task; of lm-eval's scores the task's first."""
    tasks = [item for item in map(row.estimate, TASK_SCORES) if item is not None]
    tasks = tasks or [item for item in row.estimates if is_task_score(item.name)][:1]
    samples = sum(item.samples for item in tasks)
    return sum(item.value * item.samples for item in tasks) / samples if samples else None


# The form of each figure beside it.
_FIGURES: dict[str, tuple[str, Callable[[Row], float | None]]] = {
    "tokens/s": (".1f", lambda row: row.tokens_per_second),
    "x autoregr.": (".2f", lambda row: row.speedup),
    "x standard": (".2f", lambda row: row.over_standard),
    "accepted length": (".2f", lambda row: row.acceptance_length),
    "s/answer": (".2f", lambda row: row.value("seconds")),
    "tokens/answer": (".1f", lambda row: row.value("output_tokens")),
    "NLL": (".3f", lambda row: row.value("nll")),
    "loss": (".4f", lambda row: row.value("loss")),
    "repeats": (".3f", lambda row: row.value("repeated_4grams")),
    "agreement": (".2f", lambda row: row.value("agreement")),
    "identity": (".2f", lambda row: row.value("identity")),
    "task score": (".2f", _task_score),
    "samples": ("d", lambda row: max((item.samples for item in row.estimates), default=None)),
}
