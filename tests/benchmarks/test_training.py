"""The figures of training, from files as examples/grpo_trl.py writes them."""

import json
import re

import pytest

from benchmarks import figures, training


def write(directory, name, rewards, weight=None):
    """A run whose tokens per step follow its rewards."""
    weighed = {} if weight is None else {"sampling/importance_sampling_ratio/mean": weight}
    lines = [{"run": {"command": ["grpo_trl.py"], "git_commit": "a" * 40}}]
    for step, value in enumerate(rewards, start=1):
        told = {"step": step, "reward": value, "tokens_per_step": 2 + value}
        lines.append(told | {"nats_per_token": 0.02} | weighed)
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def raw(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "RAW", tmp_path / "training")
    monkeypatch.setattr(training, "RESULTS", tmp_path)
    monkeypatch.setattr(training, "DOCS", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    for seed, last in ((0, 0.9), (1, 0.7)):
        write(tmp_path / "training", f"mars-{seed}", [0.5] * 5 + [last] * 5, 1.0)
    write(tmp_path / "training", "unweighted-0", [0.5] * 10)
    return tmp_path


def test_a_table_has_a_row_for_each_rule_and_the_ends_of_its_seeds(raw):
    training.main()
    found = figures.read("training")
    assert [run["raw"] for run in found["runs"]] == [
        "training/mars-0.jsonl",
        "training/mars-1.jsonl",
        "training/unweighted-0.jsonl",
    ]
    lines = [*figures.table_of(found["columns"], found["rows"])]
    assert lines[2] == (
        "| mars | 2 | 0.80 (0.70–0.90) | 2.65 (2.60–2.70) "
        "| 0.0200 (0.0200–0.0200) | 1.0000 (1.0000–1.0000) |"
    )
    # Without weights there is no mean of them.
    assert lines[3].split(" | ")[5] == " |"


def test_a_picture_has_a_line_for_each_seed(raw):
    training.main()
    drawn = (raw / "reward.svg").read_text()
    lines = re.findall(r'<polyline points="([^"]*)" class="s-(\w+)"[^>]*stroke-width="1.5"', drawn)
    assert [colour for _, colour in lines] == ["good", "good", "bad"]
    heights = [float(point.split(",")[1]) for point in lines[0][0].split()]
    # More is higher, which SVG counts from above.
    assert heights[0] > heights[-1] and len(heights) == 10


def test_runs_of_different_lengths_are_no_figures(raw):
    write(training.RAW, "strict-0", [0.5] * 3, 1.0)
    with pytest.raises(ValueError, match=r"runs of \[3, 10\] steps; give each the same --steps"):
        training.main()


@pytest.mark.skipif(not training.RAW.is_dir(), reason="no raw runs are kept")
def test_the_figures_are_those_of_the_raw_runs():
    runs, heads = training.read(training.RAW)
    found = figures.read("training")
    assert found["runs"] == heads
    assert found["rows"] == training.table(runs)["rows"]
    assert (training.DOCS / "reward.svg").read_text() == str(training.reward(training.RAW))
