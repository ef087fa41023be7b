"""Reference for constraints: strict positions and repeated n-grams, in plain Python.

Repetition means n-grams of 2 to `repeat_ngram` tokens, which may overlap, among the last
NGRAM_WINDOW output tokens and the draft before a position.

    sampled  tokens that have followed the last token are preserved, so that each n-gram repeats as
             often as under the target
    greedy   no token is relaxed that completes a longer n-gram than the argmax would

If this takes more than MAX_FOLLOWERS tokens, the position is strict.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from vllm_mars.kernels.interface import MAX_FOLLOWERS, NGRAM_WINDOW, Verdict


class NgramIndex:
    """Index of the tokens that followed each n-gram in the last `window` tokens of an answer."""

    def __init__(self, length: int, window: int = NGRAM_WINDOW) -> None:
        # Longest n-gram in tokens, at least 2.
        self._length = length
        self._window = window
        # Prefix -> following token -> number of answer tokens up to its last occurrence.
        self._ends: dict[tuple[int, ...], dict[int, int]] = {}
        self._scanned = 0

    def before(self, answer: Sequence[int], draft: Sequence[int]) -> Iterator[list[set[int]]]:
        """Yields for each draft position the tokens that repeat a 2-gram, a 3-gram, and so on.

        The answer is all output tokens so far; earlier draft tokens count as accepted.
        """
        if len(answer) < self._scanned:
            self._ends.clear()
            self._scanned = 0
        for end in range(self._scanned + 1, len(answer) + 1):
            for prefix in _prefixes(answer[max(end - self._length, 0) : end - 1]):
                self._ends.setdefault(prefix, {})[answer[end - 1]] = end
        self._scanned = len(answer)

        first = max(len(answer) - self._window, 0)
        last = list(answer[-(self._length - 1) :])
        drafted: dict[tuple[int, ...], set[int]] = {}
        for token in draft:
            by_length = []
            for prefix in _prefixes(last):
                ends = self._ends.get(prefix, {})
                followers = {
                    follower for follower, end in ends.items() if end - len(prefix) > first
                }
                by_length.append(followers | drafted.get(prefix, set()))
                drafted.setdefault(prefix, set()).add(token)
            yield by_length
            last = [*last, token][-(self._length - 1) :]


def _prefixes(last: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the first tokens of the 2-gram, 3-gram, ... that end with the next token."""
    return [tuple(last[-count:]) for count in range(1, len(last) + 1)]


def cpu_constraints(
    reasons: Iterable[int],
    draft: Sequence[int],
    repeated: Iterable[list[set[int]]],
    is_sampled: bool,
) -> Iterator[tuple[int, bool, Collection[int]]]:
    """Yields entries of `CpuConstraints` from `MarkerTracker.blocked` and `NgramIndex.before`."""
    for reason, token, by_length in zip(reasons, draft, repeated, strict=True):
        lists = by_length[:1]
        repeats = any(token in followers for followers in lists)
        if not is_sampled:
            # The longest n-gram that the draft token completes.
            lists = [followers for followers in by_length if token in followers][-1:]
        listed = lists[0] if lists else ()
        if len(listed) > MAX_FOLLOWERS:
            reason, listed = reason or Verdict.REPEAT, ()
        yield reason, repeats, listed
