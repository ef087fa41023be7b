"""Prompt files of a sweep, with what their answers are judged by.

A line is a JSON object. What it holds decides how answers to it are scored:

    prompt | turns           the request; of several turns only the first is asked
    question, answer         a line of GSM8K as published: the request is the question
    answer | reference       with "#### NUMBER" at its end: exact match of the number
    test, entry_point        HumanEval as published: the answer's code must pass the test
    schema                   a JSON schema that the answer must fit
    expected                 beside `schema`: the value that the answer must hold
    sql                      "setup", "query" and perhaps "ordered": the answer's query must give
                             the rows that this one gives
    accepted                 texts, one of which the answer's first line must hold
    id | question_id | task_id, category
"""

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_mars.local.prompts import parse_prompt, read_json_lines
from vllm_mars.local.requirements import require

PACKAGED_TASKS = Path(__file__).with_name("tasks.jsonl")

_MATH = (
    "Solve this problem step by step. Write the final answer, a number, in the last line after "
    "####.\n\n"
)
_CODE = "Complete this function. Answer with the whole function in one Python code block.\n\n"
_NUMBER = re.compile(r"####\s*(-?[\d.,]*\d)")


@dataclass(frozen=True)
class Sql:
    """What an answer in SQLite is compared with: the rows that `query` gives after `setup`."""

    setup: str
    query: str
    ordered: bool = False


@dataclass(frozen=True)
class Item:
    """One request and what its answer is judged by.

    Attributes:
        id: unique within the file.
        answer: the number that the answer must give.
        test: Python code that defines `check(candidate)`, which calls the function `entry_point`.
        code: the beginning of the program that the request shows, or "".
        expected: the value that an answer in JSON must hold, or None where any will do that fits
            the `schema`.
        accepted: texts, one of which names the fact that is asked for; empty for other tasks.
    """

    id: str
    category: str
    prompt: str
    answer: str | None = None
    test: str | None = None
    entry_point: str = ""
    code: str = ""
    schema: dict[str, Any] | None = None
    expected: Any = None
    sql: Sql | None = None
    accepted: tuple[str, ...] = ()

    @property
    def is_task(self) -> bool:
        """Whether there is something to score an answer by."""
        checks = (self.answer, self.test, self.schema, self.sql)
        return bool(self.accepted) or any(check is not None for check in checks)


@dataclass(frozen=True)
class Dataset:
    """Requests of a sweep.

    Attributes:
        items: the requests; empty for a dataset of vLLM and a task of lm-eval.
        vllm_args: arguments with which `vllm bench serve` makes the requests itself; empty for a
            file.
        count: requests of a cell at low concurrency; 0 for all of a task.
        task: name or YAML file of a task of lm-eval, which asks and scores; "" for all others.
    """

    name: str
    items: tuple[Item, ...]
    vllm_args: tuple[str, ...] = ()
    count: int = 0
    task: str = ""

    @property
    def checksum(self) -> str:
        """Of what is asked, as far as it is known here: the prompts, or the arguments for vLLM."""
        asked = [[item.id, item.prompt] for item in self.items] or self.vllm_args
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]

    def blocks(self, size: int) -> "list[Dataset]":
        """The requests of a file in datasets of so many, as `CellKey` names them; 0 takes all."""
        if not size or not self.items:
            return [self]
        parts = [self.items[first : first + size] for first in range(0, len(self.items), size)]
        return [
            Dataset(f"{self.name}#{number}", part, (), len(part))
            for number, part in enumerate(parts)
        ]


def load_dataset(source: str, num_prompts: int) -> Dataset:
    """Reads a prompt file, or names a dataset of vLLM or a task of lm-eval.

    Args:
        source: path of a JSON lines file, "vllm:NAME" or "vllm:NAME:PATH" with a name that
            `vllm bench serve --dataset-name` takes, or "lm-eval:TASK" with a name that `lm_eval
            run --tasks` takes or the YAML file of a task.
        num_prompts: how many, taken from the categories in turn; 0 takes all.

    Raises:
        ValueError: the file cannot be read, is empty, has an id twice, or a line is wrong.
        RuntimeError: lm-eval is not installed.
    """
    if source.startswith("vllm:"):
        _, name, *file = source.split(":", 2)
        if not name or not num_prompts:
            raise ValueError(
                f"prompts={source!r} with num_prompts={num_prompts}: write vllm:NAME or "
                "vllm:NAME:PATH, and say how many prompts vLLM draws (1 or more)."
            )
        args = ("--dataset-name", name, *(("--dataset-path", file[0]) if file else ()))
        stem = "".join(f"-{Path(path).stem}" for path in file)
        return Dataset(f"vllm-{name}{stem}", (), args, num_prompts)
    if source.startswith("lm-eval:"):
        return _task(source.removeprefix("lm-eval:"), num_prompts)
    path = Path(source)
    items = read_json_lines(
        path, _parse, option="prompts", instead="a JSONL file, vllm:NAME or lm-eval:TASK"
    )
    chosen = _spread(items, num_prompts) if num_prompts else items
    return Dataset(path.stem, tuple(chosen), (), len(chosen))


def _task(task: str, num_prompts: int) -> Dataset:
    require(f"prompts=lm-eval:{task}", "experiments", ["lm_eval"])
    path = Path(task)
    if path.suffix == ".yaml":
        if not path.is_file():
            raise ValueError(
                f"prompts=lm-eval:{task}: there is no such file; name a task of lm-eval or the "
                "YAML file of one."
            )
        task = str(path.resolve())
    elif not task:
        raise ValueError("prompts='lm-eval:' names no task; write lm-eval:TASK.")
    return Dataset(f"lm-eval-{path.stem}", (), (), num_prompts, task)


def _parse(data: dict[str, Any], where: str, number: int) -> Item:
    if isinstance(data.get("question"), str):
        data = {"prompt": _MATH + data["question"], **data}
    read = parse_prompt(data, where, number, "'prompt', 'turns' nor 'question' (texts)")
    prompt, code, sql = read.turns[0], "", data.get("sql")
    has_test, accepted = "test" in data, data.get("accepted", ())

    def check(fine: bool, problem: str) -> None:
        if not fine:
            raise ValueError(f"{where}: {problem}")

    is_object = isinstance(data.get("schema", {}), dict)
    check(is_object, "'schema' is not an object; write a JSON schema.")
    has_schema = "expected" not in data or "schema" in data
    check(has_schema, "'expected' without a 'schema'; add the JSON schema it fits.")
    if "sql" in data:
        check(
            isinstance(sql, dict)
            and sql.keys() <= {"setup", "query", "ordered"}
            and all(_is_text(sql.get(name)) for name in ("setup", "query")),
            "'sql' needs to be an object with 'setup' and 'query' (texts), and 'ordered' where the "
            "order of the rows counts.",
        )
    if "accepted" in data:
        is_list = isinstance(accepted, list) and bool(accepted) and all(map(_is_text, accepted))
        check(is_list, "'accepted' is not a list of texts; write the right answers.")
    if has_test:
        is_code = all(isinstance(data.get(name), str) for name in ("test", "entry_point"))
        check(is_code, "'test' needs to be code, with the 'entry_point' it calls.")
    if has_test and "turns" not in data and "task_id" in data:
        prompt, code = f"{_CODE}```python\n{prompt}```", prompt
    return Item(
        id=read.id,
        category=read.category,
        prompt=prompt,
        answer=_answer(data),
        test=data.get("test"),
        entry_point=data["entry_point"] if has_test else "",
        code=code,
        schema=data.get("schema"),
        expected=data.get("expected"),
        sql=Sql(**sql) if sql else None,
        accepted=tuple(accepted),
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _answer(data: dict[str, Any]) -> str | None:
    text = data.get("answer", data.get("reference"))
    if isinstance(text, list):
        text = "\n".join(str(part) for part in text)
    found = _NUMBER.findall(text) if isinstance(text, str) else []
    return found[-1] if found else None


def _spread(items: list[Item], count: int) -> list[Item]:
    """The first items of each category in turn, in the order of the file."""
    before: Counter[str] = Counter()
    ranks = []
    for place, item in enumerate(items):
        ranks.append((before[item.category], place))
        before[item.category] += 1
    return [items[place] for place in sorted(place for _, place in sorted(ranks)[:count])]
