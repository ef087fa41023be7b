"""Texts that the prompts ask to summarise, rewrite, translate or take facts from."""

import random
import re

from benchmarks.draft import words

ADJECTIVES = """
happy quiet bright ancient clever gentle rough simple strange busy careful famous fresh heavy
honest hungry lonely modern narrow patient proud rare sharp silent smooth steady stubborn sudden
thirsty tiny useful vast warm wild wise young broken cheap curious deep eager fragile generous
""".split()
INGREDIENTS = words.split("""
potatoes; rice; chicken; lentils; tomatoes; eggs; mushrooms; spinach; carrots; beans; salmon;
apples; oats; pasta; pumpkin; cheese; onions; bananas; chickpeas; bread; yogurt; corn
""")

SENTENCES = (
    "The {adjective} {job} walked to {place} on {day}.",
    "My friend {name} likes {topic} and {topic2}.",
    "We bought {count} {item} in {place}.",
    "It was raining, so {name} stayed at home and read about {topic}.",
    "The shop is open from {hour}:00 to {later}:30 except on {day}.",
    "Nobody in the office knew where the {item} were.",
    "I would like to have a cup of tea and talk about {topic}.",
    "The {adjective} children played in the garden until it was dark.",
    "{name} asked the {job} to repair the {adjective} old house.",
    "Next {month} my sister will move to {place}.",
    "Can you tell me how to get to the station?",
    "The food was good, but the service was slow and the room was cold.",
    "Please send the {item} to the address below before {day}.",
    "When {character} {event}, everybody was surprised.",
)
NOTES = (
    "On {day}, {date}, {name} {last} of {company} met {name2} {last2} in {place}.",
    "The order was for {count} {item} at {price} dollars each, to be delivered by {month} {dom}.",
    "{name2} can be reached at 555-01{two} or in room {room}.",
    "The first prize of {more} dollars went to {name} {last}, a {job} from {place}.",
    "The tour starts at {hour}:00 at {place} and ends at {later}:30; lunch costs {price} dollars.",
    "{company} was founded in {year} by {name} {last} and has {more} employees today.",
    "In {year} the old mill in {place} was sold to {company} for {more},000 dollars.",
    "The number of visitors rose from {count} in {month} to {more} in {month2}.",
    "The meeting on {day} is cancelled because {name2} is ill.",
    "{name} said that the {item} are {adjective} and that the new ones will arrive on {day2}.",
    "A survey of {more} people showed that {percent} percent of them like {topic}.",
    "Every {day} at {hour}:00 there is a talk about {topic} in the town hall.",
    "The {adjective} bridge was closed for {days} days after the storm.",
    "{name2} {last2}, who has worked as a {job} for {two} years, called it a {adjective} idea.",
    "Tickets cost {price} dollars, and children under {days} pay nothing.",
    "The recipe needs {price} grams of {ingredient}, two spoons of oil and some {ingredient2}.",
    "Mix the {ingredient} with the {ingredient2} and bake it for {two} minutes.",
    "The books {title} by {name} {last} ({year}) and {title2} by {name2} {last2} "
    "({year2}) sold best.",
)
MESSAGES = (
    "hey {name}, the {item} did not arrive on {day} and we need them by {day2}. can "
    "you call {company}?",
    "Dear {name}, thank you for your order of {count} {item}. We will deliver them "
    "to {place} on {day}.",
    "hi all, the talk about {topic} moves to room {room} at {hour}:00. please bring "
    "your own {item}!!",
    "Hello, I stayed in room {room} for {days} nights and the heating was broken. I "
    "want my money back.",
    "dear sir, i bought {two} {item} in {month} and half of them are broken. what "
    "will you do about it?",
    "Hi {name2}, are you free on {day} at {hour}:00? {name} wants to talk about {topic} with us.",
)
OPENINGS = (
    "{topic_cap} is older than most people think.",
    "Many people in {place} care about {topic}.",
    "There was once {character} who {event}.",
    "{name} had never thought about {topic} before that {day}.",
    "A {adjective} thing happened in {place} last {month}.",
    "Experts do not agree about {topic}.",
)
TITLES = ("The", "A", "My", "Our")
TITLE_NOUNS = (
    "River House Garden Winter Road Mirror Island Letter Secret Harbour Song Clock".split()
)


def compose(rng: random.Random) -> str:
    """Returns a text of two to seven sentences, or a short message, or a list of facts."""
    kind = rng.random()
    if kind < 0.2:
        return _fill(rng.choice(MESSAGES), rng)
    if kind < 0.35:
        return "\n".join(f"- {_fill(line, rng)}" for line in rng.sample(NOTES, rng.randint(3, 5)))
    lines = [rng.choice(OPENINGS)] if rng.random() < 0.6 else []
    lines += rng.sample(NOTES + SENTENCES, rng.randint(2, 6))
    return " ".join(_fill(line, rng) for line in lines)


def sentence(rng: random.Random) -> str:
    """Returns one sentence."""
    return _fill(rng.choice(SENTENCES + NOTES[:13]), rng)


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


def misspell(text: str, rng: random.Random) -> str:
    """Returns the text with some letters swapped or dropped."""
    letters = list(text)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(1, len(letters) - 1)
        if rng.random() < 0.5:
            letters[place], letters[place - 1] = letters[place - 1], letters[place]
        else:
            del letters[place]
    return "".join(letters).replace(".", "") if rng.random() < 0.5 else "".join(letters).lower()


def snippet(rng: random.Random) -> str:
    """Returns a few lines of code."""
    first, second = rng.sample(words.IDENTIFIERS, 2)
    return rng.choice(words.SNIPPETS).format(
        f=rng.choice(words.FUNCTIONS),
        c=rng.choice(words.CLASSES),
        a=first,
        b=second,
        n=rng.randint(2, 99),
    )


def _fill(template: str, rng: random.Random) -> str:
    topics = rng.sample(words.TOPICS, 2)
    names, last_names = rng.sample(words.FIRST_NAMES, 2), rng.sample(words.LAST_NAMES, 2)
    foods, days, months = (
        rng.sample(INGREDIENTS, 2),
        rng.sample(words.DAYS, 2),
        rng.sample(words.MONTHS, 2),
    )
    hour = rng.randint(7, 15)
    return template.format(
        topic=topics[0],
        topic2=topics[1],
        topic_cap=topics[0][0].upper() + topics[0][1:],
        name=names[0],
        name2=names[1],
        last=last_names[0],
        last2=last_names[1],
        adjective=rng.choice(ADJECTIVES),
        job=rng.choice(words.JOBS),
        place=rng.choice(words.PLACES),
        company=rng.choice(words.COMPANIES),
        character=rng.choice(words.CHARACTERS),
        event=rng.choice(words.EVENTS),
        item=rng.choice(words.ITEMS),
        ingredient=foods[0],
        ingredient2=foods[1],
        day=days[0],
        day2=days[1],
        month=months[0],
        month2=months[1],
        date=f"{months[0]} {rng.randint(1, 28)}",
        dom=rng.randint(1, 28),
        hour=hour,
        later=hour + rng.randint(1, 6),
        year=rng.randint(1850, 1990),
        year2=rng.randint(1990, 2024),
        room=rng.randint(1, 420),
        count=rng.randint(10, 150),
        more=rng.randint(100, 990),
        price=rng.randint(2, 40),
        two=rng.randint(10, 99),
        days=rng.randint(2, 14),
        percent=rng.randint(3, 97),
        title=f"{rng.choice(TITLES)} {rng.choice(ADJECTIVES).title()} {rng.choice(TITLE_NOUNS)}",
        title2=f"{rng.choice(TITLES)} {rng.choice(ADJECTIVES).title()} {rng.choice(TITLE_NOUNS)}",
    )
