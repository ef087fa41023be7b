"""The demo on real servers: its file, its report, and that it ends everything that it started."""

import json
import os
import re
import signal
import subprocess
import sys
import uuid

import pytest
from transformers import AutoModelForCausalLM

import tiny_models
from processes import MARK, marked, wait_until
from vllm_mars.demo.report import LABELS
from vllm_mars.experiments.sweep.record_file import read_cells
from vllm_mars.experiments.sweep.summary import rows

pytestmark = pytest.mark.engine

PROMPTS = [
    {"id": "list", "prompt": "w10 w20 w30 w10 w20 w30 w10 w20"},
    {"id": "two", "prompt": "w40 w50 w60 w40 w50"},
    {"id": "three", "prompt": "w70 w80 w70 w80 w70"},
]


@pytest.fixture(scope="module")
def model(tiny_model):
    """A tiny target, beside it a draft that it often agrees with."""
    draft = tiny_model.with_name("eagle-head")
    target = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32")
    tiny_models.eagle(draft, target)
    return tiny_model


def start_demo(tmp_path, model, mark, *arguments):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm_mars.cli", "demo", "--model", str(model)),
            *("--draft", str(model.with_name("eagle-head"))),
            *("--prompts", str(prompts), "--max-tokens", "32", "--theta", "0.6"),
            *("--output", str(tmp_path / "out" / "demo.jsonl"), *arguments),
            # As much as the tiny model takes.
            "--server-arg=--max-model-len=512",
        ],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts the tests in the background makes them ignore it, children too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_demo(tmp_path, model):
    mark = uuid.uuid4().hex
    before = tmp_path / "out" / "demo.jsonl"
    before.parent.mkdir()
    before.write_text("of the run before\n")
    process = start_demo(tmp_path, model, mark, "--repeats", "2", "--short")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert marked(mark) == []
    assert before.with_name("demo.jsonl.old").read_text() == "of the run before\n"

    found = {row.key.method: row for row in rows(read_cells(tmp_path / "out" / "demo.jsonl"))}
    assert set(found) == set(LABELS)
    for row in found.values():
        assert len(row.cells) == 2
        assert all(len(cell.outputs) == 3 and cell.command[1] == "demo" for cell in row.cells)
    strict, mars = found["standard"], found["mars"]
    assert strict.value("agreement") == strict.value("identity") == 1
    assert (mars.key.theta, mars.key.k) == (0.6, 4)
    assert mars.acceptance_length > strict.acceptance_length > 1
    assert all(cell.lost_nats > 0 for cell in mars.cells)

    assert "mean acceptance length" in out
    assert "The strict answers equal the autoregressive ones, character for character." in out
    assert "What the target would have said there" in out
    assert "This short form shows that it works, not how fast" in out
    lines = err.splitlines()
    assert lines[0].startswith("6 cells, 0 of them in ")
    assert re.match(r"\[1/6\] autoregressive, T0, c1, prompts#0, #0: .* tokens/s$", lines[1])
    assert re.match(r"\[2/6\] .*, T0, c1, prompts#0, #0: .*; about 0:\d\d:\d\d left$", lines[2])
    assert len(lines) < 30, err
    assert "\x1b[" not in out, "no colour codes without a terminal"


# 7 processes: the demo has three guards and three servers; more: engine cores start.
@pytest.mark.parametrize(
    ("number", "code", "processes"),
    [
        pytest.param(signal.SIGINT, 130, 10, marks=pytest.mark.nightly),
        (signal.SIGTERM, 143, 7),
    ],
)
def test_a_signal_ends_all_servers(tmp_path, model, number, code, processes):
    mark = uuid.uuid4().hex
    process = start_demo(tmp_path, model, mark)
    wait_until(lambda: len(marked(mark)) >= processes, 200, "three servers")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in err
    assert marked(mark) == []
    assert not (tmp_path / "out" / "demo.jsonl").exists()


@pytest.mark.nightly
def test_a_server_that_dies_is_reported(tmp_path, model):
    mark = uuid.uuid4().hex
    process = start_demo(tmp_path, model, mark, "--server-arg=--no-such-option")
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "vLLM ended while starting" in err
    assert "--no-such-option" in err
    assert "Traceback" not in err.split("--- the end of")[0]
    assert marked(mark) == []


@pytest.mark.nightly
def test_the_short_form_of_the_packaged_model_with_its_head(tmp_path, packaged_model):
    output = tmp_path / "demo.jsonl"
    process = subprocess.run(
        [sys.executable, "-m", "vllm_mars.cli", "demo", "--short", "--output", str(output)],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert process.returncode == 0, process.stderr
    cells = {cell.key.method: cell for cell in read_cells(output)}
    assert cells["mars"].key.draft == "smollm2-135m-eagle3"
    assert [len(cells[method].outputs) for method in LABELS] == [4, 4, 4]
    assert cells["standard"].quality.estimate("agreement").value == 1
    lengths = {method: cells[method].acceptance.mean_length for method in ("standard", "mars")}
    assert lengths["mars"] >= lengths["standard"] > 1
    # What the target scores as not its first choice is what the server counted as lost.
    relaxed = [token for it in cells["mars"].quality.prompts for token in it.off_choice]
    assert cells["mars"].lost_nats == pytest.approx(sum(it.loss for it in relaxed), abs=0.01)
