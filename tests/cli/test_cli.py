"""The command line: output, exit status, errors."""

import importlib.util
import os
import sys

import pytest

from vllm_mars.cli.__main__ import main
from vllm_mars.lab.prompts import load_prompts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--theta", "1.7"], "mars_theta=1.7 is outside (0, 1]; 1 switches the relaxation off."),
        (["--startup-timeout", "0"], "startup_timeout=0.0 is below 1"),
        (["--prompts", "none.jsonl"], "prompts=none.jsonl cannot be read"),
        (["--output", "/proc/none/demo.json"], "output=/proc/none/demo.json cannot be written"),
    ],
)
def test_bad_values_fail_before_anything_starts(arguments, message, capsys):
    assert main(["sweep", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.out == ""


def test_serve_passes_every_argument_on_to_vllm(monkeypatch):
    """vLLM replaces the process, so signals and the exit status are those of vLLM."""
    calls = []
    monkeypatch.setattr(os, "execv", lambda *arguments: calls.append(arguments))
    for arguments in (
        ["--help"],
        ["m", "--port", "1", "--", "-x", ""],
        ["--version", "--theta=1"],
        [],
    ):
        main(["serve", *arguments])
        path, command = calls.pop()
        assert (path, command[0]) == (sys.executable, sys.executable)
        assert command[1:] == ["-m", "vllm_mars.cli.serve", "serve", *arguments]


def test_serve_needs_vllm(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["serve", "model"]) == 1
    message = "error: vllm-mars serve needs vLLM; run pip install '.[cuda]' in the checkout"
    assert capsys.readouterr().err.startswith(message)


def test_prompt_files(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"question_id": 7, "category": "c", "turns": ["b", "d"]}\n')
    assert [(p.id, p.category, p.turns) for p in load_prompts(path)] == [
        ("1", "", ("a",)),
        ("7", "c", ("b", "d")),
    ]
    # JSON allows Unicode's line separator in a string.
    path.write_text('{"prompt": "a\u2028b"}\r\n', encoding="utf-8")
    assert [p.turns for p in load_prompts(path)] == [("a\u2028b",)]
    # A table with empty cells is exported with nulls.
    empty = ', "id": null, "task_id": null, "category": null, "turns": null}\n'
    path.write_text('{"prompt": "a"' + empty + '{"prompt": "b"' + empty)
    prompts = [(p.id, p.category, p.turns) for p in load_prompts(path)]
    assert prompts == [("1", "", ("a",)), ("2", "", ("b",))]
    # With the byte-order mark of Windows.
    path.write_text('{"prompt": "a"}\r\n', encoding="utf-8-sig")
    assert [p.turns for p in load_prompts(path)] == [("a",)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{", "line 1 is not JSON"),
        ("[]", "line 1 is not a JSON object"),
        ('{"prompt": "a"}\n{"text": "b"}', "line 2 has neither"),
        ('{"turns": []}', "line 1 has neither"),
        ('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}', "id '1' appears twice"),
    ],
)
def test_bad_prompt_files(tmp_path, text, message):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_prompts(path)
