"""The comparison of rules on recorded steps: its expectations, and that it reads what is kept."""

import argparse
import json

import numpy as np
import pytest

from benchmarks import rules
from benchmarks.rules import RULES, Steps, at_loss, expect

RNG = np.random.default_rng(0)


def made_steps(steps=40, length=3) -> Steps:
    z1, z2 = -np.sort(-RNG.uniform(1, 20, (2, steps, length)), 0)
    own = np.where(RNG.random(z1.shape) < 0.4, z1, z2 - RNG.integers(0, 2, z1.shape))
    return Steps(RNG.beta(0.5, 0.7, z1.shape), own, z1, z2)


STEPS = made_steps()


@pytest.mark.parametrize("name", RULES)
def test_at_zero_each_rule_is_strict_and_above_it_accepts_more(name):
    accept, value_of = RULES[name]
    np.testing.assert_allclose(accept(STEPS, value_of(0.0)), STEPS.p)
    little, much = (accept(STEPS, value_of(value)) for value in (0.2, 0.6))
    assert (STEPS.p <= little + 1e-12).all() and (little <= much + 1e-12).all()
    assert much.mean() > little.mean() > STEPS.p.mean()


def test_an_expectation_is_the_sum_over_all_that_can_come_out():
    accept = rules.look_ahead(STEPS, 0.5)
    tokens = loss = 0.0
    for a, p in zip(accept, STEPS.p, strict=True):
        for accepted in range(len(p) + 1):
            served, target = (
                np.prod(x[:accepted]) * (1 - x[accepted] if accepted < len(p) else 1)
                for x in (a, p)
            )
            tokens += served * (accepted + 1)
            loss += served * np.log(served / target)
    assert expect(STEPS.p, accept) == pytest.approx((tokens / len(STEPS.p), loss / tokens))


def test_nothing_gains_more_than_looking_ahead_at_the_same_loss():
    price, best = at_loss("look-ahead", STEPS, 0.05)
    others = {name: at_loss(name, STEPS, 0.05)[1] for name in RULES}
    assert best >= max(others.values())
    assert best > others["no look-ahead"] > others["mixing"] > others["ratio"]
    accept = rules.look_ahead(STEPS, price)
    tokens, loss = expect(STEPS.p, accept)
    for size in np.geomspace(1e-3, 0.3, 100):
        moved = np.clip(accept + RNG.normal(0, size, accept.shape), 1e-9, 1 - 1e-9)
        other_tokens, other_loss = expect(STEPS.p, moved)
        assert other_tokens * (price - other_loss) < tokens * (price - loss)


def test_files_of_ragged_drafts_are_compared(tmp_path, capsys):
    lengths = np.array([3, 2, 1, 2] * 10)
    kept = np.arange(3) < lengths[:, None]
    columns = {name: values[kept] for name, values in STEPS._asdict().items()}
    paths = [tmp_path / "steps.npz"] * 2
    np.savez(paths[0], draft="ngram K 3", temperature=0.7, prompts=10, length=lengths, **columns)
    rules.compare(argparse.Namespace(recorded=paths, output=tmp_path / "rules.json"))
    written = json.loads((tmp_path / "rules.json").read_text())
    result, again = written["results"]
    assert result == again
    padded = Steps(*(np.where(kept, values, 0) for values in STEPS))
    strict, _ = expect(padded.p, padded.p)
    assert result["strict_tokens"] == strict
    value, tokens = at_loss("Cactus", padded, written["losses"][1])
    assert result["value"]["Cactus"][1] == pytest.approx(value, abs=1e-4)
    assert result["gain"]["Cactus"][1] == pytest.approx(100 * (tokens / strict - 1), abs=0.01)
    for gains in result["gain"].values():
        assert 0 < gains[0] < gains[1] < gains[2]
    assert "ngram K 3, temperature 0.7" in capsys.readouterr().out
