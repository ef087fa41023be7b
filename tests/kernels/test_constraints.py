"""Strict spans and openings, and what would repeat an answer: by hand and by brute force."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mars import MarsConfig
from vllm_mars.kernels.constraints.markers import IN_ANSWER, IN_THINKING, THINKING, MarkerTracker
from vllm_mars.kernels.constraints.markers import OPENING as OPENING_UNIT
from vllm_mars.kernels.constraints.naive import NgramIndex, cpu_constraints
from vllm_mars.kernels.interface import MAX_FOLLOWERS, Verdict


def strictness(config, *tokens, state=None, scope=0):
    """Whether each of some tokens is verified strictly, and the state after them."""
    walk, found = MarkerTracker(config), []
    state = walk.initial_state(()) if state is None else state
    for token in tokens:
        found.append(walk.is_strict(state, scope))
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


# 7 and 8 begin and end the thinking.
@pytest.mark.parametrize(
    ("scope", "strict"),
    [
        (0, [0, 0, 0, 0, 0, 0, 0, 0]),
        (IN_THINKING, [1, 1, 0, 0, 0, 1, 1, 1]),
        (IN_ANSWER, [0, 0, 1, 1, 1, 0, 0, 0]),
    ],
)
def test_outside_the_scope(scope, strict):
    config = MarsConfig(strict_opening=0, thinking_start=7, thinking_end=8)
    found, _ = strictness(config, 9, 7, 9, 9, 8, 9, 8, 9, scope=scope)
    assert found == list(map(bool, strict))
    # The opening behind the thinking, and a span within it, keep their own reasons.
    both = {"strict_opening": 1, "strict_spans": ((1, 2),)}
    walk = MarkerTracker(MarsConfig(**both, thinking_start=7, thinking_end=8))
    reasons = [*walk.blocked(walk.initial_state(()), [7, 1, 9, 2, 9, 8, 9, 9], scope)]
    outside = [Verdict.SCOPE * (scope == own) for own in (IN_ANSWER, IN_THINKING)]
    inside = outside[0]
    expected = [Verdict.OPENING, inside, Verdict.SPAN, Verdict.SPAN, inside, inside]
    assert reasons == [*expected, Verdict.OPENING, outside[1]]


# fmt: off
# 5 ends a message, 6 is another special token; 1 and 2, 7 and 8 mark spans.
PROMPTS = {
    "typed by a user":             ([9, 1, 9, 7, 9, 5, 9], 0),
    "an earlier answer, cut off":  ([5, 7, 9, 5, 9], 0),
    "opened for this answer":      ([5, 9, 5, 9, 7, 9], 2),
    "a call that was begun":       ([5, 9, 5, 9, 1, 9], 1),
    "with a separator":            ([5, 9, 5, 9, 1, 9, 6, 9], 1),
    "the last of several":         ([5, 7, 9, 8, 1, 2, 7], 2),
    "opened and closed":           ([5, 9, 5, 7, 9, 8], 0),
    "without turns":               ([9, 9, 1, 9], 1),
    "with its start alone":        ([7], 2),
    "behind a first token":        ([5, 1, 9], 1),
    "empty":                       ([], 0),
}
# fmt: on
TURNS = {"turns": (5,)}


@pytest.mark.parametrize("name", PROMPTS)
def test_what_a_prompt_opens(name):
    prompt, state = PROMPTS[name]
    for opening in (0, 3):
        config = MarsConfig(strict_spans=((1, 2), (7, 8)), strict_opening=opening, **TURNS)
        begun = MarkerTracker(config).initial_state(prompt)
        assert begun == state + opening * OPENING_UNIT


@pytest.mark.parametrize("name", PROMPTS)
def test_whether_an_answer_begins_thinking(name):
    prompt, state = PROMPTS[name]
    config = MarsConfig(strict_opening=0, thinking_start=7, thinking_end=8, **TURNS)
    assert MarkerTracker(config).initial_state(prompt) == THINKING * (state == 2)


@pytest.mark.parametrize("back", [0, 1, 63, 64, 254, 255, 256, 1_000, 10_000])
@pytest.mark.parametrize("before", [[], [5], [9] * 300, [7, 9, 5, 9], [5, 9, 8, 1, 2]])
@pytest.mark.parametrize("separators", [False, True])
def test_what_is_open_stays_open_however_long_ago(back, before, separators):
    """Behind a message's end or none, over other special tokens, and over spans of another kind."""
    spans = ((7, 8), (10, 11))
    section = {"thinking_start": 1, "thinking_end": 2}
    walk = MarkerTracker(MarsConfig(strict_spans=spans, strict_opening=0, **section, **TURNS))
    text = [6 if separators and place % 50 == 0 else 9 for place in range(back)]
    assert walk.initial_state([*before, 10, *text]) == 2
    assert walk.initial_state([*before, 10, 7, *text, 8]) == 2
    assert walk.initial_state([*before, 1, *text]) == THINKING
    assert walk.initial_state([*before, 1, 10, *text]) == 2 + THINKING
    assert walk.initial_state([*before, 10, *text, 11]) == 0
    assert walk.initial_state([*before, 1, *text, 2]) == 0
    assert walk.initial_state([*before, 10, *text, 5]) == 0


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
def test_whether_it_is_known_what_a_prompt_has_opened(name):
    prompt, known = UNKNOWN[name]
    options = {"strict_spans": ((1, 2), (3, 4), (10, 10), (11, None)), "strict_opening": 0}
    config = MarsConfig(**options, thinking_start=7, thinking_end=8)
    walk = MarkerTracker(config)
    assert walk.is_known(prompt) == known
    # By brute force: nothing is open, wherever the last message begins.
    nothing = all(walk.advance(0, prompt[at:]) == 0 for at in range(min(len(prompt), 20)))
    assert nothing or not known
    assert MarkerTracker(replace(config, turns=())).is_known(prompt)
    # An embedding may be anything.
    assert not MarkerTracker(replace(config, turns=())).is_known(None)
    assert MarkerTracker(MarsConfig(strict_opening=3)).is_known(None)


def test_nothing_is_strict_without_sections():
    assert not MarkerTracker(MarsConfig(theta=0.9))
    assert MarkerTracker(MarsConfig(strict_spans=((1, 2),)))
    assert MarkerTracker(MarsConfig(strict_opening=1))
    # A request may have a scope.
    assert MarkerTracker(MarsConfig(theta=0.9, thinking_start=7, thinking_end=8))


@given(
    tokens=st.lists(st.integers(0, 12), min_size=65, max_size=300),
    state=st.sampled_from([0, 1, 3, THINKING, THINKING + 1, 9 * OPENING_UNIT]),
    opening=st.sampled_from([0, 9, 100]),
)
def test_a_long_prompt_leads_where_its_tokens_lead_one_by_one(tokens, state, opening):
    spans = ((1, 2), (3, 4), (5, 5), (6, None))
    thinking = {"thinking_start": 7, "thinking_end": 8}
    walk = MarkerTracker(MarsConfig(strict_spans=spans, strict_opening=opening, **thinking))
    state = min(state, opening * OPENING_UNIT) if state >= OPENING_UNIT else state
    expected = state
    for token in tokens:
        expected = walk.advance(expected, [token])
    assert walk.advance(state, tokens) == expected


# Few kinds of tokens, so that much repeats; -1 is padding.
TOKENS = st.lists(st.integers(-1, 2), max_size=12)


def repeated(length, answer, draft):
    """The definition, token by token: what completes an n-gram of each length, at each position."""
    found = []
    for position in range(len(draft)):
        before = [*answer, *draft[:position]]
        by_length = []
        for n in range(2, min(length, len(before) + 1) + 1):
            ngrams = [before[at : at + n] for at in range(len(before) - n + 1)]
            by_length.append({it[-1] for it in ngrams if it[:-1] == before[len(before) - n + 1 :]})
        found.append(by_length)
    return found


@pytest.mark.parametrize(
    ("answer", "draft", "expected"),
    [
        # "2 3" was followed by 4 and by 5, and "1 2 3" by 4 alone.
        ([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], [7], [[{4, 5}, {4, 5}, {4}]]),
        # Within one draft, and overlapping.
        ([], [7, 8, 7, 8], [[], [set()], [set(), set()], [{8}, set(), set()]]),
        ([5], [5, 5, 6], [[set()], [{5}, set()], [{5}, {5}, set()]]),
        # Nothing stands behind the answer's end.
        ([1, 2], [3], [[set(), set()]]),
        ([], [], []),
    ],
)
def test_what_would_repeat(answer, draft, expected):
    assert [*NgramIndex(4).before(answer, draft)] == expected == repeated(4, answer, draft)


@given(st.integers(2, 5), st.lists(st.tuples(TOKENS, TOKENS), max_size=5))
def test_equals_brute_force_as_the_answer_grows(length, steps):
    followers, answer = NgramIndex(length), []
    for new, draft in steps:
        answer += new
        assert [*followers.before(answer, draft)] == repeated(length, answer, draft)


def test_tokens_that_vllm_takes_back_are_forgotten():
    followers, answer = NgramIndex(2), [1, 2, 3, 1]
    assert [*followers.before(answer, [9])] == [[{2}]]
    del answer[1:]
    assert [*followers.before(answer, [9])] == [[set()]]


def test_what_the_window_has_left_is_forgotten():
    followers = NgramIndex(3, window=4)
    # Of "1 2 3" the 1 has left the window, so that 3 completes an n-gram of 2 tokens alone.
    assert [*followers.before([1, 2, 3, 1, 2], [9])] == [[{3}, set()]]


@pytest.mark.parametrize(
    ("samples", "draft", "expected"),
    [
        # All that followed keep their probability.
        (True, 4, (0, True, {4, 5})),
        (True, 9, (0, False, {4, 5})),
        # It completes 4 tokens, as no other does.
        (False, 4, (0, True, {4})),
        # It completes 3 tokens; beside 4, which completes as many, it may be relaxed.
        (False, 5, (0, True, {4, 5})),
        (False, 9, (0, False, set())),
    ],
)
def test_what_the_guard_asks(samples, draft, expected):
    repeats = NgramIndex(4).before([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], [draft])
    ((reason, does_repeat, listed),) = cpu_constraints([0], [draft], repeats, samples)
    assert (reason, does_repeat, {*listed}) == expected


@pytest.mark.parametrize("reason", [Verdict.NONE, Verdict.SPAN])
@pytest.mark.parametrize("samples", [False, True])
def test_more_followers_than_can_be_listed(samples, reason):
    for count in (MAX_FOLLOWERS, MAX_FOLLOWERS + 1):
        answer = [token for other in range(count) for token in (7, 100 + other)]
        repeats = NgramIndex(4).before([*answer, 7], [100])
        (found,) = cpu_constraints([reason], [100], repeats, samples)
        fits = count == MAX_FOLLOWERS
        assert found[:2] == (reason or Verdict.REPEAT * (not fits), True)
        assert len(found[2]) == count * fits
