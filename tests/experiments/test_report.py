"""The report: what it recommends and why not, and its page."""

import json

import pytest

from sweep_files import EXAMPLE, STANDARD, failed, mars, turn, write_sweep
from vllm_mars.cli import main
from vllm_mars.experiments.records import read_sweep
from vllm_mars.experiments.report import CANNOT_TELL, MAX_LOSS, advise, write_report
from vllm_mars.experiments.rows import points, rows

BLOCKS = range(3)


def measured(cell, token_seconds, lost):
    """Three blocks with so many nats lost per token; an answer of the last is the example."""
    for block in BLOCKS:
        example = EXAMPLE if cell.is_lossy and block == 2 else ()
        yield turn(cell, block, token_seconds=token_seconds, lost=42 * lost, example=example)


RECORDS = [
    *(turn(STANDARD, block) for block in BLOCKS),
    *measured(mars(0.2), 0.018, 0.01),
    *measured(mars(0.3), 0.017, 0.018),
    *measured(mars(0.5), 0.01, 0.04),
]


def advice(path, records, max_loss=0.02):
    (group,) = points(rows(read_sweep(write_sweep(path, records))))
    return advise(group, "standard", max_loss)


def test_the_fastest_rule_within_the_budget_is_recommended(tmp_path):
    found = advice(tmp_path / "s.jsonl", RECORDS)
    assert json.loads(found.setting) == mars(0.3).config
    assert found.why.startswith(
        "price 0.3: 1.14 (1.14 to 1.15) x standard, 0.0180 nats lost per token"
    )
    assert "the fastest of 2 rules (of 3 lossy ones)" in found.why
    # The recommended setting spends its bound, and a little of the burst.
    records = [*RECORDS[:3], *measured(mars(0.3), 0.017, 0.021)]
    assert advice(tmp_path / "r.jsonl", records).row is None
    assert advice(tmp_path / "r.jsonl", records, MAX_LOSS).row
    found = advice(tmp_path / "t.jsonl", RECORDS, max_loss=0.012)
    assert found.row.cell.name == "price 0.2"


@pytest.mark.parametrize(
    ("records", "why"),
    [
        (RECORDS[:3], "No lossy rule was measured beside standard."),
        (RECORDS[3:], "No lossy rule was measured beside standard."),
        (
            [*RECORDS[:3], *RECORDS[9:]],
            "Of 1 lossy rules, 0 lose at most 0.02 nats per token, and none of these is "
            "significantly faster than standard.",
        ),
        ([*RECORDS[:3], *measured(mars(0.3), 0.02, 0.01)], "Of 1 lossy rules, 1 lose at most"),
        # One prompt block cannot tell how the loss varies.
        ([*RECORDS[:3], RECORDS[6]], "Of 1 lossy rules, 0 lose at most"),
    ],
)
def test_what_is_missing_is_named(tmp_path, records, why):
    found = advice(tmp_path / "s.jsonl", records)
    assert found.setting == CANNOT_TELL
    assert why in found.why


def test_the_page(tmp_path):
    sampled = [turn(mars(0.3, temperature=1.0), block, lost=1.0) for block in BLOCKS]
    bad = failed(mars(0.9), "vLLM <ended>\na log")
    path = write_sweep(tmp_path / "s.jsonl", [*RECORDS, *sampled, bad])
    page = tmp_path / "out" / "page.html"
    assert main(["report", str(path), "--output", str(page)]) == 0
    text = page.read_text()
    assert "<script" not in text and len(text) < 200_000
    assert text.count("<svg") == 1 and "nats lost per token" in text
    assert text.count("<table") == 3, "two of figures, one of what was run"
    assert "brown &amp; &#34;&lt;i&gt;" in text and "<b>\n" not in text, "tokens are text"
    assert "vLLM &lt;ended&gt;" in text and "a log" not in text
    assert "&#39;my prompts.jsonl&#39;" in text
    assert "At temperature 1:" in text and CANNOT_TELL in text
    order = [text.index(it) for it in ("mars_price&#34;: 0.3", "<figure", "<table", "What was run")]
    assert order == sorted(order)
    again = tmp_path / "again.html"
    assert main(["report", str(path), "--output", str(again), "--max-loss", "0.05"]) == 0
    assert "mars_price&#34;: 0.5" in again.read_text()


def test_a_sweep_without_a_loss_has_no_chart(tmp_path):
    path = write_sweep(tmp_path / "s.jsonl", [turn(STANDARD)])
    write_report(path, tmp_path / "page.html")
    assert "<svg" not in (tmp_path / "page.html").read_text()


def test_bad_files(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "none.jsonl"), "--output", str(page)]) == 1
    assert "cannot be read" in capsys.readouterr().err
    path = write_sweep(tmp_path / "s.jsonl", [turn(STANDARD)])
    assert main(["report", str(path), "--output", "/proc/none/page.html"]) == 1
    assert "output=/proc/none/page.html cannot be written" in capsys.readouterr().err
