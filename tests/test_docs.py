"""The site of `make docs`: it builds, and a dead link or anchor ends the build. The pictures."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import pictures

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
    api = (tmp_path / "docs/api.html").read_text()
    for name in ("verify_greedy", "verify_tree", "MarsConfig", "MarsRejectionSamplerV2"):
        assert f'id="vllm_mars.{name}"' in api
    # What pages link to outside docs/ lies where a checkout has it.
    raw = "benchmarks/results/kernel.json"
    assert f'href="../{raw}"' in (tmp_path / "docs/kernel.html").read_text()
    assert (tmp_path / raw).read_bytes() == (ROOT / raw).read_bytes()
    # Formulas are typeset by what the site has itself.
    rule = (tmp_path / "docs/rule.html").read_text()
    assert '<div class="arithmatex">' in rule and '"../katex/katex.min.js"' in rule
    assert (tmp_path / "katex/fonts/KaTeX_Math-Italic.woff2").is_file()
    assert not re.search(r'(?:src|href)="(?:https?:)?//[^"]*\.(?:js|css|woff2?)"', rule)
    assert '<div class="admonition warning">' in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_shows_what_its_page_says(name):
    drawn = str(pictures.PICTURES[name]())
    assert (ROOT / "docs" / name).read_text() == drawn, "`make figures` draws it"


def test_the_call_on_the_page_of_the_api():
    page = (ROOT / "docs/api.md").read_text()
    code, printed = (
        re.search(rf"```{kind}\n(.*?)```", page, re.S)[1] for kind in ("python", "text")
    )
    # Where neither vLLM nor Triton is installed.
    absent = "import sys\nsys.modules |= {'vllm': None, 'triton': None}\n"
    run = subprocess.run(
        [sys.executable, "-c", absent + code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.stdout == printed, run.stderr


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


@pytest.mark.nightly
@pytest.mark.engine
def test_the_example_for_trainers_takes_a_step(packaged_model):
    arguments = ["--max-tokens", "16", "--groups", "2", "-n", "4"]
    run = subprocess.run(
        [sys.executable, ROOT / "docs/rollouts.py", *arguments],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr
    (norm,) = re.findall(r"^gradient norm ([\d.]+); 8 answers$", run.stdout, re.M)
    (share,) = re.findall(r"^16 tokens: .* effective sample ([\d.]+)$", run.stdout, re.M)
    # All weights would be the same if the logprobs were the target's.
    assert float(norm) > 0 and 1 / 8 < float(share) < 1
