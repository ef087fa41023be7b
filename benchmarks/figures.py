"""Writes the tables of README.md, docs/ and benchmarks/.

    make figures        # a test compares

A table stands between `<!-- figures: NAME -->` and `<!-- /figures -->`. It comes from a sweep,
benchmarks/results/NAME.jsonl, or from columns, rows and the runs that gave them in NAME.json. There
a cell is a text, a number, a number with both ends of its interval, or null, and a row of one cell
is a heading. A column's second entry is the format of its numbers, or null if no table shows it;
its third, if there is one, says which do: `<!-- figures: NAME gain -->` shows those of `gain`. Of a
sweep `NAME examples` shows two answers, and `NAME lengths` how fast each K is.

Out of other files are `headline`, README's; `bounds`, `beside` and `leans`, of `ACROSS`; and
`effects`, what rows of one question say together: their mean, weighted by one over the squared
standard error, as if they were independent. These leave out what `COOL` names, and `effects` the
lowest bound; `effects all` does not.
`<!-- figures: api NAME -->` is what the docstring of NAME says.
"""

import html
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import reference
from vllm_mars.experiments import examples
from vllm_mars.experiments.records import Piece, SweepFile, read_sweep
from vllm_mars.experiments.rows import heat, rows, tables, turned, without_times
from vllm_mars.local.prompts import load_prompts

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
SCHEMA = "vllm-mars/figures/1"
MARK = re.compile(r"^<!-- /?figures", re.MULTILINE)
PLACE = re.compile(
    r"^(<!-- figures: (\S+)(?: (\S+))? -->)\n(?:.*?\n)??(<!-- /figures -->)$",
    re.DOTALL | re.MULTILINE,
)
# What the README and the results leave to the README of the raw files.
COOL = "temperature 0.4"
BOUND = "mars_max_loss 0.02"
# README's table: what is free, of these rules, and what the bound adds to it, of that one.
DEFAULT, TODAY = "standard, fixed drafts", "bound 0.02"
HEADLINE = "reading", "states"
# Tables with a column for each temperature: the file, the format of a gain, and by a row's title
# which of the file's rows it shows, of several names the one under the temperature.
ACROSS: dict[str, tuple[str, str, dict[str, tuple[str, ...]]]] = {
    "bounds": (
        "reading",
        ".2f",
        {
            "`standard`, fixed drafts: vLLM as it comes": ("standard, fixed drafts",),
            "best lossless setting": ("strict",),
            "MARS, a bound of 0.005": ("mars_max_loss 0.005",),
            "**MARS, a bound of 0.02**": (BOUND,),
            "the same, where answers ended": (BOUND,),
            "MARS, a bound of 0.05": ("mars_max_loss 0.05",),
            "theta 0.9, fixed drafts": ("mars_theta 0.9, fixed drafts",),
        },
    ),
    "beside": (
        "rivals",
        ".3f",
        {
            "`fly`, its defaults, fixed drafts": (
                *("`fly`, its defaults, fixed drafts", "`fly`, its defaults"),
            ),
            "theta 0.96, fixed drafts": ("theta 0.96", "theta 0.96, fixed drafts"),
            "ASD": ("ASD (budget 8, local ratio 0.25, 2 mismatches)",),
            "AdaptiveSpec": ("AdaptiveSpec's first mismatch, p / p1 ≥ 0.61",),
        },
    ),
    "leans": (
        "tokens",
        ".3f",
        {
            kind: (kind,)
            for kind in (
                *("2-grams again", "3-grams again", "4-grams again"),
                *("sentence ends", "line breaks", "capitals"),
            )
        },
    ),
}
# Where these tables find what a rule gains, loses, and what one price gains at that loss.
GAIN = "tokens per step x strict", "K 4: tokens per step", "served / target, by a forward pass"
ENDED = "where answers ended"
LOST = "nats lost per token", "K 4: nats per token"
PRICE = ("K 4: a price at this loss",)
# Rows that answer one question, by temperature: files and the headings there. Of one line the first
# that has the rule counts, since greedily the same prompts get the same answers.
POOLED: dict[str, list[list[tuple[str, str]]]] = {
    "greedy": [[("ends", "greedy"), ("reading", "greedy")], [("reading8", "greedy")]],
    **{
        heat: [[(name, heat)] for name in ("ends", "reading", "reading8")]
        for heat in ("temperature 0.4", "temperature 0.7", "temperature 1")
    },
}
# What is pooled: the column, its format, and which rows of it stand in the table. A difference of
# repeated 4-grams does not mean the same at all temperatures.
ALL = "all temperatures"
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


def cells(name: str) -> Iterable[tuple[str, str, dict[str, Any]]]:
    """The rows of a file: the heading above it, its rule, and its cells by the columns' titles."""
    found, heading = read(name), ""
    titles = [title for title, *_ in found["columns"]]
    for row in found["rows"]:
        if len(row) == 1:
            heading = row[0]
        else:
            yield heading, row[0], dict(zip(titles, row, strict=True))


def across(name: str, form: str, chosen: dict[str, tuple[str, ...]]) -> Iterable[str]:
    """The lines of a table with a column for each temperature: what a rule gains, for what loss."""
    found = {(heading.split(", ")[-1], rule): row for heading, rule, row in cells(name)}
    headings = list(dict.fromkeys(heading for heading, _ in found if heading != COOL))

    def cell(heading: str, title: str, rules: tuple[str, ...]) -> str:
        row = next((found[heading, rule] for rule in rules if (heading, rule) in found), {})
        gain, price = (
            next((row[title] for title in titles if title in row), None) for titles in (GAIN, PRICE)
        )
        lost = next((row[title] for title in LOST if title in row), 0)
        if title.endswith(ENDED):
            return text(row.get(ENDED), form)
        if not row or gain is None:
            return "1" if row else ""
        lost = lost[0] if isinstance(lost, list) else lost
        told = text(gain, form)
        told += f" for {lost:.3f}" if lost else "" if lost == 0 else " for an unknown loss"
        return f"{told}; a price {price[0]:{form}}" if price else told

    body = [
        [title, *(cell(at, title, rules) for at in headings)] for title, rules in chosen.items()
    ]
    return table(["", *headings], body)


def pooled(found: Sequence[Sequence[float]]) -> list[float] | None:
    """The weighted mean of values with both ends of their intervals, and its interval."""
    weights = [(2 * 1.96 / (high - low)) ** 2 for _, low, high in found]
    if not weights:
        return None
    mean = sum(w * value for w, (value, *_) in zip(weights, found, strict=True)) / sum(weights)
    half = 1.96 / sum(weights) ** 0.5
    return [mean, mean - half, mean + half]


def effects(view: str = "") -> Iterable[str]:
    """The lines of the table of what bounds do to text, and what it could have seen."""
    names = dict.fromkeys(name for of in POOLED.values() for line in of for name, _ in line)
    known = {(name, heading, rule): row for name in names for heading, rule, row in cells(name)}
    bounds = ["0.005", "0.02", "0.05"][not view :]

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
        for at in (at for at in shown if view or at != COOL):
            found = {of: pooled(values(column, at, f"mars_max_loss {of}")) for of in bounds}
            seen = found["0.02"]
            power = f"{(seen[2] - seen[0]) / 1.96 * FOUND:{form.lstrip('+')}}" if seen else ""
            name = at if len(shown) > 1 else f"**{title}**, {at}"
            body.append([name, *(text(found[of], form) for of in bounds), power])
    return table(["", *bounds, "0.02 would show"], body)


def headline() -> Iterable[str]:
    """The lines of README's table: a row for each temperature.

    The best lossless setting over vLLM's default is of other prompts than MARS over that setting,
    so what both gain together is their product.
    """
    whole, same = (list(cells(name)) for name in HEADLINE)
    plain = {at: row["tokens per step x strict"] for at, rule, row in whole if rule == DEFAULT}
    body = []
    for heading, rule, row in same:
        if rule != TODAY:
            continue
        at, gain = heading.split(",")[0], row["x strict"]
        over = plain.get(at)
        free = [1.0, 1.0, 1.0] if over == 1 else over and [1 / over[of] for of in (0, 2, 1)]
        both = free and _product(free, gain)
        shown = (text(cell, ".2f") for cell in (free if over != 1 else 1.0, gain, both))
        body.append([at, *shown, text(row["nats per token"][0], ".3f")])
    titles = ["lossless / vLLM's default", "MARS / lossless", "MARS / vLLM's default"]
    return table(["requests", *titles, "nats lost per token"], sorted(body))


def _product(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """The product of two independent ratios, with its interval: logarithms' errors add up."""
    product = one[0] * other[0]
    upper, lower = (
        math.hypot(math.log(one[at] / one[0]), math.log(other[at] / other[0])) for at in (2, 1)
    )
    return [product, product * math.exp(-lower), product * math.exp(upper)]


def lines(name: str, view: str, directory: Path) -> Iterable[str]:
    """The lines of a table and of where it comes from; a sweep has one for each temperature.

    Args:
        name: of the file of figures.
        view: which of its columns, "" for all; of a sweep one of `VIEWS`; of "api" a name.
        directory: of the page, for the link.
    """
    path = RESULTS / f"{name}.jsonl"
    if name == "api":
        yield from reference.lines(view)
        return
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
    elif name in ACROSS:
        path, runs = RESULTS / f"{ACROSS[name][0]}.json", read(ACROSS[name][0])["runs"]
        yield from (*across(*ACROSS[name]), "")
    elif name == "effects":
        of = dict.fromkeys(name for at in POOLED.values() for line in at for name, _ in line)
        path, runs = RESULTS / "README.md", [run for name in of for run in read(name)["runs"]]
        yield from (*effects(view), "")
    elif name == "headline":
        path, runs = RESULTS / "README.md", [run for name in HEADLINE for run in read(name)["runs"]]
        yield from (*headline(), "")
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
