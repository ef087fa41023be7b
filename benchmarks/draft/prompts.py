"""Training prompts: templates of many kinds, filled at random, and turns that continue answers.

The benchmarks' prompts and the demo's are no source of these. A prompt file can be added.
"""

import random
from collections.abc import Callable

from benchmarks.draft import passages, words

Messages = list[dict[str, str]]

EXPLAIN = (
    "What is {topic}?",
    "Explain {topic} in simple words.",
    "Explain {topic} to a beginner and give an example.",
    "Tell me about {topic}.",
    "Why does {topic} matter?",
    "How does {topic} affect our daily life?",
    "What should everybody know about {topic}?",
    "Explain {topic} in {n} sentences.",
    "Describe {topic} to somebody who has never heard of it.",
    "What is the history of {topic}?",
    "What are common mistakes or misunderstandings about {topic}?",
    "Why do people find {topic} interesting?",
    "Explain the difference between {topic} and {other}.",
    "What do {topic} and {other} have in common?",
    "I am a {job}. How can I use what is known about {topic} in my work?",
    "Give a short lecture on {topic} for students.",
    "My {age} year old child asked me about {topic}. What should I say?",
)
LISTS = (
    "List {n} facts about {topic}.",
    "Give me {n} tips about {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "Make a list of {n} questions that a teacher could ask about {topic}.",
    "Name {n} things that are related to {topic}, with one sentence for each.",
    "Write a checklist for a {job} who has a busy day in {place}.",
    "Suggest {n} titles for an article about {topic}.",
    "Give {n} ideas for a party with the theme {topic}.",
    "What do I need to pack for {days} days in {place}? Make a list.",
    "Write a plan for one week to learn about {topic}. One line per day.",
    "Compare {topic} and {other} in a Markdown table.",
    "Make a table of {n} examples of {topic} with two columns.",
    "Give {n} reasons for and {n} reasons against {topic}.",
    "What are the main steps to start with {topic}? Number the steps.",
    "Write a glossary of {n} words that belong to {topic}.",
)
WRITING = (
    "Write a short story about {character} who {event}.",
    "Write a story of {n} sentences about {character} in {place}.",
    "Write a poem about {topic}.",
    "Write a haiku about {topic}, and explain it.",
    "Write a letter from {name} to a friend about a visit to {place}.",
    "Write a diary entry of a {job} who {event}.",
    "Write a speech about {topic} for a school class.",
    "Write an advertisement for {company}, a firm that is known for {topic}.",
    "Write a product description for a set of {item}.",
    "Write a dialogue between {character} and a {job} about {topic}.",
    "Write a short review of a restaurant in {place}.",
    "Write a news report: {character} {event} in {place}.",
    "Write the beginning of a detective story in {place}.",
    "Write a blog post about {topic}.",
    "Write an essay about {topic}.",
    "Write a short paragraph about {topic} and {other}.",
    "Write a song with two verses about {place}.",
    "Describe {place} in the {season} with all five senses.",
    "Invent a legend that explains where {topic} came from.",
    "Tell a joke about {topic} and explain why it is funny.",
)
LETTERS = (
    "Write an email to {name} at {company} and ask for the price of {count} {item}.",
    "Write a polite complaint: {company} sent {count} {item} instead of {more} {item}.",
    "Write a thank-you note to {name} for the help on {day}.",
    "Write an invitation to a meeting about {topic} on {day} at {hour}:00 in room {room}.",
    "Write an email to my boss. I need {days} days off in {month}.",
    "Write a cover letter of a {job} who wants to work at {company} in {place}.",
    "Write a short message: our meeting moves from {day} to {other_day}.",
    "Reply to a customer of {company} whose order of {item} is {days} days late.",
    "Write a letter of recommendation for {name}, a {job}.",
    "Write a notice for the door: {company} is closed from {day} to {other_day}.",
)
ADVICE = (
    "How can I become a better {job}?",
    "How do I learn {topic}?",
    "What should I do if I feel nervous about {topic}?",
    "I have {count} dollars and {days} days. Plan a trip to {place}.",
    "Is it better to spend a free day on {topic} or on {other}? Say why.",
    "What would you ask {character} in an interview? Give {n} questions and answers.",
    "How do I explain to my {age} year old son that {character} is not real?",
    "What is a good present for a {job} who likes {topic}?",
    "Give me a recipe with {ingredient} and {ingredient2}.",
    "How do I cook {ingredient}? Number the steps.",
    "Suggest a healthy breakfast with {ingredient}.",
    "How can a {job} in {place} save money?",
    "I am moving to {place}. What should I know?",
    "Act as a guide in {place} and greet a group of {count} visitors.",
    "Give {name} a short pep talk before a job interview as a {job}.",
)
MATHS = (
    "{name} buys {small} {item} at {price} dollars each. How much does {name} pay?",
    "A shop sells {count} {item} on {day} and {more} {item} on {other_day}. How many in total?",
    "What is {count} + {more}? Show the steps.",
    "What is {count} times {small}? Explain how you compute it.",
    "{name} has {more} {item} and gives {small} to each of {n} friends. How many are left?",
    "A train drives {count} kilometres in {n} hours. What is its average speed?",
    "Solve for x: {small}x + {price} = {count}.",
    "What is {percent} percent of {more}?",
    "A rectangle is {small} metres long and {price} metres wide. Find its area and perimeter.",
    "{name} saves {price} dollars every week. How long until {name} has {count} dollars?",
    "{count} {item} are packed in boxes of {small}. How many boxes are needed?",
    "A {job} works {n} days a week, {small} hours a day, at {price} dollars an hour. "
    "What is the pay?",
    "The temperature is {small} degrees and falls by {price} degrees. What is it then?",
    "Which is larger, {small}/{price} or {n}/{count}? Explain.",
    "Order these numbers from small to large: {count}, {small}, {more}, {price}, {percent}.",
    "{name} is {age} years old, and {name2} is {n} years older. How old are they together?",
)
CODE = (
    "Write a Python function that {task}.",
    "Write a Python function that {task}, with a docstring and an example.",
    "Write a Python program that {task}. Explain how it works.",
    "How do I write code that {task} in {code_language}?",
    "Write unit tests for a Python function that {task}.",
    "Explain step by step an algorithm that {task}.",
    "What does this code do?\n\n```\n{snippet}\n```",
    "Explain this code line by line.\n\n```\n{snippet}\n```",
    "Add comments to this code and return all of it.\n\n```\n{snippet}\n```",
    "Rename `{identifier}` to `{identifier2}` in this code.\n\n```\n{snippet}\n```",
    "Add a docstring and type hints.\n\n```python\n{snippet}\n```",
    "Find possible errors in this code and write a corrected version.\n\n```\n{snippet}\n```",
    "Rewrite this code so that it is easier to read.\n\n{snippet}",
    "Write a SQL query for a table `{identifier}` with the columns name, {identifier2} and date.",
    "Write an HTML page about {topic} with a heading and a list.",
    "Write a shell command that counts the files in a folder, and explain it.",
)
LANGUAGE = (
    'Translate into {language}: "{sentence}"',
    "Translate this sentence into {language} and explain the grammar: {sentence}",
    'Correct the spelling and grammar: "{typo}"',
    'Give {n} synonyms for the word "{word}" and use each in a sentence.',
    'Use the word "{word}" in {n} different sentences.',
    "Rewrite in the past tense: {sentence}",
    "Make this sentence longer and more vivid: {sentence}",
    "Make this shorter: {sentence} {sentence2}",
    'Is this sentence positive, negative or neutral? "{sentence}" Say why.',
    'What is the opposite of "{word}"? Explain the word.',
    "Sort these words by the alphabet: {words}.",
    "Put each of these words into a group and name the group: {words}.",
    'Write {n} sentences that begin with "{first}".',
    "Continue this sentence: {sentence} Then",
    "Repeat this sentence three times: {sentence}",
    'How do you say "{sentence}" in {language}?',
)
PASSAGE_TASKS = (
    "Summarise the following text in {n} sentences.\n\n{passage}",
    "Summarize this text.\n\n{passage}",
    "Write a headline and one sentence about this text.\n\n{passage}",
    "Rewrite this text in simpler words.\n\n{passage}",
    "Rewrite this text so that it sounds formal and polite.\n\n{passage}",
    "Rewrite this as a friendly message to {name}.\n\n{passage}",
    "Translate into {language}.\n\n{passage}",
    "Correct any errors in this text and return the whole text.\n\n{passage}",
    "List the main points of this text.\n\n{passage}",
    "List all names, places, dates and numbers in this text.\n\n{passage}",
    "Turn the facts of this text into JSON.\n\n{passage}",
    "Put the facts of this text into a Markdown table.\n\n{passage}",
    "Read the text and write {n} questions with answers about it.\n\nText: {passage}",
    "What is this text about, and who might have written it?\n\n{passage}",
    "Continue this text.\n\n{passage}",
    "Turn this text into a bulleted list.\n\n{passage}",
    'Reply to this message.\n\n"{passage}"',
    "Repeat the text and mark the most important sentence.\n\n{passage}",
    "Explain this text to a child.\n\n{passage}",
    "Write a title for each sentence.\n\n{passage}",
)
FOLLOW_UPS = (
    "Make it shorter.",
    "Explain that in more detail.",
    "Can you give an example?",
    "Rewrite your answer as a list.",
    "Say it again in simpler words.",
    "Why?",
    "Thank you. What else should I know?",
    "Summarise what you said in one sentence.",
    "Translate your answer into {language}.",
    "Now write the same about {topic}.",
    "How is this related to {topic}?",
    "Give me {n} more.",
    "Is all of that true? Check your answer.",
    "Write it as a table.",
    "Make it sound more friendly.",
    "What would a {job} say about this?",
    "Ask me {n} questions about your answer.",
    "Turn it into a short story.",
)
# How often each kind is drawn. Passages weigh more: their answers copy, which needs practice.
KINDS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (16, EXPLAIN),
    (11, LISTS),
    (12, WRITING),
    (7, LETTERS),
    (8, ADVICE),
    (7, MATHS),
    (9, CODE),
    (8, LANGUAGE),
    (22, PASSAGE_TASKS),
)
# Share of prompts that go on from an earlier answer, and of passages that are one.
FOLLOW_UP_SHARE = 0.12
ANSWER_AS_PASSAGE_SHARE = 0.5


def draw(rng: random.Random, earlier: list[tuple[Messages, str]]) -> Messages:
    """Draws one conversation that ends with a user's turn.

    Args:
        rng: source of all choices.
        earlier: conversations with the target's answers, from which follow-ups and passages are
            taken; may be empty.
    """
    if earlier and rng.random() < FOLLOW_UP_SHARE:
        messages, answer = rng.choice(earlier)
        if len(messages) < 4:
            turn = fill(rng.choice(FOLLOW_UPS), rng)
            return [
                *messages,
                {"role": "assistant", "content": answer},
                {"role": "user", "content": turn},
            ]
    templates = rng.choices([kind for _, kind in KINDS], [weight for weight, _ in KINDS])[0]
    template = rng.choice(templates)
    passage = None
    if "{passage}" in template:
        if earlier and rng.random() < ANSWER_AS_PASSAGE_SHARE:
            passage = passages.shorten(rng.choice(earlier)[1], rng)
        else:
            passage = passages.compose(rng)
    return [{"role": "user", "content": fill(template, rng, passage)}]


def fill(template: str, rng: random.Random, passage: str | None = None) -> str:
    """Fills a template's fields at random."""
    if passage is not None:
        template = template.replace("{passage}", "\x00")
    choose: dict[str, Callable[[], str]] = {
        "topic": lambda: rng.choice(words.TOPICS),
        "name": lambda: rng.choice(words.FIRST_NAMES),
        "job": lambda: rng.choice(words.JOBS),
        "place": lambda: rng.choice(words.PLACES),
        "character": lambda: rng.choice(words.CHARACTERS),
        "event": lambda: rng.choice(words.EVENTS),
        "item": lambda: rng.choice(words.ITEMS),
        "company": lambda: rng.choice(words.COMPANIES),
        "language": lambda: rng.choice(words.LANGUAGES),
        "day": lambda: rng.choice(words.DAYS),
        "month": lambda: rng.choice(words.MONTHS),
        "season": lambda: rng.choice(("spring", "summer", "autumn", "winter")),
        "task": lambda: rng.choice(words.CODE_TASKS),
        "snippet": lambda: passages.snippet(rng),
        "identifier": lambda: rng.choice(words.IDENTIFIERS),
        "code_language": lambda: rng.choice(("JavaScript", "Java", "C", "Python", "Go", "Ruby")),
        "ingredient": lambda: rng.choice(passages.INGREDIENTS),
        "sentence": lambda: passages.sentence(rng),
        "typo": lambda: passages.misspell(passages.sentence(rng), rng),
        "word": lambda: rng.choice(passages.ADJECTIVES),
        "words": lambda: ", ".join(
            rng.sample(passages.ADJECTIVES + words.ITEMS + words.JOBS, rng.randint(4, 9))
        ),
        "first": lambda: rng.choice(("I wish", "Every morning", "If I were", "Nobody", "The best")),
        "n": lambda: str(rng.randint(2, 8)),
        "days": lambda: str(rng.randint(2, 14)),
        "age": lambda: str(rng.randint(4, 16)),
        "hour": lambda: str(rng.randint(8, 18)),
        "room": lambda: str(rng.randint(1, 420)),
        "small": lambda: str(rng.randint(2, 19)),
        "price": lambda: str(rng.randint(2, 40)),
        "count": lambda: str(rng.randint(10, 150)),
        "more": lambda: str(rng.randint(100, 990)),
        "percent": lambda: str(rng.choice((5, 10, 15, 20, 25, 30, 40, 60, 75))),
    }
    same_kind = {
        "other": "topic",
        "other_day": "day",
        "name2": "name",
        "ingredient2": "ingredient",
        "identifier2": "identifier",
        "sentence2": "sentence",
    }
    for field, kind in [*((name, name) for name in choose), *same_kind.items()]:
        if f"{{{field}}}" in template:
            # A field that appears twice means the same thing.
            template = template.replace(f"{{{field}}}", choose[kind]())
    return template if passage is None else template.replace("\x00", passage)
