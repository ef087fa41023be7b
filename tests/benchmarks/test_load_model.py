"""The model of gain and load in docs/load.md: its extremes, its break-even, its fit."""

import math

import pytest

from benchmarks.load import StepTime, fit, summarise
from vllm_mars.experiments.sweep.records import (
    Acceptance,
    Cell,
    CellKey,
    Output,
    Settings,
    Speed,
)

# 10 ms floor, 1 ms for each token.
STEP = StepTime(0.010, 0.001)


def test_by_hand():
    # Two tokens for the time of T(5) = 15 ms instead of T(1) = 11 ms each.
    assert STEP.gain(1, 2, 5) == pytest.approx(2 * 11 / 15)
    assert STEP.gain(1, 2, 5, drafting=0.005) == pytest.approx(2 * 11 / 20)
    assert STEP.break_even(2, 5) == pytest.approx(10 / 3)


def test_without_a_slope_the_gain_is_the_length():
    flat = StepTime(0.010, 0.0)
    assert flat.gain(64, 2.5, 5) == pytest.approx(2.5)
    assert flat.break_even(2.5, 5) == math.inf


@pytest.mark.parametrize("drafting", [0.0, 0.002])
@pytest.mark.parametrize("length", [1.5, 2.0, 4.0])
def test_the_gain_is_one_at_break_even_and_falls_with_load(length, drafting):
    batch = STEP.break_even(length, 5, drafting)
    assert STEP.gain(batch, length, 5, drafting) == pytest.approx(1)
    gains = [STEP.gain(b, length, 5, drafting) for b in (1, 2, 8, 64, 4096)]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > length / 5


def test_a_longer_acceptance_moves_the_break_even_up():
    assert STEP.break_even(2.5, 5) > 1.5 * STEP.break_even(2.0, 5)
    assert STEP.break_even(1.0, 5) == 0
    assert STEP.break_even(5, 5) == math.inf


def test_the_fit_finds_a_line():
    found = fit([(n, STEP(n)) for n in (1, 4, 16)])
    assert (found.floor, found.slope) == pytest.approx((STEP.floor, STEP.slope))


def cell(method, concurrency, seconds, accepted=None):
    """As many requests as fly at once, each answered with 12 tokens in this many seconds.

    Speculation drafts 4 tokens in each step of a request.
    """
    speculative = accepted is not None
    steps = concurrency * 12 - (accepted or 0)
    draft, k = ("ngram", 4) if speculative else ("none", 0)
    prompts = {"prompts": concurrency}
    return Cell(
        key=CellKey("m", draft, method, None, None, None, None, k, 0.0, concurrency, "p", 0),
        status="ok",
        reason="",
        settings=Settings(12, prompts, 0, ()),
        theta_set_by=None,
        speed=Speed(seconds, concurrency, 0, 0, 12 * concurrency),
        acceptance=Acceptance(steps, 4 * steps, accepted, ()) if speculative else None,
        outputs=tuple(
            Output(str(i), "", 0, 12, "length", seconds, 0.1, 0.0) for i in range(concurrency)
        ),
        created="",
        node="",
        git_commit=None,
        versions={},
        hardware={"gpu": None},
        command=(),
    )


def test_a_sweep_that_obeys_the_model_is_predicted():
    plain = [cell("autoregressive", c, 12 * STEP(c)) for c in (1, 4, 16)]
    # Half of the tokens are accepted drafts: 6 steps of 5 tokens for each request.
    strict = [cell("standard", c, 6 * STEP(5 * c), accepted=6 * c) for c in (1, 4, 16)]
    (found,) = summarise([*plain, *strict])
    assert found["step_time"] == pytest.approx({"floor": STEP.floor, "slope": STEP.slope})
    for entry, c in zip(found["cells"], (1, 4, 16), strict=True):
        assert (entry["rule"], entry["concurrency"]) == ("standard", c)
        assert (entry["length"], entry["width"]) == (2, 5)
        assert entry["measured_gain"] == pytest.approx(STEP.gain(c, 2, 5))
        assert entry["predicted_gain"] == pytest.approx(STEP.gain(c, 2, 5))
        assert entry["break_even_batch"] == pytest.approx(STEP.break_even(2, 5))


def test_one_concurrency_gives_no_line():
    with pytest.raises(ValueError, match=r"at two concurrencies.*sweep --concurrency 1 4 16"):
        summarise([cell("autoregressive", 4, 1.0)])
