"""One self-contained HTML page of sweeps."""

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mars import __version__
from vllm_mars.experiments.columns import Columns, at, filled, score
from vllm_mars.experiments.quality.scores import is_task_score
from vllm_mars.experiments.report.advice import (
    CANNOT_TELL,
    Answer,
    conclusion,
    fastest_within,
)
from vllm_mars.experiments.report.answers import Piece, relaxed_answers
from vllm_mars.experiments.report.chart import Chart, Curve, Point
from vllm_mars.experiments.sweep.measured import Measured, measure
from vllm_mars.experiments.sweep.record_file import read_cells
from vllm_mars.experiments.sweep.records import Cell
from vllm_mars.experiments.sweep.summary import Row, all_rows
from vllm_mars.local.result_file import require_writable

TEMPLATE = "report.html.j2"
# Model, draft and K.
Setup = tuple[str, str, int]
# File name and content.
Files = list[tuple[str, dict[str, Any]]]
RUNS: Columns = {
    "file": lambda of: str(of[0]),
    "commit": lambda of: of[1].get("git_commit") or "",
    "versions": lambda of: _words(of[1].get("versions")),
    "hardware": lambda of: _words(of[1].get("hardware")),
    "command": lambda of: shlex.join(of[1].get("command", [])),
}
PROBLEMS: Columns = {"cell": at("key/label"), "status": at("status"), "reason": at("reason")}


class Table(NamedTuple):
    """Texts in rows below their names; one row may be the chosen one."""

    title: str
    names: Sequence[str]
    rows: Sequence[Sequence[str]]
    chosen: int | None = None


def table(title: str, columns: Columns, items: Sequence[Any], chosen: Any = None) -> Table:
    """A row for each item, equal ones once, without the columns in which none has a text."""
    columns = filled(columns, items)
    found = {tuple(text(item) for text in columns.values()): item for item in items}
    places = [number for number, item in enumerate(found.values()) if item is chosen]
    return Table(title, list(columns), list(found), places[0] if places else None)


@dataclass(frozen=True)
class Section:
    """What one sweep measured of one setup.

    Attributes:
        answer: what to set.
        points: the rules at each point of the grid (dataset, temperature, load), and of all
            datasets where these can be taken together; first the one with most lossy rules whose
            loss is known.
        chart: their speed by loss, None without any.
        relaxed: answers with their relaxed tokens, by title.
        cells: of the sweep.
        runs: file name and content, or a cell's fields, of all that was measured.
    """

    setup: Setup
    answer: Answer
    points: Sequence[Sequence[Measured]]
    chart: Chart | None
    relaxed: dict[str, list[Piece]]
    cells: Sequence[Cell]
    runs: Files

    @property
    def rules(self) -> list[Table]:
        """A table for each point."""
        chosen = None if self.answer.setting == CANNOT_TELL else self.answer.measured
        return [_rules(point, chosen) for point in self.points]

    @property
    def run(self) -> list[Table]:
        """What was run, and what could not be measured."""
        problems = [cell for cell in self.cells if cell.status != "ok"]
        found = [table("Runs", RUNS, self.runs)]
        return found + ([table("Not measured", PROBLEMS, problems)] if problems else [])


def read_sections(paths: Iterable[Path]) -> list[Section]:
    """Reads files of `vllm-mars sweep`.

    Sweeps are never merged: only in one file did rules take turns, so that speeds compare.

    Raises:
        ValueError: a file is none, or cannot be read.
    """
    sections = []
    for path in dict.fromkeys(paths):
        cells = read_cells(path)
        found = all_rows(cells)
        setups = dict.fromkeys((row.key.model, row.key.draft, row.key.k) for row in found)
        # Decoding without drafts is beside every draft of its file.
        for setup in [setup for setup in setups if setup[2]] or setups:
            sections.append(_section(setup, path.name, found, cells))
    return sections


def _section(setup: Setup, file: str, found: Sequence[Row], cells: Sequence[Cell]) -> Section:
    model, *draft = setup
    grid: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        key = row.key
        if key.model == model and ([key.draft, key.k] == draft or not key.k):
            grid.setdefault((key.dataset, key.temperature, key.concurrency), []).append(row)
    points = [measure(point) for point in grid.values()]
    points.sort(key=lambda point: -sum(it.row.key.lossy and it.loss is not None for it in point))
    main = points[0] if points else []
    return Section(
        setup,
        fastest_within(main),
        points,
        _speed_by_loss(main),
        relaxed_answers(cell for cell in cells if [cell.key.draft, cell.key.k] == draft),
        cells,
        [(file, vars(cell)) for cell in cells],
    )


def _speed_by_loss(rules: Sequence[Measured]) -> Chart | None:
    """The lossy rules; the curve of each family starts at strict decoding."""
    families: dict[str, list[Measured]] = {}
    for it in sorted(rules, key=lambda it: it.row.key.looseness):
        if it.row.key.lossy and it.loss and it.speedup:
            families.setdefault(it.family, []).append(it)
    if not families or rules[0].strict is None:
        return None
    curves = []
    for name, own in families.items():
        points = [Point([0.0], [1.0])]
        for it in own:
            assert it.loss and it.speedup, "only such rules are drawn"
            points.append(Point(it.loss, it.speedup, at("row/key/value", "g")(it)))
        key = own[0].row.key
        curves.append(Curve(name, key.metric, key.variant, points))
    strict = rules[0].strict.key.rule
    return Chart("loss, nats per token", f"tokens per second, x {strict}", curves, 1.0)


def _rules(point: Sequence[Measured], chosen: Measured | None) -> Table:
    """What each rule gives at one point of the grid."""
    key, measured = point[0].row.key, [it for it in point if it.row.cells]
    strict = point[0].strict.key.rule if point[0].strict else "strict"
    cells = [cell for it in measured for cell in it.row.cells]
    prompts = len({output.prompt_id for cell in cells for output in cell.outputs})
    repeats = max((it.row.repeats for it in point), default=0)
    title = f"Prompts: {key.dataset}{f' ({prompts})' if prompts else ''}; temperature "
    title += f"{key.temperature:g}; requests at once: {key.concurrency}; repeats: {repeats}."
    names = dict.fromkeys(of.name for it in measured for of in it.row.estimates)
    columns: Columns = {
        **{"rule": at("family"), "value": at("row/key/value", "g")},
        "tokens/s": at("tokens_per_second", ".1f"),
        **{f"x {strict}": at("speedup", ".2f"), "x autoregr.": at("row/speedup", ".2f")},
        "ms to first token": at("ttft", ".0f", 1000),
        "ms / further token": at("tpot", ".1f", 1000),
        f"x {strict}, further tokens": at("faster", ".2f"),
        **{"seconds / answer": at("seconds", ".2f"), "tokens / answer": at("length", ".1f")},
        "accepted length": at("row/acceptance_length", ".2f"),
        "loss, nats / token": at("loss", ".4f"),
        "NLL change": partial(_change, "nll", "+.3f"),
        "repeated 4-grams": score("repeated_4grams", ".3f"),
        "same answers": score("agreement"),
    }
    for name in filter(is_task_score, names):
        task: Columns = {name: score(name), f"{name}, change": partial(_change, name, "+.2f")}
        columns = {**columns, **task}
    return table(title, columns, measured, chosen)


def _change(name: str, form: str, it: Measured) -> str:
    """A score's difference from autoregressive decoding, and what it shows."""
    found = it.row.estimate(name)
    return f"{score(name, form, 'difference')(it)} {conclusion(found)}".strip() if found else ""


def _words(values: dict[str, Any] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (values or {}).items() if value)


def write_report(paths: Sequence[Path], output: Path) -> None:
    """Writes the page of at least one file of a sweep.

    Raises:
        ValueError: a file cannot be read.
        RuntimeError: the page cannot be written.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("vllm_mars.experiments.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["exp"] = math.exp
    page = environment.get_template(TEMPLATE)
    text = page.render(sections=read_sections(paths), version=__version__)
    require_writable(output)
    output.write_text(text, encoding="utf-8")
