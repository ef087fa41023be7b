"""`make gpu` up to the point where a GPU is needed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu


def run(monkeypatch, found, *arguments):
    """The exit status of a dry run whose parts are these snippets of Python."""
    parts = {name: ["-c", code] for name, code in found.items()}
    monkeypatch.setattr(gpu, "commands", lambda args, options: parts)
    return gpu.main(["--dry-run", *arguments])


def test_without_a_gpu_it_says_what_is_missing(capsys, tmp_path):
    assert gpu.main(["--output", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert "needs a GPU, and torch 2" in error and "then `make gpu BUILD=cuda` installs" in error
    assert not (tmp_path / "new").exists()


def test_a_part_that_fails_does_not_hold_up_the_others(monkeypatch, tmp_path, capsys):
    parts = {
        "tests": "raise SystemExit(1)",
        "kernel": "import time; time.sleep(600)",
        "sweep": f"open({str(tmp_path / 'ran')!r}, 'w')",
    }
    minutes = {"tests": 30.0, "kernel": 0.05, "sweep": 30.0}
    monkeypatch.setattr(gpu, "MINUTES", minutes)
    arguments = ("--minutes", str(sum(minutes.values())), "--output", str(tmp_path))
    assert run(monkeypatch, parts, *arguments) == 1
    assert (tmp_path / "ran").exists()
    last = capsys.readouterr().out.splitlines()[-3:]
    assert last == ["tests: exit status 1", "kernel: out of time", "sweep: done"]


@pytest.mark.nightly
@pytest.mark.engine
def test_a_dry_run(tmp_path, tiny_model):
    command = [
        *(sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--output", str(tmp_path)),
        *("--model", str(tiny_model), "--server-arg=--max-model-len=512", "--minutes", "60"),
    ]
    child = subprocess.run(
        command, capture_output=True, text=True, timeout=580, cwd=Path(__file__).parents[2]
    )
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-3000:]
    assert child.stdout.endswith("tests: done\nkernel: done\nsweep: done\n")
    assert len(json.loads((tmp_path / "kernel.json").read_text())["rows"]) == 5
    assert (tmp_path / "sweep.jsonl").exists()
