"""Which draft tokens repeat their answer: they complete an n-gram that it holds already.

The answer is the output tokens of a request and the draft before the token; n-grams may overlap.
`AnswerNgrams` is the definition, and the form for a CPU; `vllm_mars.kernels.repeats` is that for an
accelerator, to which `DeviceAnswers` takes the output tokens of the V1 runner.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from vllm_mars.kernels.terms import Drafts, Slots


class AnswerNgrams:
    """The n-grams of one answer, which grows.

    Args:
        length: tokens of an n-gram, >= 2.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._held: set[tuple[int, ...]] = set()
        self._scanned = 0

    def repeated(self, answer: Sequence[int], draft: Sequence[int]) -> list[bool]:
        """Whether each draft token repeats the answer, if those before it are accepted.

        Args:
            answer: all output tokens of the request so far.
            draft: the draft tokens that follow.
        """
        length = self._length
        if len(answer) < self._scanned:
            self._held.clear()
            self._scanned = 0
        for end in range(max(self._scanned + 1, length), len(answer) + 1):
            self._held.add(tuple(answer[end - length : end]))
        self._scanned = len(answer)

        tokens = list(answer[-length:])
        drafted: set[tuple[int, ...]] = set()
        found = []
        for token in draft:
            tokens.append(token)
            last = tuple(tokens[-length:])
            found.append(last in self._held or last in drafted)
            # One that is too short equals none that follows, which are longer.
            drafted.add(last)
        return found


@dataclass
class DeviceAnswer:
    """One answer of `DeviceAnswers`.

    Attributes:
        tokens: all output tokens so far, on the host.
        row: where they are on the device; -1 for that of no request.
        copied: how many of them are.
    """

    tokens: list[int]
    row: int = -1
    copied: int = 0


class DeviceAnswers:
    """The output tokens of a batch on an accelerator; vLLM's V1 runner has them on the host alone.

    A request keeps its row while it is in the batch, so nothing moves. A step copies what is new.

    Args:
        length: tokens of an n-gram, >= 2.
        max_num_reqs: most requests of a batch.
        device: an accelerator.
        to_device: copies numbers there without a wait.
    """

    def __init__(
        self,
        length: int,
        max_num_reqs: int,
        device: torch.device,
        to_device: Callable[[Sequence[float]], torch.Tensor],
    ) -> None:
        self._length = length
        self._to_device = to_device
        # The last row is that of no request.
        self._tokens = torch.zeros((max_num_reqs + 1, 0), dtype=torch.int32, device=device)

    def follow(self, answers: Sequence[DeviceAnswer]) -> None:
        """Gives the new ones among a batch's answers the rows of those that have gone."""
        free = set(range(self._tokens.shape[0] - 1)) - {answer.row for answer in answers}
        for answer in answers:
            if answer.row < 0:
                answer.row = free.pop()

    def block_repeats(
        self, blocked: torch.Tensor, answers: Sequence[DeviceAnswer], drafts: Drafts
    ) -> None:
        """Writes REPEAT into `blocked`, int8 `[num_draft]`, where nothing else is.

        Args:
            blocked: a `Verdict` of each draft token, or 0.
            answers: of the step's requests.
            drafts: the step's.
        """
        from vllm_mars.kernels.repeats import block_repeats

        self._copy(answers)
        rows = [answer.row % self._tokens.shape[0] for answer in answers]
        total_len = [0] * self._tokens.shape[0]
        for row, answer in zip(rows, answers, strict=True):
            total_len[row] = len(answer.tokens)
        slots = Slots(
            self._to_device(rows).int(),
            self._tokens,
            torch.zeros_like(self._tokens[:, 0]),
            self._to_device(total_len).int(),
        )
        block_repeats(blocked, slots, drafts, self._length)

    def _copy(self, answers: Iterable[DeviceAnswer]) -> None:
        longest = max((len(answer.tokens) for answer in answers), default=0)
        rows, width = self._tokens.shape
        if longest >= width:
            wider = self._tokens.new_zeros((rows, 2 * longest + 1))
            wider[:, :width] = self._tokens
            self._tokens = wider
        index: list[int] = []
        tokens: list[int] = []
        for answer in answers:
            begin = answer.row * self._tokens.shape[1]
            answer.copied = min(answer.copied, len(answer.tokens))
            index += range(begin + answer.copied, begin + len(answer.tokens))
            tokens += answer.tokens[answer.copied :]
            answer.copied = len(answer.tokens)
        if index:
            self._tokens.view(-1)[self._to_device(index)] = self._to_device(tokens).int()
