"""Writes the prompts of the figures of text: Spec-Bench's questions by use, and texts of our own.

    python -m benchmarks.questions question.jsonl build/questions

`question.jsonl` is data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench at commit
fd2c1cd, no part of this repository; `texts.jsonl` beside this file is. What is written has the
categories in turn, so that any part of it has all of them.
"""

import json
import sys
from pathlib import Path

TEXTS = Path(__file__).with_name("texts.jsonl")
# Of each file the kinds, their categories, and the first prompt of a category that is taken: by the
# 47 before settings were chosen.
FILES = {
    # For a human reader.
    "reading": {
        "chat": {"writing": 1, "roleplay": 1, "humanities": 1},
        "rewriting": {"rewriting": 1},
        "summaries": {"summary": 1, "summarization": 48},
    },
    # With one right answer.
    "exact": {
        "questions": {"qa": 48},
        "translation": {"translation": 48},
        "mathematics": {"math_reasoning": 48, "math": 1},
        "code": {"coding": 1},
    },
    # Whose strict answers mostly end within 200 tokens.
    "ends": {
        "questions": {"qa": 1},
        "translation": {"translation": 1},
        "summaries": {"summary": 1, "summarization": 1},
        "rewriting": {"rewriting": 1},
        "passages": {"rag": 1},
    },
}


def main(source: Path, directory: Path) -> None:
    """Writes a file of prompts for each of `FILES`."""
    asked: dict[str, list[dict[str, str]]] = {}
    for path in (source, TEXTS):
        for line in path.read_text(encoding="utf-8").splitlines():
            it = json.loads(line)
            turns = it.get("turns") or [it["prompt"]]
            of = {"id": str(it.get("question_id", it.get("id"))), "prompt": turns[0]}
            asked.setdefault(it["category"], []).append(of)
    directory.mkdir(parents=True, exist_ok=True)
    for name, kinds in FILES.items():
        placed = []
        for kind, categories in kinds.items():
            for category, first in categories.items():
                own = asked[category][first - 1 :]
                placed += [(at / len(own), {**it, "category": kind}) for at, it in enumerate(own)]
        placed.sort(key=lambda it: it[0])
        lines = [json.dumps(it, ensure_ascii=False) + "\n" for _, it in placed]
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{name}: {len(lines)} prompts")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
