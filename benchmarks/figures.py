"""Writes the tables of README.md and docs/.

    make figures        # a test compares

A table stands between `<!-- figures: NAME -->` and `<!-- /figures -->`. It comes from columns, rows
and the runs that gave them in benchmarks/results/NAME.json. There a cell is a text, a number, a
number with both ends of its interval, or null, and a row of one cell is a heading. A column's
second entry is the format of its numbers, or null if no table shows it; its third, if there is one,
says which do: `<!-- figures: NAME gain -->` shows those of `gain`.

Out of other files are `headline`, README's; `bounds`, `answers` and `theta`, of `ACROSS`; and
`effects`, what rows of one question say together: their mean, weighted by one over the squared
standard error, as if they were independent. It leaves out temperature 0.4, at which a bound gains
little.

index.json beside the files says of each what a cell of it tells, what it depends on, and, where
that has changed since, the words that stand below each table of it (`stale`); a test compares with
git. The site shows all of their tables (`all_tables`).
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
# These commits stand in raw files and were lost with their history. What they measured is the code
# of the first commit that landed after them, or an earlier state of it.
LOST_COMMITS = {"072008d", "16ddfa7", "8fb2266", "b6f5b74", "c2d0069", "f4fddf3", "fe99184"}
LANDED = "3575cce"
# A list without a text, object or list in it. A text holds no line's end, so it starts outside one.
FLAT_LIST = re.compile(r'\[\n([^][{}"]*)\]')
MARK = re.compile(r"^<!-- /?figures", re.MULTILINE)
PLACE = re.compile(
    r"^(<!-- figures: (\S+)(?: (\S+))? -->)\n(?:.*?\n)??(<!-- /figures -->)$",
    re.DOTALL | re.MULTILINE,
)
BOUND = "mars_max_loss 0.02"
TODAY, DEFAULT = "bound 0.02", "x vLLM's default"
GAIN, ENDED = "tokens per step x strict", "where answers ended"
# Tables with a column for each temperature: the format of a gain, and by a row's title the file,
# its rules, of which a temperature shows the first that it has, and the column.
ACROSS: dict[str, tuple[str, dict[str, tuple[str, tuple[str, ...], str]]]] = {
    "bounds": (
        ".3f",
        {
            f"bound {of}": ("states", (f"bound {of}",), "x strict")
            for of in ("0.005", "0.02", "0.05")
        },
    ),
    "answers": (
        ".3f",
        {
            "91 prompts: chat, rewriting, summaries": ("reading", (BOUND,), GAIN),
            "of these, answers that ended under both rules": ("reading", (BOUND,), ENDED),
            "348 prompts with short answers": ("ends", (BOUND,), GAIN),
            "119 prompts with one right answer": ("exact", (BOUND,), GAIN),
        },
    ),
    "theta": (
        ".2f",
        {
            title: ("reading", (rule,), GAIN)
            for title, rule in {
                "vLLM's default: `standard`, fixed drafts": "standard, fixed drafts",
                "theta 0.96, fixed drafts": "mars_theta 0.96, fixed drafts",
                "theta 0.9, fixed drafts": "mars_theta 0.9, fixed drafts",
            }.items()
        },
    ),
}
# The columns that say what a rule loses; and a heading's temperature.
LOST = "nats lost per token", "nats per token"
HEAT = re.compile("greedy|temperature")
# Rows that answer one question, by temperature: files and the headings there. Of one line the first
# that has the rule counts: of the 91 prompts 61 are among the 348, and a greedy answer has no seed.
POOLED: dict[str, list[list[tuple[str, str]]]] = {
    "greedy": [[("ends", "greedy"), ("reading", "greedy")], [("reading8", "greedy")]],
    **{
        heat: [[(name, heat)] for name in ("ends", "reading", "reading8")]
        for heat in ("temperature 0.7", "temperature 1")
    },
}
# What is pooled: the column, its format, and which rows of it stand in the table. A difference of
# repeated 4-grams does not mean the same at all temperatures.
ALL = "all three"
EFFECTS = {
    "ended, points": ("ended less strict's, points", "+.1f", (*POOLED, ALL)),
    "length, x strict": ("length x strict", ".3f", (ALL,)),
    "repeated 4-grams": ("repeated 4-grams less strict's", "+.3f", tuple(POOLED)),
    "NLL less entropy": ("NLL less entropy", "+.3f", (ALL,)),
}
# Of a difference that is found four times in five, in standard errors.
FOUND = 1.96 + 0.84


def pages() -> list[Path]:
    """The pages that may have tables."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
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


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes a file of figures, indented, a list of numbers in one line."""
    found = json.dumps({"schema": SCHEMA, **content}, indent=2, ensure_ascii=False)
    found = FLAT_LIST.sub(lambda at: f"[{' '.join(at[1].split())}]", found)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(found + "\n", encoding="utf-8")


def text(cell: Any, form: str) -> str:
    """A cell as a table shows it, such as "1.15 (1.02–1.33)"."""
    if isinstance(cell, list):
        value, low, high = (text(end, form) for end in cell)
        is_signed = low.startswith(("−", "+"))
        return f"{value} ({low} to {high})" if is_signed else f"{value} ({low}–{high})"
    if cell is None or isinstance(cell, str):
        return cell or ""
    return format(cell, form).replace("-", "−")


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


def cells(name: str) -> Iterable[tuple[str, str, dict[str, Any]]]:
    """The rows of a file: the heading above it, its rule, and its cells by the columns' titles."""
    found, heading = read(name), ""
    titles = [title for title, *_ in found["columns"]]
    for row in found["rows"]:
        if len(row) == 1:
            heading = row[0]
        else:
            yield heading, row[0], dict(zip(titles, row, strict=True))


def across(form: str, chosen: dict[str, tuple[str, tuple[str, ...], str]]) -> Iterable[str]:
    """The lines of a table with a column for each temperature at which a row has a cell.

    What rules of several kinds gain stands beside what they lose, if the file says it.
    """
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name in {name for name, *_ in chosen.values()}:
        for heading, rule, row in cells(name):
            at = next((it for it in heading.split(", ") if HEAT.match(it)), "")
            found.setdefault((name, at, rule), row)
    tells_lost = len({rules for _, rules, _ in chosen.values()}) > 1

    def cell(at: str, name: str, rules: tuple[str, ...], column: str) -> str:
        row = next((found[name, at, rule] for rule in rules if (name, at, rule) in found), {})
        lost = next((row[it] for it in LOST if it in row), None) if tells_lost else None
        lost = lost[0] if isinstance(lost, list) else lost
        return f"{text(row.get(column), form)}{f' for {lost:.3f}' if lost else ''}"

    columns = {
        at: [cell(at, *of) for of in chosen.values()] for at in sorted({at for _, at, _ in found})
    }
    columns = {at: of for at, of in columns.items() if any(of)}
    return table(["", *columns], [list(row) for row in zip(chosen, *columns.values(), strict=True)])


def pooled(found: Sequence[Sequence[float]]) -> list[float] | None:
    """The weighted mean of values with both ends of their intervals, and its interval."""
    weights = [(2 * 1.96 / (high - low)) ** 2 for _, low, high in found]
    if not weights:
        return None
    mean = sum(w * value for w, (value, *_) in zip(weights, found, strict=True)) / sum(weights)
    half = 1.96 / sum(weights) ** 0.5
    return [mean, mean - half, mean + half]


def effects() -> Iterable[str]:
    """The lines of the table of what bounds do to text, and what it could have seen."""
    names = dict.fromkeys(name for of in POOLED.values() for line in of for name, _ in line)
    known = {(name, heading, rule): row for name in names for heading, rule, row in cells(name)}
    bounds = "0.02", "0.05"

    def values(column: str, at: str, rule: str) -> list[list[float]]:
        """The cells of a column that are pooled, at one temperature or at all."""
        lines = [line for name, of in POOLED.items() if at in (name, ALL) for line in of]
        rows = (
            next((known[*it, rule] for it in line if (*it, rule) in known), {}) for line in lines
        )
        return [row[column] for row in rows if isinstance(row.get(column), list)]

    body: list[list[str]] = []
    for title, (column, form, shown) in EFFECTS.items():
        body += [[f"**{title}**", *[""] * (len(bounds) + 1)]] if len(shown) > 1 else []
        for at in shown:
            found = {of: pooled(values(column, at, f"mars_max_loss {of}")) for of in bounds}
            seen = found["0.02"]
            power = f"{(seen[2] - seen[0]) / 1.96 * FOUND:{form.lstrip('+')}}" if seen else ""
            name = at if len(shown) > 1 else f"**{title}**, {at}"
            body.append([name, *(text(found[of], form) for of in bounds), power])
    return table(["", *bounds, "0.02 would show"], body)


def headline() -> Iterable[str]:
    """The lines of README's table: a row for each temperature."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for heading, rule, row in cells("states"):
        # The first is of four probabilistic drafts.
        found.setdefault((heading.split(", ")[0], rule), row)
    body = []
    for at in dict.fromkeys(at for at, _ in found):
        strict, own = found[at, "strict"], found[at, TODAY]
        shown = strict[DEFAULT], own["x strict"], own[DEFAULT]
        body.append([at, *(text(it, ".2f") for it in shown), text(own["nats per token"][0], ".3f")])
    titles = ["lossless / vLLM's default", "MARS / lossless", "MARS / vLLM's default"]
    return table(["requests", *titles, "nats lost per token"], body)


def index() -> dict[str, dict[str, Any]]:
    """What index.json says of each file: `tells`, `of`, and maybe `stale`."""
    path = RESULTS / "index.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def lines(name: str, view: str, directory: Path) -> Iterable[str]:
    """The lines of a table and of where it comes from.

    Args:
        name: of the file of figures.
        view: which of its columns, "" for all.
        directory: of the page, for the link.
    """
    names = [name]
    if name in ACROSS:
        names = [*dict.fromkeys(of for of, *_ in ACROSS[name][1].values())]
        yield from across(*ACROSS[name])
    elif name == "headline":
        names = ["states"]
        yield from headline()
    elif name == "effects":
        names = [*dict.fromkeys(name for at in POOLED.values() for line in at for name, _ in line)]
        yield from effects()
    else:
        given = read(name)
        yield from table_of(given["columns"], given["rows"], view)
    path = RESULTS / (f"{names[0]}.json" if len(names) == 1 else "README.md")
    told = sources(run for of in names for run in read(of)["runs"])
    # Of reading.json it shows rules without a price, which a change of the price does not touch.
    said = "" if name == "theta" else notes(names)
    yield ""
    yield f"[Commands and figures]({os.path.relpath(path, directory)}); {told}.{said}"


def sources(runs: Iterable[dict[str, Any]]) -> str:
    """The commits and machines of runs."""
    commits: dict[str, dict[str, None]] = {}
    for run in runs:
        commits.setdefault(machine(run), {})[landed(run["git_commit"])[:7]] = None
    told = ", ".join(f"{', '.join(of)} ({where})" for where, of in commits.items())
    return f"commit {told}"


def landed(commit: str) -> str:
    """The commit, or the first in the history that has the code which was measured."""
    return LANDED if commit[:7] in LOST_COMMITS else commit.removesuffix("-dirty")


def notes(names: Iterable[str]) -> str:
    """What a reader of files' tables has to know: that they are of something before today's."""
    known = index()
    told = dict.fromkeys(known[name]["stale"] for name in names if known.get(name, {}).get("stale"))
    return "".join(f" **{it}**" for it in told)


def all_tables() -> str:
    """A section for each file that is a table: what the site shows behind the list."""
    told: list[str] = []
    for name, of in index().items():
        if "columns" not in json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")):
            continue
        columns = read(name)["columns"]
        views = dict.fromkeys(view for _, _, *own in columns for view in " ".join(own).split())
        told += [f"## {name}", "", of["tells"], ""]
        for view in views or [""]:
            told += [*lines(name, view, RESULTS), ""]
    return "\n".join(told)


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


def main() -> int:
    """Writes the pages whose tables differ; returns 1 after an error."""
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
