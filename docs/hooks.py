"""The files of the site: the repository's own, at the paths that they have there.

So one link serves the site and a checkout alike, from a page to the README or to a raw result.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/*.md", "docs/*/README.md", "benchmarks/*/README.md")
TARGET = re.compile(r"\]\(([^)#\s]+)")
# What mkdocstrings fills in stands in comments, which a checkout does not show.
DOCSTRING = re.compile(r"^<!-- (::: .*?) -->$", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces what MkDocs found by the pages, the style, and every file that a page links to.

    Args:
        files: what is in `docs_dir`, and the theme's own.
        config: of mkdocs.yml.
    """
    pages = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
    targets = {
        Path(os.path.normpath(page.parent / target))
        for page in pages
        for target in TARGET.findall(page.read_text(encoding="utf-8"))
    }
    targets.update(ROOT / str(name) for name in config.extra_css)
    linked = sorted(path for path in targets.difference(pages) if path.is_file())
    ours = [
        File(
            path.relative_to(ROOT).as_posix(),
            str(ROOT),
            config.site_dir,
            config.use_directory_urls,
        )
        for path in (*pages, *linked)
    ]
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *ours])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Uncovers what mkdocstrings fills in."""
    return DOCSTRING.sub(r"\1\n", markdown)
