"""Training questions: templates of nine kinds in prompts.json, filled at random.

The benchmarks' prompts and the demo's are no source.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

DATA: dict[str, Any] = json.loads(Path(__file__).with_name("prompts.json").read_text("utf-8"))
# What a field may be, by its name; some are templates again.
WORDS = DATA["words"] | {name: range(*ends) for name, ends in DATA["numbers"].items()}
# How often each kind is drawn. Passages weigh more: their answers copy, which needs practice.
WEIGHTS = [kind["weight"] for kind in DATA["kinds"].values()]


def draw(rng: random.Random) -> str:
    """Draws one question."""
    (kind,) = rng.choices(list(DATA["kinds"].values()), WEIGHTS)
    return fill(rng.choice(kind["templates"]), rng)


def fill(template: str, rng: random.Random) -> str:
    """Fills a template's fields at random.

    A field that appears twice means the same, {name2} is another name, {Topic} begins in capitals.
    """
    values: dict[str, str] = {}

    def value(found: re.Match[str]) -> str:
        field = found[1].lower()
        if field not in values:
            kind = field if field in WORDS else field.rstrip("0123456789")
            values[field] = fill(str(rng.choice(WORDS[kind])), rng)
        text = values[field]
        return text if found[1] == field else text[0].upper() + text[1:]

    return re.sub(r"\{(\w+)\}", value, template)
