"""One self-contained HTML page, and PNGs, of sweeps and calibrations."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_mars import __version__
from vllm_mars.calibration import read_calibration
from vllm_mars.experiments.report.figures import (
    acceptance_plots,
    calibration_plots,
    ladder_plots,
    load_plots,
    margin_plots,
    pareto_plots,
)
from vllm_mars.experiments.report.plots import Plot
from vllm_mars.experiments.report.tables import (
    Relaxed,
    Table,
    calibration_table,
    provenance_table,
    quality_table,
    relaxed_answers,
    speed_table,
    unmeasured_table,
)
from vllm_mars.experiments.sweep.record_file import read_cells
from vllm_mars.experiments.sweep.records import Cell
from vllm_mars.experiments.sweep.summary import rows

TEMPLATE = "report.html.j2"


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        name: its anchor.
        title: its heading.
        text: what it shows.
        missing: which data is not there and which command gives it; "" where all is.
        plots, tables, answers: what it holds.
    """

    name: str
    title: str
    text: str
    missing: str = ""
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    answers: Sequence[Relaxed] = ()


@dataclass
class Runs:
    """What the report is made of.

    Attributes:
        cells: of all sweeps.
        calibrations: name and content of each calibration.
    """

    cells: list[Cell] = field(default_factory=list)
    calibrations: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def load_runs(paths: Sequence[Path]) -> Runs:
    """Reads files of `vllm-mars sweep` (`.jsonl`) and `vllm-mars calibrate` (`.json`).

    Raises:
        ValueError: a file is neither, or cannot be read.
    """
    runs = Runs()
    sweeps = []
    for path in paths:
        if path.suffix == ".jsonl":
            sweeps.append(path)
        elif path.suffix == ".json":
            runs.calibrations.append((path.stem, read_calibration(path)))
        else:
            raise ValueError(
                f"{path} is neither a sweep (.jsonl) nor a calibration (.json); give files that "
                "`vllm-mars sweep` or `vllm-mars calibrate` wrote."
            )
    runs.cells = read_cells(sweeps)
    return runs


def sections(runs: Runs) -> list[Section]:
    """Builds the page's sections; each says what it lacks and what gives it."""
    found = rows(runs.cells)
    calibrations = runs.calibrations
    pareto, acceptance = pareto_plots(found), acceptance_plots(found)
    load, ladder = load_plots(found), ladder_plots(found)
    margins, answers = margin_plots(calibrations), relaxed_answers(runs.cells)
    parts = [
        Section(
            "pareto",
            "Quality against speed",
            "Each point is a verification rule: to the right is faster, up is better. The line "
            "joins the rules that no other beats in both. Bars are 95 % intervals of a paired "
            "bootstrap over prompts.",
            ""
            if pareto
            else "No sweep holds judged cells of autoregressive decoding and another method at the "
            "same point. `vllm-mars sweep` measures and judges them.",
            pareto,
            [*speed_table(found), *quality_table(found)],
        ),
        Section(
            "acceptance",
            "Acceptance by position",
            "Share of verification steps whose draft token at this position was accepted.",
            "" if acceptance else "No sweep holds cells with drafts. `vllm-mars sweep` gives them.",
            acceptance,
        ),
        Section(
            "margins",
            "Margins",
            "How close the target's second choice is to its first, z2 / z1, at the positions that "
            "strict verification looks at. A runner-up to the right of theta is let through.",
            ""
            if margins
            else "No calibration is given. `vllm-mars calibrate` records the target's two largest "
            "logits; add its file to the report.",
            [*margins, *calibration_plots(calibrations)],
            calibration_table(calibrations),
        ),
        Section(
            "load",
            "Speed by concurrency",
            "Output tokens per second of all requests together.",
            ""
            if load
            else "No sweep holds one rule at two concurrencies. "
            "`vllm-mars sweep --concurrency 1 4 16 64` measures them.",
            load,
        ),
        Section(
            "drafts",
            "Draft ladder",
            "What each draft gives, strictly and with the margin: drafts by rising speed.",
            ""
            if ladder
            else "No sweep holds two drafts or draft lengths. `vllm-mars sweep --draft ngram DIR` "
            "or `--k 2 4 8` measures them.",
            ladder,
        ),
        Section(
            "relaxed",
            "Relaxed tokens in context",
            "Answers at temperature 0; marked is each token that is not the target's first choice. "
            "Point at one, tap it or reach it with the tab key to see the target's choice.",
            ""
            if answers
            else "No sweep holds a judged answer of a lossy rule at temperature 0 with such a "
            "token. `vllm-mars sweep` judges its answers unless it is given --no-judge.",
            answers=answers,
        ),
        Section(
            "runs",
            "What was run",
            "Versions, hardware and commands of every file.",
            tables=[*provenance_table(runs.cells, calibrations), *unmeasured_table(runs.cells)],
        ),
    ]
    return parts


def write_report(paths: Sequence[Path], output: Path, png_directory: Path | None = None) -> int:
    """Writes the page and one PNG for each plot.

    Args:
        paths: files of sweeps and calibrations, at least one.
        output: the HTML file.
        png_directory: where PNGs go; by default beside the page, in a directory of its name.

    Returns:
        The number of plots.

    Raises:
        ValueError: a file cannot be read.
        RuntimeError: the page cannot be written.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    runs = load_runs(paths)
    parts = sections(runs)
    environment = Environment(
        loader=PackageLoader("vllm_mars.experiments.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = ", ".join(dict.fromkeys([*(cell.key.model for cell in runs.cells), *_models(runs)]))
    page = environment.get_template(TEMPLATE).render(
        sections=parts, models=names, files=[path.name for path in paths], version=__version__
    )
    directory = png_directory or output.with_suffix("")
    plots = [plot for part in parts for plot in part.plots]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page, encoding="utf-8")
        for plot in plots:
            plot.png(directory / f"{plot.name}.png")
    except OSError as error:
        raise RuntimeError(f"output={output} cannot be written: {error}; name another.") from error
    return len(plots)


def _models(runs: Runs) -> list[str]:
    return [str(content["model"].get("name")) for _, content in runs.calibrations]
