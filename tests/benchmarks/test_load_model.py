"""The model of gain and load in docs/scale.md: its extremes, its break-even, its fit."""

import math

import pytest

from benchmarks.load import StepTime, fit

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
