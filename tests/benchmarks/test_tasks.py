"""Scores and comparisons of `benchmarks.tasks`."""

import json

import pytest

from benchmarks import tasks

HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "import math\n\ndef root(x):\n    '''The square root.'''\n",
    "entry_point": "root",
    "test": "def check(candidate):\n    assert candidate(9) == 3",
}
FENCED = "```python\ndef root(x):\n    return {}\n```\nIt works."
POINT = {"model": "tiny", "draft": "tiny", "k": 4, "sampling": {}, "max_tokens": 64}


@pytest.fixture
def problem(tmp_path):
    path = tmp_path / "humaneval.jsonl"
    path.write_text(json.dumps(HUMANEVAL) + "\n")
    (problem,) = tasks.problems_of("humaneval", path)
    return problem


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (FENCED.format("math.sqrt(x)"), True),
        (FENCED.format("x"), False),
        ("    return math.sqrt(x)", True),
        (FENCED.format("open('/dev/null').missing"), False),
        ("```python\ndef root(x):\n    return math.sqrt(x)", True),
    ],
    ids=["right", "wrong", "completion", "raises", "cut off"],
)
def test_an_answer_to_humaneval_is_run(problem, text, is_right):
    assert problem.is_right(text) == is_right


def test_a_program_that_does_not_end_is_wrong(monkeypatch):
    monkeypatch.setattr(tasks, "SECONDS", 1)
    assert not tasks.passes("while True: pass")


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("2 + 2 = 4, so\n#### 1,234", True),
        ("The answer is 1234.", True),
        ("#### 1234.0 dollars", True),
        ("#### 12", False),
        ("1234 eggs, of which 5 are left", False),
        ("", False),
    ],
)
def test_an_answer_to_gsm8k_is_its_last_number(tmp_path, text, is_right):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": "A sum.\n#### 1,234"}))
    (problem,) = tasks.problems_of("gsm8k", path)
    assert problem.is_right(text) == is_right


def line(rule, problem, right, tokens, steps, ended=1):
    return {
        "point": POINT,
        "task": "gsm8k",
        "problem": problem,
        "seed": 0,
        "rule": rule,
        "right": right,
        "tokens": tokens,
        "steps": steps,
        "ended": ended,
        "nats": 0.5,
    }


def test_rules_are_compared_on_common_problems():
    lines = [
        line("strict", "a", True, 11, 5),
        line("strict", "b", True, 21, 10),
        line("strict", "c", False, 31, 15, ended=0),
        line("lossy", "a", True, 13, 4),
        line("lossy", "b", False, 31, 10),
        line("lossy", "c", True, 31, 10),
        line("lossy", "d", True, 1001, 1),
    ]
    (title,), strict, lossy = tasks.report(lines)
    assert title == "gsm8k, greedy, K 4, tiny, 3 problems"
    figures = {
        name: value[0] if isinstance(value, list) else value
        for (name, *_), value in zip(tasks.COLUMNS, lossy, strict=True)
    }
    assert strict[0] == "strict" and figures["problems"] == 4
    assert figures["right, %"] == 75 and figures["right less strict's, points"] == 0
    assert figures["won / lost"] == "1 / 1"
    assert figures["tokens per step x strict"] == pytest.approx(72 / 24 / (60 / 30), abs=1e-5)
    assert figures["steps per answer x strict"] == pytest.approx(24 / 30)
    assert figures["where both ended"] == pytest.approx(14 / 15, abs=1e-5)
    assert figures["tokens per answer x strict"] == pytest.approx(75 / 63, abs=1e-5)


@pytest.mark.engine
def test_a_stopped_call_resumes(bytes_model, tmp_path, capsys):
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    output = tmp_path / "out.jsonl"
    arguments = [
        str(output),
        f"--model={bytes_model}",
        f"--draft={bytes_model}",
        f"--tasks=chat={questions}",
        "--max-tokens=12",
        "--dtype=float32",
        *("--rules", "strict", "mars_price=2"),
        '--sampling={"temperature": 0.8}',
    ]
    tasks.main(arguments)
    first = output.read_text().splitlines()
    assert len(first) == 1 + 2 * 2
    # The last answer is lost.
    output.write_text("\n".join(first[:-1]) + "\n")
    tasks.main(arguments)
    second = output.read_text().splitlines()
    assert json.loads(second[-1]) == json.loads(first[-1]) and len(second) == len(first) + 1
    capsys.readouterr()
    tasks.main([str(output), "--report"])
    assert "| mars_price 2 | 2 |" in capsys.readouterr().out
