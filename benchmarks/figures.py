"""Writes the tables of figures in README.md, CONTRIBUTING.md and docs/ out of the raw files.

    make figures        # a test compares

A table stands between the lines `<!-- figures: NAME -->` and `<!-- /figures -->`, with NAME one of
`benchmarks.tables.TABLES`.
"""

import re
import sys
from pathlib import Path

from benchmarks.tables import TABLES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MARK = re.compile(r"^<!-- /?figures", re.MULTILINE)
PLACE = re.compile(
    r"^(<!-- figures: (\S+) -->)\n(?:.*?\n)??(<!-- /figures -->)$", re.DOTALL | re.MULTILINE
)


def written(page: str) -> str:
    """A page with its tables as the raw files have them.

    Raises:
        ValueError: a mark is not closed, or names no table.
    """
    names = [place[2] for place in PLACE.finditer(page)]
    if 2 * len(names) != len(MARK.findall(page)):
        raise ValueError("`<!-- figures: NAME -->` and `<!-- /figures -->` do not go together.")
    if unknown := set(names) - TABLES.keys():
        raise ValueError(f"{', '.join(unknown)} is not one of {', '.join(TABLES)}.")
    return PLACE.sub(lambda at: "\n".join((at[1], *TABLES[at[2]](), at[3])), page)


def main() -> int:
    """Writes the pages whose tables differ; returns 1 if a page has a wrong mark."""
    for page in PAGES:
        name, before = page.relative_to(ROOT), page.read_text(encoding="utf-8")
        try:
            after = written(before)
        except ValueError as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            return 1
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"{name} has new figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
