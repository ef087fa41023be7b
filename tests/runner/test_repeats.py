"""Where an answer may repeat itself: by hand, and by brute force as it grows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mars.runner.repeats import AnswerNgrams

# Few kinds of tokens, so that much repeats; -1 is padding.
TOKENS = st.lists(st.integers(-1, 2), max_size=12)


def repeats(length, samples, answer, draft):
    """The definition, token by token."""
    found = []
    for position in range(len(draft)):
        before = [*answer, *draft[:position]]
        last = [*before, draft[position]][-length:]
        held = [before[end - length : end] for end in range(length, len(before) + 1)]
        if samples:
            # Whatever follows.
            last, held = last[:-1], [ngram[:-1] for ngram in held]
        found.append(len(last) == length - samples and last in held)
    return found


@pytest.mark.parametrize(
    ("length", "answer", "draft", "expected"),
    [
        (4, [1, 2, 3, 4, 9, 1, 2, 3], [4, 5], [True, False]),
        (4, [1, 2, 3, 4, 9], [1, 2, 3, 4], [False, False, False, True]),
        # Within one draft, and overlapping.
        (2, [], [7, 8, 7, 8], [False, False, False, True]),
        (2, [5], [5, 5, 5], [False, True, True]),
        # The end of the answer with the draft is no n-gram that it holds.
        (3, [1, 2], [3], [False]),
        (2, [], [], []),
    ],
)
def test_by_hand(length, answer, draft, expected):
    assert AnswerNgrams(length, samples=False).repeated(answer, draft) == expected
    assert repeats(length, False, answer, draft) == expected


def test_by_hand_where_a_request_samples():
    """What follows three tokens that were there before, whatever it is."""
    ngrams = AnswerNgrams(4, samples=True)
    assert ngrams.repeated([1, 2, 3, 4, 9, 1, 2, 3], [7, 5]) == [True, False]
    # That they end the answer is not enough.
    assert ngrams.repeated([1, 2, 3], [1, 2, 3, 4]) == [False, False, False, True]


@given(st.integers(2, 5), st.booleans(), st.lists(st.tuples(TOKENS, TOKENS), max_size=5))
def test_equals_brute_force_as_the_answer_grows(length, samples, steps):
    ngrams, answer = AnswerNgrams(length, samples), []
    for new, draft in steps:
        answer += new
        assert ngrams.repeated(answer, draft) == repeats(length, samples, answer, draft)


def test_tokens_that_vllm_takes_back_are_forgotten():
    ngrams = AnswerNgrams(2, samples=False)
    answer = [1, 2, 3, 4]
    assert ngrams.repeated(answer, [3, 4]) == [False, True]
    del answer[2:]
    assert ngrams.repeated(answer, [3, 4]) == [False, False]
