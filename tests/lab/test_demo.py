"""The demo: its preset, its output, and, on real servers, that no process is left."""

import dataclasses
import io
import signal
import uuid

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM

import tiny_models
from interpreter import TESTS
from processes import marked, start, wait_until
from sweep_files import PIECES, STANDARD, mars, turn, write_prompts, write_sweep
from vllm_mars.lab.demo import CATEGORIES, LENGTHS, MARS, sweep_options
from vllm_mars.lab.demo_report import around, changed, conclusion, print_report
from vllm_mars.lab.plan import STRICT, load_sweep
from vllm_mars.lab.records import Piece, read_sweep
from vllm_mars.lab.rows import Interval, rows
from vllm_mars.models.draft_head import PACKAGED_HEAD
from vllm_mars.models.drafts import RECOMMENDED

PROMPTS = [
    {"id": "list", "prompt": "w10 w20 w30 w10 w20 w30 w10 w20"},
    {"id": "two", "prompt": "w40 w50 w60 w40 w50"},
    {"id": "three", "prompt": "w70 w80 w70 w80 w70"},
]


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_preset(on_cpu):
    options = sweep_options(on_cpu=on_cpu)
    cells = {(cell.name, cell.temperature): cell for cell in options.all_cells()}
    assert list(cells) == [(STRICT, 0.0), (MARS, 0.0), (STRICT, 0.7), (MARS, 0.7)]
    for (name, temperature), cell in cells.items():
        assert cell.config["model"] == str(PACKAGED_HEAD)
        assert (cell.lossy_reason is not None) == (name == MARS)
        assert cell.config["num_speculative_tokens"] == LENGTHS[temperature][name]
    assert "rejection_sample_method" not in cells[STRICT, 0.0].config
    # The fastest lossless verification. On a CPU vLLM samples wrong tokens without MARS.
    strict = cells[STRICT, 0.7].config
    assert strict["draft_sample_method"] == "probabilistic"
    assert strict["rejection_sample_method"] == ("mars" if on_cpu else "block")
    assert strict.get("mars_price") == (0 if on_cpu else None)
    # One server of MARS serves both temperatures.
    ((servers, _),) = load_sweep(options).groups(0)
    assert len(servers) == 3
    other = sweep_options(on_cpu=on_cpu, model="other", num_speculative_tokens=5).all_cells()
    assert {cell.config["method"] for cell in other} == {"ngram"}
    assert {cell.config["num_speculative_tokens"] for cell in other} == {5}
    assert not any("draft_sample_method" in cell.config for cell in other)
    assert {cell.config.get("rejection_sample_method") for cell in other} == {None, "mars"}


def test_prompts_ask_for_prose(tmp_path):
    whole, short = (load_sweep(sweep_options(on_cpu=True, short=s)).prompts for s in (False, True))
    assert len(whole) == 12 and {prompt.category for prompt in whole} == set(CATEGORIES)
    assert whole[: len(short)] == short and 0 < len(short) < len(whole)
    path = write_prompts(tmp_path / "p.jsonl", [{"prompt": "x", "category": "mine"}])
    assert len(load_sweep(sweep_options(on_cpu=True, prompts=path)).prompts) == 1


def printed(path, records, width=150):
    console = Console(file=io.StringIO(), width=width)
    print_report(read_sweep(write_sweep(path, records, STRICT)), {"p0": "Say [it]"}, console)
    return console.file.getvalue()


def test_printed_report(tmp_path):
    strict = STANDARD._replace(name=STRICT)
    records = []
    for temperature in (0.0, 0.7):
        for block in range(3):
            records.append(turn(strict._replace(temperature=temperature), block))
            cell = mars(0.3, temperature)._replace(name=MARS)
            seconds, pieces = (0.02, ()) if temperature else (0.01, PIECES)
            records.append(turn(cell, block, token_seconds=seconds, lost=0.84, pieces=pieces))
    text = printed(tmp_path / "s.jsonl", records)
    assert text.index("greedy, 1 request") < text.index("temperature 0.7, 1 request")
    assert text.count("Draft tokens a step: strict 4, MARS 4.") == 2
    greedy, sampled = (line for line in text.splitlines() if "as many tokens per step" in line)
    assert greedy.startswith("Greedy, MARS takes 1.00 times as many tokens per step as strict, wit")
    assert (
        "with 0.0200 nats lost per token and answers of 21.0 tokens compared with 21.0. Its"
        in greedy
    )
    assert "Its answers came 1.71 (" in greedy and ") times as fast: MARS is faster." in greedy
    assert greedy.endswith(" A step of MARS takes 0.50 times as long.")
    assert sampled.startswith("At temperature 0.7, MARS takes 1.00 times as many tokens per step ")
    assert sampled.endswith("Its answers came 1.00 times as fast: no difference is shown.")
    assert "ms per further token" in text
    assert "\x1b[" not in text, "no colour codes without a terminal"


def answered(cell, *answers):
    """A turn with a text and its pieces for each prompt."""
    record = turn(cell, lost=0.8)
    first, *_ = record.measured.answers
    replaced = tuple(
        dataclasses.replace(first, prompt=f"p{number}", text=text, pieces=pieces)
        for number, (text, pieces) in enumerate(answers)
    )
    measured = dataclasses.replace(record.measured, answers=replaced)
    return dataclasses.replace(record, measured=measured)


def test_two_answers_are_shown_with_the_strict_ones(tmp_path):
    """p2 shares most words with the strict answer, p0 lost most, p3 did not change."""
    strict = STANDARD._replace(name=STRICT)
    lossy = mars(0.3)._replace(name=MARS)
    text = "".join(piece.text for piece in PIECES)
    near = (Piece("The fox"), Piece(" is", 0.1), Piece(" red"))
    records = [
        answered(strict, *(("The fox was red", ()),) * 4),
        answered(
            lossy,
            (text, PIECES),
            (text, PIECES[:2]),
            ("The fox is red", near),
            ("The fox was red", ()),
        ),
    ]
    out = printed(tmp_path / "s.jsonl", records)
    assert "MARS changed 3 greedy answers." in out
    least = out.index("The one that changed least: p2")
    assert least < out.index("The one that lost most: p0") < out.index("Say [it]")
    (line,) = (line for line in out.splitlines() if "The [red] fox <b>" in line)
    assert "The fox was red" in line, "in two columns"
    assert "[|] end" in out and "MARS, relaxed 2 for 0.75 nats" in out
    narrow = printed(tmp_path / "n.jsonl", records, width=80)
    (line,) = (line for line in narrow.splitlines() if "The [red] fox <b>" in line)
    assert "was" not in line, "one above the other"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" red", (" ", "red", "")),
        ("a b", ("", "a b", "")),
        (" ", ("", "␣", "")),
        (" \n", ("", "↵", " \n")),
    ],
)
def test_a_relaxed_token_is_visible(text, shown):
    assert around(Piece(text, 0.1)) == shown


def test_without_relaxed_tokens_there_is_no_example(tmp_path):
    records = [turn(STANDARD._replace(name=STRICT)), turn(mars(0)._replace(name=MARS))]
    assert "MARS changed no greedy answer." in printed(tmp_path / "s.jsonl", records)


def test_uneven_turns_show_no_speed(tmp_path):
    """The machine is busy during one turn of MARS."""
    strict = STANDARD._replace(name=STRICT)
    lossy = mars(0.3)._replace(name=MARS)
    records = [turn(strict), turn(strict, repeat=1), turn(lossy, accepted=20, lost=0.42)]
    records.append(turn(lossy, repeat=1, token_seconds=0.04, accepted=20, lost=0.42))
    text = printed(tmp_path / "s.jsonl", records)
    assert "Greedy, MARS takes 1.50 times as many tokens per step as strict, with 0.0100" in text
    assert (
        "no speed is reported: turns of one rule differ by more than a third (MARS 22 to 40 "
        in text
    )
    assert "as fast" not in text and "ms per further token" not in text


def test_the_conclusion_follows_the_figures(tmp_path):
    records = [turn(STANDARD), turn(mars(0.3), lost=0.42)]
    base, row = rows(read_sweep(write_sweep(tmp_path / "s.jsonl", records)))
    for speed, text in (
        (Interval(0.8, 0.7, 0.9), "0.80 (0.70 to 0.90) times as fast: price 0.3 is slower."),
        (None, "the speed was not measured"),
    ):
        assert text in conclusion(dataclasses.replace(row, speed=speed), base)


@pytest.fixture(scope="module")
def model(tiny_model):
    """A tiny target, and next to it a draft that it often agrees with."""
    draft = tiny_model.with_name("eagle-head")
    target = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32")
    tiny_models.eagle(draft, target)
    return tiny_model


def check(file):
    """Checks all figures but times, and that reports and metrics agree."""
    by_cell = {(row.cell.name, row.cell.temperature): row for row in rows(file)}
    greedy, strict = by_cell[MARS, 0.0], by_cell[STRICT, 0.0]
    assert greedy.steps.value >= strict.steps.value > 1
    assert greedy.lost.value > strict.lost.value == 0
    assert by_cell[STRICT, 0.7].lost.value == 0
    for record in file.records:
        if record.key[:2] != (MARS, 0.0):
            continue
        for answer in record.measured.answers:
            assert sum(answer.lost) <= RECOMMENDED["mars_max_loss"] * (answer.tokens + 100)
        reported = sum(sum(answer.lost) for answer in record.measured.answers)
        assert reported == pytest.approx(record.measured.lost_nats, rel=1e-3)
    assert changed(file)


def start_demo(tmp_path, model, mark, *arguments, program=("-m", "vllm_mars.cli"), **env):
    options = {
        "--model": model,
        "--draft": model.with_name("eagle-head"),
        "--prompts": write_prompts(tmp_path / "prompts.jsonl", PROMPTS),
        "--output": tmp_path / "out" / "demo.jsonl",
        # The tiny model's maximum.
        "--server-arg": "--max-model-len=512",
    }
    words = [f"{option}={value}" for option, value in options.items()]
    return start(*program, "demo", "--short", *words, *arguments, mark=mark, **env)


# A demo whose servers are fakes that never become ready.
STARTING = """
import sys
from stand_in import StandInServer
from vllm_mars.cli.__main__ import main
from vllm_mars.lab import measure
measure.VllmServer, measure.MINUTE = StandInServer, 0.2
sys.exit(main(sys.argv[1:]))
"""


def test_a_demo_that_is_ended_ends_its_servers(tmp_path, model):
    mark = uuid.uuid4().hex
    process = start_demo(
        tmp_path,
        model,
        mark,
        "--server-arg=--load-seconds=300",
        program=["-c", STARTING],
        PYTHONPATH=str(TESTS),
    )
    # Each server has an engine core and a worker.
    wait_until(lambda: len(marked(mark)) > 9, 100, "servers")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err, err
    assert "interrupted" in err and marked(mark) == []
    # Printed each minute; the remaining time is unknown.
    assert "servers have been starting for" in err


@pytest.mark.engine
@pytest.mark.nightly
def test_the_short_form_of_the_packaged_model_with_its_head(tmp_path, packaged_model):
    output = tmp_path / "demo.jsonl"
    process = start("-m", "vllm_mars.cli", "demo", "--short", "--output", output)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "4 turns, " in err and "This short form shows that it works, not how fast" in out
    check(read_sweep(output))
    # A tiny model's words have no spaces.
    example, *_ = changed(read_sweep(output))
    assert "".join(piece.text for piece in example.lossy.pieces) == example.lossy.text
    assert "The one that changed least: " in out


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_a_demo_on_model_runner_v2(tmp_path, tiny_model):
    """Times are meaningless there, since kernels are interpreted."""
    draft = tmp_path / "draft"
    target = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32")
    tiny_models.first_layer(draft, target)
    mark, output = uuid.uuid4().hex, tmp_path / "out" / "demo.jsonl"
    interpreted = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS / "interpreted")}
    process = start_demo(tmp_path, tiny_model, mark, "--draft", str(draft), **interpreted)
    out, err = process.communicate(timeout=1400)
    assert process.returncode == 0, err
    assert marked(mark) == []
    logs = [path.read_text() for path in output.parent.rglob("*.log")]
    assert sum("model runner V2; the output is LOSSY" in log for log in logs) == 2
    assert not any("Model Runner V2 requires Triton" in log for log in logs)
    check(read_sweep(output))
    assert "The one that changed least: " in out
