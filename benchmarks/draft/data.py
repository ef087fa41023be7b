"""Training data: questions, most of them the target's own, and its answers, as token ids.

    DIRECTORY/00000.json    {"made_by": ..., "conversations": [[prompt, answer], ...]}

Given the beginning of a user's turn, a chat model goes on with a question, of the kinds that it was
trained on (Magpie, arXiv 2406.08464). Templates add kinds that it seldom asks.

An interrupted run resumes with the part that is missing.
"""

import json
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.draft import prompts
from benchmarks.draft.recipe import Recipe
from vllm_mars.lab.prompts import load_prompts
from vllm_mars.lab.result_file import write_json

# A prompt and its answer, with its end.
Conversation = tuple[list[int], list[int]]
# Prompts and temperatures, the longest answer, a seed; gives each answer, with its end.
Answer = Callable[[list[list[int]], list[float], int, int], list[list[int]]]
# What a part depends on, beside its number and the target.
MADE_BY = ("seed", "part_size", "max_question_tokens", "max_answer_tokens")
TEMPLATE_SHARE = 1 / 3
QUESTION_TEMPERATURE = 1.0
# Of answers, and their shares.
TEMPERATURES = {0.0: 0.4, 0.5: 0.15, 0.7: 0.15, 1.0: 0.3}


def make_data(
    directory: Path, recipe: Recipe, tokenizer: Any, engine: AbstractContextManager[Answer]
) -> list[Conversation]:
    """Makes the parts that are missing, by an engine of the target, and returns all conversations.

    Raises:
        ValueError: those that are there were made by another recipe.
    """
    made_by = {name: getattr(recipe, name) for name in MADE_BY}
    conversations: list[Conversation] = []
    paths = [directory / f"{number:05d}.json" for number in range(recipe.parts)]
    is_complete = all(path.is_file() for path in paths)
    context: AbstractContextManager[Any] = nullcontext() if is_complete else engine
    with context as answer:
        for number, path in enumerate(paths):
            if not path.is_file():
                rng = random.Random(f"{recipe.seed} {number}")
                asked = ask(rng, recipe, tokenizer, answer, [prompt for prompt, _ in conversations])
                heat = rng.choices(list(TEMPERATURES), list(TEMPERATURES.values()), k=len(asked))
                answers = answer(asked, heat, recipe.max_answer_tokens, rng.getrandbits(62))
                made = list(zip(asked, answers, strict=True))
                write_json(path, {"made_by": made_by, "conversations": made})
            part = json.loads(path.read_text())
            if part["made_by"] != made_by:
                raise ValueError(
                    f"{path} was made by {part['made_by']}, not {made_by}; name another --work."
                )
            conversations += part["conversations"]
    return conversations


def ask(
    rng: random.Random, recipe: Recipe, tokenizer: Any, answer: Answer, asked: list[list[int]]
) -> list[list[int]]:
    """Returns the prompts of one part, without those that were asked before."""

    def chat(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return list(rendered["input_ids"])

    from_templates = round(TEMPLATE_SHARE * recipe.part_size)
    own = recipe.part_size - from_templates
    # What the template puts before a user's text.
    mark = "@question@"
    turn = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    begin = tokenizer(turn.partition(mark)[0], add_special_tokens=False)["input_ids"]
    heat, seed = [QUESTION_TEMPERATURE] * own, rng.getrandbits(62)
    questions = answer([begin] * own, heat, recipe.max_question_tokens, seed)
    # One that was cut is no question.
    whole = [ids[:-1] for ids in questions if ids[-1:] == [tokenizer.eos_token_id]]
    texts = [text.strip() for text in tokenizer.batch_decode(whole, skip_special_tokens=True)]
    texts += [prompts.draw(rng) for _ in range(from_templates)]
    # A head that is measured on the demo's prompts must not be trained on them.
    measured = {turn for prompt in load_prompts() for turn in prompt.turns}
    drawn = [chat(text) for text in dict.fromkeys(texts) if text and text not in measured]
    before = set(map(tuple, asked))
    return [
        ids for ids in drawn if len(ids) <= recipe.max_question_tokens and tuple(ids) not in before
    ]
