"""`make gpu` up to the point where a GPU is needed, and the page that it fills."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

import sweep_files
from benchmarks import gpu, validated
from sweep_files import STANDARD, failed, mars, turn

ROOT = Path(__file__).parents[2]
RESULT = {
    "dry_run": False,
    "hardware": {"gpu": "NVIDIA H100"},
    "versions": {"vllm": "0.33.0"},
}


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def write_sweep(path, *, same=True, problem=""):
    """A sweep of `standard`, price 0 and price 0.3."""
    records = [
        *(turn(STANDARD, block) for block in range(2)),
        *(turn(mars(0), block, lost=0.0) for block in range(2)),
        *(turn(mars(0.3), block, token_seconds=0.016, lost=0.42) for block in range(2)),
    ]
    if problem:
        records[0] = failed(STANDARD, problem)
    if not same:
        records[2:4] = [sweep_files.answering(record, "another") for record in records[2:4]]
    return sweep_files.write_sweep(path, records)


def test_without_a_gpu_it_says_what_is_missing(capsys, tmp_path):
    assert gpu.main(["--output", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert "needs a GPU, and torch 2" in error and "then `make gpu BUILD=cuda` installs" in error
    assert not (tmp_path / "new").exists()
    for arguments in (["--parts", "named"], ["--gpus", "2"]):
        with pytest.raises(SystemExit, match="2"):
            gpu.main(arguments)
        assert "--model is missing, for the part `named`" in capsys.readouterr().err


def test_parts_are_given_what_their_commands_take(tmp_path):
    """The commands' own parsers read what they are handed."""
    from vllm_mars.cli import _parser

    arguments = ["--model", "some/model", "--draft", "some/draft", "--minutes", "20"]
    found = {}

    def run(args, options, name):
        found.update(gpu.commands(args, options))
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "run", run)
        options = ["--dry-run", *arguments, "--gpus", "2"]
        assert gpu.main([*options, "--output", str(tmp_path)]) == 0
    assert list(found) == ["tests", "kernel", "packaged", "named"]
    sweep = _parser().parse_args(found["named"][2:])
    assert (sweep.model, sweep.drafts, sweep.gpus) == ("some/model", ["some/draft"], 2)
    assert sweep.prices == [0.0, 0.3]
    packaged = _parser().parse_args(found["packaged"][2:])
    assert packaged.model is None and Path(packaged.drafts[0], "config.json").is_file()
    assert "--seconds=108" in found["kernel"]


def test_the_parts_that_are_asked_for_share_the_minutes():
    for model, parts, seconds in (
        ("some/model", None, {"tests": 180, "kernel": 180, "packaged": 420, "named": 420}),
        (None, None, {"tests": 277, "kernel": 277, "packaged": 646}),
        (None, ["kernel", "tune"], {"kernel": 720, "tune": 480}),
    ):
        args = Namespace(minutes=20.0, model=model, parts=parts)
        assert {name: round(gpu.share(args, name)) for name in gpu.asked(args)} == seconds


def test_a_part_that_fails_does_not_hold_up_the_others(tmp_path, monkeypatch, capsys):
    output = tmp_path / "gpu"
    goals = [{"goal": "fast", "result": "MISS", "measured": {}}]
    kernel = f"open({str(output / 'kernel.json')!r}, 'w').write({json.dumps({'goals': goals})!r})"
    parts = {
        "tests": "import sys; sys.exit('no such test')",
        "kernel": kernel,
        "tune": "import time; print('begun', flush=True); time.sleep(600)",
        "packaged": "print('measured')",
    }
    found = {name: ["-c", code] for name, code in parts.items()}
    monkeypatch.setattr(gpu, "commands", lambda args, options: found)
    monkeypatch.setattr(gpu, "share", lambda args, name: 10.0 if name == "tune" else 60.0)
    output.mkdir()
    write_sweep(output / "packaged.jsonl")
    assert gpu.main(["--dry-run", "--output", str(output)]) == 1
    result = json.loads((output / "gpu.json").read_text())
    statuses = {name: part["exit_status"] for name, part in result["parts"].items()}
    assert statuses == {"tests": 1, "kernel": 0, "tune": None, "packaged": 0}
    assert result["goals"] == goals
    assert {rule["rule"] for rule in result["rules"]} == {"standard", "price 0", "price 0.3"}
    assert result["hardware"]["cores"] and result["versions"]["torch"]
    assert (output / "tune.log").read_text() == "begun\n"
    out = capsys.readouterr().out
    assert "no such test" in out and "its share of --minutes is over" in out
    assert "MISS: fast" in out and "Nothing has been validated yet." in out

    # One part more joins them in the file.
    found.clear()
    found["tune"] = ["-c", "pass"]
    assert gpu.main(["--dry-run", "--output", str(output)]) == 1
    again = json.loads((output / "gpu.json").read_text())
    assert again["parts"].keys() == statuses.keys()
    assert again["parts"]["tune"]["exit_status"] == 0


def test_what_was_measured_elsewhere_moves_aside(tmp_path, monkeypatch, capsys):
    output = tmp_path / "gpu"
    output.mkdir()
    write_sweep(output / "packaged.jsonl")
    summary = {"created": "2026-01-01T00:00:00+00:00", "git_commit": "older"}
    (output / "gpu.json").write_text(json.dumps(summary))
    monkeypatch.setattr(gpu, "commands", lambda args, options: {"tests": ["-c", "pass"]})
    assert gpu.main(["--dry-run", "--output", str(output)]) == 0
    assert json.loads((output / "gpu.json").read_text())["rules"] == []
    aside = tmp_path / "gpu-2026-01-01T00-00-00+00-00"
    assert {path.name for path in aside.iterdir()} == {"packaged.jsonl", "gpu.json"}
    assert f"is in {aside}" in capsys.readouterr().out


def test_a_wrong_model_does_not_stay(tmp_path):
    good = write_sweep(tmp_path / "named.jsonl")
    gpu.set_failed_aside(good, "other")
    assert good.exists()
    failed = write_sweep(tmp_path / "failed.jsonl", problem="no such model")
    gpu.set_failed_aside(failed, "tiny")
    assert failed.exists(), "the same model goes on"
    gpu.set_failed_aside(failed, "other")
    assert not failed.exists() and Path(f"{failed}.old").exists()


def test_the_row(tmp_path):
    found = validated.rules(write_sweep(tmp_path / "a.jsonl"))
    # As a file has them.
    found = json.loads(json.dumps(found))
    assert validated.objections(found) == []
    head, rule, row = validated.table([{**RESULT, "rules": found}])
    assert head.count("|") == rule.count("|") == row.count("|")
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[:6] == ["tiny", "ngram", "price 0.3", "4", "1", "1.25"]
    assert cells[6:] == ["21.0", "0.0100", "1.00", "NVIDIA H100, vLLM 0.33.0"]


@pytest.mark.parametrize(
    ("changes", "objection"),
    [
        ({"same": False}, "price 0, tiny, ngram, batch 1: 100% of its answers differ from"),
        ({"problem": "vLLM ended\nlog"}, "standard, tiny, ngram, batch 1: vLLM ended"),
    ],
)
def test_no_row_where_strict_is_not_strict(tmp_path, changes, objection):
    found = validated.rules(write_sweep(tmp_path / "a.jsonl", **changes))
    (reason,) = validated.objections(found)
    assert reason.startswith(objection) and "\n" not in reason
    nothing = ["Nothing has been validated yet."]
    assert validated.table([{**RESULT, "rules": found}]) == nothing
    fine = validated.rules(write_sweep(tmp_path / "b.jsonl"))
    assert validated.table([{**RESULT, "rules": fine, "dry_run": True}]) == nothing


@pytest.mark.nightly
@pytest.mark.engine
def test_a_dry_run_of_all_but_the_packaged_model(tmp_path, tiny_model):
    output = tmp_path / "gpu"
    command = [
        *(sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--output", str(output)),
        *("--parts", "tests", "kernel", "tune", "named", "--model", str(tiny_model)),
        *("--server-arg=--max-model-len=512", "--minutes", "60"),
    ]
    child = subprocess.run(command, capture_output=True, text=True, timeout=580)
    logs = [log.read_text()[-2000:] for log in output.glob("*.log")]
    assert child.returncode == 0, "\n".join([child.stdout, child.stderr, *logs])
    result = json.loads((output / "gpu.json").read_text())
    assert result["schema"] == "vllm-mars/gpu/1"
    assert {part["exit_status"] for part in result["parts"].values()} == {0, gpu.NO_TESTS_RAN}
    assert [goal["result"] for goal in result["goals"]] == ["not measured"] * 4
    names = ("standard", "price 0", "price 0.3")
    found = {(rule["rule"], rule["batch"]) for rule in result["rules"]}
    assert found == {(name, batch) for name in names for batch in (1, 2)}
    strict = [rule["same"][0] for rule in result["rules"] if rule["rule"] == "price 0"]
    assert strict == [1.0] * 2
    assert "Nothing has been validated yet." in child.stdout
