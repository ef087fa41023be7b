"""Scores of answers, and the confinement of generated code, on cases with known answers."""

import time

import pytest

from vllm_mars.experiments.quality import confined
from vllm_mars.experiments.quality.confined import confinement, run_confined
from vllm_mars.experiments.quality.scores import (
    divergence,
    likeness,
    names_one,
    program,
    repeated_4grams,
    task_scores,
)
from vllm_mars.experiments.sweep.datasets import Item, Sql


@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        ("8", "3 + 5 = 8\n#### 8", 1),
        ("8", "#### 8.0", 1),
        ("1,002", "#### $1002", 1),
        ("8", "#### 9 and 8 apples", 0),
        ("8", "She has 8 apples.", 1),
        ("-3.5", "it is -3.5", 1),
        ("8", "no idea", 0),
        ("8", "", 0),
    ],
)
def test_exact_match(answer, text, score):
    assert task_scores(Item("a", "", "?", answer=answer), text) == {"exact_match": score}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"a": 1}', 1),
        ('```json\n{"a": 1}\n```', 1),
        ('Here it is:\n```\n{"a": 1}\n```\nDone.', 1),
        ('{"a": "1"}', 0),
        ('{"a": 1', 0),
        ('It is {"a": 1}', 0),
        ("", 0),
        # An answer that repeats itself to its end.
        pytest.param("[" * 100_000, 0, id="nested"),
    ],
)
def test_json_validity(text, score):
    assert task_scores(Item("a", "", "?", schema=SCHEMA), text) == {"json_valid": score}


@pytest.mark.parametrize(
    ("text", "valid", "right"),
    [
        ('{"a": 1, "b": [2]}', 1, 1),
        ('```json\n{"b": [2], "a": 1}\n```', 1, 1),
        ('{"a": 2, "b": [2]}', 1, 0),
        ('{"a": 1}', 1, 0),
        ('{"a": "1", "b": [2]}', 0, 0),
        ("1", 0, 0),
    ],
)
def test_json_values(text, valid, right):
    item = Item("a", "", "?", schema=SCHEMA, expected={"a": 1, "b": [2]})
    assert task_scores(item, text) == {"json_valid": valid, "json_values": right}


BOOKS = """
CREATE TABLE books (title TEXT, pages INTEGER, price REAL);
INSERT INTO books VALUES ('A', 100, 0.1), ('B', 300, 0.2), ('C', 200, 0.3);
"""


@pytest.mark.parametrize(
    ("query", "text", "score", "score_ordered"),
    [
        ("SELECT title FROM books", "SELECT title FROM books;", 1, 1),
        ("SELECT title FROM books", "Thus:\n```sql\nselect title from books\n```\n", 1, 1),
        # Names of columns are no matter, order may be.
        ("SELECT title FROM books", "SELECT title AS t FROM books ORDER BY pages", 1, 0),
        ("SELECT SUM(price) FROM books", "SELECT 0.6", 1, 1),
        ("SELECT COUNT(*) FROM books", "SELECT 3.0", 1, 1),
        ("SELECT title FROM books", "SELECT title, pages FROM books", 0, 0),
        ("SELECT title FROM books", "SELECT title FROM books LIMIT 2", 0, 0),
        # Once more is too often.
        ("SELECT 1", "SELECT 1 UNION ALL SELECT 1", 0, 0),
        ("SELECT 1", "SELECT one", 0, 0),
        ("SELECT 1", "", 0, 0),
        ("SELECT 1", "SELECT 1; SELECT 1", 0, 0),
        # What is asked for is a query.
        ("SELECT title FROM books WHERE pages > 900", "DELETE FROM books", 0, 0),
    ],
)
def test_rows_of_sql(query, text, score, score_ordered):
    for ordered, expected in ((False, score), (True, score_ordered)):
        item = Item("a", "", "?", sql=Sql(BOOKS, query, ordered))
        assert task_scores(item, text) == {"sql_rows": expected}


def test_a_query_without_end_is_ended(monkeypatch):
    monkeypatch.setattr(confined, "CPU_SECONDS", 1)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT MAX(i) FROM n"
    assert task_scores(Item("a", "", "?", sql=Sql(BOOKS, "SELECT 1")), endless) == {"sql_rows": 0}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Paris", 1),
        ("\n**paris**\nIt lies on the Seine.", 1),
        ("The capital is Paris.", 1),
        ("The city of light", 1),
        ("Parisian", 0),
        ("Rome\nParis", 0),
        ("", 0),
    ],
)
def test_facts(text, score):
    item = Item("a", "", "?", accepted=("Paris", "city of light"))
    assert task_scores(item, text) == {"fact": score}


@pytest.mark.parametrize(
    "text", ["12", "It is 12.", "12.0", "(12)", "12, of course", "**12** legs"]
)
def test_a_number_that_is_named(text):
    assert names_one(text, ["12"])


@pytest.mark.parametrize("text", ["-12", "12.5", "1,212", "12,500", "0.12", "112", "123", "12th"])
def test_a_number_that_is_not_named(text):
    assert not names_one(text, ["12"])


def test_a_wrong_schema_is_named():
    with pytest.raises(RuntimeError, match="the schema of prompt 'a' is wrong"):
        task_scores(Item("a", "", "?", schema={"type": "nonsense"}), "{}")


CODE = Item(
    "a",
    "",
    "?",
    test="def check(candidate):\n    assert candidate(2, 3) == 5\n",
    entry_point="add",
)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Sure:\n```python\ndef add(a, b):\n    return a + b\n```\n", 1),
        ("def add(a, b):\n    return a + b", 1),
        ("```python\ndef add(a, b):\n    return a - b\n```", 0),
        ("```python\ndef other(a, b):\n    return a + b\n```", 0),
        ("I cannot.", 0),
        # An early end is not a pass.
        ("import sys\ndef add(a, b):\n    sys.exit(0)", 0),
        ("import os\ndef add(a, b):\n    os._exit(0)", 0),
    ],
)
def test_pass_at_1(text, score):
    assert task_scores(CODE, text) == {"pass_at_1": score}


def test_an_answer_may_continue_the_function_of_its_prompt():
    stub = "import math\n\n\ndef root(x):\n    '''Root.'''\n"
    item = Item("a", "", "?", None, "def check(c):\n    assert c(4) == 2\n", "root", stub)
    assert run_confined(program(item, "    return math.sqrt(x)\n")).passed
    whole = "```python\ndef root(x):\n    return math.sqrt(x)\n```"
    assert run_confined(program(item, whole)).passed


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: pass", "SIGXCPU|SIGKILL"),
        ("x = bytearray(10**10)", "MemoryError"),
        (
            "import socket; socket.create_connection(('127.0.0.1', 9), 1)",
            "socket.* is not allowed to generated code",
        ),
        ("import subprocess; subprocess.run(['true'])", "is not allowed to generated code"),
        ("import os; os.fork()", "os.fork is not allowed"),
        ("import os; os.system('true')", "os.system is not allowed"),
        ("import ctypes; ctypes.CDLL(None)", "ctypes.dlopen is not allowed"),
        ("open('x', 'w').write('a' * 10**8)", "File too large|SIGXFSZ"),
        ("import os; assert not os.environ.get('PATH'), os.environ", ""),
        ("assert not input()", "EOF"),
        ("print([1, 2]); print('and more')", ""),
        ("while True: print('x' * 1000)", "SIGXCPU|SIGKILL"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "x{500}"),
        ("raise ValueError('no')", "ValueError: no"),
    ],
)
def test_what_generated_code_cannot_do(code, reason, monkeypatch):
    monkeypatch.setattr(confined, "CPU_SECONDS", 1)
    begin = time.monotonic()
    verdict = run_confined(code)
    assert time.monotonic() - begin < confined.WALL_SECONDS
    if reason:
        assert not verdict.passed
        import re

        assert re.search(reason, verdict.reason), verdict
    else:
        assert verdict.passed, verdict


def test_code_that_sleeps_is_ended(monkeypatch):
    monkeypatch.setattr(confined, "WALL_SECONDS", 1.0)
    verdict = run_confined("import time; time.sleep(60)")
    assert not verdict.passed and "longer than 1 s" in verdict.reason


def test_no_network_even_past_the_audit_hook():
    """Where the confinement claims a network namespace, it holds a loopback alone."""
    if "network namespace" not in confinement():
        pytest.skip(
            "this machine gives ordinary users no network namespace; the sysctls "
            "kernel.unprivileged_userns_clone=1 or kernel.apparmor_restrict_unprivileged_userns=0 "
            "allow it"
        )
    code = "assert [l.split(':')[0].strip() for l in open('/proc/net/dev')][2:] in ([], ['lo'])"
    assert run_confined(code).passed


def test_confinement_in_words():
    words = confinement()
    assert "audit hook that refuses sockets and processes" in words
    assert "512 MiB" in words


def test_likeness():
    assert likeness("", "") == {"rouge_l": 1.0, "chrf": 1.0, "agreement": 1.0}
    assert likeness("the cat", "the cat")["chrf"] == 1.0
    found = likeness("the cat sat", "the cat ran")
    # Two of three words in order.
    assert found["rouge_l"] == pytest.approx(2 / 3)
    assert 0 < found["chrf"] < 1 and found["agreement"] == 0
    assert likeness("", "the cat")["rouge_l"] == 0


def test_divergence():
    assert divergence([1, 2, 3], [1, 2, 3]) == {"common_prefix": 1.0}
    assert divergence([1, 9, 3], [1, 2, 3, 4]) == {"common_prefix": 0.25, "first_divergence": 1.0}
    assert divergence([1, 2], [1, 2, 3, 4]) == {"common_prefix": 0.5, "first_divergence": 2.0}
    assert divergence([], []) == {"common_prefix": 1.0}
    assert divergence([1], []) == {"common_prefix": 0.0, "first_divergence": 0.0}


def test_repeated_4grams():
    assert repeated_4grams([1, 2, 3, 4, 5]) == repeated_4grams([1, 1, 1]) == 0
    assert repeated_4grams([1, 1, 1, 1, 1, 1]) == pytest.approx(2 / 3)
