"""One self-contained HTML page of sweeps and calibrations."""

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_mars import __version__
from vllm_mars.calibration import read_calibration
from vllm_mars.config import OPTION
from vllm_mars.experiments.quality.scores import is_task_score
from vllm_mars.experiments.report import advice
from vllm_mars.experiments.report.advice import Answer, calibrated, fastest_within
from vllm_mars.experiments.report.answers import Piece, relaxed_answers
from vllm_mars.experiments.report.chart import Chart, ChartPoint, Curve
from vllm_mars.experiments.report.measured import Interval, Measured, measure
from vllm_mars.experiments.sweep.record_file import read_cells
from vllm_mars.experiments.sweep.records import Cell, CellKey
from vllm_mars.experiments.sweep.summary import ALL, Row, rows, together
from vllm_mars.local.result_file import require_writable

TEMPLATE = "report.html.j2"
# Model, draft and K.
Setup = tuple[str, str, int]
# File name and content.
Calibrations = list[tuple[str, dict[str, Any]]]
# What a calibration's file may lack.
NOTHING: dict[str, Any] = {"samples": {}, "curve": [], "confirmations": []}


@dataclass(frozen=True)
class Section:
    """What one sweep measured of one setup, and that setup's calibrations.

    Attributes:
        answers: what to set, by each calibration or else by the sweep.
        points: the rules at each point of the grid (dataset, temperature, load), and of all
            datasets where these can be taken together; first the one with most lossy rules whose
            loss is known.
        chart: their speed by loss, None without any.
        calibrations: file name, content and chart of each.
        relaxed: answers with their relaxed tokens, by title.
        runs: file name, commit, versions, hardware and command of all that, each once.
    """

    setup: Setup
    answers: Sequence[Answer]
    points: Sequence[Sequence[Measured]]
    chart: Chart | None
    calibrations: Sequence[tuple[str, dict[str, Any], Chart | None]]
    relaxed: dict[str, list[Piece]]
    cells: Sequence[Cell]
    runs: Sequence[tuple[str, ...]]


def read_sections(paths: Iterable[Path]) -> list[Section]:
    """Reads files of `vllm-mars sweep` (`.jsonl`) and `vllm-mars calibrate` (`.json`).

    Sweeps are never merged: only in one file did rules take turns, so that speeds compare.

    Raises:
        ValueError: a file is neither, or cannot be read.
    """
    sweeps: dict[str, list[Cell]] = {}
    calibrations: dict[Setup, Calibrations] = {}
    for path in dict.fromkeys(paths):
        if path.suffix == ".jsonl":
            sweeps[str(path)] = read_cells(path)
        elif path.suffix == ".json":
            content = NOTHING | read_calibration(path)
            model, draft = content["model"], content["draft"]
            setup = (model.get("name"), draft.get("name"), draft.get("num_speculative_tokens"))
            calibrations.setdefault(setup, []).append((path.name, content))
        else:
            raise ValueError(
                f"{path} is neither a sweep (.jsonl) nor a calibration (.json); give files that "
                "`vllm-mars sweep` or `vllm-mars calibrate` wrote."
            )
    sections = []
    for file, cells in sweeps.items():
        found = rows([*_all_prompts(cells), *cells], **_margins(cells))
        setups = dict.fromkeys((row.key.model, row.key.draft, row.key.k) for row in found)
        # Decoding without drafts is beside every draft of its file.
        for setup in [setup for setup in setups if setup[2]] or setups:
            own = calibrations.get(setup, [])
            sections.append(_section(setup, own, Path(file).name, found, cells))
    shown = {section.setup for section in sections}
    sections += [_section(setup, own) for setup, own in calibrations.items() if setup not in shown]
    return sections


def _all_prompts(cells: Iterable[Cell]) -> list[Cell]:
    """The cells of several datasets as one, if the same rules answered different prompts."""
    timed = [cell for cell in cells if cell.outputs]
    asked: dict[str, set[str]] = {}
    rules: dict[str, set[CellKey]] = {}
    for cell in timed:
        dataset = cell.key.prompts
        asked.setdefault(dataset, set()).update(output.prompt_id for output in cell.outputs)
        rules.setdefault(dataset, set()).add(replace(cell.key, dataset=ALL, repeat=0))
    if len(asked) < 2 or ALL in asked or len(set(map(frozenset, rules.values()))) > 1:
        return []
    differ = sum(map(len, asked.values())) == len(set().union(*asked.values()))
    return together(timed) if differ else []


def _margins(cells: Iterable[Cell]) -> dict[str, float]:
    """Those that a sweep judged with, as for `rows`; without a test, its defaults."""
    found: dict[str, float] = {}
    for cell in cells:
        for of in cell.quality.estimates if cell.quality else ():
            if of.margin is not None and of.name == "nll":
                found["nll_margin"] = of.margin
            elif of.margin is not None and of.reference:
                found["margin"] = of.margin / of.reference
    return found


def _section(
    setup: Setup,
    calibrations: Calibrations,
    file: str = "",
    found: Sequence[Row] = (),
    cells: Sequence[Cell] = (),
) -> Section:
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
        [calibrated(content, main) for _, content in calibrations] or [fastest_within(main)],
        points,
        _speed_by_loss(main),
        [(name, content, _cost_by_threshold(content)) for name, content in calibrations],
        relaxed_answers(cell for cell in cells if [cell.key.draft, cell.key.k] == draft),
        cells,
        _runs([*((file, vars(cell)) for cell in cells), *calibrations]),
    )


def _speed_by_loss(rules: Sequence[Measured]) -> Chart | None:
    """The lossy rules; the curve of each family starts at strict decoding."""
    families: dict[str, list[tuple[float, ChartPoint]]] = {}
    for it in rules:
        if it.row.key.lossy and it.loss and it.speedup:
            key = it.row.key
            looser = key.value or 0.0
            if key.metric == "ratio":
                looser = -looser
            text = it.family if key.value is None else f"{key.value:g}"
            families.setdefault(it.family, []).append((looser, (it.loss, it.speedup, text)))
    if not families or rules[0].strict is None:
        return None
    name = rules[0].strict.key.rule
    origin = (_exact(0), _exact(1), "")
    curves = [
        Curve(family, [origin, *(point for _, point in sorted(points))])
        for family, points in families.items()
    ]
    return Chart("loss, nats per token", f"speed, x {name}", curves, (1.0, f"strict: {name}"))


def _cost_by_threshold(content: dict[str, Any]) -> Chart | None:
    """What a calibration predicted, and what it measured on held-out prompts."""
    if not content["curve"]:
        return None
    curves = [
        Curve(text, [(_exact(it["threshold"]), _exact(it[name]), "") for it in content["curve"]])
        for text, name in (("predicted", "cost"), ("90 % bound of that", "high"))
    ]
    measured = [
        (_exact(it["threshold"]), Interval(*(it["cost"][end] for end in Interval._fields)), "")
        for it in content["confirmations"]
    ]
    curves.append(Curve("measured on held-out prompts", measured, joined=False))
    budget = content["budget"]
    level = None if budget is None else (budget, f"budget {budget:g}")
    return Chart(OPTION[content["metric"]], "cost, nats per token", curves, level)


def _exact(value: float) -> Interval:
    return Interval(value, value, value)


def _milliseconds(seconds: Interval | None) -> Interval | None:
    return seconds and Interval(*(1000 * end for end in seconds))


def _runs(origins: Iterable[tuple[str, dict[str, Any]]]) -> list[tuple[str, ...]]:
    def words(values: dict[str, Any] | None) -> str:
        return ", ".join(f"{name} {value}" for name, value in (values or {}).items() if value)

    runs = []
    for name, content in origins:
        versions, hardware = (words(content.get(what)) for what in ("versions", "hardware"))
        command = shlex.join(content.get("command", []))
        runs.append((name, content.get("git_commit") or "", versions, hardware, command))
    return list(dict.fromkeys(runs))


def _kept(calibration: dict[str, Any], tried: dict[str, Any]) -> float:
    """The share of bootstrap samples within a calibration's budget."""
    names = ("recovery",) if calibration["budget"] is None else ("cost", "nll_increase")
    return min(float(tried[name]["kept_share"]) for name in names)


def write_report(paths: Sequence[Path], output: Path) -> None:
    """Writes the page of at least one file of a sweep or calibration.

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
    environment.tests["task_score"] = is_task_score
    environment.filters |= {"exp": math.exp, "ms": _milliseconds}
    environment.globals.update(advice=advice, option=OPTION, kept=_kept, version=__version__)
    page = environment.get_template(TEMPLATE).render(sections=read_sections(paths))
    require_writable(output)
    output.write_text(page, encoding="utf-8")
