"""Writes the tables of README.md and docs/.

    make figures        # a test compares

A table is between `<!-- figures: NAME -->` and `<!-- /figures -->`. Its columns, rows and runs are
in benchmarks/results/NAME.json. A cell is a text, a number, a number with the ends of its interval,
or null; a row of one cell is a heading. A column has a title, the format of its numbers (null hides
it) and maybe the views that show it: `<!-- figures: NAME gain -->` is the view `gain`.

Tables computed from a file's rows are `headline`, `bounds` and `drafts` (`BY_SETTING`),
`answers` and `theta` (`ACROSS`), and `effects`, which pools rows of one question by inverse
variance, as if they were independent, without temperature 0.4, at which a bound gains little.

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
BOUND = "mars_max_loss 0.02"
GAIN, ENDED = "tokens per step x strict", "where answers ended"
# Tables with a row per setting and a column per rule: the files, the rules by column title, and a
# pattern of settings to omit.
BY_SETTING: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "headline": (
        ("states", "pair-states"),
        {"MARS / lossless, nats lost per token": "bound 0.02"},
        "fixed|K 8|0.4",
    ),
    "bounds": (
        ("states", "pair-states"),
        {f"bound {bound}": f"bound {bound}" for bound in ("0.005", "0.02", "0.05")},
        "",
    ),
    "drafts": (
        ("drafts",),
        {
            "strict, new drafts": "strict, drafts under the request's parameters",
            "bound 0.02, vLLM's drafts": "bound 0.02",
            "bound 0.02, new drafts": "bound 0.02, drafts under the request's parameters",
            "and at 0.85 of the temperature": "bound 0.02, drafts at 0.85 of the temperature",
        },
        "",
    ),
}
# Model names in headings; the packaged model has none.
MODELS = {"qwen2.5-coder-1.5b-instruct": "Qwen2.5-Coder-1.5B", "": "SmolLM2-135M"}
# Tables with a column per temperature: the format of a gain; by row title the file, the rules, of
# which each temperature shows the first that it has, and the column.
ACROSS: dict[str, tuple[str, dict[str, tuple[str, tuple[str, ...], str]]]] = {
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
# Columns of a rule's loss, and the temperature in a heading.
LOST = "nats lost per token", "nats per token"
TEMPERATURE = re.compile("greedy|temperature")
# Rows to pool, by temperature, as files and headings. In each list the first with the rule counts:
# 61 of the 91 prompts are among the 348, and their greedy answers are the same without a seed.
POOLED: dict[str, list[list[tuple[str, str]]]] = {
    "greedy": [[("ends", "greedy"), ("reading", "greedy")], [("reading8", "greedy")]],
    **{
        temperature: [[(name, temperature)] for name in ("ends", "reading", "reading8")]
        for temperature in ("temperature 0.7", "temperature 1")
    },
}
# Pooled columns by title: the column, its format and the temperatures to show. A difference of
# repeated 4-grams has another meaning at each temperature.
ALL = "all three"
EFFECTS = {
    "ended, points": ("ended less strict's, points", "+.1f", (*POOLED, ALL)),
    "length, x strict": ("length x strict", ".3f", (ALL,)),
    "repeated 4-grams": ("repeated 4-grams less strict's", "+.3f", tuple(POOLED)),
    "NLL less entropy": ("NLL less entropy", "+.3f", (ALL,)),
}
# Difference that is detected with 80% power, in standard errors.
FOUND = 1.96 + 0.84


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


def across(form: str, chosen: dict[str, tuple[str, tuple[str, ...], str]]) -> Iterable[str]:
    """Returns the lines of a table with a column for each temperature at which a row has a cell.

    If the table compares rules, a gain is followed by the loss, if known.
    """
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name in {name for name, *_ in chosen.values()}:
        for heading, rule, row in cells(name):
            at = next((part for part in heading.split(", ") if TEMPERATURE.match(part)), "")
            rows.setdefault((name, at, rule), row)
    shows_loss = len({rules for _, rules, _ in chosen.values()}) > 1

    def cell(at: str, name: str, rules: tuple[str, ...], column: str) -> str:
        row = next((rows[name, at, rule] for rule in rules if (name, at, rule) in rows), {})
        return gain_and_loss(row, column, form) if shows_loss else text(row.get(column), form)

    columns = {
        at: [cell(at, name, rules, column) for name, rules, column in chosen.values()]
        for at in sorted({at for _, at, _ in rows})
    }
    columns = {at: column for at, column in columns.items() if any(column)}
    return table(["", *columns], [list(row) for row in zip(chosen, *columns.values(), strict=True)])


def by_setting(names: Iterable[str], rules: dict[str, str], omitted: str = "") -> Iterable[str]:
    """Returns the lines of a table of gains over strict, each followed by the loss if there is one.

    It has a row for each model and each heading of the files, and a column for each rule.
    """
    headings: dict[str, dict[str, dict[str, Any]]] = {}
    for name in names:
        for heading, rule, row in cells(name):
            headings.setdefault(heading, {})[rule] = row

    bodies: dict[str, list[list[str]]] = {model: [] for model in MODELS}
    for heading, by_rule in headings.items():
        if omitted and re.search(omitted, heading):
            continue
        first, _, rest = heading.partition(", ")
        model, setting = ("", heading) if TEMPERATURE.match(first) else (first, rest)
        setting = setting.replace(", probabilistic drafts", "").replace(", K 4", "")
        gains = (gain_and_loss(by_rule.get(rule, {}), "x strict", ".3f") for rule in rules.values())
        bodies[model].append([setting, *gains])
    body = [
        row
        for model, rows in bodies.items()
        for row in ([[f"**{MODELS[model]}**", *[""] * len(rules)], *rows] if rows else [])
    ]
    return table(["", *rules], body)


def pooled(estimates: Sequence[Sequence[float]]) -> list[float] | None:
    """Pools values with their intervals by inverse variance."""
    weights = [(2 * 1.96 / (high - low)) ** 2 for _, low, high in estimates]
    if not weights:
        return None
    mean = sum(w * value for w, (value, *_) in zip(weights, estimates, strict=True)) / sum(weights)
    half = 1.96 / sum(weights) ** 0.5
    return [mean, mean - half, mean + half]


def pooled_files() -> list[str]:
    names = (name for lists in POOLED.values() for keys in lists for name, _ in keys)
    return [*dict.fromkeys(names)]


def effects() -> Iterable[str]:
    """Returns the table of the effects of bounds on text, with the detectable difference."""
    names = pooled_files()
    known = {(name, heading, rule): row for name in names for heading, rule, row in cells(name)}
    bounds = "0.02", "0.05"

    def values(column: str, at: str, rule: str) -> list[list[float]]:
        """Returns the cells of a column to pool, at one temperature or all."""
        alternatives = [keys for name in POOLED if at in (name, ALL) for keys in POOLED[name]]
        rows = (
            next((known[*key, rule] for key in keys if (*key, rule) in known), {})
            for keys in alternatives
        )
        return [row[column] for row in rows if isinstance(row.get(column), list)]

    body: list[list[str]] = []
    for title, (column, form, shown) in EFFECTS.items():
        body += [[f"**{title}**", *[""] * (len(bounds) + 1)]] if len(shown) > 1 else []
        for at in shown:
            means = {
                bound: pooled(values(column, at, f"mars_max_loss {bound}")) for bound in bounds
            }
            mean = means["0.02"]
            power = f"{(mean[2] - mean[0]) / 1.96 * FOUND:{form.lstrip('+')}}" if mean else ""
            name = at if len(shown) > 1 else f"**{title}**, {at}"
            body.append([name, *(text(means[bound], form) for bound in bounds), power])
    return table(["", *bounds, "0.02 would show"], body)


def index() -> dict[str, dict[str, Any]]:
    path = RESULTS / "index.json"
    entries: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return entries


def lines(name: str, view: str, directory: Path) -> Iterable[str]:
    """Yields the lines of a file's or computed table and of its source.

    `view` is "" for all columns; the link is relative to the page's `directory`.
    """
    names: Sequence[str] = [name]
    if name in ACROSS:
        form, chosen = ACROSS[name]
        names = [*dict.fromkeys(file for file, *_ in chosen.values())]
        yield from across(form, chosen)
    elif name in BY_SETTING:
        names, rules, omitted = BY_SETTING[name]
        yield from by_setting(names, rules, omitted)
    elif name == "effects":
        names = pooled_files()
        yield from effects()
    else:
        content = read(name)
        yield from table_of(content["columns"], content["rows"], view)
    path = RESULTS / (f"{names[0]}.json" if len(names) == 1 else "README.md")
    source = sources(run for file in names for run in read(file)["runs"])
    # `theta` shows rules without a price, to which the note about the price does not apply.
    note = "" if name == "theta" else notes(names)
    yield ""
    yield f"[Commands and figures]({os.path.relpath(path, directory)}); {source}.{note}"


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
