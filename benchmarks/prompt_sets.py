"""Rebuilds the prompt files of some older results out of the public files that they were made of.

    git clone https://github.com/5SSjw/MARS && git -C MARS checkout 8909b41
    python -m benchmarks.prompt_sets MARS --output build/prompts

writes gsm8k.jsonl and humaneval-examples.jsonl of docs/tasks.md, and prompts-120.jsonl of
docs/calibration.md. Nothing is downloaded, and no question stands here.
"""

import argparse
import doctest
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_mars.local.packaged_model import sha256

# Of `mars/data/NAME/question.jsonl` at that commit, sha256.
SOURCES = {
    "mt_bench": "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    "alpaca": "8ad3e5a7fc61b88d8e25edb81a52a2ce00a04494d5694c122cb11a5cc26a00df",
    "gsm8k": "54e01fa336148bf0afb81491a477d002da9f6c2e18088b935c6fb8d418ce096e",
    "humaneval": "382abeadf116ca4d5a33491090b3d7956622e312e66d635189fc67373a6edfed",
}
# HumanEval/32 has examples of another expression than a call, and one of HumanEval/47 is wrong.
LEFT_OUT = (32, 47)
HUMANEVAL_QUESTIONS = 82


def read(checkout: Path, name: str) -> list[dict[str, Any]]:
    """The questions of a set.

    Raises:
        ValueError: the file is not the one that was used.
    """
    path = checkout / "mars/data" / name / "question.jsonl"
    if (found := sha256(path)) != SOURCES[name]:
        raise ValueError(
            f"{path} has sha256 {found}, and not {SOURCES[name]}; check out commit 8909b41."
        )
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prompts_120(checkout: Path) -> Iterator[dict[str, Any]]:
    """The first 40 first turns of three sets, one set after the other."""
    for name in ("mt_bench", "alpaca", "gsm8k"):
        for question in read(checkout, name)[:40]:
            turns = question["turns"][:1]
            yield {"id": f"{name}/{question['question_id']}", "category": name, "turns": turns}


def gsm8k(checkout: Path) -> Iterator[dict[str, Any]]:
    """The first 60 problems as published, without what the question files say before them."""
    for question in read(checkout, "gsm8k")[:60]:
        _, text = question["turns"][0].split("\n\n", 1)
        yield {"question": text, "answer": "\n".join(question["reference"])}


def humaneval_examples(checkout: Path) -> Iterator[dict[str, Any]]:
    """Functions whose docstring has two or more examples, which are their test."""
    for question in read(checkout, "humaneval")[:HUMANEVAL_QUESTIONS]:
        number = question["question_id"]
        _, prompt = question["turns"][0].split("\n\n", 1)
        name = re.findall(r"^def (\w+)", prompt, re.MULTILINE)[-1]
        examples = doctest.DocTestParser().get_examples(prompt)
        if len(examples) < 2 or number in LEFT_OUT:
            continue
        asserts = []
        for example in examples:
            call = example.source.strip().replace(f"{name}(", "candidate(", 1)
            # The docstring may end in the line of the last one.
            want = example.want.strip().removesuffix('"""').strip() or "None"
            asserts.append(f"    assert {call} == {want}\n")
        test = "def check(candidate):\n" + "".join(asserts)
        yield {
            **{"task_id": f"HumanEval/{number}", "prompt": prompt, "test": test},
            "entry_point": name,
        }


SETS = {
    "prompts-120": prompts_120,
    "gsm8k": gsm8k,
    "humaneval-examples": humaneval_examples,
}


def main() -> int:
    """Writes the files; returns 1 if a source is missing or another one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkout", type=Path, help="of github.com/5SSjw/MARS")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        for name, lines in SETS.items():
            found = [json.dumps(line, ensure_ascii=False) for line in lines(args.checkout)]
            path = args.output / f"{name}.jsonl"
            path.write_text("\n".join([*found, ""]), encoding="utf-8")
            print(f"{sha256(path)}  {path.name}")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
