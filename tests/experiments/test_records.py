"""The file of a sweep: what is written is read back, and whatever is wrong is named."""

import dataclasses
import json

import pytest

from vllm_mars.experiments.sweep.record_file import (
    append_cell,
    append_quality,
    read_cells,
    repair_end,
)
from vllm_mars.experiments.sweep.records import (
    Acceptance,
    Cell,
    CellKey,
    Estimate,
    OffChoice,
    Output,
    PromptQuality,
    Quality,
    Settings,
    Speed,
    TaskAnswer,
)

KEY = CellKey("model", "ngram", "mars", "ratio", 0.9, None, True, 4, 0.0, 1, "prompts", 0)
CELL = Cell(
    key=KEY,
    status="ok",
    reason="",
    settings=Settings(64, {"prompts": 1}, 0, ("--enforce-eager",)),
    theta_set_by="request",
    speed=Speed(2.0, 1, 0, 7, 8),
    acceptance=Acceptance(3, 12, 6, (3, 2, 1, 0)),
    # Characters at which some readers, but not JSON, end a line.
    outputs=(Output("a", "one\u2028two\x85\n", 7, 8, "stop", 2.0, 0.5, 0.0),),
    created="2026-01-01T00:00:00+00:00",
    node="host",
    git_commit=None,
    versions={"vllm": "0.32.0", "torch": None},
    hardware={"cpu": "x", "cores": 2, "memory_gib": 1.5, "gpu": None},
    command=("vllm-mars", "sweep"),
)
QUALITY = Quality(
    prompts=(PromptQuality("a", {"nll": 0.5}, (OffChoice(1, 3, 6, "two", -2.0, "2", -0.1),)),),
    estimates=(Estimate("nll", 1, 0.5, 0.5, 0.5, reference=0.4),),
    notes=("one",),
)


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "new" / "run.jsonl"
    other = dataclasses.replace(CELL, key=dataclasses.replace(KEY, repeat=1))
    failed = dataclasses.replace(
        CELL,
        key=dataclasses.replace(KEY, repeat=2),
        status="failed",
        reason="the server ended",
        speed=None,
        acceptance=None,
        outputs=(),
    )
    for cell in (CELL, other, failed):
        append_cell(path, cell)
    append_quality(path, KEY, Quality((), ()))
    append_quality(path, KEY, QUALITY)
    cells = read_cells(path)
    assert cells == [CELL, other, failed]
    assert [cell.quality for cell in cells] == [QUALITY, None, None]
    assert cells[0].quality.estimate("nll").reference == 0.4
    assert cells[0].quality.estimate("pass") is None
    assert path.read_text(encoding="utf-8").count("\n") == 5


def test_derived_figures():
    assert CELL.speed.tokens_per_second == 4
    assert CELL.acceptance.mean_length == 3
    assert Acceptance(0, 0, 0, ()).mean_length == 1
    assert KEY.label == "mars 0.9, ngram K4, T0, c1, prompts, #0"
    assert KEY.lossy and not dataclasses.replace(KEY, theta=1.0).lossy
    gap = dataclasses.replace(KEY, metric="gap", theta=None, gap=0.5, protected=False)
    assert gap.rule == "mars gap 0.5 unprotected" and gap.lossy
    price = dataclasses.replace(KEY, metric="price", theta=None, price=0.25)
    bound = dataclasses.replace(price, options='{"mars_max_relaxed_share": 0.1}')
    assert (price.rule, price.value, price.lossy) == ("mars price 0.25", 0.25, True)
    assert bound.rule == "mars price 0.25 max_relaxed_share 0.1"
    assert not dataclasses.replace(price, price=0.0).lossy


def test_a_file_from_before_there_were_prices_is_read(tmp_path):
    path = tmp_path / "run.jsonl"
    append_cell(path, CELL)
    line = json.loads(path.read_text(encoding="utf-8"))
    del line["key"]["price"], line["key"]["options"]
    path.write_text(json.dumps(line) + "\n")
    assert read_cells(path) == [CELL]


def test_an_unfinished_last_line_is_left_out_and_cut_off(tmp_path):
    path = tmp_path / "run.jsonl"
    repair_end(path)
    append_cell(path, CELL)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    assert read_cells(path) == [CELL]
    repair_end(path)
    assert path.read_bytes() == whole
    repair_end(path)
    assert path.read_bytes() == whole


def test_a_failed_cell_may_be_measured_again_a_measured_one_not(tmp_path):
    path = tmp_path / "run.jsonl"
    append_cell(path, dataclasses.replace(CELL, status="failed", reason="x", speed=None))
    append_cell(path, CELL)
    assert read_cells(path) == [CELL]
    append_cell(path, CELL)
    with pytest.raises(ValueError, match=r"line 3 measures mars 0\.9.* a second time"):
        read_cells(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"theta": 1.7},
            r"line 1: key: theta=1\.7 is outside \(0, 1\]; 1 switches",
        ),
        ({"theta": "0.9"}, r"line 1: key\.theta: Input should be a valid number"),
        ({"theta": None}, "metric 'ratio' needs theta, and gap, price null"),
        ({"gap": 0.5}, "metric 'ratio' needs theta, and gap, price null"),
        ({"metric": "price", "price": 0.5}, "metric 'price' needs price, and theta, gap null"),
        ({"metric": None}, "method 'mars' needs metric"),
        ({"method": "best"}, r"key\.method: Input should be 'autoregressive', 'standard'"),
        ({"method": "standard"}, "metric='ratio' belongs to method 'mars'"),
        ({"k": 0}, "method 'autoregressive', draft 'none' and k 0 go together"),
        ({"concurrency": 0}, "concurrency=0 is below 1"),
        ({"repeat": -1}, "repeat=-1 is below 0"),
        ({"model": ""}, "model is empty"),
        ({"colour": 1}, r"key\.colour: Unexpected keyword"),
    ],
)
def test_a_bad_key_is_named(tmp_path, change, message):
    path = tmp_path / "run.jsonl"
    append_cell(path, CELL)
    line = json.loads(path.read_text(encoding="utf-8"))
    line["key"] |= change
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=message):
        read_cells(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "neither a cell nor its quality"),
        ('{"kind": "cell"}', "has schema=None, not 1"),
        ('{"kind": "cell", "schema": 1}', "line 1: key: Field required"),
        (
            json.dumps({"kind": "quality", "schema": 1, "key": dataclasses.asdict(KEY)}),
            r"line 1 judges mars 0\.9.*, which no earlier line measured",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "run.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_cells([path])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.jsonl cannot be read.*vllm-mars sweep"):
        read_cells(tmp_path / "nothing.jsonl")


def test_no_number_that_json_lacks_is_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_cell(
            tmp_path / "run.jsonl",
            dataclasses.replace(CELL, speed=Speed(float("nan"), 1, 0, 7, 8)),
        )
    assert not (tmp_path / "run.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": None}, "has a speed or answers of a task exactly when it is 'ok'"),
        (
            {"speed": None, "task_answers": (TaskAnswer("t/0", "", {}),)},
            "outputs: a cell that is 'ok' has a speed",
        ),
        ({"reason": "x"}, "has a reason unless it is 'ok'"),
    ],
)
def test_status_and_content_agree(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CELL, **change)
