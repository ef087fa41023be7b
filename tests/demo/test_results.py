"""The demo's figures and what it prints of them, against cases worked out by hand."""

import io
import re

import pytest
from rich.console import Console

from vllm_mars.demo.chat import Answer, ScoredToken
from vllm_mars.demo.options import MODES, DemoOptions
from vllm_mars.demo.report import print_report
from vllm_mars.demo.results import Example, Record, Results, Speedup, speedup
from vllm_mars.local.prompts import Prompt


def answer(ttft, tpot, tokens, text="same", relaxed=()):
    return Answer(
        text=text,
        seconds=ttft + tpot * (tokens - 1),
        first_token_seconds=ttft,
        prompt_tokens=7,
        output_tokens=tokens,
        drafts=5,
        draft_tokens=20,
        accepted_tokens=10,
        finish_reason="stop",
        token_ids=tuple(range(tokens)),
        relaxed_positions=relaxed,
        loss_nats=0.5 * len(relaxed),
    )


def results(answers, options=None):
    """Results of single-turn prompts a, b, c, ...: `answers[mode]` has one list per repeat."""
    found = Results(options or DemoOptions(), "dir/model", {"versions": {}})
    for mode in MODES:
        for repeat, row in enumerate(answers[mode]):
            for letter, one in zip("abcdefgh", row, strict=False):
                prompt = Prompt(letter, f"kind {letter}", ("?",))
                found.records[mode].append(Record(prompt, 0, repeat, [], one))
    found.token_texts = {i: f"<{i}>" for i in range(100)}
    return found


@pytest.fixture
def three():
    """Per token, strict is 2, 2 and 4 x autoregressive, MARS 1, 2 and 0.5 x strict."""
    return results(
        {
            "autoregressive": [
                [answer(1.0, 0.8, 11), answer(1.0, 0.8, 21), answer(3.0, 0.8, 2, "other")]
            ],
            "strict": [[answer(1.0, 0.4, 11), answer(1.0, 0.4, 21), answer(3.0, 0.2, 2)]],
            "mars": [
                [
                    answer(2.0, 0.4, 11, "new", relaxed=(3, 4)),
                    answer(2.0, 0.2, 11),
                    answer(2.0, 0.4, 5, "new", relaxed=(1,)),
                ]
            ],
        }
    )


def test_ttft_and_tpot_are_apart(three):
    strict, mars = three.summary("strict"), three.summary("mars")
    assert (strict["ttft_seconds"], strict["tpot_seconds"]) == pytest.approx((1.0, 0.4))
    assert (mars["ttft_seconds"], mars["tpot_seconds"]) == pytest.approx((2.0, 0.4))
    # 5 + 9 + 3.2 seconds for 34 tokens.
    assert strict["seconds_per_answer"] == pytest.approx(17.2 / 3)
    assert strict["tokens_per_second"] == pytest.approx(34 / 17.2)


def test_answers_that_equal_the_autoregressive_ones(three):
    assert [three.summary(mode)["equal_answers"] for mode in MODES] == [3, 2, 1]
    comparison = three.comparison()
    assert comparison["differing_prompts"] == ["c"]
    assert comparison["differing_prompts_compares"] == ["strict", "autoregressive"]
    assert comparison["strict_text_equals_autoregressive"] is False


def test_speedups_are_medians_of_paired_ratios(three):
    assert three.ratios("mars", "strict", "tpot_seconds") == pytest.approx(
        {"a": 1.0, "b": 2.0, "c": 0.5}
    )
    found = three.speedups("mars", "strict")["tpot"]
    assert (found.prompts, found.median) == (3, pytest.approx(1.0))
    assert three.speedups("strict", "autoregressive")["tpot"].median == pytest.approx(2.0)
    # 5 / 6, 9 / 4 and 3.2 / 3.6 seconds.
    assert three.speedups("mars", "strict")["seconds"].median == pytest.approx(3.2 / 3.6)
    assert list(three.kinds().items()) == [
        ("kind b", pytest.approx(2.0)),
        ("kind a", pytest.approx(1.0)),
        ("kind c", pytest.approx(0.5)),
    ]


def test_interval_of_a_median_by_enumeration():
    """Of 27 resamples of three values, 7 have the lowest as their median and 7 the highest."""
    found = speedup([1.0, 2.0, 4.0])
    assert found == Speedup(prompts=3, median=2.0, low=1.0, high=4.0)
    assert speedup([1.5] * 8) == Speedup(8, 1.5, 1.5, 1.5)
    assert speedup([]) is None
    # With one outlier of 21, its resamples reach the median in less than 2.5 %.
    assert speedup([1.0] * 20 + [9.0]).high == 1.0


def test_the_interval_covers_the_median():
    import numpy as np

    draws = np.random.default_rng(1).lognormal(np.log(1.2), 0.3, (200, 32))
    covered = [found.low <= 1.2 <= found.high for found in map(speedup, draws)]
    assert 0.9 <= np.mean(covered) <= 0.99


def test_of_repeats_each_answers_median_counts():
    rows = {
        "autoregressive": [[answer(1.0, 0.8, 11)]] * 3,
        "strict": [[answer(1.0, 0.4, 11)], [answer(9.0, 0.5, 11)], [answer(1.2, 4.0, 11)]],
        "mars": [[answer(1.0, 0.2, 11)]] * 3,
    }
    strict = results(rows).summary("strict")
    assert (strict["ttft_seconds"], strict["tpot_seconds"]) == pytest.approx((1.2, 0.5))
    assert strict["output_tokens"] == 11
    assert results(rows).speedups("mars", "strict")["tpot"].median == pytest.approx(2.5)


def test_an_answer_of_one_token_has_no_time_per_further_token():
    rows = {mode: [[answer(1.0, 0.0, 1), answer(1.0, 0.1, 3)]] for mode in MODES}
    found = results(rows)
    assert found.summary("mars")["tpot_seconds"] == pytest.approx(0.1)
    assert found.speedups("mars", "strict")["tpot"].prompts == 1
    assert found.speedups("mars", "strict")["seconds"].prompts == 2
    alone = results({mode: [[answer(1.0, 0.0, 1)]] for mode in MODES})
    assert alone.summary("mars")["tpot_seconds"] is None
    assert alone.comparison()["speedup"]["mars_over_strict"]["tpot"] is None


def test_turns_of_a_conversation_count_as_one_prompt():
    found = results({mode: [[answer(1.0, 0.5, 3)]] for mode in MODES})
    for mode, tpot in zip(MODES, (0.5, 0.5, 0.1), strict=True):
        prompt = found.records[mode][0].prompt
        found.records[mode].append(Record(prompt, 1, 0, [], answer(1.0, tpot, 3)))
    # 0.5 + 0.5 over 0.5 + 0.1 seconds per token.
    assert found.ratios("mars", "strict", "tpot_seconds") == pytest.approx({"a": 1.0 / 0.6})


def test_relaxed_tokens_are_what_the_server_told(three):
    content = three.to_json()
    assert content["mars"]["relaxed_tokens"] == 3
    assert content["mars"]["relaxed_share"] == pytest.approx(3 / 27)
    assert content["mars"]["loss_nats_per_token"] == pytest.approx(1.5 / 27)
    assert content["mars"]["relaxed"][0] == {
        "id": "a",
        "turn": 0,
        "tokens": [{"position": 3, "text": "<3>"}, {"position": 4, "text": "<4>"}],
    }
    assert "token_ids" not in content["mars"]["answers"][0]


def printed(found):
    file = io.StringIO()
    print_report(found, Console(file=file, width=110))
    return file.getvalue()


def test_the_report_says_what_changed(three):
    tokens = [ScoredToken("so", -0.1, "so", -0.1), ScoredToken(" far", -1.2, " near", -0.5)]
    three.example = Example(three.records["mars"][0], "new", tokens)
    out = printed(three)
    assert re.search(r"ms to first token \(median\) +│ +1000.0 │ +1000.0 │ +2000.0 │", out)
    assert re.search(r"ms per further token \(median\) +│ +800.0 │ +400.0 │ +400.0 │", out)
    assert re.search(r"nats lost per token +│ +- │ +- │ +0.056 │", out)
    assert re.search(r"equal to autoregressive +│ +- │ +2 of 3 │ +1 of 3 │", out)
    assert re.search(r"MARS / strict +│ +1.00 \(0.50 to 2.00\) │ +0.89 \(0.83 to 2.25\) │", out)
    assert "MARS / strict per further token: kind b 2.00, kind a 1.00, kind c 0.50" in out
    assert "2 of 3 answers changed length (tokens, strict -> MARS): b 21 -> 11, c 2 -> 5" in out
    assert "The strict answers differ from the autoregressive ones at: c" in out
    assert "so[ far]" in out
    assert "' near'" in out
    assert "gave another text" not in out
    assert "short form" not in out


def test_the_report_names_the_best_and_the_worst_of_many_kinds():
    tpots = [0.1 * (i + 1) for i in range(8)]
    found = results(
        {
            mode: [[answer(1.0, tpot if mode == "mars" else 0.8, 5) for tpot in tpots]]
            for mode in MODES
        },
        DemoOptions(short=True),
    )
    out = printed(found)
    assert (
        "MARS / strict per further token, of 8 kinds of prompt: most kind a 8.00, kind b 4.00, "
        "kind c 2.67; least kind f 1.33, kind g 1.14, kind h 1.00"
    ) in " ".join(out.split())
    assert "0 of 8 answers changed length\n" in out
    assert "The strict answers equal the autoregressive ones" in out
    assert "No token was relaxed in any answer." in out
    assert "This short form shows that it works, not how fast" in out


def test_another_text_of_the_example_is_said(three):
    three.example = Example(three.records["mars"][0], "changed", [])
    out = " ".join(printed(three).split())
    assert "the MARS server gave another text than the timed one" in out
    assert three.to_json()["mars"]["example"]["same_text"] is False
