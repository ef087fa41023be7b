"""Pages: the site builds, links lead somewhere, commands run, figures and pictures are current."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks import figures, pictures
from vllm_mars.cli import __main__ as cli
from vllm_mars.lab.plan import SweepOptions
from vllm_mars.options.config import (
    DRAWN_PRICE,
    FIXED_PRICE,
    price_of_bound,
    split_speculative_config,
)
from vllm_mars.releases import RELEASES

ROOT = Path(__file__).parents[1]
# Commands within a sentence.
INLINE = re.compile(
    r"`((?:\.venv/bin/|[A-Z_]+=\S+ )?(?:vllm-mars|make|pip install|python -m) (?!\d)[^`\n]+)`"
)
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "benchmarks/results/*.md", "vllm_mars/**/README.md")
    for path in ROOT.glob(pattern)
)
SETUP = (ROOT / "setup.py").read_text()


def test_the_site_builds(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    # Files outside docs/ to which pages link have the same path as in a checkout.
    raw = "benchmarks/results/kernel.json"
    assert f'href="../{raw}"' in (tmp_path / "docs/kernel.html").read_text()
    assert (tmp_path / raw).read_bytes() == (ROOT / raw).read_bytes()
    # Two pages have generated content.
    assert '<h2 id="kernel">' in (tmp_path / "benchmarks/results/index.html").read_text()
    assert "max_draft_len" in (tmp_path / "docs/api.html").read_text()
    # Formulas are typeset by the site's files.
    rule = (tmp_path / "docs/rule.html").read_text()
    assert '<div class="arithmatex">' in rule and '"../katex/katex.min.js"' in rule
    assert (tmp_path / "katex/fonts/KaTeX_Math-Italic.woff2").is_file()
    assert not re.search(r'(?:src|href)="(?:https?:)?//[^"]*\.(?:js|css|woff2?)"', rule)
    assert '<div class="admonition warning">' in (tmp_path / "index.html").read_text()
    results = (tmp_path / "docs/results.html").read_text()
    assert re.search(r'>[\d.]+ <span class="interval">\([\d.–]+\)</span></td>', results)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_current(name):
    picture = str(pictures.PICTURES[name]())
    assert (ROOT / "docs" / name).read_text() == picture, "run `make figures`"


def test_the_call_on_the_page_of_the_api():
    page = (ROOT / "docs/api.md").read_text()
    name, code = re.search(r"```python\n# (\S+)\n(.*?)```", page, re.S).groups()
    printed = re.search(r"```text\n(.*?)```", page, re.S)[1]
    assert (ROOT / name).read_text().endswith(f'"""\n\n{code}')
    # As if neither vLLM nor Triton were installed.
    absent = "import sys\nsys.modules |= {'vllm': None, 'triton': None}\n"
    run = subprocess.run(
        [sys.executable, "-c", absent + code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.stdout == printed, run.stderr


def test_the_prices_of_a_bound():
    """Checks the table of prices in how-it-works.md."""
    page = (ROOT / "docs/how-it-works.md").read_text()
    assert f"here {price_of_bound(0.02, 0, False):.3f} nats" in page
    assert f"| greedy | {FIXED_PRICE:g} √b | {price_of_bound(0.02, 0, False):.2f} |" in page
    for factor, is_probabilistic in ((FIXED_PRICE, False), (DRAWN_PRICE, True)):
        prices = (
            f"{price_of_bound(0.02, temperature, is_probabilistic):.2f} at T {temperature:g}"
            for temperature in (1, 0.7, 0.4)
        )
        assert f"{factor:g} √(b / T) | {', '.join(prices)} |" in page


def scripts():
    """Yields each complete Python script of a page."""
    for page in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")]):
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
            if block.startswith(("import ", "from ")):
                yield pytest.param(block, id=page.stem)


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", scripts())
def test_an_example_runs_as_a_file(packaged_model, tmp_path, script):
    """On a CPU vLLM spawns processes that import the file."""
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert name in script
    (file := tmp_path / "example.py").write_text(script.replace(name, str(packaged_model)))
    env = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    run = subprocess.run(
        [sys.executable, file], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].strip()


def anchors(page):
    """Returns GitHub's anchors of a page's headings, and explicit ids."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    plain = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower() for heading in headings)
    slugs = {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in plain}
    return slugs | set(re.findall(r'id="(.+?)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_link_to_a_heading_works_in_a_checkout(page):
    """`make docs` adds headings that a checkout lacks."""
    for path, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text()):
        assert anchor in anchors(page.parent / path if path else page), (path, anchor)


def test_prose_says_that_its_figures_are_old():
    """Like the notes below tables. The figures on the paper's page do not depend on a price."""
    stale = {name for name, entry in figures.index().items() if "stale" in entry}
    for page in PAGES:
        text = figures.PLACE.sub("", page.read_text())
        for passage in re.split(r"\n\n|\n- ", text):
            linked = set(re.findall(r"results/([\w-]+)\.json\)", passage))
            if page.stem != "paper" and linked & stale:
                assert re.search(r"\b(older|earlier)\b", passage), passage


def commands():
    """Yields each command on a page, as a list of words."""
    for page in PAGES:
        text = page.read_text()
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S) + INLINE.findall(text):
            lines = block.splitlines(keepends=True)
            while lines:
                command = lines.pop(0)
                # A quotation or a backslash continues in the next line.
                while lines and (command.endswith("\\\n") or command.count("'") % 2):
                    command += lines.pop(0)
                words = shlex.split(command.replace("\\\n", ""), comments=True)
                if words:
                    yield pytest.param(page, words, id=f"{page.stem}: {' '.join(words[:3])}")


def parse_sweep(words):
    """Parses arguments of `vllm-mars`."""
    args = cli._parser().parse_args(words)
    for path in getattr(args, "prompts", None) or ():
        # A file of this repository, of a clone next to it, or of the user.
        assert (ROOT / path).is_file() or path.startswith("../") or "/" not in path, path
    return args


def serve(words):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", *words])
    config, _ = split_speculative_config(args.speculative_config)
    assert config is not None


def make(words):
    # Without the variables of `make test ARGS=...`.
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "ARGS"))
    }
    dry = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, env=env)
    assert dry.returncode == 0, dry.stderr
    for swept in re.findall(r"vllm-mars (sweep .*?)\|\|", dry.stdout, re.S):
        assert parse_sweep(shlex.split(swept.replace("\\\n", ""))).methods[-1] == "mars"


def pip_install(words):
    extras = set(re.findall(r'^        "(\w+)": ', SETUP, re.M))
    for word in words:
        if named := re.fullmatch(r"\.\[(.+)\]", word):
            assert set(named[1].split(",")) <= extras, word


def serve_run(words):
    """Reads the source, because Ray's module cannot be imported with every vLLM."""
    application, *options = words
    assert application == "vllm_mars.ray_serve:app"
    text = (ROOT / "vllm_mars/ray_serve.py").read_text()
    for option in options:
        assert re.search(rf"^    {option.partition('=')[0]}: ", text, re.M), option


# Checks of commands without a GPU or a network; only the files of other projects' commands (None)
# are checked.
CHECKS = {
    "vllm-mars": parse_sweep,
    "vllm serve": serve,
    "make": make,
    "pip install": pip_install,
    "serve run": serve_run,
    **dict.fromkeys(("docker", "kubectl", "curl", "ps", "kill", "python3 -m venv"), None),
}


@pytest.mark.parametrize(("page", "words"), commands())
def test_a_command_is_valid(page, words):
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    # Installed by `make`, or by a `pip install` of the page.
    if words[0].startswith(".venv/bin/"):
        words = [words[0].removeprefix(".venv/bin/"), *words[1:]]
    elif words[0] in ("vllm-mars", "vllm") and f"`{' '.join(words)}`" not in page.read_text():
        here = r"\. \.venv/bin/activate|^pip install '\.\[(cuda|experiments)"
        assert re.search(here, page.read_text(), re.M), "the page does not install it"
    for word in words:
        if re.match(r"(docs|examples|tests|vllm_mars|benchmarks)/", word):
            assert (ROOT / word).exists(), word
    command = " ".join(words)
    begin = next((prefix for prefix in CHECKS if command.startswith(f"{prefix} ")), None)
    if begin is None:
        script = words[words[0] == "python"]
        if script == "-m":
            assert importlib.util.find_spec(words[2]), command
        else:
            assert (ROOT / script).is_file(), f"{command} is not among CHECKS"
    elif check := CHECKS[begin]:
        check(words[len(begin.split()) :])


def test_pages_name_one_release_and_one_draft_length():
    """The release that a GPU's user installs, and the length of `make gpu`."""
    (allowed,) = re.findall(r'"cuda": \["(.+)"\]', SETUP)
    newest = RELEASES[-1]
    beyond = "{}.{}".format(*newest.split(".")[:1], int(newest.split(".")[1]) + 1)
    assert str(Requirement(allowed).specifier) == f"<{beyond},>={RELEASES[0]}"
    form = (ROOT / ".github/ISSUE_TEMPLATE/validated-configuration.yml").read_text()
    quickstart = (ROOT / "docs/quickstart.md").read_text()
    for text in (form, quickstart, (ROOT / ".ci/run").read_text()):
        assert newest in text
    (length,) = SweepOptions().num_speculative_tokens
    assert length == 4 and "four tokens a step" in re.sub(r"\s+", " ", form)
    for page in PAGES:
        # The paper's experiments have other lengths.
        if page.stem != "paper":
            lengths = re.findall(r'"?num_speculative_tokens"?: (\d+)', page.read_text())
            assert set(lengths) <= {str(length)}, page
