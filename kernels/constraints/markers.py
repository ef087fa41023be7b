"""Strict spans and sections of an answer, opened and closed by single marker tokens.

A request's state is one integer, so that it can be on the device: the number of the open span (0 if
none), plus THINKING in the thinking section, plus OPENING for each token left of the opening.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_mars.kernels.interface import Markers, Verdict

if TYPE_CHECKING:
    from vllm_mars.options.config import MarsConfig

# Spans are numbered from 1; the spans that a token closes are a bit mask.
MAX_SPANS = 31
# Up to this many tokens a Python loop is faster than NumPy's search for markers.
_FEW_TOKENS = 64
# Parts of a state.
OPENING = 1 << 9
THINKING = 1 << 8
# Bit fields of `Markers.table`; CLOSES is a shift.
OPENS = 31
THINKING_END = 32
CLOSES = 6
THINKING_START = 1 << 40
# Scope of a request: the only section that may be relaxed; 0 if both may.
IN_THINKING = 1
IN_ANSWER = 2


class MarkerTracker:
    """State machine over the markers of one engine; `strict_spans` must be resolved to ids."""

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
        # With a known thinking section a request may have a scope.
        return self._may_open or self.opening > 0

    def initial_state(self, prompt: Sequence[int]) -> int:
        """Returns the state before the first output token: spans of the last message are open."""
        # It starts after the last end-of-message token; without any, the prompt is one message.
        state = 0
        if self._may_open:
            ends = np.flatnonzero(np.isin(_ids(prompt), self._message_ends or ()))
            message_start = int(ends[-1]) + 1 if len(ends) else 0
            state = self.advance(0, prompt[message_start:])
        return state % OPENING + OPENING * self.opening

    def is_known(self, prompt: Sequence[int] | None) -> bool:
        """Whether the spans that a prompt opens are known; None is a prompt without token ids."""
        if not self._may_open:
            return True
        if prompt is None or self._message_ends is not None:
            return prompt is not None
        # The last message may start anywhere, so anything that the prompt leaves open is unknown:
        # a message that starts after all markers opens nothing.
        spans = 0
        thinking = False
        ids = _ids(prompt)
        for token in ids[np.isin(ids, self._marking)].tolist():
            spans &= ~self.closes.get(token, 0)
            if token in self.opens:
                spans |= 1 << (self.opens[token] - 1)
            thinking = token == self.thinking_start or (thinking and token != self.thinking_end)
        return not (spans or thinking)

    def advance(self, state: int, tokens: Sequence[int]) -> int:
        if len(tokens) > _FEW_TOKENS:
            # In a long prompt, only markers and the last `opening` tokens can change the state.
            ids = _ids(tokens)
            matters = np.isin(ids, self._marking)
            matters[max(len(ids) - self.opening, 0) :] = True
            tokens = ids[matters].tolist()
        for token in tokens:
            span = state % THINKING
            thinking = state & THINKING
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

    def reason(self, state: int, scope: int = 0) -> int:
        """Returns why the next token is strict, a `Verdict`, or 0."""
        reason: int = Verdict.NONE
        if state % THINKING:
            reason = Verdict.SPAN
        elif state >= OPENING:
            reason = Verdict.OPENING
        elif scope == (IN_ANSWER if state & THINKING else IN_THINKING):
            reason = Verdict.SCOPE
        return reason

    def markers(self, device: torch.device) -> Markers | None:
        """Builds the kernel's table of markers; None if no position can be strict."""
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
        """Yields `reason` for each draft position."""
        for token in draft:
            yield self.reason(state, scope)
            state = self.advance(state, (token,))


def _ids(tokens: Sequence[int]) -> np.ndarray:
    return np.fromiter(tokens, np.int64, len(tokens))
