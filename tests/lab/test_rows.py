"""Files of a sweep: lines, figures known by hand, intervals, tables."""

import dataclasses
import math
import statistics

import numpy as np
import pytest

from sweep_files import STANDARD, failed, joined, mars, turn, write_sweep
from vllm_mars.lab.measure import pieces
from vllm_mars.lab.records import Piece, read_sweep
from vllm_mars.lab.rows import (
    COLUMNS,
    estimate,
    ratio_of_means,
    rich_table,
    rows,
    shown,
    tables,
    transposed,
)

BLOCKS = range(3)


def rows_of(path, records):
    return {row.cell.name: row for row in rows(read_sweep(write_sweep(path, records)))}


@pytest.fixture
def strict_and_price(tmp_path):
    """Rows of strict verification and of a price that halves the time per token."""
    records = [turn(STANDARD, block) for block in BLOCKS]
    records += [
        turn(mars(0.3), block, token_seconds=0.01, lost=0.42 * (block + 1), accepted=30, drift=0.84)
        for block in BLOCKS
    ]
    by_name = rows_of(tmp_path / "s.jsonl", records)
    return by_name["standard"], by_name["price 0.3"]


def test_figures(strict_and_price):
    strict, price = strict_and_price
    assert strict.answers == price.answers == 6
    assert strict.ttft.value == pytest.approx(0.1)
    # 0.02 s x (1, 1.1, 1.2, 1.3, 1.4, 1.5).
    assert strict.tpot.value == pytest.approx(0.025)
    assert price.tpot.value == pytest.approx(0.0125)
    assert (strict.steps.value, price.steps.value) == (2.0, 4.0)
    assert strict.speed is None and strict.gain is None
    assert strict.lost == (0, 0, 0)
    # 0.42, 0.84 and 1.26 nats of 42 tokens each.
    assert price.lost.value == pytest.approx(0.02)
    assert 0.01 <= price.lost.low < 0.02 < price.lost.high < 0.031
    assert price.length.value == 21
    assert price.drift.value == pytest.approx(0.02)


def test_ratios_are_paired(strict_and_price):
    """Prompts differ by half, but all have the same ratio."""
    strict, price = strict_and_price
    for ratio, value in ((price.token_speed, 2), (price.gain, 2), (price.step_ratio, 0.5)):
        assert ratio == pytest.approx((value, value, value))
    assert strict.tpot.high - strict.tpot.low > 0.002
    # 0.6 s against 0.35 s on average.
    assert price.speed.value == pytest.approx(12 / 7)


def test_only_common_prompts_are_compared(tmp_path):
    records = [turn(STANDARD, block) for block in BLOCKS]
    records += [turn(mars(0.3), block, token_seconds=0.04) for block in (0, 1)]
    price = rows_of(tmp_path / "s.jsonl", records)["price 0.3"]
    assert price.token_speed.value == pytest.approx(0.5)
    price = rows_of(tmp_path / "t.jsonl", [turn(STANDARD, 0), turn(mars(0.3), 1)])["price 0.3"]
    assert price.speed is None and price.tpot is not None


def test_an_interval_is_close_to_that_of_a_jackknife():
    above, below = np.random.default_rng(0).uniform(1, 3, (2, 100))
    samples = {i: {"a": above[i], "b": below[i]} for i in range(100)}
    value, low, high = estimate(ratio_of_means, samples, ["a", "b"])
    jackknife = [ratio_of_means(np.delete(above, i), np.delete(below, i)) for i in range(100)]
    assert value == pytest.approx(above.sum() / below.sum())
    half = 1.96 * math.sqrt(99 * statistics.pvariance(jackknife))
    assert (high - low) / 2 == pytest.approx(half, rel=0.15)


def test_one_block_has_no_interval(tmp_path):
    price = rows_of(tmp_path / "s.jsonl", [turn(STANDARD), turn(mars(0.3))])["price 0.3"]
    assert price.gain == (1.0, -math.inf, math.inf)
    assert shown(price.gain, ".2f") == "1.00"


def test_one_stall_of_the_machine_hardly_matters(tmp_path):
    """One of 16 answers takes 44 s longer; the others are equal."""
    records = [
        joined([turn(cell, block) for block in blocks], stall)
        for cell, stalls in ((STANDARD, (0, 0)), (mars(0.3), (0, 44)))
        for blocks, stall in zip(((0, 3, 4, 7), (1, 2, 5, 6)), stalls, strict=True)
    ]
    row = rows_of(tmp_path / "s.jsonl", records)["price 0.3"]
    assert row.speed.value == pytest.approx(1, abs=0.1) and row.speed.low > 0.8
    assert row.time.high < 1.5
    assert not row.is_uneven


def test_repeats_are_averaged_by_prompt(tmp_path):
    records = [
        turn(STANDARD, block, repeat, token_seconds=seconds)
        for block in BLOCKS
        for repeat, seconds in enumerate((0.01, 0.03))
    ]
    strict = rows_of(tmp_path / "s.jsonl", records)["standard"]
    assert strict.tpot.value == pytest.approx(0.025)
    assert strict.answers == 12


def test_tables(tmp_path):
    concurrent = dataclasses.replace(turn(STANDARD), concurrency=4)
    no_counter = turn(mars(0.3, temperature=1.0))
    bad = failed(mars(0.5), "vLLM ended\nlong log")
    path = write_sweep(tmp_path / "s.jsonl", [bad, turn(STANDARD), no_counter, concurrent])
    greedy, under_load, sampled = tables(rows(read_sweep(path)), "standard")
    assert greedy.title == "greedy, 1 request at a time, 2 answers"
    assert under_load.title == "greedy, 4 requests at a time, 2 answers"
    assert sampled.title == "temperature 1, 1 request at a time, 2 answers"
    assert [row[0] for row in greedy.rows] == ["standard", "price 0.5"]
    assert greedy.names[-1] == "failed" and [row[-1] for row in greedy.rows] == ["", "vLLM ended"]
    assert "tokens/s" in under_load.names and "tokens/s" not in greedy.names
    assert "nats lost per token" not in sampled.names, "vLLM without MARS does not count it"
    assert set(greedy.names) <= COLUMNS.keys(), "nothing is compared with the baseline"
    assert rich_table(greedy).row_count == 2


@pytest.mark.parametrize(
    ("reasons", "shown"),
    [
        ([], []),
        (["one\nlong log"], [["price 0.5", "one"]]),
        (["one", ""], [["price 0.5", "one"], ["price 0.6", "no reason is given"]]),
    ],
)
def test_tables_without_figures(tmp_path, reasons, shown):
    records = [failed(mars(0.5 + 0.1 * i), reason) for i, reason in enumerate(reasons)]
    made = tables(rows(read_sweep(write_sweep(tmp_path / "s.jsonl", records))), "price 0.5")
    assert [[*map(list, table.rows)] for table in made] == ([shown] if shown else [])
    for table in made:
        assert table.names == ["rule", "failed"] and rich_table(transposed(table)).row_count == 1


def test_some_turns_failed(tmp_path):
    records = [turn(STANDARD), dataclasses.replace(failed(STANDARD, "why"), block=1)]
    (table,) = tables(rows(read_sweep(write_sweep(tmp_path / "s.jsonl", records))), "standard")
    assert "2 answers" in table.title and table.rows[0][-1] == "why"


def test_a_truncated_line_is_skipped_and_replaced(tmp_path):
    path = write_sweep(tmp_path / "s.jsonl", [turn(STANDARD)])
    whole = path.read_text()
    with path.open("a") as file:
        file.write('{"kind": "turn", "na')
    assert len(read_sweep(path).records) == 1
    write_sweep(path, [turn(STANDARD, lost=1.0), turn(STANDARD, 1)])
    assert path.read_text().startswith(whole)
    first, second = read_sweep(path).records
    assert first.measured.lost_nats == 1.0, "the later line of a turn counts"
    assert second.block == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("", "says nothing of its sweep"),
        ("{}\n", r"s\.jsonl, line 1, is not of `vllm-mars sweep` of this release: "),
        ("[1\n", "line 1, is not of"),
    ],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "s.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_sweep(path)


def test_relaxed_tokens_of_an_answer():
    content = [{"token": text} for text in ("a", " b", " c", " d", "<end>")]
    report = {"relaxed_positions": [2], "loss_nats": [0.7]}
    answer = {
        "choices": [{"logprobs": {"content": content}, "finish_reason": "stop"}],
        "metrics": {"mars": [report]},
    }
    assert pieces(answer) == (Piece("a b"), Piece(" c", 0.7), Piece(" d"))
    # A server without MARS makes no report.
    assert pieces(answer | {"metrics": None}) == (Piece("a b c d"),)
    answer["choices"][0]["finish_reason"] = "length"
    assert pieces(answer)[-1] == Piece(" d<end>")
