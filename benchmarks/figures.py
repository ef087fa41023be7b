"""Writes the tables of README.md and docs/.

    make figures        # a test compares

A table is between `<!-- figures: NAME -->` and `<!-- /figures -->`. Its columns, rows and runs are
in benchmarks/results/NAME.json. A cell is a text, a number, a number with the ends of its interval,
or null; a row of one cell is a heading. A column has a title, the format of its numbers (null hides
it) and maybe the views that show it: `<!-- figures: NAME gain -->` is the view `gain`.

Tables computed from the rows of one or more files, with a row per model and setting, are those of
`BY_SETTING`.

index.json has, for each file, the meaning of a cell, the dependencies and, if these have changed
since, a note for each of its tables (`stale`), which a test compares with git. The site shows the
tables of all files (`all_tables`).
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
SCHEMA = "vllm-mars/figures/1"
# Raw files name these commits, which were lost with their history. They measured the code of the
# first commit that landed after them, or an earlier state of it.
LOST_COMMITS = {"072008d", "16ddfa7", "8fb2266", "b6f5b74", "c2d0069", "f4fddf3", "fe99184"}
LANDED = "3575cce"
# A list without strings, objects or lists. Strings have no newlines, so a match starts outside one.
FLAT_LIST = re.compile(r'\[\n([^][{}"]*)\]')
MARK = re.compile(r"^<!-- /?figures", re.MULTILINE)
PLACE = re.compile(
    r"^(<!-- figures: (\S+)(?: (\S+))? -->)\n(?:.*?\n)??(<!-- /figures -->)$",
    re.DOTALL | re.MULTILINE,
)
# Titles of columns with gains, which cells of computed tables show with the loss.
GAINS = "x strict", "tokens per step x strict"
LOST = "nats lost per token", "nats per token"
BOUND = "mars_max_loss 0.02"
# Tables with a row per model and setting: the files, the rule and column of a file by column title,
# and a pattern of settings to omit.
BY_SETTING: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, str]], str]] = {
    "headline": (
        ("states", "pair-states"),
        {"MARS / lossless, nats lost per token": ("bound 0.02", GAINS[0])},
        "fixed|K 8|0.4",
    ),
    "bounds": (
        ("states", "pair-states"),
        {f"bound {bound}": (f"bound {bound}", GAINS[0]) for bound in ("0.005", "0.02", "0.05")},
        "",
    ),
    "drafts": (
        ("drafts",),
        {
            title: (rule, GAINS[0])
            for title, rule in {
                "strict, new drafts": "strict, drafts under the request's parameters",
                "bound 0.02, vLLM's drafts": "bound 0.02",
                "bound 0.02, new drafts": "bound 0.02, drafts under the request's parameters",
                "and at 0.85 of the temperature": "bound 0.02, drafts at 0.85 of the temperature",
            }.items()
        },
        "",
    ),
    "whole": (
        ("answers",),
        {
            "tokens per step": (BOUND, GAINS[1]),
            "where both ended": (BOUND, "where answers ended"),
            "length": (BOUND, "length x strict"),
            "ended, points": (BOUND, "ended less strict's, points"),
            "repeated 4-grams": (BOUND, "repeated 4-grams less strict's"),
        },
        "",
    ),
    "theta": (
        ("answers",),
        {
            "theta 0.96": ("mars_theta 0.96, fixed drafts", GAINS[1]),
            "theta 0.9": ("mars_theta 0.9, fixed drafts", GAINS[1]),
            "bound 0.02": (BOUND, GAINS[1]),
        },
        "qwen",
    ),
}
# Model names in headings; some files do not name the packaged model.
MODELS = {
    "qwen2.5-coder-1.5b-instruct": "Qwen2.5-Coder-1.5B",
    "SmolLM2-135M-Instruct-float32": "SmolLM2-135M",
    "": "SmolLM2-135M",
}
TEMPERATURE = re.compile("greedy|temperature")


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def read(name: str) -> dict[str, Any]:
    """Reads a file of figures; raises ValueError if there is none or a row does not fit."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise ValueError(f"figures={name} has no {path.relative_to(ROOT)}.")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if content.get("schema") != SCHEMA:
        raise ValueError(f"{path.name} has schema {content.get('schema')}, not {SCHEMA}.")
    num_columns = len(content["columns"])
    for row in content["rows"]:
        if len(row) not in (1, num_columns):
            raise ValueError(f"{path.name}: {row} does not fit {num_columns} columns.")
    return content


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes a file of figures, indented, with each list of numbers in one line."""
    lines = json.dumps({"schema": SCHEMA, **content}, indent=2, ensure_ascii=False)
    lines = FLAT_LIST.sub(lambda match: f"[{' '.join(match[1].split())}]", lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(lines + "\n", encoding="utf-8")


def text(cell: Any, form: str) -> str:
    """Formats a cell, such as "1.15 (1.02–1.33)"."""
    if isinstance(cell, list):
        value, low, high = (text(end, form) for end in cell)
        is_signed = low.startswith(("−", "+"))
        return f"{value} ({low} to {high})" if is_signed else f"{value} ({low}–{high})"
    if cell is None or isinstance(cell, str):
        return cell or ""
    return format(cell, form).replace("-", "−")


def machine(run: dict[str, Any]) -> str:
    hardware = run["hardware"]
    if hardware["gpu"]:
        return str(hardware["gpu"])
    cpu = re.sub(r"\(\w+\)", "", hardware["cpu"])
    model = re.search(r"model \d+", cpu)
    return " ".join([*cpu.split(",")[0].split()[:2], *([model[0]] if model else [])])


def table(titles: Sequence[str], body: Iterable[Sequence[str]]) -> Iterable[str]:
    """Yields the lines of a Markdown table."""
    yield f"| {' | '.join(titles)} |"
    yield f"| {' | '.join(['---', *['---:'] * (len(titles) - 1)])} |"
    for row in body:
        yield f"| {' | '.join(row)} |"


def table_of(
    columns: Sequence[Sequence[Any]], rows: Iterable[Sequence[Any]], view: str = ""
) -> Iterable[str]:
    """Returns the lines of a table with the columns of a view."""
    shown = [
        (index, title, form)
        for index, (title, form, *views) in enumerate(columns)
        if form is not None and (not views or not view or view in views[0].split())
    ]
    body = (
        [f"**{row[0]}**", *[""] * (len(shown) - 1)]
        if len(row) == 1 < len(columns)
        else [text(row[index], form) for index, _, form in shown]
        for row in rows
    )
    return table([title for _, title, _ in shown], body)


def cells(name: str) -> Iterable[tuple[str, str, dict[str, Any]]]:
    """Yields the heading, rule and cells, by title, of each row of a file."""
    content = read(name)
    heading = ""
    titles = [title for title, *_ in content["columns"]]
    for row in content["rows"]:
        if len(row) == 1:
            heading = row[0]
        else:
            yield heading, row[0], dict(zip(titles, row, strict=True))


def gain_and_loss(row: dict[str, Any], column: str, form: str) -> str:
    """Formats a gain and the loss per token, if known, such as "1.12 for 0.023"."""
    lost = next((row[title] for title in LOST if title in row), None)
    lost = lost[0] if isinstance(lost, list) else lost
    return f"{text(row.get(column), form)}{f' for {lost:.3f}' if lost else ''}"


def by_setting(
    names: Iterable[str], columns: dict[str, tuple[str, str]], omitted: str = ""
) -> Iterable[str]:
    """Returns the lines of a table with a row for each model and setting of the files.

    Args:
        columns: rule and column of the files by title. A gain is followed by the loss, if any.
        omitted: pattern of headings to omit.
    """
    headings: dict[str, dict[str, dict[str, Any]]] = {}
    forms: dict[str, str] = {}
    for name in names:
        forms |= {title: form or "" for title, form, *_ in read(name)["columns"]}
        for heading, rule, row in cells(name):
            headings.setdefault(heading, {})[rule] = row

    bodies: dict[str, list[list[str]]] = {model: [] for model in MODELS.values()}
    for heading, by_rule in headings.items():
        if omitted and re.search(omitted, heading):
            continue
        first, _, rest = heading.partition(", ")
        model, setting = ("", heading) if TEMPERATURE.match(first) else (first, rest)
        setting = setting.replace(", probabilistic drafts", "").replace(", K 4", "")
        body = [
            gain_and_loss(by_rule.get(rule, {}), column, forms[column])
            if column in GAINS
            else text(by_rule.get(rule, {}).get(column), forms[column])
            for rule, column in columns.values()
        ]
        bodies[MODELS[model]].append([setting, *body])
    rows = [
        row
        for model, settings in bodies.items()
        for row in ([[f"**{model}**", *[""] * len(columns)], *settings] if settings else [])
    ]
    return table(["", *columns], rows)


def index() -> dict[str, dict[str, Any]]:
    path = RESULTS / "index.json"
    entries: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return entries


def lines(name: str, view: str, directory: Path) -> Iterable[str]:
    """Yields the lines of a file's or computed table and of its source.

    `view` is "" for all columns; the link is relative to the page's `directory`.
    """
    names: Sequence[str] = [name]
    if name in BY_SETTING:
        names, columns, omitted = BY_SETTING[name]
        yield from by_setting(names, columns, omitted)
    else:
        content = read(name)
        yield from table_of(content["columns"], content["rows"], view)
    path = RESULTS / (f"{names[0]}.json" if len(names) == 1 else "README.md")
    source = sources(run for file in names for run in read(file)["runs"])
    yield ""
    yield f"[Commands and figures]({os.path.relpath(path, directory)}); {source}.{notes(names)}"


def sources(runs: Iterable[dict[str, Any]]) -> str:
    commits: dict[str, dict[str, None]] = {}
    for run in runs:
        commits.setdefault(machine(run), {})[landed(run["git_commit"])[:7]] = None
    listed = (f"{', '.join(hashes)} ({where})" for where, hashes in commits.items())
    return f"commit {', '.join(listed)}"


def landed(commit: str) -> str:
    """Returns the commit, or the first in the history with the measured code."""
    return LANDED if commit[:7] in LOST_COMMITS else commit.removesuffix("-dirty")


def notes(names: Iterable[str]) -> str:
    """Returns the notes on files that measured an earlier state."""
    entries = (index().get(name, {}) for name in names)
    stale = dict.fromkeys(entry["stale"] for entry in entries if entry.get("stale"))
    return "".join(f" **{note}**" for note in stale)


def all_tables() -> str:
    """Returns a section for each file with a table, which the site adds to the list of files."""
    sections: list[str] = []
    for name, entry in index().items():
        if "columns" not in json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")):
            continue
        columns = read(name)["columns"]
        views = dict.fromkeys(view for _, _, *names in columns for view in " ".join(names).split())
        sections += [f"## {name}", "", entry["tells"], ""]
        for view in views or [""]:
            sections += [*lines(name, view, RESULTS), ""]
    return "\n".join(sections)


def written(page: str, directory: Path) -> str:
    """Updates the tables of a page; ValueError if a mark is not closed or a file does not fit."""
    if 2 * len(PLACE.findall(page)) != len(MARK.findall(page)):
        raise ValueError("`<!-- figures: NAME -->` and `<!-- /figures -->` do not go together.")
    return PLACE.sub(
        lambda match: "\n".join((match[1], *lines(match[2], match[3] or "", directory), match[4])),
        page,
    )


def main() -> int:
    try:
        for page in pages():
            before = page.read_text(encoding="utf-8")
            if (after := written(before, page.parent)) != before:
                page.write_text(after, encoding="utf-8")
                print(f"{page.relative_to(ROOT)} has new figures")
    except ValueError as error:
        print(f"error: {page.relative_to(ROOT)}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
