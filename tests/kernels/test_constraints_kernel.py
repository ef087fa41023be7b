"""The kernel of what looks at tokens, run by the interpreter, against its definitions."""

import itertools

import numpy as np
import pytest
import torch

from calls import listed
from vllm_mars import MarsConfig
from vllm_mars.kernels.constraints import fused as constraints_kernel
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
from vllm_mars.kernels.row_stats.fused import bucket_size

pytestmark = pytest.mark.interpreted

CPU = torch.device("cpu")
SLOTS, BATCH, CAPACITY = 6, 4, 2_000


def ids(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Batch:
    """Requests in slots, which come, grow, lose tokens and go, and what the definitions say.

    Args:
        seed: of all that is random.
        kinds: tokens are below it; those below 7 mark something.
        tracker: markers, or none.
        ngram: tokens of the longest n-gram; 0 for no guard.
        window: of the guard.
    """

    def __init__(
        self, seed: int, kinds: int, tracker: MarkerTracker, ngram: int, window: int
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.kinds, self.tracker, self.ngram, self.window = kinds, tracker, ngram, window
        self.records = Records(torch.full((SLOTS, RECORD_SIZE), -7))
        self.ring = torch.full((SLOTS, window), -7).int()
        self.markers = tracker.markers(CPU)
        self.temperature = torch.tensor([0.0, 1.0] * (SLOTS // 2))
        self.pads_with_last_token = kinds == 3
        self.prompts: dict[int, list[int]] = {}
        self.answers: dict[int, list[int]] = {}
        self.reasons: set[int] = set()
        self.repeated = self.listed = 0
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
        record[Column.PROMPT_STATE] = self.tracker.advance(0, self.prompts[slot])
        record[Column.STATE] = self.tracker.advance(0, known)
        record[Column.NUM_SCANNED] = len(known)
        record[Column.RING_END] = len(self.prompts[slot])
        record[Column.SCOPE] = int(self.rng.integers(0, 3))
        # A strict request among them, for which nothing that repeats is looked for.
        record[Column.VALUE] = int(slot != 5)

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
            expected.append(self.expected(slot, draft))
        found = self.found(slots, drafts)
        assert found == expected
        for reason, repeats, own in itertools.chain(*found):
            self.reasons.add(reason)
            self.repeated += repeats
            self.listed += len(own)
        for slot in slots:
            if rng.random() < 0.1:
                self.begin(slot, int(rng.integers(0, 40)))
            elif rng.random() < 0.1:
                del self.answers[slot][-2:]
            else:
                self.answers[slot] += self.tokens(int(rng.integers(0, 9)))

    def expected(self, slot: int, draft: list[int]) -> list[tuple]:
        """What the definitions say of a draft."""
        answer = self.answers[slot]
        state = self.tracker.advance(0, self.prompts[slot] + answer)
        scope = int(self.records.table[slot, Column.SCOPE])
        reasons = [*self.tracker.blocked(state, draft, scope)]
        if not self.tracker:
            # Without markers no request may have a scope.
            reasons = [0] * len(draft)
        if self.pads_with_last_token:
            # 3 is the input token before a draft.
            pairs = zip(draft, [3, *draft], strict=False)
            is_filled = [token == last for token, last in pairs]
            reasons = [a or Verdict.REPEAT * b for a, b in zip(reasons, is_filled, strict=True)]
        repeated = [[] for _ in draft]
        if self.ngram and self.records.table[slot, Column.VALUE]:
            repeated = NgramIndex(self.ngram, self.window).before(answer, draft)
        rows = cpu_constraints(reasons, draft, repeated, bool(self.temperature[slot]))
        return [(*row[:2], {*row[2]}) for row in rows]

    def found(self, slots, drafts) -> list[list[tuple]]:
        """What the kernel says of drafts."""
        table = torch.full((SLOTS, CAPACITY), 1).int()
        prompt, total = torch.zeros((2, SLOTS)).int()
        for slot in range(SLOTS):
            known = self.prompts[slot] + self.answers[slot]
            table[slot, : len(known)] = ids(known)
            prompt[slot], total[slot] = len(self.prompts[slot]), len(known)
        rows = [token for draft in drafts for token in (3, *draft)]
        ends = ids([len(draft) + 1 for draft in drafts]).cumsum(0).int()
        logits = torch.empty(len(rows), max(self.kinds, 4))
        own = self.records, torch.tensor(slots), total, prompt, 0
        step = VerifyInputs(logits, ids(rows), ends, *own)
        constraint_inputs = ConstraintInputs(
            ring=self.ring,
            tokens=table,
            temperature=self.temperature,
            markers=self.markers,
            ngram=self.ngram,
            pads_with_last_token=self.pads_with_last_token,
        )
        constraints = listed(compute_constraints(step, constraint_inputs), len(rows))
        size = bucket_size(len(slots), 64), -(-logits.shape[1] // 32)
        known = constraints_kernel._none_seen.cache_info().misses
        assert not constraints_kernel._none_seen(*size, logits.device).any()
        assert constraints_kernel._none_seen.cache_info().misses == known, "it is the kernel's own"
        by_request = [
            constraints[end - len(draft) - 1 : end]
            for draft, end in zip(drafts, ends.tolist(), strict=True)
        ]
        assert all(own.pop() == (0, False, set()) for own in by_request)
        return by_request


def tracker(which: str) -> MarkerTracker:
    if which == "none":
        return MarkerTracker(MarsConfig(theta=0.9))
    spans, opening = ((1, 2), (3, 4), (5, 5), (6, None)), 3 * (which == "opening")
    options = {"strict_spans": spans[: 2 if opening else 4], "strict_opening": opening}
    return MarkerTracker(MarsConfig(**options, thinking_start=7, thinking_end=8))


@pytest.mark.parametrize(
    ("which", "ngram", "window", "kinds", "reasons"),
    [
        ("spans", 0, 8, 10, {0, Verdict.SPAN, Verdict.SCOPE}),
        ("opening", 3, 16, 10, {0, Verdict.SPAN, Verdict.OPENING, Verdict.SCOPE}),
        ("none", 2, 32, 4, {0}),
        # Where drafts are filled up.
        ("none", 4, 16, 3, {0, Verdict.REPEAT}),
        ("none", 4, 64, 20, {0}),
    ],
)
def test_equals_the_definitions(which, ngram, window, kinds, reasons):
    batch = Batch(len(which) + ngram, kinds, tracker(which), ngram, window)
    for _ in range(16):
        batch.step()
    assert batch.reasons == reasons
    assert (batch.repeated > 0) == (batch.listed > 0) == (ngram > 0)


@pytest.mark.parametrize("count", [1_023, 1_024, 1_025, 1_900])
@pytest.mark.parametrize("slot", [0, 1])
def test_answers_of_several_blocks(slot, count):
    """A draft copies what stands at the seam of two blocks, and then repeats itself."""
    batch = Batch(0, 60, tracker("none"), 4, 1_024)
    answer = batch.tokens(count)
    begin = max(count - 1_024, 0)
    for at in (0, begin, 1_020 - begin, count - 8):
        draft = [*answer[at : at + 8], *answer[at : at + 8]]
        batch.answers[slot] = answer
        batch.records.table[slot, Column.RING_END] = len(batch.prompts[slot])
        assert batch.found([slot], [draft]) == [batch.expected(slot, draft)]


@pytest.mark.parametrize("count", [MAX_FOLLOWERS, MAX_FOLLOWERS + 1])
def test_more_followers_than_can_be_listed(count):
    """The position is strict, and nothing of them is left for the next one."""
    batch = Batch(0, 50_000, tracker("none"), 4, 1_024)
    answer = [token for other in range(count) for token in (7, 100 + other)]
    for slot in (0, 1):
        batch.answers[slot] = answer
        batch.records.table[slot, Column.RING_END] = len(batch.prompts[slot])
        draft = [7, 100, 101, 7]
        (found,) = batch.found([slot], [draft])
        assert found == batch.expected(slot, draft)
        # One follower of the draft's own can be one too many.
        reason, repeats, own = found[1]
        fits = count <= MAX_FOLLOWERS
        assert (reason, repeats, len(own)) == (Verdict.REPEAT * (not fits), True, count * fits)


@pytest.mark.parametrize("count", [511, 513, 1_100])
def test_new_tokens_of_several_blocks(count):
    """All of an answer is walked through at once where vLLM has taken tokens back."""
    batch = Batch(count, 10, tracker("opening"), 0, 1_024)
    answer, draft = batch.tokens(count), batch.tokens(20)
    batch.answers[0], record = answer, batch.records.table[0]
    record[Column.NUM_SCANNED] = CAPACITY
    assert batch.found([0], [draft]) == [batch.expected(0, draft)]
    assert record[Column.STATE] == batch.tracker.advance(0, batch.prompts[0] + answer)
