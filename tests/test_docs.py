"""The site of `make docs`: it builds, and a dead link or anchor ends the build."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def build(directory, site):
    """Builds the site of a checkout as `make docs` does."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_site_builds(tmp_path):
    run = build(ROOT, tmp_path)
    assert run.returncode == 0, run.stderr
    api = (tmp_path / "docs/api.html").read_text()
    for name in ("verify_greedy", "verify_tree", "MarsConfig", "MarsRejectionSamplerV2"):
        assert f'id="vllm_mars.{name}"' in api
    # What pages link to outside docs/ lies where a checkout has it.
    raw = "benchmarks/results/speed.json"
    assert f'href="../{raw}"' in (tmp_path / "docs/results.html").read_text()
    assert (tmp_path / raw).read_bytes() == (ROOT / raw).read_bytes()


@pytest.mark.nightly
def test_what_ends_the_build(tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "docs", checkout / "docs")
    for path in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml"):
        shutil.copy(path, checkout)
    for folder in ("benchmarks", "kernels", "vllm_mars"):
        os.symlink(ROOT / folder, checkout / folder)
    with (checkout / "docs/rule.md").open("a") as page:
        page.write("\n[file](gone.md), [anchor](metrics.md#gone), [raw](../benchmarks/gone.json)\n")
    (checkout / "docs/lost.md").write_text("# A page that is not in the navigation\n")
    run = build(checkout, tmp_path / "site")
    assert run.returncode == 1
    for fault in ("'gone.md'", "'metrics.md#gone'", "'../benchmarks/gone.json'", "docs/lost.md"):
        assert fault in run.stderr, run.stderr
    assert "Aborted with 4 warnings in strict mode" in run.stdout


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
