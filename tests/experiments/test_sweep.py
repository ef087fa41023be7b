"""A real sweep of a tiny model; at night ended in the middle, with a draft that cannot start."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid

import pytest

from processes import MARK, marked, wait_until
from vllm_mars.cli import main
from vllm_mars.config import OPTION
from vllm_mars.experiments.sweep.bench_client import BenchClient, read_result
from vllm_mars.experiments.sweep.record_file import read_cells
from vllm_mars.experiments.sweep.summary import rows

pytestmark = pytest.mark.engine

PROMPTS = [
    {"id": "repeat", "prompt": "w20 w21 w22 w20 w21 w22 w20 w21 w22"},
    {"id": "math", "prompt": "w30 w31 w30 w31", "answer": "#### 8"},
    {"id": "json", "prompt": "w40 w41 w42 w43 w40 w41", "schema": {"type": "object"}},
]


@pytest.fixture(scope="module")
def directory(tiny_model, tmp_path_factory):
    """A model, a prompt file, and a draft that has a configuration but no weights."""
    path = tmp_path_factory.mktemp("sweep")
    (path / "tiny").symlink_to(tiny_model)
    (path / "broken").mkdir()
    shutil.copy(tiny_model / "config.json", path / "broken")
    (path / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in PROMPTS))
    return path


@pytest.fixture
def start(directory):
    """Starts sweeps; those that a failed test leaves are ended with their servers."""
    started = []

    def start_one(mark, *arguments):
        started.append(start_sweep(directory, mark, *arguments))
        return started[-1]

    yield start_one
    for process in started:
        process.terminate()
        process.communicate(timeout=120)


def sweep(directory, output, *arguments):
    return [
        *("sweep", "--model", str(directory / "tiny"), "--output", str(output)),
        *("--prompts", str(directory / "prompts.jsonl"), "--num-prompts", "0"),
        *("--theta", "0.3", "1", "--reference-theta", "0.3", "--gap", "--no-unprotected"),
        *("--price", "--temperature", "0", "--concurrency", "2", "--max-tokens", "12"),
        *("--server-arg=--max-model-len=256", *arguments),
    ]


def start_sweep(directory, mark, *arguments):
    grid = [
        *("--draft", "ngram", str(directory / "broken"), "--repeats", "2"),
        *("--method", "autoregressive", "standard", "fly", "mars"),
    ]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm_mars.cli"),
            *sweep(directory, directory / "run.jsonl", *grid, *arguments),
        ],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_sweep(directory, tmp_path, monkeypatch, capsys):
    mark, output = uuid.uuid4().hex, tmp_path / "run.jsonl"
    monkeypatch.setenv(MARK, mark)
    methods = ("--method", "autoregressive", "fly", "mars", "--repeats=1")
    options = (*methods, "--price", "2")
    command = sweep(directory, output, *options)
    assert main(command) == 0
    out, told = capsys.readouterr()
    assert "tokens/s" in out and "mars 0.3" in out
    # The first cell's time is that of the servers' start, from which nothing follows.
    first, *others = (line for line in told.splitlines() if line.startswith("["))
    assert "left" not in first
    assert all("; about 0:" in line for line in others), told
    assert marked(mark) == []
    cells = read_cells(output)
    check_cells(cells, directory, {"none": 1, "ngram": 4})

    # Nothing is left to do, so no server starts.
    assert main(command) == 0
    assert "0 server starts" in capsys.readouterr().err
    assert read_cells(output) == cells

    # Recorded answers are judged again, and one of theta 1 that differs is not put down to ties.
    again = tmp_path / "again.jsonl"
    with again.open("w") as file:
        for line in output.read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == "cell":
                if record["key"]["theta"] == 1:
                    record["outputs"][0]["text"] = "w7 w8 w9"
                file.write(json.dumps(record) + "\n")
    assert main(sweep(directory, again, *options)) == 0
    assert "0 server starts" in capsys.readouterr().err
    (strict,) = (cell for cell in read_cells(again) if cell.key.theta == 1)
    assert strict.quality.estimate("identity").value == pytest.approx(2 / 3)
    (note,) = (note for note in strict.quality.notes if "as far as batching moves them" in note)
    assert 0 <= float(note.partition("within ")[2].split()[0]) < 1e-3


@pytest.mark.nightly
@pytest.mark.timeout(2700)
def test_a_sweep_that_is_ended_continues(directory, start):
    output = directory / "run.jsonl"
    mark = uuid.uuid4().hex
    process = start(mark)
    wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 3, 600, "3 cells")
    second = start(mark)
    _, err = second.communicate(timeout=120)
    assert second.returncode == 1 and "is in use by another sweep" in err
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143
    assert "Traceback" not in err
    wait_until(lambda: marked(mark) == [], 10, "every process ends")
    before = [cell for cell in read_cells(output) if cell.status == "ok"]
    # As if the machine had stopped while it wrote.
    with output.open("a") as file:
        file.write('{"kind": "cell", "sch')

    process = start(mark)
    out, err = process.communicate(timeout=1800)
    assert process.returncode == 0, err
    assert marked(mark) == []
    cells = read_cells(output)
    assert [cell for cell in cells if cell.key in {c.key for c in before}] == before
    check_cells(cells, directory, {"none": 2, "ngram": 8, "broken": 8})
    assert "standard" in {row.key.rule for row in rows(cells)}
    assert "tokens/s" in out and "mars 0.3" in out

    # Nothing is left to do, so no server starts.
    process = start(mark)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "0 server starts" in err
    assert read_cells(output) == cells

    process = start(mark, "--max-tokens", "13")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "was measured with max_tokens=12, but this sweep has 13; name another file" in err


def check_cells(cells, directory, expected_sizes):
    by_draft = {}
    for cell in cells:
        by_draft.setdefault(cell.key.draft, []).append(cell)
    sizes = {draft: len(group) for draft, group in by_draft.items()}
    assert sizes == expected_sizes
    assert len({cell.key for cell in cells}) == len(cells)
    for cell in by_draft.get("broken", []):
        fly = cell.key.method == "fly"
        assert cell.status == ("unavailable" if fly else "failed")
        assert "fly" in cell.reason if fly else "vLLM ended while starting" in cell.reason
    for cell in by_draft["none"] + by_draft["ngram"]:
        if cell.key.method == "fly":
            assert cell.status == "unavailable" and cell.quality is None
            continue
        check_measured(cell, str(directory))

    summary = {row.key.rule: row for row in rows(cells) if row.cells}
    assert summary["autoregressive"].speedup == 1
    for name in {"standard", "mars 1"} & set(summary):
        row = summary[name]
        assert row.estimate("agreement").value == 1, "a strict rule gives the target's text"
        assert row.estimate("identity").value == 1
        assert row.estimate("nll").difference == 0
    # Whether drafts are made and runners-up are taken is a matter of the random weights.
    lossy = summary["mars 0.3"]
    assert lossy.estimate("exact_match").samples == lossy.estimate("json_valid").samples == 1


def check_measured(cell, directory):
    key = cell.key
    assert cell.status == "ok" and cell.speed.requests == 3
    assert [output.prompt_id for output in cell.outputs] == ["repeat", "math", "json"]
    assert cell.speed.output_tokens == sum(output.output_tokens for output in cell.outputs)
    for output in cell.outputs:
        assert 1 <= output.output_tokens <= 12 and output.error == ""
        assert (output.finish_reason == "length") == (output.output_tokens == 12)
        assert 0 < output.first_token_seconds <= output.seconds
    assert (cell.acceptance is None) == (key.method == "autoregressive")
    assert (cell.lost_nats is None) == (key.method != "mars")
    assert bool(cell.lost_nats) <= key.lossy
    if cell.acceptance is not None:
        assert sum(cell.acceptance.accepted_by_position) == cell.acceptance.accepted_tokens
        assert len(cell.acceptance.accepted_by_position) in (0, key.k)
    mars = key.method == "mars"
    assert cell.theta_set_by == ("request" if mars else None)
    if mars:
        assert json.dumps({"vllm_xargs": {OPTION[key.metric]: key.value}}) in cell.client_command
    assert '"seed"' not in " ".join(cell.client_command), "answers must not share their luck"
    assert directory not in " ".join((*cell.server_command, *cell.client_command))
    assert "--max-model-len=256" in cell.server_command
    assert cell.versions["vllm"] and cell.hardware["cores"]
    for prompt in cell.quality.prompts:
        assert prompt.scores["nll"] > 0
        assert all(token.loss > 0 for token in prompt.off_choice)
        assert (prompt.scores["loss"] > 0) == bool(prompt.off_choice)
        assert 0 <= prompt.scores["repeated_4grams"] < 1
    assert not [note for note in cell.quality.notes if "another length" in note]


def test_the_client_says_what_went_wrong(tmp_path):
    with contextlib.closing(BenchClient(tmp_path / "client.log")) as client:
        with pytest.raises(RuntimeError, match="vllm bench serve failed: SystemExit: 2"):
            client.run(["--no-such-option"], 120)
        # The same process goes on.
        with pytest.raises(RuntimeError, match="vllm bench serve failed: ValueError: .*dataset"):
            client.run(["--model", "m", "--skip-tokenizer-init", "--dataset-name", "custom"], 60)
        with pytest.raises(RuntimeError, match=r"took longer than cell_timeout=0\.001 s"):
            client.run(["--model", "m", "--dataset-name", "custom"], 0.001)
    assert (tmp_path / "client.log").read_text()


def test_a_result_that_is_none_is_named(tmp_path):
    path = tmp_path / "result.json"
    with pytest.raises(RuntimeError, match=r"is not a result of vllm bench serve"):
        read_result(path, [], 8)
    path.write_text('{"start_times": [0]}')
    with pytest.raises(RuntimeError, match=r"is not a result of .*KeyError\('generated_texts'\)"):
        read_result(path, [], 8)


def test_failed_requests_fail_the_cell(tmp_path):
    path = tmp_path / "result.json"
    per_request = {"start_times": [1, 2], "input_lens": [3, 3], "output_lens": [4, 0]}
    per_request |= {"latencies": [1, 0], "ttfts": [1, 0], "generated_texts": ["a", ""]}
    path.write_text(json.dumps({**per_request, "errors": ["", "x\nBad Request"], "failed": 1}))
    with pytest.raises(
        RuntimeError, match="1 of 2 requests failed: Bad Request: .*max-model-len=N"
    ):
        read_result(path, ["a", "b"], 8)
