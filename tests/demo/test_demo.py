"""The demo: its preset, what it prints, and on real servers that it ends all that it started."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import uuid

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM

import tiny_models
from processes import MARK, marked, wait_until
from sweep_files import EXAMPLE, STANDARD, mars, turn, write_sweep
from vllm_mars.demo.command import MARS, STRICT_DRAWN, sweep_options
from vllm_mars.demo.report import conclusion, print_report
from vllm_mars.experiments.plan import STRICT
from vllm_mars.experiments.records import read_sweep
from vllm_mars.experiments.rows import Interval, rows
from vllm_mars.local.draft_head import PACKAGED_HEAD

PROMPTS = [
    {"id": "list", "prompt": "w10 w20 w30 w10 w20 w30 w10 w20"},
    {"id": "two", "prompt": "w40 w50 w60 w40 w50"},
    {"id": "three", "prompt": "w70 w80 w70 w80 w70"},
]


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_preset(on_cpu):
    options = sweep_options(on_cpu=on_cpu)
    found = {(cell.name, cell.temperature): cell for cell in options.all_cells()}
    of_sampled = [(STRICT, 1.0), (STRICT_DRAWN, 1.0), (MARS, 1.0)]
    assert list(found) == [(STRICT, 0.0), (MARS, 0.0), *of_sampled]
    for cell in found.values():
        assert cell.config["model"] == str(PACKAGED_HEAD)
        assert cell.is_lossy == (cell.name == MARS)
    assert "rejection_sample_method" not in found[STRICT, 0.0].config
    # On a CPU vLLM's own server samples wrong tokens.
    assert ("mars_price" in found[STRICT, 1.0].config) == on_cpu
    drawn = {"draft_sample_method": "probabilistic", "num_speculative_tokens": 2}
    assert found[STRICT_DRAWN, 1.0].config == found[STRICT, 1.0].config | drawn
    # One server of MARS for both.
    assert found[MARS, 0.0].config == found[MARS, 1.0].config
    other = sweep_options(on_cpu=on_cpu, model="other", num_speculative_tokens=5).all_cells()
    assert {cell.config["method"] for cell in other} == {"ngram"}
    assert {cell.config["num_speculative_tokens"] for cell in other} == {5}
    assert not any("draft_sample_method" in cell.config for cell in other)
    assert sweep_options(on_cpu=on_cpu, short=True).num_prompts < options.num_prompts


def printed(path, records):
    console = Console(file=io.StringIO(), width=150)
    print_report(read_sweep(write_sweep(path, records, STRICT)), console)
    return console.file.getvalue()


def test_what_is_printed(tmp_path):
    strict = STANDARD._replace(name=STRICT)
    records = []
    for temperature in (0.0, 1.0):
        for block in range(3):
            records.append(turn(strict._replace(temperature=temperature), block))
            cell = mars(0.3, temperature)._replace(name=MARS)
            example = EXAMPLE if block == 2 and not temperature else ()
            seconds = 0.01 if not temperature else 0.015
            records.append(turn(cell, block, token_seconds=seconds, lost=0.84, example=example))
            if temperature:
                # As fast as MARS, and faster than strict verification whose drafts are not drawn.
                drawn = strict._replace(name=STRICT_DRAWN, temperature=temperature)
                records[-2:-2] = [turn(drawn, block, token_seconds=seconds)]
    text = printed(tmp_path / "s.jsonl", records)
    assert text.index("greedy, 1 request") < text.index("temperature 1, 1 request")
    assert "The [red] fox <b>" in text, "marked without colours"
    assert 'brown & "<i>' in text and "0.25" in text
    greedy, sampled = (line for line in text.splitlines() if "as many tokens per step" in line)
    assert greedy.startswith("Greedy, MARS takes 1.00 times as many tokens per step as strict, wit")
    assert ", with 0.0200 nats lost per token. An answer takes strict 1.71 (" in greedy
    assert greedy.endswith(") times as long. A step of MARS takes 0.50 times as long.")
    assert sampled.startswith(
        "At temperature 1, MARS takes 1.00 times as many tokens per step as s"
    )
    assert (
        "An answer takes strict, probabilistic 1.00 times as long: no difference shown." in sampled
    )
    assert "ms per further token" in text
    assert "\x1b[" not in text, "no colour codes without a terminal"


def test_turns_that_disagree_tell_tokens_per_step_alone(tmp_path):
    """The machine did other work during one turn of MARS."""
    strict, own = STANDARD._replace(name=STRICT), mars(0.3)._replace(name=MARS)
    records = [turn(strict), turn(strict, repeat=1), turn(own, accepted=20, lost=0.42)]
    records.append(turn(own, repeat=1, token_seconds=0.04, accepted=20, lost=0.42))
    text = printed(tmp_path / "s.jsonl", records)
    assert "Greedy, MARS takes 1.50 times as many tokens per step as strict, with 0.0100" in text
    assert "no speed is told: turns of one rule differ by more than a third (MARS 22 to 40 " in text
    assert "as long" not in text and "ms per further token" not in text


def test_the_sentence_goes_where_the_figures_point(tmp_path):
    records = [turn(STANDARD), turn(mars(0.3), lost=0.42)]
    base, row = rows(read_sweep(write_sweep(tmp_path / "s.jsonl", records)))
    for speed, text in (
        (Interval(1.2, 1.1, 1.3), "takes standard 1.20 (1.10 to 1.30) times as long."),
        (Interval(1.1, 0.9, 1.3), "1.10 (0.90 to 1.30) times as long: no difference shown."),
        (Interval(0.8, 0.7, 0.9), "takes standard 0.80 (0.70 to 0.90) times as long."),
        (None, "the speed was not measured"),
    ):
        assert text in conclusion(dataclasses.replace(row, speed=speed), base)


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
            *(sys.executable, "-m", "vllm_mars.cli", "demo", "--short", "--model", str(model)),
            *("--draft", str(model.with_name("eagle-head")), "--prompts", str(prompts)),
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


@pytest.mark.engine
@pytest.mark.parametrize("turns", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_demo_that_is_ended_goes_on(tmp_path, model, turns):
    """While its servers start, or after a turn."""
    mark, output = uuid.uuid4().hex, tmp_path / "out" / "demo.jsonl"
    process = start_demo(tmp_path, model, mark)

    def is_as_far():
        lines = output.read_bytes().count(b"\n") if output.exists() else 0
        return lines > turns and len(marked(mark)) > 2

    wait_until(is_as_far, 300, "servers or a turn")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert marked(mark) == []

    process = start_demo(tmp_path, model, mark)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert marked(mark) == []
    file = read_sweep(output)
    assert len(file.records) == 5 and len(file.heads) == 2
    for record in file.records:
        assert len(record.measured.answers) == 3
    assert "temperature 1, 1 request at a time, 3 answers" in out
    assert "This short form shows that it works, not how fast" in out
    lines = err.splitlines()
    assert lines[0].startswith("5 turns, ") and lines[0].endswith(" servers start")
    assert lines[1].startswith("[") and " left" in err

    process = start_demo(tmp_path, model, mark)
    again, err = process.communicate(timeout=60)
    assert again == out and "all 5 turns are in" in err


@pytest.mark.engine
@pytest.mark.nightly
def test_a_server_that_dies_is_reported(tmp_path, model):
    mark = uuid.uuid4().hex
    process = start_demo(tmp_path, model, mark, "--server-arg=--no-such-option")
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "vLLM ended while starting" in err and "--no-such-option" in err
    assert "Traceback" not in err.split("--- the end of")[0]
    assert marked(mark) == []


@pytest.mark.engine
@pytest.mark.nightly
def test_the_short_form_of_the_packaged_model_with_its_head(tmp_path, packaged_model):
    output = tmp_path / "demo.jsonl"
    process = subprocess.run(
        [sys.executable, "-m", "vllm_mars.cli", "demo", "--short", "--output", str(output)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr
    found = {(row.cell.name, row.cell.temperature): row for row in rows(read_sweep(output))}
    greedy, strict = found[MARS, 0.0], found[STRICT, 0.0]
    assert greedy.steps.value >= strict.steps.value > 1
    assert greedy.lost.value > strict.lost.value == 0
    assert any(token.lost is not None for token in greedy.example)
    assert found[STRICT, 1.0].lost.value == 0
