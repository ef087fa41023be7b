"""The tables of the docs against their raw files, and what a raw file says of its run."""

import json
import re
import shutil
import sys

import pytest

from benchmarks import figures, frontier, sweep_tables, tables
from vllm_mars.experiments.sweep.summary import ALL

RESULTS = sorted(
    path for path in sweep_tables.RESULTS.iterdir() if path.suffix in (".json", ".jsonl")
)
# What older files do not say. A new file says all of it: measure at a clean commit.
LACK = {
    "cpu load": (
        *("calibration-cpu.json", "calibration-task-cpu.json", "demo-cpu.json"),
        *("demo-cpu-2.json", "demo-eagle3-24-cpu.json", "demo-eagle3-k3-cpu.json"),
        *("demo-eagle3-k4-cpu.json", "demo-price-cpu.json"),
        *("frontier-cpu.json", "frontier-cpu.jsonl", "frontier-ratio-cpu.jsonl"),
        *("sampled-price-cpu.json", "sampler-cpu.json", "soak.json"),
        *("trees-cpu.json", "trees-longer-cpu.json"),
    ),
    # Changed files, the docs say which where it matters.
    "clean cpu load": ("fuzz.json", "load-cpu.json", "startup-cpu.json"),
    # They name the host.
    "nameless cpu load": ("sweep-cpu.jsonl", "sweep-eagle3-cpu.jsonl", "sweep-short-cpu.jsonl"),
    "clean nameless cpu load": ("sweep-tasks-cpu.jsonl",),
}


def test_each_table_stands_once():
    pages = "".join(page.read_text() for page in figures.PAGES)
    assert sorted(re.findall(r"^<!-- figures: (\S+) -->", pages, re.M)) == sorted(tables.TABLES)


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.stem)
def test_the_docs_show_the_raw_files(page):
    text = page.read_text()
    assert figures.written(text) == text, "`make figures` writes what the raw files say"


def test_cells_of_several_datasets_are_compared_within_each():
    (none,) = (
        row
        for row in sweep_tables.by_dataset("recommended-cpu")[ALL]
        if row.key.method == "autoregressive"
    )
    assert len({cell.key.dataset for cell in none.cells}) == 11 and none.speedup == 1


@pytest.mark.parametrize("before", ["| old |\n| --- |\n", "", "\n"])
def test_a_table_is_written_between_its_marks(monkeypatch, before):
    monkeypatch.setattr(figures, "TABLES", {"a.b": lambda: ["| new |", "| --- |"]})
    page = "x\n\n<!-- figures: a.b -->\n{}<!-- /figures -->\n\ny\n"
    assert figures.written(page.format(before)) == page.format("| new |\n| --- |\n")


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- figures: gone -->\n<!-- /figures -->\n", "gone is not one of demo, "),
        ("<!-- figures: load -->\n| 1 |\n", "do not go together"),
        ("<!-- figures: load -->\n<!-- figures: load -->\n<!-- /figures -->\n", "do not go"),
    ],
)
def test_wrong_marks(tmp_path, monkeypatch, capsys, page, message):
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "PAGES", [tmp_path / "page.md"])
    (tmp_path / "page.md").write_text(page)
    assert figures.main() == 1
    error = capsys.readouterr().err
    assert error.startswith("error: page.md: ") and message in error
    assert (tmp_path / "page.md").read_text() == page


def test_a_changed_figure_is_seen_and_mended(tmp_path, monkeypatch, capsys):
    page = tmp_path / "load.md"
    shutil.copy(figures.ROOT / "docs/load.md", page)
    right = page.read_text()
    page.write_text(right.replace("| 1 | 1.63 |", "| 1 | 1.64 |"))
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "PAGES", [page])
    assert page.read_text() != right and figures.main() == 0
    assert page.read_text() == right
    assert capsys.readouterr().out == "load.md has new figures\n"


@pytest.mark.parametrize(
    "name",
    [
        *("frontier-cpu", "frontier-ngram-cpu"),
        pytest.param("speed-head-cpu", marks=pytest.mark.nightly),
    ],
)
def test_the_summary_of_a_frontier_is_that_of_its_sweeps(name, tmp_path, monkeypatch):
    committed = sweep_tables.raw(name)
    sweeps = [str(sweep_tables.RESULTS / name) for name in committed["sweep"]]
    (draft,) = committed["drafts"].values()
    losses = [str(at["loss"]) for at in draft["at_equal_loss"]]
    command = ["frontier", *sweeps, "--output", str(tmp_path / "again.json"), "--losses", *losses]
    if name.startswith("speed"):
        command += ["--speeds", str(tmp_path / "speeds.png")]
    monkeypatch.setattr(sys, "argv", command)
    assert frontier.main() == 0
    assert json.loads((tmp_path / "again.json").read_text())["drafts"] == committed["drafts"]


def runs(path):
    """What a file says of each of its runs."""
    text = path.read_text()
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    return [run for run in map(json.loads, lines) if run.get("kind") != "quality"]


def lacking(run):
    """What a run does not say of itself."""
    commit, hardware = run.get("git_commit") or "", run.get("hardware") or {}
    said = {
        "schema": "schema" in run,
        "commit": re.fullmatch(r"[0-9a-f]{40}(-dirty)?", commit),
        "clean": not commit.endswith("-dirty"),
        "versions": {"vllm_mars", "vllm", "torch", "python"} <= run.get("versions", {}).keys(),
        "hardware": {"cpu", "cores", "memory_gib", "gpu"} <= hardware.keys(),
        "nameless": "node" not in run,
        "cpu": hardware.get("gpu") or "family" in hardware.get("cpu", ""),
        "load": "load_average" in run,
    }
    return {name for name, is_said in said.items() if not is_said}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_raw_file_says_where_it_comes_from(path):
    known = [set(lack.split()) for lack, names in LACK.items() if path.name in names]
    assert set().union(*map(lacking, runs(path))) == set().union(*known)
