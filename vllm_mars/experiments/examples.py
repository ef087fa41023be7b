"""Greedy answers of a lossy rule beside the strict ones to the same prompts.

Those that the rule changed are in an order that nobody chooses by hand: by the NLL per token of the
whole text under the target, less that of the strict answer. So the first became most probable to
the target, and the last became least probable.
"""

from typing import NamedTuple

from vllm_mars.experiments.records import Answer, Piece, SweepFile


class Example(NamedTuple):
    """Two answers to one prompt."""

    strict: Answer
    lossy: Answer

    @property
    def hotter(self) -> float:
        """NLL per token of the lossy answer less that of the strict one."""
        return self.lossy.nll_per_token - self.strict.nll_per_token


def changed(file: SweepFile) -> list[Example]:
    """The answers that relaxed tokens changed, beside those of the baseline."""
    strict: dict[str, Answer] = {}
    lossy: dict[str, Answer] = {}
    for record in file.records:
        if record.temperature == 0 and record.measured:
            own = strict if record.name == file.heads[-1].baseline else lossy
            own |= {answer.prompt: answer for answer in record.measured.answers}
    found = [Example(strict[prompt], lossy[prompt]) for prompt in lossy if prompt in strict]
    return sorted(
        (it for it in found if it.lossy.lost and it.lossy.text != it.strict.text),
        key=lambda it: it.hotter,
    )


def around(piece: Piece) -> tuple[str, str, str]:
    """A relaxed token between the white space around it; a sign for one that is nothing else."""
    token = piece.text.strip()
    if not token:
        return ("", "↵", piece.text) if "\n" in piece.text else ("", "␣", "")
    before, _, after = piece.text.partition(token)
    return before, token, after
