"""Where in an answer verification is strict: its opening, marked spans, and what it may repeat.

Or all of its thinking section, or all but that: a request's scope is `IN_THINKING` or `IN_ANSWER`
where that alone may be relaxed, else 0.

Markers are single tokens. The state of a request is one integer, so that it can stay on the device:
the number of the span that is open (0 for none), plus `THINKING` while the thinking section is, and
`OPENING` for each token that the opening still has. A draft is walked through token by token, so a
marker inside it changes the positions behind it.

The guard against repetition looks at the n-grams of the answer, of 2 to `repeat_ngram` tokens; the
answer is the last `GUARD_WINDOW` output tokens and the draft before a position, and n-grams may
overlap. Where a request samples, each token that followed the last one before the position keeps
its probability, whatever was drawn there; so each n-gram repeats as often as under the target. A
greedy request relaxes no token that completes a longer n-gram of the answer than the first choice
would. Where more than `MOST_FOLLOWERS` tokens are to be listed for that, the position is strict.

This is the definition, and the form for a CPU; `vllm_mars.kernels.strictness.fused` is that for an
accelerator.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm_mars.kernels.verdicts import Verdict

if TYPE_CHECKING:
    from vllm_mars.options.config import MarsConfig

# Spans are numbered from 1; a token closes those of a bit mask.
MOST_SPANS = 31
# So many are walked through in Python sooner than NumPy finds the markers among them.
_FEW_TOKENS = 64
# Added to the state of a request (see `vllm_mars.kernels.strictness.naive`) for each token that its
# opening, which is strict, still has.
OPENING = 1 << 9
# The same while its thinking section is open.
THINKING = 1 << 8
# What a token marks: see `Markers`.
OPENS, THINKING_END, CLOSES = 31, 32, 6
THINKING_START = 1 << 40
# What of a request's answer may be relaxed, where that is not all of it.
IN_THINKING, IN_ANSWER = 1, 2
# The guard against repetition looks at so many of an answer's last tokens, a power of 2, and lists
# so many of those that followed one of them: in texts as long no token had more than 131.
GUARD_WINDOW = 4096
MOST_FOLLOWERS = 256


class Guarded(NamedTuple):
    """What the text before each row asks of its position: a CPU's form of `strictness.naive.Guard`.

    Attributes:
        blocked: a `Verdict` where the draft token must stay strict, else 0.
        repeats: whether the draft token is among those that followed the last token before it.
        followers: the tokens that are listed there.
    """

    blocked: Sequence[int]
    repeats: Sequence[bool]
    followers: Sequence[Collection[int]]

    @classmethod
    def of(cls, rows: Iterable[tuple[int, bool, Collection[int]]]) -> "Guarded":
        """The entries of each row."""
        known = [*rows]
        return cls([row[0] for row in known], [row[1] for row in known], [row[2] for row in known])


class Guard(NamedTuple):
    """What the text before each row asks of its position, as a kernel takes it.

    A CPU's form is `strictness.naive.Guarded`. That of a bonus row asks nothing.

    Attributes:
        blocked: int8 `[num_rows]`, a `Verdict` where the draft token must stay strict, else 0.
        repeats: int8 `[num_rows]`, whether the draft token followed the last token before it
            somewhere earlier in the answer.
        num_followers: int32 `[num_rows]`.
        followers: int32 `[num_rows, MOST_FOLLOWERS]`, each token once; what lies behind
            `num_followers` of them is not read. Of a request that samples all tokens that followed
            the last one. Of a greedy request, where the draft token repeats, those that complete an
            n-gram as long as it does: beside one of these it may be relaxed. Of a strict request
            nothing that repeats is looked for. Sorted.
    """

    blocked: torch.Tensor
    repeats: torch.Tensor
    num_followers: torch.Tensor
    followers: torch.Tensor


class Markers(NamedTuple):
    """What `vllm_mars.kernels.strictness.naive` walks by, on a device.

    Attributes:
        table: int64 `[largest marker + 1]`, what a token marks: among OPENS the number of the span
            that it opens, THINKING_START and THINKING_END of what begins and ends the thinking
            section, and from bit CLOSES the spans that it closes, the first of them there.
        opening: strict tokens at the begin of an answer, and behind its thinking section.
    """

    table: torch.Tensor
    opening: int


class Sections:
    """The markers of one engine.

    Args:
        config: resolved options: `strict_spans` are pairs of ids.
    """

    def __init__(self, config: "MarsConfig") -> None:
        self._turns = config.turns
        self.opening = config.opening
        self.thinking_start = -1 if config.thinking_start is None else config.thinking_start
        self.thinking_end = -1 if config.thinking_end is None else config.thinking_end
        self.opens: dict[int, int] = {}
        self.closes: dict[int, int] = {}
        for number, (start, end) in enumerate(config.strict_spans or (), start=1):
            assert isinstance(start, int) and not isinstance(end, str), "resolved in the front end"
            self.opens[start] = number
            if end is not None:
                self.closes[end] = self.closes.get(end, 0) | 1 << (number - 1)
        self._marking = np.array(
            [*self.opens, *self.closes, self.thinking_start, self.thinking_end]
        )

    @property
    def _may_open(self) -> bool:
        return bool(self.opens) or self.thinking_start >= 0

    def __bool__(self) -> bool:
        """Whether any position can be strict."""
        # A request may choose a scope wherever the thinking section is known.
        return self._may_open or self.opening > 0

    def begin(self, prompt: Sequence[int]) -> int:
        """The state before a request's first output token.

        What the prompt's last message has opened is open: that stands behind the last token by
        which the chat template ends a message. Without any the whole prompt is that message.
        """
        state = 0
        if self._may_open:
            ends = np.flatnonzero(np.isin(_ids(prompt), self._turns or ()))
            state = self.advance(0, prompt[int(ends[-1]) + 1 if len(ends) else 0 :])
        begun: int = state % OPENING + OPENING * self.opening
        return begun

    def is_known(self, prompt: Sequence[int] | None) -> bool:
        """Whether it is known what a prompt has opened.

        Args:
            prompt: its tokens; None where it has others than these.
        """
        if not self._may_open:
            return True
        if prompt is None or self._turns is not None:
            return prompt is not None
        # The last message may begin anywhere. One that begins behind all markers opens nothing.
        spans, thinking = 0, False
        ids = _ids(prompt)
        for token in ids[np.isin(ids, self._marking)].tolist():
            spans &= ~self.closes.get(token, 0)
            if token in self.opens:
                spans |= 1 << (self.opens[token] - 1)
            thinking = token == self.thinking_start or (thinking and token != self.thinking_end)
        return not (spans or thinking)

    def advance(self, state: int, tokens: Sequence[int]) -> int:
        """The state after some more tokens."""
        if len(tokens) > _FEW_TOKENS:
            # A prompt can be long, and only markers change the state, and the last few tokens.
            ids = _ids(tokens)
            counts = np.isin(ids, self._marking)
            counts[max(len(ids) - self.opening, 0) :] = True
            tokens = ids[counts].tolist()
        for token in tokens:
            span, thinking = state % THINKING, state & THINKING
            opening = max(state // OPENING - 1, 0)
            if span == 0:
                span = self.opens.get(token, 0)
            elif self.closes.get(token, 0) >> (span - 1) & 1:
                span = 0
            if token == self.thinking_start:
                thinking = THINKING
            if token == self.thinking_end:
                thinking, opening = 0, self.opening
            state = span + thinking + OPENING * opening
        return state

    def is_strict(self, state: int, scope: int = 0) -> bool:
        """Whether the next token is verified strictly."""
        return bool(self._reason(state, scope))

    def _reason(self, state: int, scope: int) -> int:
        """Why it is, or 0."""
        reason: int = Verdict.NONE
        if state % THINKING:
            reason = Verdict.SPAN
        elif state >= OPENING:
            reason = Verdict.OPENING
        elif scope == (IN_ANSWER if state & THINKING else IN_THINKING):
            reason = Verdict.SCOPE
        return reason

    def markers(self, device: torch.device) -> Markers | None:
        """The markers for the kernel; None where no position can be strict."""
        if not self:
            return None
        thinking = self.thinking_start, self.thinking_end
        table = [0] * (max(0, *thinking, *self.opens, *self.closes) + 1)
        for token, number in self.opens.items():
            table[token] += number
        for token, spans in self.closes.items():
            table[token] += spans << CLOSES
        for token, mark in zip(thinking, (THINKING_START, THINKING_END), strict=True):
            if token >= 0:
                table[token] += mark
        return Markers(torch.tensor(table, device=device), self.opening)

    def blocked(self, state: int, draft: Sequence[int], scope: int = 0) -> Iterator[int]:
        """Yields for each position of a request's draft why it is strict, a `Verdict`, or 0.

        Args:
            state: before the first draft token.
            draft: its tokens.
            scope: of the request.
        """
        for token in draft:
            yield self._reason(state, scope)
            state = self.advance(state, (token,))


def _ids(tokens: Sequence[int]) -> np.ndarray:
    return np.fromiter(tokens, np.int64, len(tokens))


class Followers:
    """What followed each token of one answer, which grows.

    Args:
        length: tokens of the longest n-gram that is looked at, >= 2.
        window: the answer's last tokens that are looked at.
    """

    def __init__(self, length: int, window: int = GUARD_WINDOW) -> None:
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
                held = self._ends.get(before, {}).items()
                found.append({it for it, end in held if end - len(before) > first})
                found[-1] |= drafted.get(before, set())
                drafted.setdefault(before, set()).add(token)
            yield found
            last = [*last, token][-(self._length - 1) :]


def _beginnings(last: Sequence[int]) -> list[tuple[int, ...]]:
    """Of an n-gram of 2 tokens, of 3, ... all but the token that comes behind the last ones."""
    return [tuple(last[-count:]) for count in range(1, len(last) + 1)]


def guarded(
    reasons: Iterable[int],
    draft: Sequence[int],
    repeated: Iterable[list[set[int]]],
    samples: bool,
) -> Iterator[tuple[int, bool, Collection[int]]]:
    """Yields of each position of a draft the entries of `strictness.naive.Guarded`.

    Args:
        reasons: why each is strict for its place in the answer, a `Verdict`, or 0.
        draft: its tokens.
        repeated: of `Followers`.
        samples: whether the request does.
    """
    for reason, token, by_length in zip(reasons, draft, repeated, strict=True):
        lists = by_length[:1]
        repeats = any(token in found for found in lists)
        if not samples:
            # The longest that the draft token completes.
            lists = [found for found in by_length if token in found][-1:]
        listed = lists[0] if lists else ()
        if len(listed) > MOST_FOLLOWERS:
            reason, listed = reason or Verdict.REPEAT, ()
        yield reason, repeats, listed
