"""Greedy answers of a lossy rule beside the strict ones to the same prompts.

Of those that the rule changed, two are shown, which nobody chooses by hand: the one that shares
most words with the strict answer, and the one whose whole text became least probable to the target,
by its NLL per token less that of the strict answer. The one that became most probable would often
be one that repeats itself.
"""

import difflib
from collections.abc import Sequence
from typing import NamedTuple

from vllm_mars.lab.records import Answer, Piece, SweepFile


class Example(NamedTuple):
    """Two answers to one prompt."""

    strict: Answer
    lossy: Answer

    @property
    def hotter(self) -> float:
        """NLL per token of the lossy answer less that of the strict one."""
        return self.lossy.nll_per_token - self.strict.nll_per_token

    @property
    def alike(self) -> float:
        """The share of words that stand in both answers in the same order."""
        strict, lossy = self.strict.text.split(), self.lossy.text.split()
        return difflib.SequenceMatcher(None, strict, lossy, autojunk=False).ratio()


def changed(file: SweepFile) -> list[Example]:
    """The answers that relaxed tokens changed, beside those of the baseline, in any order."""
    strict: dict[str, Answer] = {}
    lossy: dict[str, Answer] = {}
    for record in file.records:
        if record.temperature == 0 and record.measured:
            own = strict if record.name == file.heads[-1].baseline else lossy
            own |= {answer.prompt: answer for answer in record.measured.answers}
    found = [Example(strict[prompt], lossy[prompt]) for prompt in lossy if prompt in strict]
    return [it for it in found if it.lossy.lost and it.lossy.text != it.strict.text]


def shown(found: Sequence[Example]) -> dict[str, Example]:
    """Two of the changed answers, by what they are; there must be one at least."""
    return {
        "The one that changed least": max(found, key=lambda it: it.alike),
        "The one that became least probable": max(found, key=lambda it: it.hotter),
    }


def told(found: Sequence[Example]) -> str:
    """What the two answers of `shown` are."""
    return (
        f"MARS changed {len(found)} greedy answers. These are the one that shares most words with "
        "the strict answer, and the one whose whole text became least probable to the target."
    )


def around(piece: Piece) -> tuple[str, str, str]:
    """A relaxed token between the white space around it; a sign for one that is nothing else."""
    token = piece.text.strip()
    if not token:
        return ("", "↵", piece.text) if "\n" in piece.text else ("", "␣", "")
    before, _, after = piece.text.partition(token)
    return before, token, after
