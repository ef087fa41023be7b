"""The site of `make docs`: it builds, and a dead link or anchor ends the build. The pictures."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import pictures
from vllm_mars.options.config import DRAWN_PRICE, FIXED_PRICE, price_of_bound

ROOT = Path(__file__).parents[1]


def test_the_site_builds(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    # What pages link to outside docs/ lies where a checkout has it.
    raw = "benchmarks/results/kernel.json"
    assert f'href="../{raw}"' in (tmp_path / "docs/kernel.html").read_text()
    assert (tmp_path / raw).read_bytes() == (ROOT / raw).read_bytes()
    # Two pages have more than a checkout.
    assert '<h2 id="kernel">' in (tmp_path / "benchmarks/results/index.html").read_text()
    assert "max_draft_len" in (tmp_path / "docs/api.html").read_text()
    # Formulas are typeset by what the site has itself.
    rule = (tmp_path / "docs/rule.html").read_text()
    assert '<div class="arithmatex">' in rule and '"../katex/katex.min.js"' in rule
    assert (tmp_path / "katex/fonts/KaTeX_Math-Italic.woff2").is_file()
    assert not re.search(r'(?:src|href)="(?:https?:)?//[^"]*\.(?:js|css|woff2?)"', rule)
    assert '<div class="admonition warning">' in (tmp_path / "index.html").read_text()
    results = (tmp_path / "docs/results.html").read_text()
    assert re.search(r'>[\d.]+ <span class="interval">\([\d.–]+\)</span></td>', results)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_shows_what_its_page_says(name):
    drawn = str(pictures.PICTURES[name]())
    assert (ROOT / "docs" / name).read_text() == drawn, "`make figures` draws it"


def test_the_call_on_the_page_of_the_api():
    page = (ROOT / "docs/api.md").read_text()
    name, code = re.search(r"```python\n# (\S+)\n(.*?)```", page, re.S).groups()
    printed = re.search(r"```text\n(.*?)```", page, re.S)[1]
    assert (ROOT / name).read_text().endswith(f'"""\n\n{code}')
    # Where neither vLLM nor Triton is installed.
    absent = "import sys\nsys.modules |= {'vllm': None, 'triton': None}\n"
    run = subprocess.run(
        [sys.executable, "-c", absent + code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.stdout == printed, run.stderr


def test_the_prices_of_a_bound():
    """As the page of how it works gives them."""
    page = (ROOT / "docs/how-it-works.md").read_text()
    assert f"here {price_of_bound(0.02, 0, False):.3f} nats" in page
    assert f"| greedy | {FIXED_PRICE:g} √b | {price_of_bound(0.02, 0, False):.2f} |" in page
    for factor, is_drawn in ((FIXED_PRICE, False), (DRAWN_PRICE, True)):
        prices = (f"{price_of_bound(0.02, it, is_drawn):.2f} at T {it:g}" for it in (1, 0.7, 0.4))
        assert f"{factor:g} √(b / T) | {', '.join(prices)} |" in page


def scripts():
    """Each example in Python that is a whole script, by its page."""
    for page in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")]):
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
            if block.startswith(("import ", "from ")):
                yield pytest.param(block, id=page.stem)


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", scripts())
def test_an_example_runs_as_a_file(packaged_model, tmp_path, script):
    """On a CPU vLLM spawns its processes, each of which imports the file."""
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert name in script
    (file := tmp_path / "example.py").write_text(script.replace(name, str(packaged_model)))
    env = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    run = subprocess.run(
        [sys.executable, file], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].strip()
