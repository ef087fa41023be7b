"""The constraints kernel in the interpreter, against the CPU reference."""

import itertools

import numpy as np
import pytest
import torch

from calls import listed
from vllm_mars import MarsConfig
from vllm_mars.kernels.constraints.fused import compute_constraints
from vllm_mars.kernels.constraints.markers import MarkerTracker
from vllm_mars.kernels.constraints.naive import NgramIndex, cpu_constraints
from vllm_mars.kernels.interface import (
    MAX_FOLLOWERS,
    RECORD_SIZE,
    Column,
    ConstraintInputs,
    Records,
    Verdict,
    VerifyInputs,
)

pytestmark = pytest.mark.interpreted

CPU = torch.device("cpu")
SLOTS, BATCH, CAPACITY = 6, 4, 2_000


def ids(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Batch:
    """Requests in slots that start, grow, lose tokens and end, with the reference's constraints.

    The first 7 tokens may be markers; `ngram` is the length of the longest n-gram, or 0.
    """

    def __init__(
        self, seed: int, vocab: int, tracker: MarkerTracker, ngram: int, window: int
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.vocab, self.tracker, self.ngram, self.window = vocab, tracker, ngram, window
        self.records = Records(torch.full((SLOTS, RECORD_SIZE), -7))
        self.ring = torch.full((SLOTS, window), -7).int()
        self.markers = tracker.markers(CPU)
        self.temperature = torch.tensor([0.0, 1.0] * (SLOTS // 2))
        self.pads_with_last_token = vocab == 3
        self.prompts: dict[int, list[int]] = {}
        self.answers: dict[int, list[int]] = {}
        self.reasons: set[int] = set()
        self.repeated = self.listed = 0
        for slot in range(SLOTS):
            self.begin(slot, int(self.rng.integers(0, 8)))

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(0, self.vocab, count).tolist()

    def begin(self, slot: int, resumed: int) -> None:
        """Starts a request in a slot, with `resumed` output tokens from before a preemption."""
        self.prompts[slot] = self.tokens(int(self.rng.integers(1, 12)))
        self.answers[slot] = self.tokens(resumed)
        known = self.prompts[slot] + self.answers[slot]
        record = self.records.table[slot]
        record[Column.PROMPT_STATE] = self.tracker.advance(0, self.prompts[slot])
        record[Column.STATE] = self.tracker.advance(0, known)
        record[Column.NUM_SCANNED] = len(known)
        record[Column.RING_END] = len(self.prompts[slot])
        record[Column.SCOPE] = int(self.rng.integers(0, 3))
        # Slot 5 holds a strict request, for which repeats are not checked.
        record[Column.VALUE] = int(slot != 5)

    def step(self) -> None:
        rng = self.rng
        slots = rng.permutation(SLOTS)[:BATCH].tolist()
        drafts, expected = [], []
        for slot in slots:
            answer, length = self.answers[slot], int(rng.integers(0, 11))
            draft = self.tokens(length)
            if len(answer) > 12 and rng.random() < 0.5:
                start = int(rng.integers(0, len(answer) - 8))
                draft = (answer[start : start + 6] + draft)[:length]
            drafts.append(draft)
            expected.append(self.expected(slot, draft))
        assert self.computed(slots, drafts) == expected
        for reason, repeats, followers in itertools.chain(*expected):
            self.reasons.add(reason)
            self.repeated += repeats
            self.listed += len(followers)
        for slot in slots:
            if rng.random() < 0.1:
                self.begin(slot, int(rng.integers(0, 40)))
            elif rng.random() < 0.1:
                del self.answers[slot][-2:]
            else:
                self.answers[slot] += self.tokens(int(rng.integers(0, 9)))

    def expected(self, slot: int, draft: list[int]) -> list[tuple]:
        answer = self.answers[slot]
        state = self.tracker.advance(0, self.prompts[slot] + answer)
        scope = int(self.records.table[slot, Column.SCOPE])
        reasons = [*self.tracker.blocked(state, draft, scope)]
        if not self.tracker:
            # A request cannot set a scope without markers.
            reasons = [0] * len(draft)
        if self.pads_with_last_token:
            # The input token before a draft is 3.
            pairs = zip(draft, [3, *draft], strict=False)
            is_filled = [token == last for token, last in pairs]
            reasons = [a or Verdict.REPEAT * b for a, b in zip(reasons, is_filled, strict=True)]
        repeated = [[] for _ in draft]
        if self.ngram and self.records.table[slot, Column.VALUE]:
            repeated = NgramIndex(self.ngram, self.window).before(answer, draft)
        rows = cpu_constraints(reasons, draft, repeated, bool(self.temperature[slot]))
        return [(*row[:2], {*row[2]}) for row in rows]

    def computed(self, slots, drafts) -> list[list[tuple]]:
        table = torch.full((SLOTS, CAPACITY), 1).int()
        prompt, total = torch.zeros((2, SLOTS)).int()
        for slot in range(SLOTS):
            known = self.prompts[slot] + self.answers[slot]
            table[slot, : len(known)] = ids(known)
            prompt[slot], total[slot] = len(self.prompts[slot]), len(known)
        rows = [token for draft in drafts for token in (3, *draft)]
        ends = ids([len(draft) + 1 for draft in drafts]).cumsum(0).int()
        logits = torch.empty(len(rows), max(self.vocab, 4))
        step = VerifyInputs(
            logits, ids(rows), ends, self.records, torch.tensor(slots), total, prompt, 0
        )
        constraint_inputs = ConstraintInputs(
            ring=self.ring,
            tokens=table,
            temperature=self.temperature,
            markers=self.markers,
            ngram=self.ngram,
            pads_with_last_token=self.pads_with_last_token,
        )
        constraints = listed(compute_constraints(step, constraint_inputs), len(rows))
        by_request = [
            constraints[end - len(draft) - 1 : end]
            for draft, end in zip(drafts, ends.tolist(), strict=True)
        ]
        bonus_rows = [rows.pop() for rows in by_request]
        assert bonus_rows == [(0, False, set())] * len(slots)
        return by_request


def tracker(which: str) -> MarkerTracker:
    if which == "none":
        return MarkerTracker(MarsConfig(theta=0.9))
    spans, opening = ((1, 2), (3, 4), (5, 5), (6, None)), 3 * (which == "opening")
    options = {"strict_spans": spans[: 2 if opening else 4], "strict_opening": opening}
    return MarkerTracker(MarsConfig(**options, thinking_start=7, thinking_end=8))


@pytest.mark.parametrize(
    ("which", "ngram", "window", "vocab", "reasons"),
    [
        ("spans", 0, 8, 10, {0, Verdict.SPAN, Verdict.SCOPE}),
        ("opening", 3, 16, 10, {0, Verdict.SPAN, Verdict.OPENING, Verdict.SCOPE}),
        ("none", 2, 32, 4, {0}),
        # A vocabulary of 3 also tests drafts that are padded with their last token.
        ("none", 4, 16, 3, {0, Verdict.REPEAT}),
        ("none", 4, 64, 20, {0}),
    ],
)
def test_the_kernel_equals_the_reference(which, ngram, window, vocab, reasons):
    batch = Batch(len(which) + ngram, vocab, tracker(which), ngram, window)
    for _ in range(16):
        batch.step()
    assert batch.reasons == reasons
    assert (batch.repeated > 0) == (batch.listed > 0) == (ngram > 0)


@pytest.mark.parametrize("count", [1_023, 1_024, 1_025, 1_900])
@pytest.mark.parametrize("slot", [0, 1])
def test_answers_of_several_blocks(slot, count):
    """A draft copies tokens across the boundary of two blocks, and then repeats itself."""
    batch = Batch(0, 60, tracker("none"), 4, 1_024)
    answer = batch.tokens(count)
    begin = max(count - 1_024, 0)
    for start in (0, begin, 1_020 - begin, count - 8):
        draft = answer[start : start + 8] * 2
        batch.answers[slot] = answer
        batch.records.table[slot, Column.RING_END] = len(batch.prompts[slot])
        assert batch.computed([slot], [draft]) == [batch.expected(slot, draft)]


@pytest.mark.parametrize("count", [MAX_FOLLOWERS, MAX_FOLLOWERS + 1])
def test_too_many_followers_make_a_position_strict(count):
    """They do not affect the next position."""
    batch = Batch(0, 50_000, tracker("none"), 4, 1_024)
    answer = [token for other in range(count) for token in (7, 100 + other)]
    for slot in (0, 1):
        batch.answers[slot] = answer
        batch.records.table[slot, Column.RING_END] = len(batch.prompts[slot])
        draft = [7, 100, 101, 7]
        (constraints,) = batch.computed([slot], [draft])
        assert constraints == batch.expected(slot, draft)
        # A follower in the draft itself can exceed the limit.
        assert constraints[1][0] == Verdict.REPEAT * (count > MAX_FOLLOWERS)


@pytest.mark.parametrize("count", [511, 513, 1_100])
def test_new_tokens_of_several_blocks(count):
    """The kernel scans the whole answer again after vLLM has taken tokens back."""
    batch = Batch(count, 10, tracker("opening"), 0, 1_024)
    answer, draft = batch.tokens(count), batch.tokens(20)
    batch.answers[0], record = answer, batch.records.table[0]
    record[Column.NUM_SCANNED] = CAPACITY
    assert batch.computed([0], [draft]) == [batch.expected(0, draft)]
    assert record[Column.STATE] == batch.tracker.advance(0, batch.prompts[0] + answer)
