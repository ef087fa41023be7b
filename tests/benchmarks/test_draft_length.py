"""The best number of draft tokens, on cells whose times are known by hand."""

import dataclasses
import json
import sys

import pytest

from benchmarks import draft_length
from benchmarks.draft_length import curves
from report_files import make_cell
from vllm_mars.experiments.sweep.record_file import append_cell
from vllm_mars.experiments.sweep.records import Output
from vllm_mars.experiments.sweep.summary import rows


def cell(k, tpots, method="standard", repeat=0):
    """Answers of 11 tokens, the first after a second; without a further token where None."""
    made = make_cell(method, 0.9 if method == "mars" else None, k, 20.0, 1, repeat)
    outputs = tuple(
        Output(str(number), "x", 5, 1 if tpot is None else 11, "length", 1 + 10 * (tpot or 0), 1, 0)
        for number, tpot in enumerate(tpots)
    )
    return dataclasses.replace(made, outputs=outputs)


def test_the_peak_and_its_interval():
    # K 4 is best for each prompt but the last, and in no resample beaten by K 8.
    found = curves(rows([cell(2, [0.4] * 9), cell(4, [0.2] * 8 + [0.9]), cell(8, [0.3] * 9)]))
    (curve,) = found
    assert (curve["draft"], curve["concurrency"], curve["rule"]) == ("ngram", 1, "standard")
    assert curve["peak"] == {"value": 4, "low": 4, "high": 4}
    assert [of["k"] for of in curve["by_k"]] == [2, 4, 8]
    assert [of["tpot_seconds"]["value"] for of in curve["by_k"]] == pytest.approx([0.4, 0.2, 0.3])
    assert curve["by_k"][0]["seconds_per_answer"]["value"] == pytest.approx(5.0)
    assert curve["by_k"][0]["tokens_per_answer"]["value"] == pytest.approx(11)
    # 30 + 15 of 60 drafts were accepted.
    assert curve["by_k"][0]["acceptance_length"] == pytest.approx(1.75)


def test_resamples_that_disagree_widen_the_interval():
    one, other = [0.2, 0.2, 0.2, 0.5, 0.5], [0.3] * 5
    (curve,) = curves(rows([cell(2, one), cell(4, other)]))
    assert curve["peak"] == {"value": 2, "low": 2, "high": 4}


def test_each_rule_has_a_curve_and_repeats_are_averaged():
    cells = [cell(2, [0.4]), cell(2, [0.1], repeat=1), cell(4, [0.3]), cell(4, [0.3], repeat=1)]
    cells += [cell(2, [0.4], "mars"), cell(4, [0.3], "mars"), cell(0, [0.1], "autoregressive")]
    peaks = {curve["rule"]: curve["peak"]["value"] for curve in curves(rows(cells))}
    # 0.25 beside 0.3.
    assert peaks == {"standard": 2, "mars 0.9": 4}


def test_a_lossy_rule_is_compared_with_strict_verification_at_its_k():
    cells = [cell(2, [0.4] * 3), cell(4, [0.3] * 3)]
    cells += [cell(2, [0.2] * 3, "mars"), cell(4, [0.2] * 3, "mars")]
    strict, mars = curves(rows(cells))
    gains = [of["strict_tpot_over_tpot"]["value"] for of in mars["by_k"]]
    assert gains == pytest.approx([2.0, 1.5])
    assert {of["strict_tpot_over_tpot"] for of in strict["by_k"]} == {None}


def test_datasets_have_curves_of_their_own():
    other = [
        dataclasses.replace(it, key=dataclasses.replace(it.key, dataset="other"))
        for it in (cell(2, [0.1]), cell(4, [0.2]))
    ]
    found = curves(rows([cell(2, [0.4]), cell(4, [0.3]), *other]))
    peaks = {curve["dataset"]: curve["peak"]["value"] for curve in found}
    assert peaks == {"prompts": 4, "other": 2}


def test_what_has_no_time_per_further_token_is_left_out():
    (curve,) = curves(rows([cell(2, [0.1, 0.4, 0.4]), cell(4, [None, 0.3, 0.3])]))
    assert curve["peak"]["value"] == 4
    with pytest.raises(ValueError, match="K 2, 4 have no prompt in common"):
        curves(rows([cell(2, [0.1]), cell(4, [None])]))


def test_the_command_writes_both_files(tmp_path, monkeypatch):
    path = tmp_path / "length.jsonl"
    for one in (cell(2, [0.4, 0.5]), cell(4, [0.3, 0.3])):
        append_cell(path, one)
    output, picture = tmp_path / "length.json", tmp_path / "length.png"
    arguments = [str(path), "--output", str(output), "--plot", str(picture)]
    monkeypatch.setattr(sys, "argv", ["draft_length.py", *arguments])
    assert draft_length.main() == 0
    result = json.loads(output.read_text())
    assert (result["sweep"], len(result["curves"])) == (["length.jsonl"], 1)
    assert result["git_commit"] == "0123456789abcdef0123"
    assert picture.read_bytes().startswith(b"\x89PNG")
