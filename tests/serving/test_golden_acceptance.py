"""Acceptance of the packaged model's head against a stored table."""

import json

import pytest

from golden_acceptance import GOLDEN, RULES, K, measure

pytestmark = pytest.mark.engine

# Rounding differs between processors, so answers may differ after a near tie.
TOLERANCE = 0.05


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())["rules"]


@pytest.fixture(scope="module")
def measured(packaged_model):
    return measure(packaged_model)


@pytest.mark.parametrize("rule", RULES)
def test_acceptance_by_position(golden, measured, rule):
    assert rule in golden, "run python tests/golden_acceptance.py"
    drafts, accepted = golden[rule]["drafts"], golden[rule]["accepted"]
    now = measured[rule]
    assert len(now["accepted"]) == len(accepted) == K
    rates = [count / now["drafts"] for count in now["accepted"]]
    assert rates == pytest.approx([count / drafts for count in accepted], abs=TOLERANCE)
    assert sum(rates) == pytest.approx(sum(accepted) / drafts, rel=TOLERANCE)


def test_the_table_has_these_rules_and_they_differ(golden):
    assert golden.keys() == RULES.keys()
    lengths = {rule: sum(row["accepted"]) / row["drafts"] for rule, row in golden.items()}
    strict = lengths.pop("strict")
    # A rule that fell back to strict verification is noticed.
    assert min(lengths.values()) > (1 + 2 * TOLERANCE) * strict
