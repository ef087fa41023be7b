"""Writes the tables of README.md and docs/, and the picture of speed by loss.

    make figures        # a test compares

A table stands between `<!-- figures: NAME -->` and `<!-- /figures -->`; its columns, its rows and
the runs that gave them are in benchmarks/results/NAME.json. A cell is a text, a number, a number
with both ends of its interval, or null; a column's second entry is the format of its numbers.
"""

import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PICTURE = ROOT / "docs/speed.png"
SCHEMA = "vllm-mars/figures/1"
MARK = re.compile(r"^<!-- /?figures", re.MULTILINE)
PLACE = re.compile(
    r"^(<!-- figures: (\S+) -->)\n(?:.*?\n)??(<!-- /figures -->)$", re.DOTALL | re.MULTILINE
)
# Of a rule its mark, its colour, and the side of its label.
MARKS = {"theta": ("o", "#b5651d", "below"), "price": ("D", "#1f77b4", "above")}


def pages() -> list[Path]:
    """The pages that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


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


def source(run: dict[str, Any]) -> str:
    """The commit and the machine of a run."""
    hardware = run["hardware"]
    cpu = re.sub(r"\(\w+\)", "", hardware["cpu"])
    model = re.search(r"model \d+", cpu)
    names = [hardware["gpu"] or " ".join(cpu.split(",")[0].split()[:2])]
    return f"{run['git_commit'][:7]} ({' '.join(names + ([model[0]] if model else []))})"


def lines(name: str, directory: Path) -> Iterable[str]:
    """The lines of a table and of where it comes from.

    Args:
        name: of the file of figures.
        directory: of the page, for the link.
    """
    found = read(name)
    columns = found["columns"]
    yield f"| {' | '.join(title for title, _ in columns)} |"
    yield f"| {' | '.join(['---', *['---:'] * (len(columns) - 1)])} |"
    for row in found["rows"]:
        cells = (text(cell, form) for cell, (_, form) in zip(row, columns, strict=True))
        yield f"| {' | '.join(cells)} |"
    runs = ", ".join(dict.fromkeys(map(source, found["runs"])))
    link = os.path.relpath(RESULTS / f"{name}.json", directory)
    yield from ("", f"[Commands and figures]({link}); commit {runs}.")


def written(page: str, directory: Path) -> str:
    """A page with its tables as the files of figures have them.

    Raises:
        ValueError: a mark is not closed, or a table has no file that fits.
    """
    if 2 * len(PLACE.findall(page)) != len(MARK.findall(page)):
        raise ValueError("`<!-- figures: NAME -->` and `<!-- /figures -->` do not go together.")
    return PLACE.sub(lambda at: "\n".join((at[1], *lines(at[2], directory), at[3])), page)


def draw(path: Path) -> None:
    """Draws speed by loss, from the rows of the table `speed` with the head."""
    # Only the picture needs it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.8), layout="constrained", facecolor="white")
    axis = figure.subplots()
    for draft, rule, _, lost, _, _, speed, _ in read("speed")["rows"]:
        name, _, value = rule.partition(" ")
        if draft != "head" or name not in MARKS:
            continue
        middle, low, high = speed
        mark, colour, side = MARKS[name]
        ends = ([middle - low], [high - middle])
        axis.errorbar([lost], [middle], ends, fmt=mark, color=colour)
        edge, shift, align = (high, 4, "bottom") if side == "above" else (low, -4, "top")
        axis.annotate(
            rule,
            (lost, edge),
            (0, shift),
            textcoords="offset points",
            color=colour,
            ha="center",
            va=align,
        )
    axis.axhline(1, color="#444444", linewidth=1)
    axis.annotate("strict", (0, 1), (4, -4), textcoords="offset points", va="top")
    axis.set(xlabel="nats lost per token", ylabel="speed, x strict", xlim=(0, 0.1))
    axis.set(ylim=(0.95, 1.42))
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
