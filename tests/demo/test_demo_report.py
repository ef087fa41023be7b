"""What the demo prints of its cells, against cases worked out by hand."""

import dataclasses
import io
import re

import pytest
from rich.console import Console

from report_files import make_cell
from vllm_mars.demo.command import sweep_options
from vllm_mars.demo.report import print_report
from vllm_mars.experiments.sweep.datasets import load_dataset
from vllm_mars.experiments.sweep.plan import Sweep, plan
from vllm_mars.experiments.sweep.records import (
    OffChoice,
    Output,
    PromptQuality,
    Quality,
)
from vllm_mars.experiments.sweep.summary import rows
from vllm_mars.local.drafts import NGRAM_CONFIG, RECOMMENDED

TEXT = "so far away"
RELAXED = OffChoice(1, 2, 6, " far", -1.2, " near", -0.5)
ANOTHER = OffChoice(2, 6, 11, " away", -0.9, " off", -0.8)


def answer(prompt, ttft, tpot, tokens, agrees=True, relaxed=()):
    output = Output(prompt, TEXT, 7, tokens, "stop", ttft + tpot * (tokens - 1), ttft, 0.0)
    scores = {
        **{"agreement": float(agrees), "nll": 0.5},
        "loss": sum(token.loss for token in relaxed) / tokens,
    }
    return output, PromptQuality(prompt, scores, tuple(relaxed))


def cell(method, answers, block=0, repeat=0):
    theta = 0.9 if method == "mars" else None
    made = make_cell(method, theta, 0 if method == "autoregressive" else 4, 20.0, 1, repeat)
    outputs, qualities = zip(*answers, strict=True)
    return dataclasses.replace(
        made,
        key=dataclasses.replace(made.key, dataset=f"prompts#{block}"),
        outputs=outputs,
        quality=Quality(qualities, ()),
        lost_nats=0.75 if method == "mars" else None,
    )


@pytest.fixture
def cells():
    """Per token, strict is 2, 2 and 4 x autoregressive, MARS 1, 2 and 0.5 x strict; two blocks."""
    answers = {
        "autoregressive": [(1.0, 0.8, 11), (1.0, 0.8, 21), (3.0, 0.8, 2)],
        "standard": [(1.0, 0.4, 11), (1.0, 0.4, 21), (3.0, 0.2, 2, False)],
        "mars": [
            (2.0, 0.4, 11, False, (RELAXED, ANOTHER)),
            (2.0, 0.2, 11),
            (2.0, 0.4, 5, False, (RELAXED,)),
        ],
    }
    return [
        cell(method, [answer(name, *row) for name, row in zip(names, rows, strict=True)], block)
        for method, three in answers.items()
        for block, (names, rows) in enumerate((("ab", three[:2]), ("c", three[2:])))
    ]


def printed(cells, kinds=None):
    file = io.StringIO()
    print_report(cells, kinds or {}, Console(file=file, width=110))
    return file.getvalue()


def test_the_report_says_what_changed(cells):
    out = printed(cells, {"a": "lists", "b": "", "c": "lists"})
    assert "3 answers of at most 64 tokens, one at a time" in out
    assert "ngram drafts of 4 tokens" in out
    assert re.search(r"│ autoregressive │ +strict │ MARS 0.9 │", out.replace("┃", "│"))
    assert re.search(r"ms to first token \(median\) +│ +1000.0 │ +1000.0 │ +2000.0 │", out)
    assert re.search(r"ms per further token \(median\) +│ +800.0 │ +400.0 │ +400.0 │", out)
    # 5 + 9 + 3.2 seconds, 34 tokens.
    assert re.search(r"seconds per answer +│ +9.93 │ +5.73 │ +4.53 │", out)
    assert re.search(r"tokens per answer +│ +11.3 │ +11.3 │ +9.0 │", out)
    assert re.search(r"relaxed tokens +│ +- │ +- │ +11.1% │", out)
    assert re.search(r"nats lost per token +│ +- │ +- │ +0.056 │", out)
    assert re.search(r"equal to autoregressive +│ +- │ +2 of 3 │ +1 of 3 │", out)
    # Per token 1, 2 and 0.5; 17.2 seconds over 13.6.
    assert re.search(r"MARS / strict +│ +1.00 \(0.50 to 2.00\) │ +1.26 \(", out)
    assert re.search(r"strict / autoregressive +│ +2.00 \(2.00 to 4.00\) │", out)
    # The median of 1 and 0.5 of one kind.
    assert "MARS / strict per further token: (no category) 2.00, lists 0.75\n" in out
    assert "2 of 3 answers changed length (tokens, strict -> MARS): b 21 -> 11, c 2 -> 5" in out
    assert "The strict answers differ from the autoregressive ones at: c" in out
    assert "MARS answer to a: relaxed tokens marked" in out
    assert "so[ far][ away]" in out
    assert re.search(r"│ ' far' +│ 0.30 │ ' near' +│ 0.61 │", out)


def test_of_repeats_the_first_answers_are_shown(cells):
    again = [
        dataclasses.replace(it, key=dataclasses.replace(it.key, repeat=1), quality=None)
        for it in cells
    ]
    assert [max(row.repeats for row in rows(some)) for some in (cells, cells + again)] == [1, 2]
    out = printed(cells + again)
    assert re.search(r"equal to autoregressive +│ +- │ +2 of 3 │ +1 of 3 │", out)
    assert re.search(r"relaxed tokens +│ +- │ +- │ +11.1% │", out)


def test_an_answer_of_one_token_has_no_time_per_further_token():
    one = [
        cell(method, [answer("a", 1.0, 0.0, 1)])
        for method in ("autoregressive", "standard", "mars")
    ]
    out = printed(one)
    assert re.search(r"ms per further token \(median\) +│ +- │ +- │ +- │", out)
    assert re.search(r"MARS / strict +│ +- │ +1.00 \(1.00 to 1.00\) │", out)
    assert "0 of 1 answers changed length\n" in out
    assert "The strict answers equal the autoregressive ones" in out
    assert "No token was relaxed in any answer." in out


def test_of_many_kinds_the_report_names_the_best_and_the_worst():
    names = "abcdefgh"
    tpots = {
        "autoregressive": [0.8] * 8,
        "standard": [0.8] * 8,
        "mars": [0.1 * place for place in range(1, 9)],
    }
    many = [
        cell(method, [answer(name, 1.0, tpot, 5) for name, tpot in zip(names, of, strict=True)])
        for method, of in tpots.items()
    ]
    out = printed(many, {name: f"kind {name}" for name in names})
    assert (
        "MARS / strict per further token, of 8 kinds of prompt: most kind a 8.00, kind b 4.00, "
        "kind c 2.67; least kind f 1.33, kind g 1.14, kind h 1.00 0 of 8 answers"
    ) in " ".join(out.split())
    assert "MARS / strict per further token" not in printed(many)


def servers(tmp_path, **options):
    """The speculative configs of a demo's servers, and the thresholds that it asks them with."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(9)))
    chosen = sweep_options(model="model", prompts=str(prompts), **options)
    blocks = tuple(load_dataset(str(prompts), 0).blocks(chosen.block))
    (group,) = plan(Sweep(chosen, "model", blocks), chosen.side_by_side)
    return group


def test_three_servers_take_turns_of_eight_prompts(tmp_path):
    group = servers(tmp_path, draft="ngram")
    assert [(key.method, key.dataset) for key, _ in group.cells] == [
        *(("autoregressive", "prompts#0"), ("standard", "prompts#0"), ("mars", "prompts#0")),
        *(("standard", "prompts#1"), ("mars", "prompts#1"), ("autoregressive", "prompts#1")),
    ]
    plain, strict, mars = (server.speculative_config() for server in group.servers)
    assert plain is None
    assert strict == {**NGRAM_CONFIG, "num_speculative_tokens": 4}
    assert mars["mars_max_loss"] == RECOMMENDED["mars_max_loss"]
    assert {key.price for key, _ in group.cells} == {None, RECOMMENDED["mars_price"]}


def test_a_threshold_of_ones_own_has_no_bound(tmp_path):
    group = servers(tmp_path, theta=0.8, num_speculative_tokens=3)
    assert {key.theta for key, _ in group.cells} == {None, 0.8}
    assert "mars_max_loss" not in group.servers[2].speculative_config()
    group = servers(tmp_path, price=0.25)
    assert {key.rule for key, _ in group.cells} >= {"mars price 0.25"}
    with pytest.raises(ValueError, match=r"theta=0\.8 and price=0\.25 are two rules; give one of"):
        sweep_options(theta=0.8, price=0.25)
