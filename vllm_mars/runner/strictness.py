"""Where in an answer verification is strict: its opening, marked spans, and what it may repeat.

Markers are single tokens. The state of a request is one integer, so that it can stay on the device:
the number of the span that is open (0 for none), plus `OPENING` for each token that the opening
still has. A draft is walked through token by token, so a marker inside it changes the positions
behind it.

The guard against repetition makes a position of a greedy request strict where the draft token
completes an n-gram that the answer holds already; of one that samples, where the answer holds the
n - 1 tokens before it already, and behind them any token: what is served must not depend on the
token that was drawn, and so a repetition comes as often as the target's own. The answer is the last
`GUARD_WINDOW` output tokens and the draft before the token; n-grams may overlap.

This is the definition, and the form for a CPU; `vllm_mars.kernels.strictness` is that for an
accelerator.
"""

from collections.abc import Iterator, Sequence, Set

import numpy as np
import torch

from vllm_mars.config import MarsConfig
from vllm_mars.kernels.terms import (
    CLOSES,
    GUARD_WINDOW,
    OPENING,
    THINKING_END,
    Markers,
    Verdict,
)

# Spans are numbered from 1; a token closes those of a bit mask.
MOST_SPANS = 31
# So many are walked through in Python sooner than NumPy finds the markers among them.
_FEW_TOKENS = 64
# What opens a section for an answer is looked for among so many tokens at its prompt's end.
LOOKED_AT = 256


class Sections:
    """The markers of one engine.

    Args:
        config: resolved options: `strict_spans` are pairs of ids.
        turns: tokens that stand between the turns of a conversation.
    """

    def __init__(self, config: MarsConfig, turns: Set[int] = frozenset()) -> None:
        self._turns = turns
        self.opening = config.opening
        self.thinking_end = -1 if config.thinking_end is None else config.thinking_end
        self.opens: dict[int, int] = {}
        self.closes: dict[int, int] = {}
        for number, (start, end) in enumerate(config.strict_spans or (), start=1):
            assert isinstance(start, int) and not isinstance(end, str), "resolved in the front end"
            self.opens[start] = number
            if end is not None:
                self.closes[end] = self.closes.get(end, 0) | 1 << (number - 1)
        self._marking = np.array([*self.opens, *self.closes, self.thinking_end])

    def __bool__(self) -> bool:
        """Whether any position can be strict."""
        return bool(self.opens) or self.opening > 0

    def begin(self, prompt: Sequence[int]) -> int:
        """The state before a request's first output token.

        What opens a section for this answer stands behind the prompt's last turn token, where the
        chat template begins the answer. A marker elsewhere is text of the conversation.

        Args:
            prompt: its tokens, or its last `LOOKED_AT` alone.
        """
        state = 0
        if self.opens:
            for index in range(len(prompt) - 1, max(len(prompt) - LOOKED_AT, 0), -1):
                if prompt[index] in self._turns:
                    state = self.advance(0, prompt[index + 1 :])
                    break
        begun: int = state % OPENING + OPENING * self.opening
        return begun

    def advance(self, state: int, tokens: Sequence[int]) -> int:
        """The state after some more tokens."""
        if len(tokens) > _FEW_TOKENS:
            # A prompt can be long, and only markers change the state, and the last few tokens.
            ids = np.fromiter(tokens, np.int64, len(tokens))
            counts = np.isin(ids, self._marking)
            counts[max(len(ids) - self.opening, 0) :] = True
            tokens = ids[counts].tolist()
        for token in tokens:
            span = state % OPENING
            opening = max(state // OPENING - 1, 0)
            if span == 0:
                span = self.opens.get(token, 0)
            elif self.closes.get(token, 0) >> (span - 1) & 1:
                span = 0
            if token == self.thinking_end:
                opening = self.opening
            state = span + OPENING * opening
        return state

    def is_strict(self, state: int) -> bool:
        """Whether the next token is verified strictly."""
        return bool(self._reason(state))

    def _reason(self, state: int) -> int:
        """Why it is, or 0."""
        opening: int = Verdict.OPENING if state >= OPENING else Verdict.NONE
        return Verdict.SPAN if state % OPENING else opening

    def markers(self, device: torch.device) -> Markers | None:
        """The markers for the kernel; None where no position can be strict."""
        if not self:
            return None
        table = [0] * (max(0, self.thinking_end, *self.opens, *self.closes) + 1)
        for token, number in self.opens.items():
            table[token] += number
        for token, spans in self.closes.items():
            table[token] += spans << CLOSES
        if self.thinking_end >= 0:
            table[self.thinking_end] += THINKING_END
        return Markers(torch.tensor(table, device=device), self.opening)

    def blocked(self, state: int, draft: Sequence[int]) -> Iterator[int]:
        """Yields for each position of a request's draft why it is strict, a `Verdict`, or 0.

        Args:
            state: before the first draft token.
            draft: its tokens.
        """
        for token in draft:
            yield self._reason(state)
            state = self.advance(state, (token,))


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
