"""Writes the tables of README.md, docs/ and benchmarks/, and the picture of speed by loss.

    make figures        # a test compares

A table stands between `<!-- figures: NAME -->` and `<!-- /figures -->`. It comes from a sweep,
benchmarks/results/NAME.jsonl, or from columns, rows and the runs that gave them in NAME.json. There
a cell is a text, a number, a number with both ends of its interval, or null; a column's second
entry is the format of its numbers, or null if the table leaves it out.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_mars.experiments.records import read_sweep
from vllm_mars.experiments.rows import rows, tables, turned, without_times

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PICTURE = ROOT / "docs/speed.png"
SCHEMA = "vllm-mars/figures/1"
MARK = re.compile(r"^<!-- /?figures", re.MULTILINE)
PLACE = re.compile(
    r"^(<!-- figures: (\S+) -->)\n(?:.*?\n)??(<!-- /figures -->)$", re.DOTALL | re.MULTILINE
)
# Of the picture: the sweeps of each panel, and each line's rules, mark and colour.
PANELS = {"greedy": ("greedy",), "temperature 1": ("sampled", "sampled_low")}
SERIES = {
    "mars_max_loss": (r"max_loss .*", "s-", "#009e73"),
    "mars_max_loss, probabilistic drafts": (r"strict, drawn|drawn, max_loss .*", "^-", "#cc79a7"),
    "mars_price, probabilistic drafts": (r"drawn, price .*", "v:", "#8a5a83"),
    "mars_price": (r"price .*", "D:", "#0072b2"),
    "the paper's theta": (r"theta .*", "o--", "#b5651d"),
}
RECOMMENDED = {"greedy": "max_loss 0.02", "temperature 1": "drawn, max_loss 0.02"}
CAPTION = (
    "SmolLM2-135M-Instruct with its EAGLE-3 head, K 4, 110 answers of at most 64 tokens, 2 CPU "
    "cores; probabilistic drafts at the request's temperature."
)
TEXT: dict[str, Any] = {"textcoords": "offset points", "fontsize": "small"}
# What people use, in nats per token.
MOST_LOST = 0.11


def pages() -> list[Path]:
    """The pages that may have tables."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "benchmarks").glob("*/README.md")),
    ]


def read(name: str) -> dict[str, Any]:
    """The content of a file of figures.

    Raises:
        ValueError: there is no such file, or a row does not fit the columns.
    """
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise ValueError(f"figures={name} has no {path.relative_to(ROOT)}.")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if found.get("schema") != SCHEMA:
        raise ValueError(f"{path.name} has schema {found.get('schema')}, not {SCHEMA}.")
    for row in found["rows"]:
        if len(row) != len(found["columns"]):
            raise ValueError(f"{path.name}: {row} does not fit {len(found['columns'])} columns.")
    return found


def text(cell: Any, form: str) -> str:
    """A cell as a table shows it, such as "1.15 (1.02–1.33)"."""
    if isinstance(cell, list):
        value, low, high = (format(end, form) for end in cell)
        return f"{value} ({low} to {high})" if cell[1] < 0 else f"{value} ({low}–{high})"
    return "" if cell is None else cell if isinstance(cell, str) else format(cell, form)


def machine(run: dict[str, Any]) -> str:
    """What a run was measured on."""
    hardware = run["hardware"]
    if hardware["gpu"]:
        return str(hardware["gpu"])
    cpu = re.sub(r"\(\w+\)", "", hardware["cpu"])
    model = re.search(r"model \d+", cpu)
    return " ".join([*cpu.split(",")[0].split()[:2], *([model[0]] if model else [])])


def table(titles: Sequence[str], body: Iterable[Sequence[str]]) -> Iterable[str]:
    """The lines of a table in Markdown."""
    yield f"| {' | '.join(titles)} |"
    yield f"| {' | '.join(['---', *['---:'] * (len(titles) - 1)])} |"
    for row in body:
        yield f"| {' | '.join(row)} |"


def table_of(columns: Sequence[Sequence[Any]], rows: Iterable[Sequence[Any]]) -> Iterable[str]:
    """The lines of a table of rows, without the columns that it leaves out."""
    body = (
        [text(cell, form) for cell, (_, form) in zip(row, columns, strict=True) if form is not None]
        for row in rows
    )
    return table([title for title, form in columns if form is not None], body)


def lines(name: str, directory: Path) -> Iterable[str]:
    """The lines of a table and of where it comes from; a sweep has one for each temperature.

    Args:
        name: of the file of figures.
        directory: of the page, for the link.
    """
    path = RESULTS / f"{name}.jsonl"
    if path.is_file():
        file = read_sweep(path)
        runs = [head.run for head in file.heads]
        measured = rows(file)
        if any(row.cell.concurrency > 1 for row in measured):
            # Asked many at a time to save hours: then tokens and losses are what was measured.
            measured = [without_times(row) for row in measured]
        for found in tables(measured, file.heads[-1].baseline):
            # A table of two rules is read from column to column.
            shown = turned(found) if len(found.rows) == 2 else found
            yield from (f"{found.title[0].upper()}{found.title[1:]}:", "")
            yield from (*table(shown.names, shown.rows), "")
    else:
        path, given = RESULTS / f"{name}.json", read(name)
        runs = given["runs"]
        yield from (*table_of(given["columns"], given["rows"]), "")
    commits: dict[str, dict[str, None]] = {}
    for run in runs:
        commits.setdefault(machine(run), {})[run["git_commit"][:7]] = None
    told = ", ".join(f"{', '.join(of)} ({where})" for where, of in commits.items())
    yield f"[Commands and figures]({os.path.relpath(path, directory)}); commit {told}."


def written(page: str, directory: Path) -> str:
    """A page with its tables as the files of figures have them.

    Raises:
        ValueError: a mark is not closed, or a table has no file that fits.
    """
    if 2 * len(PLACE.findall(page)) != len(MARK.findall(page)):
        raise ValueError("`<!-- figures: NAME -->` and `<!-- /figures -->` do not go together.")
    return PLACE.sub(lambda at: "\n".join((at[1], *lines(at[2], directory), at[3])), page)


def draw(path: Path) -> None:
    """Draws tokens per step by loss, greedy and sampled, from the sweeps of `PANELS`."""
    # Only the picture needs it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.4), layout="constrained", facecolor="white")
    axes = figure.subplots(1, len(PANELS), squeeze=False).flat
    for axis, (title, sweeps) in zip(axes, PANELS.items(), strict=True):
        found = [row for name in sweeps for row in rows(read_sweep(RESULTS / f"{name}.jsonl"))]
        for label, (pattern, mark, colour) in SERIES.items():
            own = [row for row in found if re.fullmatch(pattern, row.cell.name)]
            points = [
                (row.lost.value, *row.gain) for row in own if row.gain and row.lost is not None
            ]
            points = sorted(point for point in points if point[0] < MOST_LOST)
            if points:
                lost, values, lows, highs = np.transpose(points)
                ends = (values - lows, highs - values)
                style = {"fmt": mark, "color": colour, "capsize": 2, "markersize": 5}
                axis.errorbar(lost, values, ends, label=label, **style)
        axis.plot(0, 1, "k*", markersize=9, label="strict (lossless)")
        for row in found:
            if row.gain and row.cell.name == "strict, drawn":
                style = {"color": "#cc79a7", "markersize": 12}
                label = "strict, probabilistic drafts (lossless)"
                axis.plot(0, row.gain.value, "*", label=label, **style)
            if row.gain and row.lost and row.cell.name == RECOMMENDED[title]:
                where, style = (row.lost.value, row.gain.value), {"arrowstyle": "->"}
                axis.annotate("recommended", where, (18, -28), arrowprops=style, **TEXT)
        axis.set(title=title, xlim=(-0.004, MOST_LOST), ylim=(0.97, 1.6))
        axis.set(xlabel="nats lost per token", ylabel="tokens per step, x strict")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize="x-small", loc="upper left")
    figure.supxlabel(CAPTION, fontsize="x-small")
    figure.savefig(path, dpi=150, metadata={"Software": None})


def main() -> int:
    """Writes the pages whose tables differ, and the picture; returns 1 after an error."""
    try:
        for page in pages():
            before = page.read_text(encoding="utf-8")
            if (after := written(before, page.parent)) != before:
                page.write_text(after, encoding="utf-8")
                print(f"{page.relative_to(ROOT)} has new figures")
        draw(PICTURE)
    except ValueError as error:
        print(f"error: {page.relative_to(ROOT)}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
