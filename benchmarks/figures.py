"""Writes the tables of README.md, docs/ and benchmarks/, and the picture of speed by loss.

    make figures        # a test compares

A table stands between `<!-- figures: NAME -->` and `<!-- /figures -->`. It comes from a sweep,
benchmarks/results/NAME.jsonl, or from columns, rows and the runs that gave them in NAME.json. There
a cell is a text, a number, a number with both ends of its interval, or null, and a row of one cell
is a heading. A column's second entry is the format of its numbers, or null if no table shows it;
its third, if there is one, says which do: `<!-- figures: NAME gain -->` shows those of `gain`. Of a
sweep `NAME examples` shows two answers, and `NAME lengths` how fast each K is.
`<!-- figures: headline -->` is README's, out of two files.
"""

import html
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_mars.experiments import examples
from vllm_mars.experiments.records import Piece, SweepFile, read_sweep
from vllm_mars.experiments.rows import heat, rows, tables, turned, without_times
from vllm_mars.local.prompts import load_prompts

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PICTURE = ROOT / "docs/tokens_by_nats.png"
SCHEMA = "vllm-mars/figures/1"
MARK = re.compile(r"^<!-- /?figures", re.MULTILINE)
PLACE = re.compile(
    r"^(<!-- figures: (\S+)(?: (\S+))? -->)\n(?:.*?\n)??(<!-- /figures -->)$",
    re.DOTALL | re.MULTILINE,
)
# README's table: a column's title, then the file, the rule and the column that it is taken from.
HEADLINE = [
    ("vLLM as it comes", "reading", "standard, fixed drafts", "tokens per step"),
    ("best lossless setting", "reading", "strict", "tokens per step"),
    ("MARS", "reading", "mars_max_loss 0.02", "tokens per step"),
    ("MARS / best lossless", "reading", "mars_max_loss 0.02", "tokens per step x strict"),
    ("nats lost per token", "reading", "mars_max_loss 0.02", "nats lost per token"),
    ("answers that ended, points", "ends", "mars_max_loss 0.02", "ended less strict's, points"),
]
# Of these the interval is what counts.
WITH_ENDS = "tokens per step x strict", "ended less strict's, points"
# The picture: by the begin of a rule's name what it is called, its mark and its colour.
PICTURED, HEAT = "reading", "temperature 1"
SERIES = {
    "standard, fixed drafts": ("vLLM as it comes", "*", "#555555"),
    "strict": ("the best without loss", "*", "#000000"),
    "mars_max_loss": ("MARS, by a bound of nats per token", "s-", "#009e73"),
    "mars_theta": ("the paper's theta", "o--", "#b5651d"),
}


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
        if len(row) not in (1, len(found["columns"])):
            raise ValueError(f"{path.name}: {row} does not fit {len(found['columns'])} columns.")
    return found


def text(cell: Any, form: str) -> str:
    """A cell as a table shows it, such as "1.15 (1.02–1.33)"."""
    if isinstance(cell, list):
        value, low, high = (format(end, form) for end in cell)
        return (
            f"{value} ({low} to {high})" if "-" in low or "+" in low else f"{value} ({low}–{high})"
        )
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


def table_of(
    columns: Sequence[Sequence[Any]], rows: Iterable[Sequence[Any]], view: str = ""
) -> Iterable[str]:
    """The lines of a table of rows, without the columns that it or the view leaves out."""
    shown = [
        (at, title, form)
        for at, (title, form, *views) in enumerate(columns)
        if form is not None and (not views or not view or view in views[0].split())
    ]
    body = (
        [f"**{row[0]}**", *[""] * (len(shown) - 1)]
        if len(row) == 1 < len(columns)
        else [text(row[at], form) for at, _, form in shown]
        for row in rows
    )
    return table([title for _, title, _ in shown], body)


def headline(files: dict[str, dict[str, Any]]) -> Iterable[str]:
    """The lines of README's table: a row for each temperature of the files."""
    found: dict[str, dict[tuple[str, ...], str]] = {}
    for name, file in files.items():
        heading = ""
        for row in file["rows"]:
            heading = row[0] if len(row) == 1 else heading
            for (title, form, *_), cell in zip(file["columns"], row, strict=False):
                if isinstance(cell, list) and title not in WITH_ENDS:
                    cell = cell[0]
                found.setdefault(heading, {})[name, row[0], title] = text(cell, form or "")
    body = [[heading, *(of[tuple(it)] for _, *it in HEADLINE)] for heading, of in found.items()]
    return table(["tokens per step", *(title for title, *_ in HEADLINE)], body)


def lines(name: str, view: str, directory: Path) -> Iterable[str]:
    """The lines of a table and of where it comes from; a sweep has one for each temperature.

    Args:
        name: of the file of figures.
        view: which of its columns, "" for all; of a sweep one of `VIEWS`.
        directory: of the page, for the link.
    """
    path = RESULTS / f"{name}.jsonl"
    if path.is_file():
        file = read_sweep(path)
        runs = [head.run for head in file.heads]
        if view:
            yield from (*VIEWS[view](file), "")
        measured = [] if view else rows(file)
        if any(row.cell.concurrency > 1 for row in measured):
            # Asked many at a time to save hours: then tokens and losses are what was measured.
            measured = [without_times(row) for row in measured]
        for found in tables(measured, file.heads[-1].baseline):
            # A table of two rules is read from column to column.
            shown = turned(found) if len(found.rows) == 2 else found
            yield from (f"{found.title[0].upper()}{found.title[1:]}:", "")
            yield from (*table(shown.names, shown.rows), "")
    elif name == "headline":
        files = {name: read(name) for _, name, *_ in HEADLINE}
        path, runs = RESULTS / "README.md", [run for file in files.values() for run in file["runs"]]
        yield from (*headline(files), "")
    else:
        path, given = RESULTS / f"{name}.json", read(name)
        runs = given["runs"]
        yield from (*table_of(given["columns"], given["rows"], view), "")
    commits: dict[str, dict[str, None]] = {}
    for run in runs:
        commits.setdefault(machine(run), {})[run["git_commit"][:7]] = None
    told = ", ".join(f"{', '.join(of)} ({where})" for where, of in commits.items())
    yield f"[Commands and figures]({os.path.relpath(path, directory)}); commit {told}."


def beside(file: SweepFile) -> Iterable[str]:
    """Two answers that MARS changed, each beside the strict one and the prompt.

    Raises:
        ValueError: it changed none.
    """
    found = examples.changed(file)
    prompts = {prompt.id: prompt.turns[0] for prompt in load_prompts()}
    if not found:
        raise ValueError("its sweep has no answer that MARS changed.")
    yield f"{examples.told(found)} Relaxed tokens are bold."
    for which, (strict, lossy) in examples.shown(found).items():
        yield from ("", f"**{which}.** The prompt:", "")
        yield from (f"> {_inline(prompts[strict.prompt])}", "")
        yield f"| strict | MARS, {sum(lossy.lost):.2f} nats lost |"
        yield "| --- | --- |"
        yield f"| {_inline(strict.text)} | {''.join(map(_bold, lossy.pieces)).strip()} |"


def _bold(piece: Piece) -> str:
    if piece.lost is None:
        return _inline(piece.text, ends=True)
    before, token, after = examples.around(piece)
    return f"{_inline(before, ends=True)}<b>{_inline(token)}</b>{_inline(after, ends=True)}"


def _inline(text: str, *, ends: bool = False) -> str:
    """Text as it is, within one line of Markdown."""
    plain = re.sub(r"([\\`*_\[\]|#~])", r"\\\1", html.escape(text, quote=False))
    return re.sub(r"\s*\n\s*", "<br>", plain if ends else plain.strip())


def lengths(file: SweepFile) -> Iterable[str]:
    """How long an answer takes, by rule, temperature and K, and where turns disagree."""
    found: dict[tuple[float, str], dict[int, str]] = {}
    for row in rows(file):
        rule, _, k = row.cell.name.partition(", K ")
        if row.time:
            told = f"{row.time.value:.2f}{' (uneven)' if row.is_uneven else ''}"
            found.setdefault((row.cell.temperature, rule), {})[int(k)] = told
    ks = sorted({k for of in found.values() for k in of})
    yield from table(
        ["s per answer", *(f"K {k}" for k in ks)],
        (
            [
                f"{rule}, {heat(temperature)}",
                *(of.get(k, "") for k in ks),
            ]
            for (temperature, rule), of in found.items()
        ),
    )


VIEWS = {"examples": beside, "lengths": lengths}


def written(page: str, directory: Path) -> str:
    """A page with its tables as the files of figures have them.

    Raises:
        ValueError: a mark is not closed, or a table has no file that fits.
    """
    if 2 * len(PLACE.findall(page)) != len(MARK.findall(page)):
        raise ValueError("`<!-- figures: NAME -->` and `<!-- /figures -->` do not go together.")
    return PLACE.sub(
        lambda at: "\n".join((at[1], *lines(at[2], at[3] or "", directory), at[4])), page
    )


def draw(path: Path) -> None:
    """Draws tokens per step by loss, of the rules of `SERIES` at one temperature of `PICTURED`."""
    # Only the picture needs it.
    from matplotlib.figure import Figure

    found, heading = read(PICTURED), ""
    titles = [title for title, *_ in found["columns"]]
    lost, gain = titles.index("nats lost per token"), titles.index("tokens per step")
    points: dict[str, list[tuple[str, float, list[float]]]] = {name: [] for name in SERIES}
    for row in found["rows"]:
        heading = row[0] if len(row) == 1 else heading
        name = next((it for it in SERIES if row[0].startswith(it)), None)
        if len(row) > 1 and name and heading == HEAT:
            points[name].append((row[0].split(",")[0].split()[-1], row[lost], row[gain]))
    figure = Figure(figsize=(6, 4.2), layout="constrained", facecolor="white")
    axis = figure.subplots()
    for name, (label, mark, colour) in SERIES.items():
        own = sorted(points[name], key=lambda point: point[1])
        values = np.array([value for *_, value in own])
        ends = np.abs(values[:, 1:] - values[:, :1]).T
        nats = [at for _, at, _ in own]
        style: dict[str, Any] = {"fmt": mark, "color": colour, "capsize": 3}
        style |= {"markersize": 9, "linewidth": 2}
        axis.errorbar(nats, values[:, 0], ends, label=label, **style)
        for value, at, (height, *_) in own if len(own) > 1 else []:
            axis.annotate(value, (at, height), (9, -12), textcoords="offset points", fontsize=11)
    # Room for what stands beside the last point.
    axis.margins(x=0.1)
    axis.set_xlabel("nats lost per token", fontsize=13)
    axis.set_ylabel(f"tokens per step, {HEAT}", fontsize=13)
    axis.tick_params(labelsize=11)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=11, loc="lower right")
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
