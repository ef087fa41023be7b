"""Spans and sections of an answer that their markers open and close.

Markers are single tokens. The state of a request is one integer, so that it can stay on the device:
the number of the open span (0 for none), plus `THINKING` while the thinking section is open, and
`OPENING` for each token that is left of the opening. A draft is walked through token by token, so a
marker in it changes the positions after it.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_mars.kernels.interface import Markers, Verdict

if TYPE_CHECKING:
    from vllm_mars.options.config import MarsConfig

# Spans are numbered from 1; a token closes those of a bit mask.
MAX_SPANS = 31
# So many are walked through in Python sooner than NumPy finds the markers among them.
_FEW_TOKENS = 64
# Added to the state of a request (see `vllm_mars.kernels.constraints.markers`) for each token that
# its opening, which is strict, still has.
OPENING = 1 << 9
# The same while its thinking section is open.
THINKING = 1 << 8
# What a token marks: see `Markers`.
OPENS, THINKING_END, CLOSES = 31, 32, 6
THINKING_START = 1 << 40
# What of a request's answer may be relaxed, where that is not all of it.
IN_THINKING, IN_ANSWER = 1, 2


class MarkerTracker:
    """The markers of one engine.

    Args:
        config: resolved options: `strict_spans` are pairs of ids.
    """

    def __init__(self, config: "MarsConfig") -> None:
        self._message_ends = config.turns
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

    def initial_state(self, prompt: Sequence[int]) -> int:
        """The state before a request's first output token.

        What the prompt's last message has opened is open: that stands behind the last token by
        which the chat template ends a message. Without any the whole prompt is that message.
        """
        state = 0
        if self._may_open:
            ends = np.flatnonzero(np.isin(_ids(prompt), self._message_ends or ()))
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
        if prompt is None or self._message_ends is not None:
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
