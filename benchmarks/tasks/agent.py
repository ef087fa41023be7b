"""An agent's task and its tools: a calculator, a table, a store.

Calls are lines of JSON in the text, not those of a chat template, so that any model can take part.
"""

import ast
import json
import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vllm_mars.experiments.quality.scores import names_one
from vllm_mars.local.prompts import parse_prompt

HERE = Path(__file__).parent
# User and agent in turn, the first of whom says what tools there are: not every chat template has a
# system message.
OPENING: list[str] = yaml.safe_load((HERE / "tools.yaml").read_text(encoding="utf-8"))["opening"]
ROLES = ("user", "assistant")
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Task:
    """A line of tools.jsonl.

    Attributes:
        id, category, prompt: as in every prompt file.
        answer: the right one.
        table: what can be looked up.
        holds: what the store holds at first.
        stored: what it must hold in the end.
    """

    id: str
    category: str
    prompt: str
    answer: Any
    table: Mapping[str, Any] = field(default_factory=dict)
    holds: Mapping[str, Any] = field(default_factory=dict)
    stored: Mapping[str, Any] = field(default_factory=dict)


def read_task(data: dict[str, Any], where: str, number: int) -> Task:
    """A line of the file, as `vllm_mars.local.prompts.read_json_lines` calls it."""
    prompt = parse_prompt(data, where, number)
    if "answer" not in data:
        raise ValueError(f"{where} has no 'answer'; write the right one.")
    known = {name: data[name] for name in ("table", "holds", "stored") if name in data}
    return Task(prompt.id, prompt.category, prompt.turns[0], data["answer"], **known)


def lead(task: Task, ask: Callable[[Messages], tuple[str, int]], max_turns: int) -> dict[str, Any]:
    """Leads a task to its end: an answer, or too many turns.

    Args:
        task: the task.
        ask: gives the agent's next message and its number of tokens.
        max_turns: most messages of the agent.

    Returns:
        "reached", whether the answer is right and the store holds what it must; "turns",
        "output_tokens" and "seconds" up to the end; and "messages", those of the agent and the
        tools in turn.
    """
    messages: Messages = []
    for text in (*OPENING, task.prompt):
        messages.append({"role": ROLES[len(messages) % 2], "content": text})
    asked = len(messages)
    store, found, turns, tokens = dict(task.holds), dict[str, Any](), 0, 0
    begin = time.perf_counter()
    while turns < max_turns and "answer" not in found:
        text, count = ask(messages)
        turns, tokens, found = turns + 1, tokens + count, first_object(text)
        messages.append({"role": "assistant", "content": text})
        if "answer" not in found:
            messages.append({"role": "user", "content": f"Result: {call(found, task, store)}"})
    seconds = time.perf_counter() - begin
    wanted, given = {"": task.answer, **task.stored}, {"": found.get("answer"), **store}
    return {
        "reached": all(names_one(str(given.get(key)), [str(wanted[key])]) for key in wanted),
        **{"turns": turns, "output_tokens": tokens, "seconds": seconds},
        "messages": [message["content"] for message in messages[asked:]],
    }


def first_object(text: str) -> dict[str, Any]:
    """The first JSON object in a message; an empty one where there is none."""
    start = text.find("{")
    while start >= 0:
        try:
            found: dict[str, Any] = json.JSONDecoder().raw_decode(text, start)[0]
            return found
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
    return {}


def call(request: Mapping[str, Any], task: Task, store: dict[str, Any]) -> str:
    """What a tool answers; "put" changes the store."""
    match request:
        case {"tool": "calculate", "expression": str(expression)}:
            return calculate(expression)
        case {"tool": "look_up", "key": str(key)}:
            return str(task.table.get(key, "error: the table has no such key"))
        case {"tool": "get", "key": str(key)}:
            return str(store.get(key, "error: the store has no such key"))
        case {"tool": "put", "key": str(key), "value": value}:
            store[key] = value
            return "done"
    return "error: neither a call of a tool nor an answer"


def calculate(expression: str) -> str:
    """The value of an expression with + - * / and parentheses, or that it is none."""

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right):
                return OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
        raise ValueError("no arithmetic")

    try:
        found = value(ast.parse(expression.strip(), mode="eval").body)
        return str(int(found) if found == int(found) else round(found, 6))
    except (SyntaxError, ValueError, KeyError, ArithmeticError, RecursionError, MemoryError):
        return "error: no expression of numbers with + - * / and parentheses"
