"""Strict spans and openings, and where an answer may repeat itself: by hand and by brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mars import MarsConfig
from vllm_mars.kernels import terms
from vllm_mars.runner.strictness import AnswerNgrams, Sections


def strictness(config, *tokens, state=None):
    """Whether each of some tokens is verified strictly, and the state after them."""
    walk, found = Sections(config), []
    state = walk.begin(()) if state is None else state
    for token in tokens:
        found.append(walk.is_strict(state))
        state = walk.advance(state, [token])
    return found, state


ONE = ((1, 2),)
OPENING = {"strict_opening": 2}
# fmt: off
WALKS = {
    # name: (options, tokens, whether each is verified strictly)
    "up to and with its end":      ({"strict_spans": ONE}, [9, 1, 9, 2, 9], [0, 0, 1, 1, 0]),
    "closed by its own end alone": ({"strict_spans": ((1, 2), (3, 4))},
                                    [1, 4, 3, 9, 2, 9], [0, 1, 1, 1, 1, 0]),
    "one token opens and closes":  ({"strict_spans": ((5, 5),)}, [5, 9, 5, 9], [0, 1, 1, 0]),
    "without an end":              ({"strict_spans": ((6, None),)}, [6, 1, 2, 6], [0, 1, 1, 1]),
    "two share their end":         ({"strict_spans": ((1, 9), (2, 9))},
                                    [2, 9, 1, 9, 0], [0, 1, 0, 1, 0]),
    "an opening":                  (OPENING, [9, 9, 9, 8], [1, 1, 0, 0]),
    "another behind thinking":     ({**OPENING, "thinking_end": 8},
                                    [7, 9, 9, 8, 9, 9, 9], [1, 1, 0, 0, 1, 1, 0]),
    "a span in an opening":        ({**OPENING, "strict_spans": ONE},
                                    [1, 9, 9, 2, 9], [1, 1, 1, 1, 0]),
}
# fmt: on


@pytest.mark.parametrize("name", WALKS)
def test_by_hand(name):
    options, tokens, strict = WALKS[name]
    found, _ = strictness(MarsConfig(**{"strict_opening": 0, **options}), *tokens)
    assert found == list(map(bool, strict))


# fmt: off
# 5 stands between turns; 1 and 2, 7 and 8 mark spans.
PROMPTS = {
    "typed by a user":             ([9, 1, 9, 7, 9, 5, 9], 0),
    "an earlier answer, cut off":  ([5, 7, 9, 5, 9], 0),
    "opened for this answer":      ([5, 9, 5, 9, 7, 9], 2),
    "a call that was begun":       ([5, 9, 5, 9, 1, 9], 1),
    "opened and closed":           ([5, 9, 5, 7, 9, 8], 0),
    "without turns":               ([9, 9, 1, 9], 0),
    "a first token alone":         ([5, 9, 1, 9], 0),
    "empty":                       ([], 0),
}
# fmt: on


@pytest.mark.parametrize("name", PROMPTS)
def test_what_a_prompt_opens(name):
    prompt, state = PROMPTS[name]
    for opening in (0, 3):
        config = MarsConfig(strict_spans=((1, 2), (7, 8)), strict_opening=opening)
        begun = Sections(config, frozenset({5})).begin(prompt)
        assert begun == state + opening * terms.OPENING


def test_nothing_is_strict_without_sections():
    assert not Sections(MarsConfig(theta=0.9))
    assert Sections(MarsConfig(strict_spans=((1, 2),)))
    assert Sections(MarsConfig(strict_opening=1))


@given(
    tokens=st.lists(st.integers(0, 12), min_size=65, max_size=300),
    state=st.sampled_from([0, 1, 3, 9 * terms.OPENING]),
    opening=st.sampled_from([0, 9, 100]),
)
def test_a_long_prompt_leads_where_its_tokens_lead_one_by_one(tokens, state, opening):
    spans = ((1, 2), (3, 4), (5, 5), (6, None))
    walk = Sections(MarsConfig(strict_spans=spans, strict_opening=opening, thinking_end=8))
    state = min(state, opening * terms.OPENING) if state >= terms.OPENING else state
    expected = state
    for token in tokens:
        expected = walk.advance(expected, [token])
    assert walk.advance(state, tokens) == expected


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
def test_repeats(length, answer, draft, expected):
    assert AnswerNgrams(length, samples=False).repeated(answer, draft) == expected
    assert repeats(length, False, answer, draft) == expected


def test_repeats_where_a_request_samples():
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
