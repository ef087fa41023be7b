import numpy as np
import pytest

from benchmarks.near_ties import THETAS, rows_of


def test_near_ties_are_counted_by_theta():
    """Two of five positions are never a tie: one has a large gap, one a negative logit."""
    logits = np.array([[10, 9.5], [10, 9.1], [10, 8.5], [10, 1], [-1, -1.01]])
    (heading,), *rows = rows_of("a model", {"one": logits[:3], "two": logits[3:]})
    assert heading.startswith("a model, 2 answers, 5 positions, largest logit 10.0")
    shares = {row[0]: row[1] for row in rows}
    assert [*shares] == [f"{theta:g}" for theta in THETAS]
    assert shares["0.84"][0] == 60 and shares["0.9"][0] == 40
    assert rows[-1] == ["0.96", 0, None, None, None]
    ((_, _, low, median, nats),) = [row for row in rows if row[0] == "0.9"]
    assert median == pytest.approx(np.exp(-0.7)) and low < median
    assert nats == pytest.approx(0.7)
