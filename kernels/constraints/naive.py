"""Where in an answer verification is strict: its opening, marked spans, and what it may repeat.

Or all of its thinking section, or all but that: a request's scope is `IN_THINKING` or `IN_ANSWER`
where that alone may be relaxed, else 0.

The guard against repetition looks at the n-grams of the answer, of 2 to `repeat_ngram` tokens; the
answer is the last `NGRAM_WINDOW` output tokens and the draft before a position, and n-grams may
overlap. Where a request samples, each token that followed the last one before the position keeps
its probability, whatever was drawn there; so each n-gram repeats as often as under the target. A
greedy request relaxes no token that completes a longer n-gram of the answer than the first choice
would. Where more than `MAX_FOLLOWERS` tokens are to be listed for that, the position is strict.

This is the definition, and the form for a CPU; `vllm_mars.kernels.constraints.fused` is that for an
accelerator.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from vllm_mars.kernels.interface import MAX_FOLLOWERS, NGRAM_WINDOW, Verdict


class NgramIndex:
    """What followed each token of one answer, which grows.

    Args:
        length: tokens of the longest n-gram that is looked at, >= 2.
        window: the answer's last tokens that are looked at.
    """

    def __init__(self, length: int, window: int = NGRAM_WINDOW) -> None:
        self._length = length
        self._window = window
        # Of each n-gram what followed it, and where that stands last: the number of tokens up to
        # and including it.
        self._ends: dict[tuple[int, ...], dict[int, int]] = {}
        self._scanned = 0

    def before(self, answer: Sequence[int], draft: Sequence[int]) -> Iterator[list[set[int]]]:
        """Yields for each position of a draft what would repeat there.

        Args:
            answer: all output tokens of the request so far.
            draft: the draft tokens that follow; those before a position count as accepted.

        Yields:
            The tokens that complete an n-gram of 2 tokens which these hold, of 3, and so on.
        """
        if len(answer) < self._scanned:
            self._ends.clear()
            self._scanned = 0
        for end in range(self._scanned + 1, len(answer) + 1):
            for before in _beginnings(answer[max(end - self._length, 0) : end - 1]):
                self._ends.setdefault(before, {})[answer[end - 1]] = end
        self._scanned = len(answer)

        first = max(len(answer) - self._window, 0)
        last = list(answer[-(self._length - 1) :])
        drafted: dict[tuple[int, ...], set[int]] = {}
        for token in draft:
            found = []
            for before in _beginnings(last):
                followers = self._ends.get(before, {}).items()
                found.append({it for it, end in followers if end - len(before) > first})
                found[-1] |= drafted.get(before, set())
                drafted.setdefault(before, set()).add(token)
            yield found
            last = [*last, token][-(self._length - 1) :]


def _beginnings(last: Sequence[int]) -> list[tuple[int, ...]]:
    """Of an n-gram of 2 tokens, of 3, ... all but the token that comes behind the last ones."""
    return [tuple(last[-count:]) for count in range(1, len(last) + 1)]


def cpu_constraints(
    reasons: Iterable[int],
    draft: Sequence[int],
    repeated: Iterable[list[set[int]]],
    samples: bool,
) -> Iterator[tuple[int, bool, Collection[int]]]:
    """Yields of each position of a draft the entries of `CpuConstraints`.

    Args:
        reasons: why each is strict for its place in the answer, a `Verdict`, or 0.
        draft: its tokens.
        repeated: of `NgramIndex`.
        samples: whether the request does.
    """
    for reason, token, by_length in zip(reasons, draft, repeated, strict=True):
        lists = by_length[:1]
        repeats = any(token in found for found in lists)
        if not samples:
            # The longest that the draft token completes.
            lists = [found for found in by_length if token in found][-1:]
        listed = lists[0] if lists else ()
        if len(listed) > MAX_FOLLOWERS:
            reason, listed = reason or Verdict.REPEAT, ()
        yield reason, repeats, listed
