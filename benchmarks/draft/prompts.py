"""Training prompts: templates of nine kinds, filled at random, and turns that continue answers.

prompts.json holds the templates and the words, in the form and order with which a seed gives the
prompts that the packaged head was trained on. The benchmarks' prompts and the demo's are no source.
"""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]
Values = Mapping[str, Sequence[Any]]

DATA = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))


RANGES = {
    part: {name: range(low, high + 1) for name, (low, high) in DATA[part].items()}
    for part in ("numbers", "passage_numbers")
}
WORDS: Values = {
    **DATA["words"],
    **RANGES["numbers"],
    "company": [f"{firm} {of}" for firm in DATA["words"]["firm"] for of in DATA["words"]["trade"]],
}
# Fields of passages have names and limits of their own.
PASSAGE_WORDS: Values = {**WORDS, **RANGES["passage_numbers"]}
# How often each kind is drawn. Passages weigh more: their answers copy, which needs practice.
WEIGHTS = [kind["weight"] for kind in DATA["kinds"].values()]
# Share of prompts that go on from an earlier answer, and of passages that are one.
FOLLOW_UP_SHARE = 0.12
ANSWER_AS_PASSAGE_SHARE = 0.5


def draw(rng: random.Random, earlier: list[tuple[Messages, str]]) -> Messages:
    """Draws one conversation that ends with a user's turn.

    Args:
        rng: source of all choices; the same state draws the same prompts.
        earlier: conversations with the target's answers, from which follow-ups and passages are
            taken; may be empty.
    """
    if earlier and rng.random() < FOLLOW_UP_SHARE:
        messages, answer = rng.choice(earlier)
        if len(messages) < 4:
            turn = fill(rng.choice(DATA["follow_ups"]), rng)
            answered = {"role": "assistant", "content": answer}
            return [*messages, answered, {"role": "user", "content": turn}]
    template = rng.choice(rng.choices(list(DATA["kinds"].values()), WEIGHTS)[0]["templates"])
    passage = ""
    if "{passage}" in template:
        if earlier and rng.random() < ANSWER_AS_PASSAGE_SHARE:
            passage = shorten(rng.choice(earlier)[1], rng)
        else:
            passage = compose(rng)
    # The passage comes last: it may hold braces.
    text = fill(template, rng).replace("{passage}", passage)
    return [{"role": "user", "content": text}]


def fill(template: str, rng: random.Random) -> str:
    """Fills a template's fields at random; a field that appears twice means the same thing."""
    composed: dict[str, Callable[[random.Random], str]] = {
        "sentence": _sentence,
        "snippet": _snippet,
        "typo": _misspelt,
        "words": _some_words,
    }
    for field in DATA["fields"]:
        if f"{{{field}}}" in template:
            kind = DATA["same_kind"].get(field, field)
            value = composed[kind](rng) if kind in composed else str(rng.choice(WORDS[kind]))
            template = template.replace(f"{{{field}}}", value)
    return template


def compose(rng: random.Random) -> str:
    """Returns a text of two to seven sentences, or a short message, or a list of facts."""
    parts = DATA["passages"]
    kind = rng.random()
    if kind < 0.2:
        return _fill_passage(rng.choice(parts["messages"]), rng)
    if kind < 0.35:
        facts = rng.sample(parts["notes"], rng.randint(3, 5))
        return "\n".join(f"- {_fill_passage(fact, rng)}" for fact in facts)
    lines = [rng.choice(parts["openings"])] if rng.random() < 0.6 else []
    lines += rng.sample(parts["notes"] + parts["sentences"], rng.randint(2, 6))
    return " ".join(_fill_passage(line, rng) for line in lines)


def shorten(text: str, rng: random.Random) -> str:
    """Returns some whole sentences or lines of a text, of at most about 150 words."""
    parts = [part for part in re.split(r"(?<=[.!?])\s|\n+", text) if part.strip()]
    if len(parts) > 1:
        parts = parts[:-1]  # The last is often cut.
    first = rng.randrange(max(1, len(parts) - 3))
    kept: list[str] = []
    for part in parts[first : first + rng.randint(3, 9)]:
        kept.append(part)
        if sum(len(one.split()) for one in kept) > 120:
            break
    joint = "\n" if text.count("\n") > len(parts) / 2 else " "
    return joint.join(kept) or compose(rng)


def _sentence(rng: random.Random) -> str:
    parts = DATA["passages"]
    return _fill_passage(rng.choice(parts["sentences"] + parts["notes"][:13]), rng)


def _misspelt(rng: random.Random) -> str:
    """Returns a sentence with some letters swapped or dropped."""
    letters = list(_sentence(rng))
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(1, len(letters) - 1)
        if rng.random() < 0.5:
            letters[place], letters[place - 1] = letters[place - 1], letters[place]
        else:
            del letters[place]
    return "".join(letters).replace(".", "") if rng.random() < 0.5 else "".join(letters).lower()


def _snippet(rng: random.Random) -> str:
    first, second = rng.sample(WORDS["identifier"], 2)
    code = str(rng.choice(DATA["snippets"]))
    names = {"f": rng.choice(WORDS["function"]), "c": rng.choice(WORDS["class"])}
    return code.format(a=first, b=second, **names, n=rng.randint(2, 99))


def _some_words(rng: random.Random) -> str:
    known = [word for kind in ("adjective", "item", "job") for word in WORDS[kind]]
    return ", ".join(rng.sample(known, rng.randint(4, 9)))


def _fill_passage(template: str, rng: random.Random) -> str:
    fields: dict[str, Any] = {}
    for field in ("topic", "name", "last", "ingredient", "day", "month"):
        fields[field], fields[f"{field}2"] = rng.sample(WORDS[field], 2)
    # All are drawn, whatever the template needs.
    for field in DATA["passage_fields"]:
        fields[field] = rng.choice(PASSAGE_WORDS[DATA["same_kind"].get(field, field)])
    fields["later"] = fields["hour"] + fields["hours"]
    fields["topic_cap"] = fields["topic"][0].upper() + fields["topic"][1:]
    for field in ("title_adjective", "title_adjective2"):
        fields[field] = fields[field].title()
    return template.format(**fields)
