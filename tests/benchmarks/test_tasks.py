"""The prompt files of `benchmarks.tasks.make`: the same as ever, their own answers right."""

import hashlib
import json
import sqlite3

import pytest

from benchmarks.tasks.make import SETS, write_sets
from vllm_mars.experiments.quality.scores import names_one, task_scores
from vllm_mars.experiments.sweep.datasets import load_dataset

COUNTS = {"json": 120, "sql": 70, "facts": 107, "functions": 42, "tools": 70}
# Of the five files, one after another: a change of theirs makes other tasks, which is to be meant.
SHA256 = "961914602ac131a36466013e807f8d81e59ac8208833d1fc21f41a5c415b5d34"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return {path.stem: path for path in write_sets(tmp_path_factory.mktemp("sets"))}


@pytest.fixture(scope="module")
def lines(files):
    return {
        name: [json.loads(line) for line in path.read_text().splitlines()]
        for name, path in files.items()
    }


def scores(files, name, answers):
    """The scores of one answer to each prompt of a file."""
    items = load_dataset(str(files[name]), 0).items
    assert all(item.is_task for item in items)
    return [task_scores(item, text) for item, text in zip(items, answers, strict=True)]


def test_the_files_are_the_same_as_ever(files, tmp_path):
    digest = hashlib.sha256(b"".join(files[name].read_bytes() for name in SETS)).hexdigest()
    assert digest == SHA256, "python -m benchmarks.tasks.make writes other files"
    other = write_sets(tmp_path, seed=1)
    differs = [path.stem for path in other if path.read_bytes() != files[path.stem].read_bytes()]
    assert differs == ["json", "sql", "tools"]


def test_as_many_different_prompts_as_the_docs_say(lines):
    assert {name: len(found) for name, found in lines.items()} == COUNTS
    for name in COUNTS.keys() - {"tools"}:
        assert len({line["prompt"] for line in lines[name]}) == COUNTS[name], name


def test_json_of_what_the_text_says_is_right(files, lines):
    wanted = [line["expected"] for line in lines["json"]]
    right = scores(files, "json", map(json.dumps, wanted))
    assert right == [{"json_valid": 1, "json_values": 1}] * len(wanted)
    # What another text says fits the schema of its kind.
    (other, *_) = scores(files, "json", map(json.dumps, [wanted[1], *wanted[1:]]))
    assert other == {"json_valid": 1, "json_values": 0}


def test_the_text_says_all_values(lines):
    def said(value, text):
        if isinstance(value, dict | list):
            return all(
                said(one, text) for one in (value.values() if isinstance(value, dict) else value)
            )
        return isinstance(value, bool) or str(value) in text

    for line in lines["json"]:
        text = line["prompt"].split("\n\n")[1]
        assert said(line["expected"], text), line
        assert "examples" not in line["prompt"]


def test_reference_queries_are_right_and_give_rows(files, lines):
    queries = [line["sql"]["query"] for line in lines["sql"]]
    assert scores(files, "sql", queries) == [{"sql_rows": 1}] * len(queries)
    for line in lines["sql"]:
        database = sqlite3.connect(":memory:")
        database.executescript(line["sql"]["setup"])
        rows = database.execute(line["sql"]["query"]).fetchall()
        database.close()
        # So an empty answer is wrong.
        assert rows, line["id"]


def test_facts_are_not_in_their_questions(files, lines):
    answers = [line["accepted"][-1] for line in lines["facts"]]
    assert scores(files, "facts", answers) == [{"fact": 1}] * len(answers)
    for line in lines["facts"]:
        assert not names_one(line["prompt"], line["accepted"]), line["id"]


def test_functions_pass_their_tests(files, lines):
    answers = [
        f"```python\n{line['prompt']}{line['canonical_solution']}```" for line in lines["functions"]
    ]
    assert scores(files, "functions", answers) == [{"pass_at_1": 1}] * len(answers)
    items = load_dataset(str(files["functions"]), 0).items
    assert task_scores(items[0], f"{items[0].code}    return a - b\n") == {"pass_at_1": 0}
