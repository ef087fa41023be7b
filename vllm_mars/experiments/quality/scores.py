"""Scores of one answer: task scores, and likeness to the autoregressive answer."""

import functools
import json
import re
from collections.abc import Iterable
from typing import Any

from vllm_mars.experiments.quality.confined import run_confined
from vllm_mars.experiments.sweep.datasets import Item

# Higher is better, between 0 and 1, and the autoregressive answers have them as well.
TASK_SCORES = ("exact_match", "pass_at_1", "json_valid", "json_values", "sql_rows", "fact")
# Fewer tasks that strict decoding solves tell nothing about a loss of tasks.
MIN_SOLVED = 30

_MARKED = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")
_ANY_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*|-?\.\d+")
_FENCE = re.compile(r"```[a-zA-Z]*\n(.*?)(?:```|\Z)", re.DOTALL)
# Both queries read alone; sums of floats depend on the order of the rows.
_COMPARE_ROWS = """
import collections, sqlite3
setup, wanted, asked, ordered = {arguments!r}
database = sqlite3.connect(":memory:")
database.executescript(setup)
database.execute("PRAGMA query_only = ON")
def rows(query):
    found = [
        tuple(round(value, 6) if isinstance(value, float) else value for value in row)
        for row in database.execute(query)
    ]
    return found if ordered else collections.Counter(found)
assert rows(asked) == rows(wanted), "other rows"
"""


def is_task_score(name: str) -> bool:
    """Whether a score says how well a task was done; lm-eval's names hold a comma."""
    return name in TASK_SCORES or "," in name


def task_scores(item: Item, text: str) -> dict[str, float]:
    """Scores an answer by what its prompt's line gives to check it by.

    Returns:
        Those of `TASK_SCORES` for which the item has what they need, each 0 or 1.

    Raises:
        RuntimeError: the item's schema is not a JSON schema.
    """
    scores = {}
    if item.answer is not None:
        scores["exact_match"] = float(_number(text) == _value(item.answer))
    if item.test is not None:
        scores["pass_at_1"] = float(run_confined(program(item, text)).passed)
    if item.schema is not None:
        scores["json_valid"] = float(fits_schema(text, item.schema, item.id))
    if item.expected is not None:
        scores["json_values"] = float(scores["json_valid"] == 1 and _json(text) == item.expected)
    if item.sql is not None:
        arguments = (item.sql.setup, item.sql.query, _code(text), item.sql.ordered)
        scores["sql_rows"] = float(run_confined(_COMPARE_ROWS.format(arguments=arguments)).passed)
    if item.accepted:
        scores["fact"] = float(names_one(text, item.accepted))
    return scores


def program(item: Item, text: str) -> str:
    """The program that tests an answer: its first code block (else all of it), then the test."""
    code = _code(text)
    if f"def {item.entry_point}" not in code:
        # The answer continues the function that the request begins.
        code = item.code + code
    elif item.code:
        # Imports above the function that the answer may not repeat.
        code = item.code.split(f"def {item.entry_point}")[0] + code
    return f"{code}\n\n{item.test}\n\ncheck({item.entry_point})\n"


def fits_schema(text: str, schema: dict[str, Any], name: str = "") -> bool:
    """Whether the whole answer, or its only code block, is JSON that fits the schema."""
    import jsonschema

    try:
        jsonschema.validate(_json(text), schema)
    except (ValueError, RecursionError, jsonschema.ValidationError):
        return False
    except jsonschema.SchemaError as error:
        raise RuntimeError(f"the schema of prompt {name!r} is wrong: {error.message}.") from error
    return True


def names_one(text: str, accepted: Iterable[str]) -> bool:
    """Whether the answer's first line that is not empty holds one of these.

    As whole words, whatever their case, and as whole numbers: 12 is not in -12, 1,212 or 12.5.
    """
    line = next(iter(text.strip().splitlines()), "")
    return any(
        re.search(rf"(?<![\w.,-]){re.escape(one)}(?!\w|,\d|\.\d*[1-9])", line, re.IGNORECASE)
        for one in accepted
    )


def likeness(text: str, reference: str) -> dict[str, float]:
    """Compares an answer with the autoregressive one.

    Returns:
        "rouge_l" (F1) and "chrf", both in [0, 1], and "agreement", 1 if the texts are equal.
        Of two empty texts all are 1.
    """
    if text == reference:
        return {"rouge_l": 1.0, "chrf": 1.0, "agreement": 1.0}
    rouge, chrf = _scorers()
    return {
        "rouge_l": float(rouge.score(reference, text)["rougeL"].fmeasure),
        "chrf": float(chrf.sentence_score(text, [reference]).score) / 100,
        "agreement": 0.0,
    }


def divergence(ids: list[int], reference_ids: list[int]) -> dict[str, float]:
    """Compares two answers token by token.

    Returns:
        "common_prefix": the share of the reference's tokens before the first difference, in [0, 1];
        "first_divergence": their number, only where the answers differ.
    """
    pairs = zip(ids, reference_ids, strict=False)
    common = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if common is None:
        common = min(len(ids), len(reference_ids))
    scores = {"common_prefix": common / len(reference_ids) if reference_ids else float(not ids)}
    if ids != reference_ids:
        scores["first_divergence"] = float(common)
    return scores


def repeated_4grams(ids: list[int]) -> float:
    """The share of an answer's 4-grams of tokens that stood in it before; 0 of a shorter one."""
    found = list(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))
    return 1 - len(set(found)) / len(found) if found else 0.0


@functools.cache
def _scorers() -> tuple[Any, Any]:
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics.chrf import CHRF

    return RougeScorer(["rougeL"], use_stemmer=False), CHRF()


def _code(text: str) -> str:
    """An answer's first code block, else all of it."""
    block = _FENCE.search(text)
    return block.group(1) if block else text


def _json(text: str) -> Any:
    """What the whole answer, or its only code block, says in JSON."""
    blocks = _FENCE.findall(text)
    return json.loads(blocks[0] if len(blocks) == 1 else text)


def _number(text: str) -> float | None:
    """The number after the last ####, else the last number of the answer."""
    found = _MARKED.findall(text) or _ANY_NUMBER.findall(text)
    return _value(found[-1]) if found else None


def _value(number: str) -> float | None:
    try:
        return float(number.replace(",", "").rstrip("."))
    except ValueError:
        return None
