"""The kernel of the guard against repetition, run by the interpreter, against its definition.

Run by `tests/kernels/test_kernel_interpreted.py`, with TRITON_INTERPRET=1 set before triton loads.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

from vllm_mars.kernels import repeats
from vllm_mars.kernels.terms import Drafts, Slots, Verdict
from vllm_mars.runner.repeats import AnswerNgrams, DeviceAnswer, DeviceAnswers

CPU = torch.device("cpu")
# Few kinds of tokens, so that much repeats; -1 is padding.
TOKENS = st.lists(st.integers(-1, 2), max_size=24)
REQUESTS = st.tuples(TOKENS, TOKENS, st.lists(st.integers(-1, 2), max_size=20))


def test_the_kernel_is_interpreted():
    assert isinstance(repeats.repeat_kernel, InterpretedFunction)


def check(length, requests, bonus_row_is_last, blocked):
    """Compares the kernel with the definition for requests of a prompt, an answer and a draft."""
    slots = list(reversed(range(len(requests))))
    table = torch.full((len(requests), 1 + max(len(p) + len(a) for p, a, _ in requests)), 1).int()
    prompt_len, total_len = torch.zeros(2, len(requests), dtype=torch.int32)
    rows, ends, expected = [], [], []
    for slot, (prompt, answer, draft) in zip(slots, requests, strict=True):
        known = [*prompt, *answer]
        table[slot, : len(known)] = torch.tensor(known, dtype=torch.int32)
        prompt_len[slot], total_len[slot] = len(prompt), len(known)
        rows += [7] * bonus_row_is_last + draft
        ends.append(len(rows))
        expected += AnswerNgrams(length).repeated(answer, draft) + [False] * bonus_row_is_last
    given = torch.tensor([blocked[i % len(blocked)] for i in range(len(rows))], dtype=torch.int8)
    found = given.clone()
    repeats.block_repeats(
        found,
        Slots(torch.tensor(slots, dtype=torch.int32), table, prompt_len, total_len),
        Drafts(
            torch.empty(0, 0),
            torch.tensor(rows, dtype=torch.int32),
            torch.tensor(ends, dtype=torch.int32),
            bonus_row_is_last=bonus_row_is_last,
        ),
        length,
    )
    wanted = [
        reason or Verdict.REPEAT * is_repeat
        for reason, is_repeat in zip(given.tolist(), expected, strict=True)
    ]
    assert found.tolist() == wanted


@settings(deadline=None, max_examples=60)
@given(
    st.integers(2, 5),
    st.lists(REQUESTS, min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from([[0], [0, Verdict.SPAN], [Verdict.STRUCTURED]]),
)
def test_equals_the_definition(length, requests, bonus_row_is_last, blocked):
    check(length, requests, bonus_row_is_last, blocked)


@pytest.mark.parametrize("length", [2, 16])
@pytest.mark.parametrize("count", [511, 512, 513, 1025])
def test_answers_of_several_blocks(length, count):
    """A draft copies what stands at the seam of two blocks, and then goes on by itself."""
    rng = np.random.default_rng(count)
    answer = rng.integers(0, 50_000, count).tolist()
    seam = answer[512 - length : 512 + length] if count > 512 else answer[-2 * length :]
    loop = [*seam, *seam[:3]]
    check(length, [([5] * 9, answer, loop), ([], [], loop), ([], [3] * count, [3] * 17)], True, [0])


def test_answers_on_the_device_follow_the_batch():
    """Requests come, grow, change places, lose tokens and go; one place is empty."""
    rng = np.random.default_rng(1)
    length, most = 3, 4
    held = DeviceAnswers(length, most, CPU, torch.tensor)
    batch = []
    repeated = 0
    for _ in range(40):
        batch = [answer for answer in batch if rng.random() < 0.9]
        while len(batch) < most and rng.random() < 0.6:
            batch.append(DeviceAnswer(rng.integers(0, 3, rng.integers(0, 30)).tolist()))
        rng.shuffle(batch)
        held.follow(batch)
        assert len({answer.row for answer in batch}) == len(batch)
        answers = [*batch, DeviceAnswer([])]
        drafts = [rng.integers(0, 3, rng.integers(0, 6)).tolist() for _ in answers]
        ids = torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32)
        ends = torch.tensor([len(draft) for draft in drafts]).cumsum(0).int()
        blocked = torch.zeros(len(ids), dtype=torch.int8)
        held.block_repeats(blocked, answers, Drafts(torch.empty(0, 0), ids, ends))
        expected = [
            Verdict.REPEAT * is_repeat
            for answer, draft in zip(answers, drafts, strict=True)
            for is_repeat in AnswerNgrams(length).repeated(answer.tokens, draft)
        ]
        assert blocked.tolist() == expected
        repeated += sum(map(bool, expected))
        for answer in batch:
            if rng.random() < 0.2:
                del answer.tokens[-2:]
            else:
                answer.tokens += rng.integers(0, 3, rng.integers(1, 6)).tolist()
    assert repeated > 0
