"""Where a request must not be relaxed lest it repeat itself.

Of a greedy request, where the draft token completes an n-gram that the answer holds already. Of one
that samples, where the answer holds the n - 1 tokens before the position already, and behind them
any token: what is served must not depend on the token that was drawn, and so a repetition comes as
often as the target's own.

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
        samples: whether the request does.
        window: the answer's last tokens that are looked at.
    """

    def __init__(self, length: int, samples: bool, window: int = GUARD_WINDOW) -> None:
        self._length = length
        # What is compared of an n-gram.
        self._part = slice(length - 1 if samples else length)
        self._window = window
        # Where an n-gram of each part last ended: the number of tokens up to and including it.
        self._ends: dict[tuple[int, ...], int] = {}
        self._scanned = 0

    def repeated(self, answer: Sequence[int], draft: Sequence[int]) -> list[bool]:
        """Whether each position is such a place, if the draft tokens before it are accepted.

        Args:
            answer: all output tokens of the request so far.
            draft: the draft tokens that follow.
        """
        length = self._length
        if len(answer) < self._scanned:
            self._ends.clear()
            self._scanned = 0
        for end in range(max(self._scanned + 1, length), len(answer) + 1):
            self._ends[tuple(answer[end - length : end][self._part])] = end
        self._scanned = len(answer)

        first = len(answer) - self._window
        tokens = list(answer[-length:])
        drafted: set[tuple[int, ...]] = set()
        found = []
        for token in draft:
            tokens.append(token)
            last = tuple(tokens[-length:][self._part])
            held = self._ends.get(last, 0) - length >= max(first, 0)
            is_long = len(tokens) >= length
            found.append(is_long and (held or last in drafted))
            if is_long:
                drafted.add(last)
        return found
