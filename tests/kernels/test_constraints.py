"""Strict spans, openings, scopes and repeated n-grams: by hand and by brute force."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mars import MarsConfig
from vllm_mars.kernels.constraints.markers import IN_ANSWER, IN_THINKING, THINKING, MarkerTracker
from vllm_mars.kernels.constraints.markers import OPENING as OPENING_UNIT
from vllm_mars.kernels.constraints.naive import NgramIndex, cpu_constraints
from vllm_mars.kernels.interface import MAX_FOLLOWERS, Verdict


def strictness(config, *tokens, scope=0):
    tracker, strict = MarkerTracker(config), []
    state = tracker.initial_state(())
    for token in tokens:
        strict.append(tracker.reason(state, scope) != 0)
        state = tracker.advance(state, [token])
    return strict


ONE = ((1, 2),)
OPENING = {"strict_opening": 2}
# fmt: off
WALKS = {
    # name: (options, tokens, whether each is verified strictly)
    "up to and with its end":      ({"strict_spans": ONE}, [9, 1, 9, 2, 9], [0, 0, 1, 1, 0]),
    "closed only by its end":      ({"strict_spans": ((1, 2), (3, 4))},
                                    [1, 4, 3, 9, 2, 9], [0, 1, 1, 1, 1, 0]),
    "one token opens and closes":  ({"strict_spans": ((5, 5),)}, [5, 9, 5, 9], [0, 1, 1, 0]),
    "without an end":              ({"strict_spans": ((6, None),)}, [6, 1, 2, 6], [0, 1, 1, 1]),
    "two share their end":         ({"strict_spans": ((1, 9), (2, 9))},
                                    [2, 9, 1, 9, 0], [0, 1, 0, 1, 0]),
    "an opening":                  (OPENING, [9, 9, 9, 8], [1, 1, 0, 0]),
    "another after thinking":      ({**OPENING, "thinking_end": 8},
                                    [7, 9, 9, 8, 9, 9, 9], [1, 1, 0, 0, 1, 1, 0]),
    "a span in an opening":        ({**OPENING, "strict_spans": ONE},
                                    [1, 9, 9, 2, 9], [1, 1, 1, 1, 0]),
}
# fmt: on


@pytest.mark.parametrize("name", WALKS)
def test_spans_and_openings_are_strict(name):
    options, tokens, strict = WALKS[name]
    config = MarsConfig(**{"strict_opening": 0, **options})
    assert strictness(config, *tokens) == list(map(bool, strict))


# 7 and 8 begin and end thinking.
@pytest.mark.parametrize(
    ("scope", "strict"),
    [
        (0, [0, 0, 0, 0, 0, 0, 0, 0]),
        (IN_THINKING, [1, 1, 0, 0, 0, 1, 1, 1]),
        (IN_ANSWER, [0, 0, 1, 1, 1, 0, 0, 0]),
    ],
)
def test_tokens_outside_the_scope_are_strict(scope, strict):
    thinking = {"thinking_start": 7, "thinking_end": 8}
    config = MarsConfig(strict_opening=0, **thinking)
    assert strictness(config, 9, 7, 9, 9, 8, 9, 8, 9, scope=scope) == list(map(bool, strict))
    # The reasons of the opening after thinking, and of a span in it, take precedence.
    tracker = MarkerTracker(MarsConfig(strict_opening=1, strict_spans=((1, 2),), **thinking))
    reasons = [*tracker.blocked(tracker.initial_state(()), [7, 1, 9, 2, 9, 8, 9, 9], scope)]
    in_thinking = Verdict.SCOPE * (scope == IN_ANSWER)
    in_answer = Verdict.SCOPE * (scope == IN_THINKING)
    expected = [Verdict.OPENING, in_thinking, Verdict.SPAN, Verdict.SPAN, in_thinking, in_thinking]
    assert reasons == [*expected, Verdict.OPENING, in_answer]


# fmt: off
# 5 ends a message, 6 is another special token; (1, 2) and (7, 8) mark spans.
PROMPTS = {
    "typed by a user":             ([9, 1, 9, 7, 9, 5, 9], 0),
    "an earlier answer, cut off":  ([5, 7, 9, 5, 9], 0),
    "opened for this answer":      ([5, 9, 5, 9, 7, 9], 2),
    "a call that was begun":       ([5, 9, 5, 9, 1, 9], 1),
    "with a separator":            ([5, 9, 5, 9, 1, 9, 6, 9], 1),
    "the last of several":         ([5, 7, 9, 8, 1, 2, 7], 2),
    "opened and closed":           ([5, 9, 5, 7, 9, 8], 0),
    "without turns":               ([9, 9, 1, 9], 1),
    "only its start":              ([7], 2),
    "after a first token":         ([5, 1, 9], 1),
    "empty":                       ([], 0),
}
# fmt: on
TURNS = {"turns": (5,)}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_opens_spans_and_thinking(name):
    prompt, state = PROMPTS[name]
    for opening in (0, 3):
        config = MarsConfig(strict_spans=((1, 2), (7, 8)), strict_opening=opening, **TURNS)
        assert MarkerTracker(config).initial_state(prompt) == state + opening * OPENING_UNIT
    config = MarsConfig(strict_opening=0, thinking_start=7, thinking_end=8, **TURNS)
    assert MarkerTracker(config).initial_state(prompt) == THINKING * (state == 2)


# fmt: off
UNKNOWN = {
    "without a marker":              ([5, 9], True),
    "opened":                        ([5, 1, 9], False),
    "opened and closed":             ([1, 9, 2, 9], True),
    "closed by another's end":       ([1, 9, 4], False),
    "each closed":                   ([3, 1, 2, 4], True),
    "opened and closed by one":      ([5, 10, 9, 10], False),
    "never closed":                  ([11, 9], False),
    "thinking":                      ([7, 9], False),
    "thinking that has ended":       ([7, 9, 8], True),
    "far back":                      ([1, *[9] * 10_000], False),
}
# fmt: on


@pytest.mark.parametrize("name", UNKNOWN)
def test_without_turns_a_prompts_open_spans_may_be_unknown(name):
    prompt, known = UNKNOWN[name]
    options = {"strict_spans": ((1, 2), (3, 4), (10, 10), (11, None)), "strict_opening": 0}
    config = MarsConfig(**options, thinking_start=7, thinking_end=8)
    tracker = MarkerTracker(config)
    assert tracker.is_known(prompt) == known
    # Brute force: a known prompt has nothing open, wherever its last message begins.
    starts = range(min(len(prompt), 20))
    assert not known or all(tracker.advance(0, prompt[start:]) == 0 for start in starts)
    assert MarkerTracker(replace(config, turns=())).is_known(prompt)
    # A prompt of embeddings is unknown.
    assert not MarkerTracker(replace(config, turns=())).is_known(None)
    assert MarkerTracker(MarsConfig(strict_opening=3)).is_known(None)


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 12), min_size=65, max_size=300),
    state=st.sampled_from([0, 1, 3, THINKING, THINKING + 1, 9 * OPENING_UNIT]),
    opening=st.sampled_from([0, 9, 100]),
)
def test_advancing_at_once_equals_advancing_token_by_token(tokens, state, opening):
    spans = ((1, 2), (3, 4), (5, 5), (6, None))
    thinking = {"thinking_start": 7, "thinking_end": 8}
    tracker = MarkerTracker(MarsConfig(strict_spans=spans, strict_opening=opening, **thinking))
    state = min(state, opening * OPENING_UNIT) if state >= OPENING_UNIT else state
    expected = state
    for token in tokens:
        expected = tracker.advance(expected, [token])
    assert tracker.advance(state, tokens) == expected


# A small vocabulary, so that n-grams repeat; -1 is padding.
TOKENS = st.lists(st.integers(-1, 2), max_size=12)


def repeated(length, answer, draft):
    """Brute force: tokens that complete an earlier n-gram of each length, at each position."""
    completions = []
    for position in range(len(draft)):
        before = [*answer, *draft[:position]]
        by_length = []
        for n in range(2, min(length, len(before) + 1) + 1):
            ngrams = [before[start : start + n] for start in range(len(before) - n + 1)]
            prefix = before[len(before) - n + 1 :]
            by_length.append({ngram[-1] for ngram in ngrams if ngram[:-1] == prefix})
        completions.append(by_length)
    return completions


@pytest.mark.parametrize(
    ("answer", "draft", "expected"),
    [
        # "2 3" was followed by 4 and by 5, and "1 2 3" only by 4.
        ([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], [7], [[{4, 5}, {4, 5}, {4}]]),
        # Within one draft, and overlapping.
        ([], [7, 8, 7, 8], [[], [set()], [set(), set()], [{8}, set(), set()]]),
        ([5], [5, 5, 6], [[set()], [{5}, set()], [{5}, {5}, set()]]),
        # Nothing follows the answer's end.
        ([1, 2], [3], [[set(), set()]]),
        ([], [], []),
    ],
)
def test_repeated_ngrams(answer, draft, expected):
    assert [*NgramIndex(4).before(answer, draft)] == expected == repeated(4, answer, draft)


@settings(deadline=None)
@given(st.integers(2, 5), st.lists(st.tuples(TOKENS, TOKENS), max_size=5))
def test_the_index_equals_brute_force_as_the_answer_grows(length, steps):
    index, answer = NgramIndex(length), []
    for new, draft in steps:
        answer += new
        assert [*index.before(answer, draft)] == repeated(length, answer, draft)


def test_the_index_forgets_tokens_that_vllm_takes_back():
    index, answer = NgramIndex(2), [1, 2, 3, 1]
    assert [*index.before(answer, [9])] == [[{2}]]
    del answer[1:]
    assert [*index.before(answer, [9])] == [[set()]]


def test_the_index_forgets_tokens_that_have_left_its_window():
    index = NgramIndex(3, window=4)
    # The 1 of "1 2 3" has left the window, so 3 completes only an n-gram of 2 tokens.
    assert [*index.before([1, 2, 3, 1, 2], [9])] == [[{3}, set()]]


@pytest.mark.parametrize(
    ("is_sampled", "draft", "expected"),
    [
        # A sampled request preserves every follower.
        (True, 4, (0, True, {4, 5})),
        (True, 9, (0, False, {4, 5})),
        # 4 completes an n-gram of 4 tokens, and no other token does.
        (False, 4, (0, True, {4})),
        # 5 completes 3 tokens, and may be relaxed if the argmax is 4, which completes as many.
        (False, 5, (0, True, {4, 5})),
        (False, 9, (0, False, set())),
    ],
)
def test_constraints_of_repeated_ngrams(is_sampled, draft, expected):
    repeats = NgramIndex(4).before([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], [draft])
    ((reason, does_repeat, listed),) = cpu_constraints([0], [draft], repeats, is_sampled)
    assert (reason, does_repeat, {*listed}) == expected


@pytest.mark.parametrize("reason", [Verdict.NONE, Verdict.SPAN])
@pytest.mark.parametrize("is_sampled", [False, True])
def test_too_many_followers_make_a_position_strict(is_sampled, reason):
    for count in (MAX_FOLLOWERS, MAX_FOLLOWERS + 1):
        answer = [token for other in range(count) for token in (7, 100 + other)]
        repeats = NgramIndex(4).before([*answer, 7], [100])
        ((blocked, does_repeat, listed),) = cpu_constraints([reason], [100], repeats, is_sampled)
        fits = count == MAX_FOLLOWERS
        assert (blocked, does_repeat) == (reason or Verdict.REPEAT * (not fits), True)
        assert len(listed) == count * fits
