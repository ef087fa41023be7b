"""The prompt files that are rebuilt, from a checkout with questions of our own."""

import hashlib
import json
import sys

import pytest

from benchmarks import prompt_sets
from vllm_mars.experiments.sweep.datasets import load_dataset

DOUBLE = '''from typing import List

def double(numbers: List[int]) -> List[int]:
    """ Twice each.
    >>> double([1])
    [2]
    >>> double([])
    """
'''
ONCE = 'def once():\n    """\n    >>> once()\n    1\n    """\n'


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    def question(number, *turns, **more):
        return {"question_id": number, "category": "c", "turns": turns, **more}

    sums = [
        question(i, f"Do this.\n\n{i} + {i}?", reference=["so", f"#### {2 * i}"]) for i in range(90)
    ]
    talks = [question(i, f"first {i}", f"second {i}") for i in range(90)]
    code = [
        question(i, f"Complete it.\n\n{text}") for i, text in ((0, DOUBLE), (1, ONCE), (47, DOUBLE))
    ]
    sets = {"mt_bench": talks, "alpaca": talks, "gsm8k": sums, "humaneval": code}
    for name, questions in sets.items():
        path = tmp_path / "mars/data" / name / "question.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in questions))
        monkeypatch.setitem(
            prompt_sets.SOURCES, name, hashlib.sha256(path.read_bytes()).hexdigest()
        )
    return tmp_path


def rebuild(checkout, monkeypatch):
    command = ["prompt_sets", str(checkout), "--output", str(checkout / "out")]
    monkeypatch.setattr(sys, "argv", command)
    return prompt_sets.main()


def test_the_sets_are_files_of_a_sweep(checkout, monkeypatch, capsys):
    assert rebuild(checkout, monkeypatch) == 0
    found = {
        name: load_dataset(str(checkout / f"out/{name}.jsonl"), 0) for name in prompt_sets.SETS
    }
    assert [len(one.items) for one in found.values()] == [120, 60, 1]
    assert found["prompts-120"].items[39].prompt == "first 39"
    assert found["prompts-120"].items[119].id == "gsm8k/39"
    assert found["gsm8k"].items[3].answer == "6"
    (item,) = found["humaneval-examples"].items
    assert (item.id, item.entry_point, item.code) == ("HumanEval/0", "double", DOUBLE)
    asserts = ("candidate([1]) == [2]", "candidate([]) == None")
    assert item.test == "def check(candidate):\n" + "".join(f"    assert {it}\n" for it in asserts)
    for line in capsys.readouterr().out.splitlines():
        sha256, name = line.split()
        content = (checkout / "out" / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == sha256


def test_another_source_is_refused(checkout, monkeypatch, capsys):
    path = checkout / "mars/data/alpaca/question.jsonl"
    path.write_text(path.read_text() + "{}\n")
    assert rebuild(checkout, monkeypatch) == 1
    assert "question.jsonl has sha256" in (error := capsys.readouterr().err)
    assert "check out commit 8909b41." in error
    path.unlink()
    assert rebuild(checkout, monkeypatch) == 1
    assert "No such file" in capsys.readouterr().err
