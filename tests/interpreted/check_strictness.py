"""The kernel of what looks at tokens, run by the interpreter, against its definitions.

Run by `tests/kernels/test_kernel_interpreted.py`, with TRITON_INTERPRET=1 set before triton loads.
"""

import numpy as np
import pytest
import torch

from vllm_mars import MarsConfig
from vllm_mars.kernels.strictness import blocked_positions
from vllm_mars.kernels.terms import RECORD_SIZE, Column, Records, Step, Verdict
from vllm_mars.runner.strictness import AnswerNgrams, Sections

CPU = torch.device("cpu")
SLOTS, BATCH, CAPACITY = 6, 4, 2_000


def ids(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Batch:
    """Requests in slots, which come, grow, lose tokens and go, and what the definitions say.

    Args:
        seed: of all that is random.
        kinds: tokens are below it; those below 7 mark something.
        sections: markers, or none.
        ngram: tokens of an n-gram; 0 for no guard.
        window: of the guard.
    """

    def __init__(self, seed: int, kinds: int, sections: Sections, ngram: int, window: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.kinds, self.sections, self.ngram, self.window = kinds, sections, ngram, window
        self.records = Records(torch.full((SLOTS, RECORD_SIZE), -7))
        self.ring = torch.full((SLOTS, window), -7).int()
        self.markers = sections.markers(CPU)
        self.temperature = torch.tensor([0.0, 1.0] * (SLOTS // 2))
        self.fills = kinds == 3
        self.prompts: dict[int, list[int]] = {}
        self.answers: dict[int, list[int]] = {}
        self.reasons: set[int] = set()
        for slot in range(SLOTS):
            self.begin(slot, int(self.rng.integers(0, 8)))

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(0, self.kinds, count).tolist()

    def begin(self, slot: int, resumed: int) -> None:
        """A new request in a slot, with output tokens if it comes back from a preemption."""
        self.prompts[slot] = self.tokens(int(self.rng.integers(1, 12)))
        self.answers[slot] = self.tokens(resumed)
        known = self.prompts[slot] + self.answers[slot]
        record = self.records.table[slot]
        record[Column.BEGUN] = self.sections.advance(0, self.prompts[slot])
        record[Column.STATE] = self.sections.advance(0, known)
        record[Column.SCANNED] = len(known)
        record[Column.HELD] = len(self.prompts[slot])

    def step(self) -> None:
        rng = self.rng
        slots = rng.permutation(SLOTS)[:BATCH].tolist()
        drafts, expected = [], []
        for slot in slots:
            answer, length = self.answers[slot], int(rng.integers(0, 11))
            draft = self.tokens(length)
            if len(answer) > 12 and rng.random() < 0.5:
                at = int(rng.integers(0, len(answer) - 8))
                draft = (answer[at : at + 6] + draft)[:length]
            drafts.append(draft)
            state = self.sections.advance(0, self.prompts[slot] + answer)
            reasons = self.sections.blocked(state, draft)
            repeats = [False] * length
            samples = bool(self.temperature[slot])
            if self.ngram:
                repeats = AnswerNgrams(self.ngram, samples, self.window).repeated(answer, draft)
            if self.fills:
                # 3 is the input token before a draft.
                inputs = [3, *draft]
                repeats = [a or b == c for a, b, c in zip(repeats, draft, inputs, strict=False)]
            expected.append(
                [int(a or Verdict.REPEAT * b) for a, b in zip(reasons, repeats, strict=True)]
            )
        found = self.blocked(slots, drafts)
        assert found == expected
        self.reasons.update(reason for row in expected for reason in row)
        for slot in slots:
            if rng.random() < 0.1:
                self.begin(slot, int(rng.integers(0, 40)))
            elif rng.random() < 0.1:
                del self.answers[slot][-2:]
            else:
                self.answers[slot] += self.tokens(int(rng.integers(0, 9)))

    def blocked(self, slots, drafts):
        table = torch.full((SLOTS, CAPACITY), 1).int()
        prompt, total = torch.zeros((2, SLOTS)).int()
        for slot in range(SLOTS):
            known = self.prompts[slot] + self.answers[slot]
            table[slot, : len(known)] = ids(known)
            prompt[slot], total[slot] = len(self.prompts[slot]), len(known)
        rows = [token for draft in drafts for token in (3, *draft)]
        ends = ids([len(draft) + 1 for draft in drafts]).cumsum(0).int()
        step = Step(None, ids(rows), ends, self.records, torch.tensor(slots), total, prompt, 0)
        own = self.temperature, self.markers, self.ngram, self.fills
        blocked = blocked_positions(self.ring, table, step, *own).tolist()
        return [
            blocked[end - len(draft) - 1 : end - 1]
            for draft, end in zip(drafts, ends.tolist(), strict=True)
        ]


def sections(which: str) -> Sections:
    if which == "none":
        return Sections(MarsConfig(theta=0.9))
    spans, opening = ((1, 2), (3, 4), (5, 5), (6, None)), 3 * (which == "opening")
    options = {"strict_spans": spans[: 2 if opening else 4], "strict_opening": opening}
    return Sections(MarsConfig(**options, thinking_end=8))


@pytest.mark.parametrize(
    ("which", "ngram", "window", "kinds", "reasons"),
    [
        ("spans", 0, 8, 10, {0, Verdict.SPAN}),
        ("opening", 3, 16, 10, {0, *Verdict} - {*range(1, Verdict.SPAN), Verdict.LOSS}),
        ("none", 2, 32, 4, {0, Verdict.REPEAT}),
        ("none", 4, 16, 3, {0, Verdict.REPEAT}),
    ],
)
def test_equals_the_definitions(which, ngram, window, kinds, reasons):
    batch = Batch(len(which) + ngram, kinds, sections(which), ngram, window)
    for _ in range(16):
        batch.step()
    assert batch.reasons == reasons


@pytest.mark.parametrize("count", [511, 512, 513, 1_100])
def test_answers_of_several_blocks(count):
    """A draft copies what stands at the seam of two blocks, and then repeats itself."""
    batch = Batch(0, 50_000, sections("none"), 4, 1_024)
    answer = batch.tokens(count)
    begin = max(count - 1_024, 0)
    for at in (0, begin, 508, count - 8):
        draft = [*answer[at : at + 8], *answer[at : at + 8]]
        batch.answers[0] = answer
        batch.records.table[0, Column.HELD] = len(batch.prompts[0])
        expected = AnswerNgrams(4, False, 1_024).repeated(answer, draft)
        (found,) = batch.blocked([0], [draft])
        assert found == [Verdict.REPEAT * is_repeat for is_repeat in expected]


@pytest.mark.parametrize("count", [511, 513, 1_100])
def test_new_tokens_of_several_blocks(count):
    """All of an answer is walked through at once where vLLM has taken tokens back."""
    batch = Batch(count, 10, sections("opening"), 0, 1_024)
    answer, draft = batch.tokens(count), batch.tokens(20)
    batch.answers[0], record = answer, batch.records.table[0]
    state = batch.sections.advance(0, batch.prompts[0] + answer)
    record[Column.SCANNED] = CAPACITY
    (found,) = batch.blocked([0], [draft])
    assert found == [*batch.sections.blocked(state, draft)]
    assert record[Column.STATE] == state
