"""Where in an answer verification is strict: its opening, marked spans, all but the thinking.

Markers are single tokens. The state of a request is one integer, so that it can stay on the device:
the number of the span that is open (0 for none), plus `THINKING` inside the thinking section, plus
`OPENING` for each token that the opening still has. A draft is walked through token by token, so a
marker inside it changes the positions behind it.
"""

from collections.abc import Iterable, Iterator, Sequence, Set

import numpy as np
import torch

from vllm_mars.config import MarsConfig
from vllm_mars.kernels.terms import OPENING, THINKING, Markers, Verdict

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
        self.only_thinking = config.scope == "reasoning"
        self.thinking = config.thinking or (-1, -1)
        self.opens: dict[int, int] = {}
        self.closes: dict[int, int] = {}
        for number, (start, end) in enumerate(config.strict_spans or (), start=1):
            assert isinstance(start, int) and not isinstance(end, str), "resolved in the front end"
            self.opens[start] = number
            if end is not None:
                self.closes[end] = self.closes.get(end, 0) | 1 << (number - 1)
        self._marking = np.array([*self.opens, *self.closes, *self.thinking])

    def __bool__(self) -> bool:
        """Whether any position can be strict."""
        return bool(self.opens) or self.only_thinking or self.opening > 0

    def begin(self, prompt: Sequence[int]) -> int:
        """The state before a request's first output token.

        What opens a section for this answer stands behind the prompt's last turn token, where the
        chat template begins the answer. A marker elsewhere is text of the conversation.

        Args:
            prompt: its tokens, or its last `LOOKED_AT` alone.
        """
        state = 0
        if self.opens or self.thinking[0] >= 0:
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
            span, thinking = state % THINKING, state & THINKING
            opening = max(state // OPENING - 1, 0)
            if span == 0:
                span = self.opens.get(token, 0)
                # A tool call ends the reasoning, with or without its marker.
                thinking = 0 if span else thinking
            elif self.closes.get(token, 0) >> (span - 1) & 1:
                span = 0
            if token == self.thinking[0]:
                thinking = THINKING
            elif token == self.thinking[1]:
                thinking, opening = 0, self.opening
            state = span + thinking + OPENING * opening
        return state

    def is_strict(self, state: int) -> bool:
        """Whether the next token is verified strictly."""
        return bool(self._reason(state))

    def _reason(self, state: int) -> int:
        """Why it is, or 0."""
        reason: int = Verdict.OPENING if state >= OPENING else Verdict.NONE
        if state % THINKING or (self.only_thinking and not state & THINKING):
            reason = Verdict.SPAN
        return reason

    def markers(self, device: torch.device) -> Markers:
        """The markers for the kernel."""
        size = max([-1, *self.opens, *self.closes]) + 1
        tables = torch.zeros((2, size), dtype=torch.int32)
        for table, entries in zip(tables, (self.opens, self.closes), strict=True):
            for token, value in entries.items():
                table[token] = value
        opens, closes = tables.to(device)
        return Markers(opens, closes, self.thinking, self.only_thinking, self.opening)

    def blocked(
        self,
        states: Iterable[int],
        is_structured: Iterable[bool],
        drafts: list[int],
        ends: list[int],
    ) -> Iterator[int]:
        """Yields for each draft position why it is strict, a `Verdict`, or 0.

        Args:
            states: of each request, before its first draft token.
            is_structured: whether all of a request is strict.
            drafts: draft tokens of all requests.
            ends: inclusive prefix sum of the drafts' lengths.
        """
        begin = 0
        for state, structured, end in zip(states, is_structured, ends, strict=True):
            for draft in drafts[begin:end]:
                yield Verdict.STRUCTURED if structured else self._reason(state)
                state = self.advance(state, (draft,))
            begin = end
