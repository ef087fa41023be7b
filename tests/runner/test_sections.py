"""Strict spans and the thinking section: the walk by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mars import MarsConfig
from vllm_mars.kernels import terms
from vllm_mars.kernels.terms import THINKING
from vllm_mars.runner.sections import Sections


def strictness(config, *tokens, state=None):
    """Whether each of some tokens is verified strictly, and the state after them."""
    walk, found = Sections(config), []
    state = walk.begin(()) if state is None else state
    for token in tokens:
        found.append(walk.is_strict(state))
        state = walk.advance(state, [token])
    return found, state


ONE = ((1, 2),)
THINK = {"scope": "reasoning", "thinking": (7, 8)}
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
    "only thinking is relaxed":    (THINK, [0, 7, 0, 8, 0], [1, 1, 0, 0, 1]),
    "a span ends thinking":        ({**THINK, "strict_spans": ONE},
                                    [7, 0, 1, 0, 2, 0, 7, 0], [1, 0, 0, 1, 1, 1, 1, 0]),
    "an opening":                  (OPENING, [9, 9, 9, 8], [1, 1, 0, 0]),
    "another behind thinking":     ({**OPENING, "thinking": (7, 8)},
                                    [7, 9, 9, 8, 9, 9, 9], [1, 1, 0, 0, 1, 1, 0]),
    "a span in an opening":        ({**OPENING, "strict_spans": ONE},
                                    [1, 9, 9, 2, 9], [1, 1, 1, 1, 0]),
}
# fmt: on


@pytest.mark.parametrize("name", WALKS)
def test_by_hand(name):
    options, tokens, strict = WALKS[name]
    assert strictness(MarsConfig(**options), *tokens)[0] == list(map(bool, strict))


def test_states():
    """After a span, and where a prompt ends in the start marker of thinking."""
    assert strictness(MarsConfig(strict_spans=ONE), 9, 1, 9, 2, 9)[1] == 0
    assert strictness(MarsConfig(**THINK), 0, 8, 0, state=THINKING)[0] == [False, False, True]


# fmt: off
# 5 stands between turns; 1 and 2, 7 and 8 mark a span and the thinking.
PROMPTS = {
    "typed by a user":             ([9, 1, 9, 7, 9, 5, 9], 0),
    "an earlier answer, cut off":  ([5, 7, 9, 5, 9], 0),
    "opened for this answer":      ([5, 9, 5, 9, 7, 9], THINKING),
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
        config = MarsConfig(**THINK, strict_spans=ONE, strict_opening=opening)
        begun = Sections(config, frozenset({5})).begin(prompt)
        assert begun == state + opening * terms.OPENING


def test_nothing_is_strict_without_sections():
    assert not Sections(MarsConfig())
    assert Sections(MarsConfig(strict_spans=((1, 2),)))
    assert Sections(MarsConfig(strict_opening=1))


@given(
    tokens=st.lists(st.integers(0, 12), min_size=65, max_size=300),
    scope=st.sampled_from(["all", "reasoning"]),
    state=st.sampled_from([0, 1, THINKING, THINKING + 3, 9 * terms.OPENING]),
    opening=st.sampled_from([0, 9, 100]),
)
def test_a_long_prompt_leads_where_its_tokens_lead_one_by_one(tokens, scope, state, opening):
    spans = ((1, 2), (3, 4), (5, 5), (6, None))
    given = {"strict_spans": spans, "scope": scope, "strict_opening": opening}
    walk = Sections(MarsConfig(**given, thinking=(7, 8)))
    state = min(state, opening * terms.OPENING) if state >= terms.OPENING else state
    expected = state
    for token in tokens:
        expected = walk.advance(expected, [token])
    assert walk.advance(state, tokens) == expected
