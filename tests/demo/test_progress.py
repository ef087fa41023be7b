"""The time that is left, and how often it is said without a terminal."""

import io

import pytest
from rich.console import Console

from vllm_mars.demo import progress
from vllm_mars.demo.options import DemoOptions
from vllm_mars.demo.progress import Forecast, ProgressLine
from vllm_mars.demo.run import forecast
from vllm_mars.local.prompts import Prompt


def test_guesses_until_something_is_measured_then_means_of_each_kind():
    left = Forecast({"start": 10.0, "a": 2.0, "b": 1.0}, {"start": 1, "a": 3, "b": 4})
    assert (left.measured, left.seconds_left()) == (False, 20.0)
    left.took("start", 30.0)
    # Three times as slow as guessed.
    assert (left.measured, left.seconds_left()) == (True, pytest.approx(3 * (6.0 + 4.0)))
    left.took("a", 4.0)
    left.took("a", 2.0)
    # a took 3 on average; b is 1 second times 36 measured over 14 guessed.
    assert left.seconds_left() == pytest.approx(3.0 + 4 * 36 / 14)
    for _ in range(4):
        left.took("b", 0.5)
    left.took("a", 3.0)
    assert left.seconds_left() == 0.0


def test_the_demo_plans_every_step():
    prompts = [Prompt(str(i), "", ("?",)) for i in range(9)] + [Prompt("t", "", ("?", "?"))]
    left = forecast(DemoOptions(repeats=2), prompts)
    left.took("start", 0.0)
    # Two blocks, three modes, two passes; eleven answers of each mode in a pass.
    for kind, count in {"turn": 12, "autoregressive": 22, "strict": 22, "mars": 22}.items():
        for _ in range(count):
            assert left.seconds_left() > 0 or kind == "turn"
            left.took(kind, 1.0)
    left.took("example", 1.0)
    assert left.seconds_left() == 0.0


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_a_line_now_and_then(clock):
    file = io.StringIO()
    line = ProgressLine(Console(file=file, width=200), Forecast({"a": 70.0}, {"a": 2}))
    with line.live():
        line.show("asking: 0 of 2")
        clock[0] += progress.PLAIN_SECONDS
        line.show("asking: 0 of 2", since=100.0)
        clock[0] += 5
        line.took("a", 20.0)
        line.show("asking: 1 of 2")
        line.show("ending the servers")
        clock[0] += progress.PLAIN_SECONDS
        line.show("ending the servers")
    assert file.getvalue().splitlines() == [
        "asking: 0 of 2; at a guess 2:20 min left",
        "asking: 0 of 2; at a guess 2:05 min left",
        "ending the servers; about 0:20 min left",
        "ending the servers; about 0:20 min left",
    ]


def test_on_a_terminal_the_time_counts_down(clock):
    file = io.StringIO()
    line = ProgressLine(
        Console(file=file, width=100, force_terminal=True), Forecast({"a": 70.0}, {"a": 1})
    )
    line.show("asking")
    clock[0] += 8
    assert line.text() == "asking; at a guess 1:02 min left"
    clock[0] += 90
    assert line.text() == "asking; at a guess 0:00 min left"
    with line.live():
        pass
    assert "asking; at a guess 0:00 min left" in file.getvalue()
