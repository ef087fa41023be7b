"""Makes prompt files of tasks that a single wrong token spoils, the same for a seed.

python -m benchmarks.tasks.make DIRECTORY

    json.jsonl         what a text says, as JSON of a given schema: 120
    sql.jsonl          a query for each question, run on SQLite: 70
    facts.jsonl        well-known facts: 107
    functions.jsonl    functions with tests, in the format of HumanEval: 42
    tools.jsonl        tasks for an agent with tools, of benchmarks.tool_loop: 70

All but the last are for `vllm-mars sweep --prompts`. What they are made of lies beside this file:
facts, functions, and templates with the words and limits from which values are drawn.
"""

import argparse
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

HERE = Path(__file__).parent
# Prompts of each kind.
DRAWS = 10
# Of the five in a database of sql.yaml, those who own something.
OWNERS = 4

Line = dict[str, Any]


def draw(schema: dict[str, Any], rng: random.Random) -> Any:
    """Draws a value that fits a schema of the kinds that the templates use."""
    if "enum" in schema or "examples" in schema:
        return rng.choice(schema.get("enum") or schema["examples"])
    match schema["type"]:
        case "object":
            return {name: draw(part, rng) for name, part in schema["properties"].items()}
        case "array":
            count = rng.randint(schema["minItems"], schema["maxItems"])
            found: list[Any] = []
            while len(found) < count:
                item = draw(schema["items"], rng)
                if not (schema.get("uniqueItems") and item in found):
                    found.append(item)
            return found
        case "integer":
            return rng.randint(schema["minimum"], schema["maximum"])
        case "number":
            # Never a whole number, which could be written in two ways.
            whole = rng.randint(schema["minimum"], schema["maximum"] - 1)
            return (10 * whole + rng.randint(1, 9)) / 10
        case "boolean":
            return rng.random() < 0.5
    raise ValueError(f"the templates need no {schema['type']!r}.")


def shown(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema as the prompt shows it: all properties required, no others, no examples."""
    found = {name: part for name, part in schema.items() if name != "examples"}
    if "properties" in schema:
        found["properties"] = {name: shown(part) for name, part in schema["properties"].items()}
        found |= {"required": list(schema["properties"]), "additionalProperties": False}
    if "items" in schema:
        found["items"] = shown(schema["items"])
    return found


def json_lines(rng: random.Random) -> Iterator[Line]:
    """What a text says, as JSON."""
    data = _read("json.yaml")
    for name, kind in data["kinds"].items():
        schema, template = shown(kind["schema"]), _jinja().from_string(kind["text"])
        for number in range(DRAWS):
            value = draw(kind["schema"], rng)
            prompt = data["prompt"].format(text=template.render(value), schema=json.dumps(schema))
            yield {
                **_head(f"json-{name}", number),
                **{"prompt": prompt, "schema": schema, "expected": value},
            }


def sql_lines(rng: random.Random) -> Iterator[Line]:
    """Questions about databases."""
    data = _read("sql.yaml")
    for database in data["databases"]:
        things, owners = database["things"], database["owners"]
        words = {
            **{"t": things["table"], "n": things["name"], "v": things["number"]},
            **{"g": things["group"], "owner": things["owner"]},
            **{"o": owners["table"], "m": owners["name"], "c": owners["number"]},
        }
        inserts = []
        for number, name in enumerate(database["owner_names"], 1):
            row: tuple[Any, ...] = (number, name, rng.randint(*owners["between"]))
            inserts.append(f"INSERT INTO {owners['table']} VALUES {row};")
        low, high = things["between"]
        numbers = rng.sample(range(low, high + 1), len(database["names"]))
        for number, name in enumerate(database["names"], 1):
            # Each group is there, and each owner but the last.
            group = things["groups"][number % len(things["groups"])]
            owner = rng.randint(1, OWNERS) if number > OWNERS else number
            row = (number, name, numbers[number - 1], group, owner)
            inserts.append(f"INSERT INTO {things['table']} VALUES {row};")
        tables = data["tables"].format(**words)
        for number, question in enumerate(data["questions"]):
            words["G"] = rng.choice(things["groups"])
            words["N"] = rng.choice(numbers)
            words["O"] = rng.choice(database["owner_names"][:OWNERS])
            ask, query = (question[part].format(**words) for part in ("ask", "query"))
            yield {
                **_head(f"sql-{number}", things["table"]),
                "prompt": data["prompt"].format(tables=tables, question=ask),
                "sql": {
                    "setup": "\n".join([tables, *inserts]),
                    "query": query,
                    "ordered": question.get("ordered", False),
                },
            }


def fact_lines(rng: random.Random) -> Iterator[Line]:
    """Well-known facts."""
    for kind, (question, facts) in enumerate(_read("facts.yaml").items()):
        for subject, accepted in facts.items():
            yield {
                **_head(f"fact-{kind}", subject),
                "prompt": f"{question.format(subject)} Answer with the name or the number alone.",
                "accepted": [accepted] if isinstance(accepted, str) else accepted,
            }


def function_lines(rng: random.Random) -> Iterator[Line]:
    """Functions with tests, as HumanEval is published."""
    for name, function in _read("functions.yaml").items():
        calls = [line.rsplit(" == ", 1) for line in function["tests"].splitlines()]
        examples = [f">>> {call}\n{value}" for call, value in calls[:2]]
        docstring = "\n".join([f'"""{function["docstring"]}', "", *examples, '"""', ""])
        tests = [
            f"assert {call.replace(name, 'candidate', 1)} == {value}\n" for call, value in calls
        ]
        yield {
            "task_id": f"function/{name}",
            "category": "function",
            "prompt": f"{function['signature']}\n{indent(docstring, '    ')}",
            "entry_point": name,
            "canonical_solution": indent(function["solution"], "    "),
            "test": f"def check(candidate):\n{indent(''.join(tests), '    ')}",
        }


def tool_lines(rng: random.Random) -> Iterator[Line]:
    """Tasks for an agent with tools, of all kinds in turn."""
    kinds, environment = _read("tools.yaml")["kinds"], _jinja()
    for number, (name, kind) in itertools.product(range(DRAWS), kinds.items()):
        values = {part: draw(schema, rng) for part, schema in kind["values"].items()}
        yield {
            **_head(f"tools-{name}", number),
            "prompt": environment.from_string(kind["text"]).render(values),
            **{
                field: environment.compile_expression(kind[field])(**values)
                for field in ("table", "holds", "answer", "stored")
                if field in kind
            },
        }


SETS: dict[str, Callable[[random.Random], Iterator[Line]]] = {
    "json": json_lines,
    "sql": sql_lines,
    "facts": fact_lines,
    "functions": function_lines,
    "tools": tool_lines,
}


def write_sets(directory: Path, seed: int = 0) -> list[Path]:
    """Writes the prompt files, and returns them; facts and functions are the same for any seed."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, lines in SETS.items():
        path = directory / f"{name}.jsonl"
        text = "".join(json.dumps(line) + "\n" for line in lines(random.Random(seed)))
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def _read(name: str) -> Any:
    return yaml.safe_load((HERE / name).read_text(encoding="utf-8"))


def _jinja() -> Environment:
    environment = Environment(undefined=StrictUndefined)
    environment.globals["zip"] = zip
    return environment


def _head(category: str, name: object) -> Line:
    return {"id": f"{category}-{name}", "category": category}


def main() -> int:
    """Reads the arguments and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, help="takes the files")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for path in write_sets(args.directory, args.seed):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
