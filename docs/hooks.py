"""The files of the site: the repository's own, at the paths that they have there, and KaTeX.

So one link serves the site and a checkout alike, from a page to the README or to a raw result. Two
pages have more on the site: the tables of all raw results, and the docstrings of the API. Nothing
of the site comes from another server when it is read.
"""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ALL_TABLES = "benchmarks/results/README.md"
PAGES = ("*.md", "docs/*.md", "benchmarks/*/README.md", "findings/README.md")
TARGET = re.compile(r"\]\(([^)#\s]+)|srcset=\"([^\"]+)\"")
# As a table of figures has it.
INTERVAL = re.compile(r"\([−+]?[\d.]+(?:–| to )[−+]?[\d.]+\)(?=[^<]*</td>)")
# It typesets the formulas. npm brings it once; nothing of it is in the repository.
KATEX = "katex@0.19.1"
KATEX_FOLDER = ROOT / "build" / KATEX
# Of its package: a browser takes the first kind of font that it knows.
KATEX_FILE = re.compile(r"package/dist/(katex\.min\.(?:css|js)|fonts/.*\.woff2)|package/(LICENSE)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the version behind the name of the site."""
    version = re.search(r'"(.+)"', (ROOT / "vllm_mars/__init__.py").read_text().split("version")[1])
    assert version is not None, "the package has a version"
    config.site_name += f" {version[1]}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces what MkDocs found by the pages, the style, and every file that a page links to.

    Args:
        files: what is in `docs_dir`, and the theme's own.
        config: of mkdocs.yml.
    """
    pages = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
    targets = {
        Path(os.path.normpath(page.parent / (link or source)))
        for page in pages
        for link, source in TARGET.findall(page.read_text(encoding="utf-8"))
    }
    # The tables of raw results are written later, with links to these.
    targets.update((ROOT / ALL_TABLES).parent.glob("*.json"))
    targets.update(
        ROOT / name
        for name in map(str, (*config.extra_css, *config.extra_javascript))
        if not name.startswith("katex/")
    )
    linked = sorted(path for path in targets.difference(pages) if path.is_file())

    def file(path: Path, folder: Path) -> File:
        name = path.relative_to(folder).as_posix()
        return File(name, str(folder), config.site_dir, config.use_directory_urls)

    ours = [file(path, ROOT) for path in (*pages, *linked)]
    ours += [file(path, KATEX_FOLDER) for path in _katex()]
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *ours])


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Adds what the site alone has: the tables of raw results, and the docstrings of the API."""
    sys.path.insert(0, str(ROOT))
    from benchmarks import figures, reference

    if page.file.src_uri == ALL_TABLES:
        markdown = f"{markdown}\n\n{figures.all_tables()}"
    return reference.shown(markdown)


def on_page_content(html: str, **_: object) -> str:
    """Keeps each interval of a table on one line, below its value where room is short."""
    return INTERVAL.sub(r'<span class="interval">\g<0></span>', html)


def _katex() -> list[Path]:
    """KaTeX's files in build/, fetched by npm if they are not there.

    Raises:
        PluginError: npm is missing or failed.
    """
    folder = KATEX_FOLDER / "katex"
    if not folder.is_dir():
        KATEX_FOLDER.mkdir(parents=True, exist_ok=True)
        pack = ["npm", "pack", "--silent", "--pack-destination", str(KATEX_FOLDER), KATEX]
        try:
            run = subprocess.run(pack, capture_output=True, text=True, check=True, cwd=ROOT)
        except (OSError, subprocess.CalledProcessError) as error:
            told = getattr(error, "stderr", "") or error
            raise PluginError(
                f"{KATEX}, which typesets the formulas, could not be fetched: {str(told).strip()}; "
                "install Node.js, whose npm fetches it, and build again."
            ) from None
        # Under another name until all of it is there.
        part = KATEX_FOLDER / "part"
        with tarfile.open(KATEX_FOLDER / run.stdout.split()[-1]) as archive:
            for member in archive.getmembers():
                if found := KATEX_FILE.fullmatch(member.name):
                    path = part / (found[1] or found[2])
                    path.parent.mkdir(parents=True, exist_ok=True)
                    content = archive.extractfile(member)
                    assert content is not None, "npm packs plain files"
                    path.write_bytes(content.read())
        part.replace(folder)
    return sorted(path for path in folder.rglob("*") if path.is_file())
