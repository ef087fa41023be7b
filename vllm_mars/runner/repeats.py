"""Which draft tokens repeat their answer: they complete an n-gram that it holds already.

The answer is the last `GUARD_WINDOW` output tokens of a request and the draft before the token;
n-grams may overlap. This is the definition, and the form for a CPU; `vllm_mars.kernels.context` is
that for an accelerator.
"""

from collections.abc import Sequence

from vllm_mars.kernels.terms import GUARD_WINDOW


class AnswerNgrams:
    """The n-grams of one answer, which grows.

    Args:
        length: tokens of an n-gram, >= 2.
        window: the answer's last tokens that are looked at.
    """

    def __init__(self, length: int, window: int = GUARD_WINDOW) -> None:
        self._length = length
        self._window = window
        # Where each n-gram last ended: the number of tokens up to and including it.
        self._ends: dict[tuple[int, ...], int] = {}
        self._scanned = 0

    def repeated(self, answer: Sequence[int], draft: Sequence[int]) -> list[bool]:
        """Whether each draft token repeats the answer, if those before it are accepted.

        Args:
            answer: all output tokens of the request so far.
            draft: the draft tokens that follow.
        """
        length = self._length
        if len(answer) < self._scanned:
            self._ends.clear()
            self._scanned = 0
        for end in range(max(self._scanned + 1, length), len(answer) + 1):
            self._ends[tuple(answer[end - length : end])] = end
        self._scanned = len(answer)

        first = len(answer) - self._window
        tokens = list(answer[-length:])
        drafted: set[tuple[int, ...]] = set()
        found = []
        for token in draft:
            tokens.append(token)
            last = tuple(tokens[-length:])
            held = self._ends.get(last, 0) - length >= max(first, 0)
            found.append(held or last in drafted)
            # One that is too short equals none that follows, which are longer.
            drafted.add(last)
        return found
