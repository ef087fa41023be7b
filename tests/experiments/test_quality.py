"""Statistics and the judging of cells, on cases with known answers."""

import json
import subprocess
import sys

import numpy as np
import pytest

from vllm_mars.experiments.quality.intervals import estimate, non_inferiority
from vllm_mars.experiments.quality.judge import (
    Judge,
    estimates,
    mean_scores,
    reference_cell,
    unjudged,
)
from vllm_mars.experiments.quality.target_scores import Scored
from vllm_mars.experiments.sweep.datasets import Item
from vllm_mars.experiments.sweep.records import (
    Acceptance,
    Cell,
    CellKey,
    OffChoice,
    Output,
    Settings,
    Speed,
)
from vllm_mars.experiments.sweep.summary import rows


def scored(values):
    return {str(i): float(value) for i, value in enumerate(values)}


def test_interval_of_a_mean_is_that_of_the_normal_distribution():
    values = np.random.default_rng(1).normal(5, 2, 400)
    found = estimate("x", scored(values))
    half = 1.96 * values.std() / 20
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.05)
    assert found.high == pytest.approx(values.mean() + half, abs=0.05)
    assert found.samples == 400 and found.reference is None and found.p_value is None


def test_the_bootstrap_is_paired():
    # Prompts differ widely, but each loses exactly 0.1: unpaired, the interval would hold 0.
    reference = scored(range(50))
    found = estimate("x", {p: v - 0.1 for p, v in reference.items()}, reference, margin=0.2)
    assert found.difference_low == pytest.approx(-0.1) == found.difference_high
    assert found.high - found.low > 5
    assert found.non_inferior is True


def test_intervals_cover_the_truth():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(200):
        values, reference = rng.normal(0.5, 1, 30), rng.normal(0, 1, 30)
        found = estimate("x", scored(values), scored(reference))
        hits += found.difference_low <= 0.5 <= found.difference_high
    assert 0.88 <= hits / 200 <= 0.99


def test_recovery():
    found = estimate("x", scored([1, 0, 1, 0]), scored([1, 1, 1, 1]))
    assert (found.value, found.reference, found.recovery) == (0.5, 1.0, 0.5)
    assert found.recovery_low >= 0 and found.recovery_high <= 1
    assert estimate("x", scored([1]), scored([0])).recovery is None
    assert estimate("nll", scored([1]), scored([1]), higher_is_better=False).recovery is None


def test_only_prompts_in_both_count():
    found = estimate("x", {"a": 1.0, "b": 0.0}, {"b": 1.0, "c": 1.0})
    assert (found.samples, found.value, found.difference) == (1, 0.0, -1.0)
    with pytest.raises(ValueError, match="no prompt has a score in both"):
        estimate("x", {"a": 1.0}, {"b": 1.0})


def test_non_inferiority_against_a_t_test_by_hand():
    # Mean 0, standard deviation 1 over 4 prompts: t = (0 + 1) / (1 / 2) = 2 with 3 degrees of
    # freedom, one-sided p = 0.0697.
    gains = np.array([-1.0, -0.5, 0.5, 1.0]) / np.std([-1.0, -0.5, 0.5, 1.0], ddof=1)
    assert non_inferiority(gains, 1.0) == pytest.approx(0.0697, abs=1e-4)
    assert non_inferiority(np.zeros(3), 0.1) == 0
    assert non_inferiority(np.full(3, -0.1), 0.1) == 1


def test_non_inferiority_errs_as_rarely_as_it_says():
    rng = np.random.default_rng(3)
    # Exactly at the margin: at most 5 % may pass.
    passed = [non_inferiority(rng.normal(-0.1, 0.3, 20), 0.1) < 0.05 for _ in range(500)]
    assert sum(passed) / 500 < 0.08
    # Without a loss, and with enough prompts, nearly all pass.
    passed = [non_inferiority(rng.normal(0, 0.3, 200), 0.1) < 0.05 for _ in range(100)]
    assert sum(passed) > 95


def test_a_lower_nll_is_no_loss():
    low, high = scored([1.0, 1.2, 0.9]), scored([2.0, 2.1, 2.2])
    assert estimate("nll", low, high, margin=0.1, higher_is_better=False).non_inferior
    assert not estimate("nll", high, low, margin=0.1, higher_is_better=False).non_inferior


def cell(method, texts, repeat=0, concurrency=1, seconds=2.0, temperature=0.0):
    mars = method == "mars"
    plain = method == "autoregressive"
    key = CellKey(
        "model",
        "none" if plain else "ngram",
        method,
        "ratio" if mars else None,
        0.9 if mars else None,
        None,
        True if mars else None,
        0 if plain else 4,
        temperature,
        concurrency,
        "x",
        repeat,
    )
    outputs = tuple(
        Output(name, text, 5, len(text.split()), "stop", seconds, 0.5, 0.0) for name, text in texts
    )
    return Cell(
        key=key,
        status="ok",
        reason="",
        settings=Settings(64, {"x": 2}, 0, ()),
        theta_set_by="request" if mars else None,
        speed=Speed(seconds, len(outputs), 0, 10, sum(o.output_tokens for o in outputs)),
        acceptance=None if plain else Acceptance(2, 8, 4, (2, 1, 1, 0)),
        outputs=outputs,
        created="",
        node="",
        git_commit=None,
        versions={},
        hardware={},
        command=(),
    )


PLAIN = [("a", "one two three"), ("b", "#### 8")]
OTHER = [("a", "one two four"), ("b", "#### 9"), ("b", "#### 8")]


class Target:
    """In the place of a server of the target: each word is a token, and "four" costs 0.6 nats.

    Its two largest logits are 2 nats apart, but 0.25 at the third word, and batching moves 0.3.
    """

    rounding_asked = ()

    def token_ids(self, text):
        return [hash(word) for word in text.split()]

    def score_all(self, pairs):
        return {pair: self._score(pair[1].split()) for pair in pairs}

    def _score(self, words):
        off = tuple(
            OffChoice(i, 0, 0, word, -1.0, "three", -0.4)
            for i, word in enumerate(words)
            if word == "four"
        )
        gaps = tuple(0.25 if i == 2 else 2.0 for i in range(len(words)))
        return Scored(1.0, 0.6 * len(off) / len(words), off, 5, gaps)

    def rounding(self, prompts):
        self.rounding_asked = (*self.rounding_asked, tuple(prompts))
        return 0.3


def judged(cells, items, scorer=None):
    from dataclasses import replace

    from vllm_mars.experiments.sweep.datasets import Dataset

    judge = Judge([Dataset("x", items)], margin=0.1, nll_margin=0.1, scorer=scorer)
    found = dict(judge.judge(cells))
    return [replace(c, quality=found.get(c.key)) for c in cells]


def test_a_judged_cell():
    items = (Item("a", "", "?"), Item("b", "", "?", answer="8"))
    plain, mars = judged([cell("autoregressive", PLAIN), cell("mars", OTHER)], items)
    assert plain.quality.estimate("agreement") is None
    assert plain.quality.estimate("exact_match").value == 1
    exact = mars.quality.estimate("exact_match")
    # Of a prompt that was asked twice the first answer counts.
    assert (exact.samples, exact.value, exact.recovery) == (1, 0.0, 0.0)
    assert mars.quality.estimate("agreement").value == 0
    assert mars.quality.estimate("seconds").difference == 0
    assert [prompt.prompt_id for prompt in mars.quality.prompts] == ["a", "b"]
    assert mars.quality.notes == ()


def test_a_cell_judged_by_the_target():
    items = (Item("a", "", "?"), Item("b", "", "?"))
    looping = [("a", "one two three one two three one"), ("b", "one two four")]
    cells = [cell("autoregressive", PLAIN), cell("mars", looping)]
    _, mars = judged(cells, items, Target())
    loss = mars.quality.estimate("loss")
    assert (loss.value, loss.difference) == (pytest.approx(0.1), pytest.approx(0.1))
    repeats = mars.quality.estimate("repeated_4grams")
    assert (repeats.value, repeats.reference) == (0.125, 0.0)
    assert [len(prompt.off_choice) for prompt in mars.quality.prompts] == [0, 1]
    # Where tokens are drawn, another than the first choice is no loss.
    (drawn,) = judged([cell("mars", looping, temperature=1.0)], items, Target())
    assert drawn.quality.estimate("loss") is None and drawn.quality.estimate("nll").value == 1.0


def strict_cell(texts, **changes):
    """A cell of MARS at theta 1."""
    from dataclasses import replace

    found = cell("mars", texts, **changes)
    return replace(found, key=replace(found.key, theta=1.0))


def test_a_strict_rule_is_identical_but_for_ties():
    items = (Item("a", "", "first"), Item("b", "", "second"))
    plain = cell("autoregressive", [("a", "one two three"), ("b", "one two three")])
    # Of theta 1, "a" differs at a near tie, "b" where the target is sure.
    tied = [("a", "one two four"), ("b", "one five three")]
    target = Target()
    _, mars = judged([plain, strict_cell(tied)], items, target)
    scores = {prompt.prompt_id: prompt.scores for prompt in mars.quality.prompts}
    assert (scores["a"]["identity"], scores["a"]["divergence_gap"]) == (1.0, 0.25)
    assert (scores["b"]["identity"], scores["b"]["divergence_gap"]) == (0.0, 2.0)
    assert scores["a"]["agreement"] == scores["b"]["agreement"] == 0
    assert mars.quality.estimate("identity").value == 0.5
    assert "within 0.3 nats, as far as batching moves them" in mars.quality.notes[-1]
    # Measured once, with the prompts.
    assert target.rounding_asked == (("first", "second"),)

    # vLLM's own strict verification with the same draft counts, where it was measured.
    found = judged([plain, cell("standard", tied), strict_cell(tied)], items, target)
    assert [c.quality.estimate("identity").value for c in found[1:]] == [0.5, 1.0]
    assert found[0].quality.estimate("identity") is None
    assert found[2].quality.notes == ()
    # One answer ends where the other goes on; then both are empty.
    short = [("a", "one two"), ("b", "")]
    _, mars = judged([plain, strict_cell(short)], items, target)
    gaps = [prompt.scores["divergence_gap"] for prompt in mars.quality.prompts]
    assert gaps == [0.25, 2.0]


def test_nothing_is_said_of_identity_where_it_cannot_be_told():
    items = (Item("a", "", "?"), Item("b", "", "?"))
    plain = cell("autoregressive", PLAIN)
    target = Target()
    # Equal answers need no rounding; a lossy rule and a temperature promise no identity.
    equal, lossy = judged([plain, strict_cell(PLAIN), cell("mars", OTHER)], items, target)[1:]
    assert equal.quality.estimate("identity").value == 1 and equal.quality.notes == ()
    assert lossy.quality.estimate("identity") is None
    assert target.rounding_asked == ()
    for cells, known, scorer in (
        ([strict_cell(OTHER, temperature=1.0)], items, target),
        # Without a server, and without the prompts.
        ([plain, strict_cell(OTHER)], items, None),
        ([plain, strict_cell(OTHER)], (), target),
    ):
        assert judged(cells, known, scorer)[-1].quality.estimate("identity") is None


def test_answers_without_their_thoughts_are_not_shown_to_the_target():
    from dataclasses import replace

    items = (Item("a", "", "?"), Item("b", "", "?"))
    cells = [cell("autoregressive", PLAIN), strict_cell(OTHER)]
    settings = replace(cells[0].settings, server_args=("--reasoning-parser=deepseek_r1",))
    target = Target()
    target.score_all = lambda pairs: dict.fromkeys(pairs, "never asked")
    for found in judged([replace(c, settings=settings) for c in cells], items, target):
        for name in ("nll", "loss", "identity"):
            assert found.quality.estimate(name) is None
        assert "A reasoning parser kept the thoughts out" in found.quality.notes[0]


def test_cells_are_judged_again_once_there_is_a_reference():
    items = (Item("a", "", "?"), Item("b", "", "?"))
    (mars,) = judged([cell("mars", OTHER)], items)
    assert mars.quality.estimate("agreement") is None
    assert unjudged([mars]) == []
    plain = cell("autoregressive", PLAIN)
    assert unjudged([mars, plain]) == [mars, plain]
    mars, plain = judged([mars, plain], items)
    assert mars.quality.estimate("agreement").value == 0
    assert unjudged([mars, plain]) == []


def test_an_answer_that_fills_the_context_is_scored_but_for_its_end(monkeypatch):
    from vllm_mars.experiments.quality import target_scores

    class Tokenizer:
        """A letter is a token."""

        def __call__(self, text, **_):
            places = [(i, i + 1) for i in range(len(text))]
            return {"input_ids": [ord(letter) for letter in text], "offset_mapping": places}

    def fetch(url, timeout, body=None):
        if url.endswith("/v1/models"):
            return json.dumps({"data": [{"max_model_len": 8}]}).encode()
        assert len(body["prompt"]) < 8, "the server refuses it"
        rows = [
            {str(token): {"logprob": -2.0, "decoded_token": "?"}, "0": {"logprob": -1.0}}
            for token in body["prompt"]
        ]
        for row in rows:
            row["0"]["decoded_token"] = "!"
        return json.dumps({"choices": [{"prompt_logprobs": rows}]}).encode()

    monkeypatch.setattr(target_scores, "fetch", fetch)
    scorer = object.__new__(target_scores.TargetScorer)
    scorer._base_url = scorer._url = "url"
    scorer._model, scorer._tokenizer = "model", Tokenizer()
    scorer._prompt_ids = lambda prompt: [1, 2, 3]
    found = scorer.score_all([("?", "abcde")])[("?", "abcde")]
    assert [token.text for token in found.off_choice] == list("abcd")
    assert (found.nll, found.loss, len(found.gaps)) == (2.0, 1.0, 4)


def test_how_far_batching_moves_the_gaps(monkeypatch):
    """Beside the first prompt the second one's second gap is 0.25 less, and another token wins."""
    from vllm_mars.experiments.quality import target_scores

    def choice(tokens, gaps):
        top = [{"token_id:1": -1.0, "token_id:2": -1.0 - gap, "token_id:3": -99.0} for gap in gaps]
        named = [f"token_id:{token}" for token in tokens]
        return {"logprobs": {"tokens": named, "top_logprobs": top}}

    def answer(prompts):
        alone = choice([7, 8, 5], [2.0, 2.0, 2.0])
        # After another token nothing is comparable.
        return [alone, choice([7, 9, 5], [2.0, 1.75, 50.0])] if len(prompts) > 1 else [alone]

    def fetch(url, timeout, body):
        if "prompt_logprobs" in body:
            row = {"1": {"logprob": -1.0}, "2": {"logprob": -3.0}, "3": {"logprob": -9.0}}
            return json.dumps({"choices": [{"prompt_logprobs": [None, row, row, row]}]}).encode()
        return json.dumps({"choices": answer(body["prompt"])}).encode()

    monkeypatch.setattr(target_scores, "fetch", fetch)
    scorer = object.__new__(target_scores.TargetScorer)
    scorer._url, scorer._model, scorer._context = "url", "model", 2048
    scorer._prompt_ids = lambda prompt: [int(prompt)]
    assert scorer.rounding(["1", "2"]) == 0.25


def test_the_reference_is_the_nearest_autoregressive_cell():
    cells = [
        cell("autoregressive", PLAIN, repeat=r, concurrency=c, temperature=t)
        for r in (0, 1)
        for c in (1, 4)
        for t in (0.0, 1.0)
    ]
    for repeat, concurrency, expected in ((1, 4, (1, 4)), (2, 4, (0, 4)), (1, 16, (1, 1))):
        key = cell("mars", OTHER, repeat, concurrency).key
        found = reference_cell(key, cells).key
        assert (found.repeat, found.concurrency, found.temperature) == (*expected, 0.0)
    assert reference_cell(cell("mars", OTHER, temperature=0.5).key, cells) is None
    (alone,) = judged([cell("mars", OTHER)], ())
    assert alone.quality.notes[0].startswith("No autoregressive cell with these prompts")


def test_rows_take_ratios_within_a_repeat():
    cells = [
        cell("autoregressive", PLAIN, 0, seconds=2.0),
        cell("mars", PLAIN, 0, seconds=1.0),
        cell("standard", PLAIN, 0, seconds=1.5),
        # The machine is three times slower in the second pass.
        cell("autoregressive", PLAIN, 1, seconds=6.0),
        cell("mars", PLAIN, 1, seconds=3.0),
        cell("standard", PLAIN, 1, seconds=4.5),
    ]
    plain, mars, standard = rows(judged(cells, ()))
    assert (plain.speedup, mars.speedup) == (1.0, 2.0)
    assert mars.over_standard == pytest.approx(1.5) and standard.over_standard == 1
    assert plain.over_standard is None
    assert mars.acceptance_length == 3.0 and plain.acceptance_length is None
    assert mars.estimate("seconds").value == 2.0
    assert len(mars.cells) == 2


def test_scores_are_averaged_over_repeats_before_prompts():
    first, second = judged([cell("mars", PLAIN), cell("mars", PLAIN, 1, seconds=4.0)], ())
    assert mean_scores([first, second])["a"]["seconds"] == 3.0
    found = estimates({"a": {"nll": 1.0}}, {"b": {"nll": 1.0}}, 0.1, 0.1)
    assert found == [], "no prompt in both"


def test_importing_the_records_imports_nothing_heavy():
    heavy = "vllm, torch, numpy, pydantic, pandas"
    code = (
        "import sys, vllm_mars.cli, vllm_mars.experiments.sweep.records\n"
        f"print([m for m in '{heavy}'.split(', ') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
