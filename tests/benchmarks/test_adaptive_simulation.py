"""The simulation of adaptive verification, where what is worth it is known."""

import numpy as np
import pytest

from benchmarks.adaptive import COSTS, Measured, Recorded, simulate

LENGTH, REQUESTS = 4, 8
# Of each answer 20 steps whose drafts all stay, or none, and the feature says which.
GOOD, BAD = ([[sign] * LENGTH, [max(sign, 0)] * LENGTH] for sign in (1.0, -1.0))
ANSWERS = [[GOOD] * 20, [BAD] * 20] * 5


@pytest.fixture(scope="module")
def recorded():
    return Recorded(ANSWERS, LENGTH)


def cost(per_token):
    return 1 + per_token * np.arange(REQUESTS * LENGTH + 1)


def test_the_predictions_are_what_is_so(recorded):
    np.testing.assert_allclose(recorded.survival, recorded.reach, atol=0.01)


def test_of_drafts_that_cost_nothing_none_that_could_stay_is_left_out(recorded):
    found, whole = (simulate(recorded, REQUESTS, cost(0), adapts=it) for it in (True, False))
    assert found.speed == pytest.approx(whole.speed, rel=1e-3)
    assert whole.admitted == 1


def test_dear_drafts_are_verified_where_they_stay(recorded):
    # Nearly half of them, since answers of both kinds are as long.
    found, whole = (simulate(recorded, REQUESTS, cost(0.1), adapts=it) for it in (True, False))
    assert 0.4 < found.admitted < 0.6
    assert found.speed > 1.2 * whole.speed
    # Then a step of one token for each request.
    dear = simulate(recorded, REQUESTS, cost(100), adapts=True)
    assert dear.admitted < 0.01
    assert dear.speed == pytest.approx(REQUESTS, rel=0.1)


def test_costs_meet_what_was_measured():
    for measured in COSTS.values():
        for requests, ms in measured.drafted.items():
            tokens = np.array([requests * (1 + measured.length)])
            assert measured.step_ms(tokens, measured.length)[0] == pytest.approx(ms)
    # Beyond the longest step a straight line goes on.
    found = Measured({1: 1.0, 9: 2.0}, 1, {1: 1.5, 9: 4.0}, {1: 0.0})
    assert found.step_ms(np.array([18, 27]), 0).tolist() == pytest.approx([3.625, 5.25], abs=1e-6)
