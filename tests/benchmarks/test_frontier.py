"""The comparison of metrics at equal loss, on cells whose figures are known by hand."""

import dataclasses
import json

import pytest

from benchmarks.frontier import Frontier, totals
from vllm_mars.experiments.sweep.records import (
    Acceptance,
    Cell,
    CellKey,
    Output,
    PromptQuality,
    Quality,
    Settings,
    Speed,
)

GUARD = json.dumps({"mars_repeat_guard": 4})


def cell(fold, accepted, loss, metric=None, value=None):
    """Ten steps with a draft, `10 + accepted` tokens that lose `loss` nats each on average."""
    tokens = 10 + accepted
    values = {"theta": None, "gap": None, "price": None}
    if metric:
        values[{"ratio": "theta"}.get(metric, metric)] = value
    key = CellKey(
        model="m",
        draft="head",
        method="mars" if metric else "standard",
        metric=metric,
        protected=True if metric else None,
        k=4,
        temperature=0.0,
        concurrency=1,
        dataset=fold,
        repeat=0,
        options=GUARD if metric else "",
        **values,
    )
    return Cell(
        key=key,
        status="ok",
        reason="",
        settings=Settings(64, {fold: 1}, 0, ()),
        theta_set_by=None,
        speed=Speed(1.0, 1, 0, 0, tokens),
        acceptance=Acceptance(10, 40, accepted, ()),
        outputs=(Output(fold, "x", 0, tokens, "length", 1.0, 0.1, 0.0),),
        created="",
        git_commit=None,
        versions={},
        hardware={},
        command=(),
        lost_nats=loss * tokens if metric else None,
        quality=Quality((PromptQuality(fold, {"repeated_4grams": 0.25}),), ()),
    )


def fold(name, more=0):
    """Strict accepts 10 of ten steps' drafts; every other rule `more` above its usual figure."""
    return [
        cell(name, 10, 0.0),
        cell(name, 12 + more, 0.02, "ratio", 0.96),
        cell(name, 14 + more, 0.06, "ratio", 0.9),
        cell(name, 14 + more, 0.02, "price", 0.2),
        cell(name, 18 + more, 0.04, "price", 0.4),
    ]


def test_by_hand():
    frontier = Frontier([*fold("a"), *fold("b")])
    found = frontier.summary(with_speeds=True)
    assert found["prompts"] == 2
    strict, *_ = found["rules"]
    assert (strict["rule"], strict["acceptance_length"]) == ("standard", 2.0)
    by_rule = {rule["rule"]: rule for rule in found["rules"]}
    priced = by_rule["mars price 0.2 repeat_guard 4"]
    # 24 tokens in ten steps beside 20; every fold says the same, so the interval has no width.
    assert priced["extra_acceptance"] == pytest.approx({"value": 0.2, "low": 0.2, "high": 0.2})
    assert priced["loss"]["value"] == pytest.approx(0.02)
    assert priced["repeated_4grams"] == 0.25
    # 0.9 s for 23 further tokens beside as long for 19.
    assert priced["tpot_seconds"]["value"] == pytest.approx(0.9 / 23)
    assert priced["strict_tpot_over_tpot"]["low"] == pytest.approx(23 / 19)
    at = {entry["loss"]: entry for entry in found["at_equal_loss"]}
    ratio, price = "ratio repeat_guard 4", "price repeat_guard 4"
    # Half way between theta 0.96 (0.02, 10 %) and 0.9 (0.06, 20 %), and between the two prices.
    assert frontier.at(ratio, 0.04) == pytest.approx(0.15)
    assert at[0.03]["extra_acceptance"][price]["value"] == pytest.approx(0.3)
    assert at[0.02]["price_over"][ratio]["value"] == pytest.approx(2)
    # Below the first point the curve comes from strict decoding.
    assert at[0.0075]["extra_acceptance"][ratio]["value"] == pytest.approx(0.0375)
    assert at[0.07]["extra_acceptance"][ratio] is None, "no rule loses that much"
    (at,) = frontier.summary([0.04])["at_equal_loss"]
    assert at["extra_acceptance"][ratio]["value"] == pytest.approx(0.15)


def test_a_pass_once_more_changes_no_mean():
    once = [*fold("a"), *fold("b")]
    again = [
        dataclasses.replace(cell, key=dataclasses.replace(cell.key, repeat=1)) for cell in once
    ]
    whole, twice = Frontier(once).summary(), Frontier([*once, *again]).summary()
    assert whole == twice
    assert [rule["tokens_per_answer"] for rule in whole["rules"][:2]] == [20, 24]


def test_a_rule_is_as_fast_as_it_is_beside_strict_decoding_on_its_own_server():
    """23 further tokens beside `standard`'s 19; with price 0 the same server makes 22 of them."""
    rule = "mars price 0.2 repeat_guard 4"
    assert Frontier(fold("a")).speeds[rule].faster.value == pytest.approx(23 / 19)
    own = cell("a", 13, 0.0, "price", 0.0)
    assert Frontier([*fold("a"), own]).speeds[rule].faster.value == pytest.approx(23 / 22)


def test_the_interval_is_that_of_a_jackknife():
    frontier = Frontier([*fold("a"), *fold("b", more=2), *fold("c", more=4)])
    found = frontier.jackknife(
        lambda left_out: frontier.extra("mars price 0.2 repeat_guard 4", left_out)
    )
    # Extra acceptance of 0.2, 0.3 and 0.4; for a mean the jackknife gives the standard error,
    # and 4.302653 is Student's t at 97.5 % with two degrees of freedom.
    assert found["value"] == pytest.approx(0.3)
    assert found["high"] - found["value"] == pytest.approx(4.302653 * 0.1 / 3**0.5)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="no method 'standard'"):
        Frontier(fold("a")[1:])
    with pytest.raises(ValueError, match=r"mars 0\.96 .* not measured on each of a, b"):
        Frontier([*fold("a"), cell("b", 10, 0.0)])
    with pytest.raises(ValueError, match="without lost_nats"):
        totals([dataclasses.replace(cell("a", 10, 0.1, "gap", 1.0), lost_nats=None)])
    with pytest.raises(ValueError, match="was not judged"):
        totals([dataclasses.replace(cell("a", 10, 0.0), quality=None)])
