"""Strict spans and the thinking section: the walk by hand."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_mars import MarsConfig
from vllm_mars.kernels.terms import THINKING
from vllm_mars.runner.sections import Sections


def strictness(config, *tokens, state=0):
    """Whether each of some tokens is verified strictly, and the state after them."""
    walk, found = Sections(config), []
    for token in tokens:
        found.append(walk.is_strict(state))
        state = walk.advance(state, [token])
    return found, state


def test_a_span_is_strict_up_to_and_with_its_end():
    config = MarsConfig(strict_spans=((1, 2),))
    found, state = strictness(config, 9, 1, 9, 2, 9)
    assert found == [False, False, True, True, False]
    assert state == 0


def test_only_its_own_end_closes_a_span():
    config = MarsConfig(strict_spans=((1, 2), (3, 4)))
    assert strictness(config, 1, 4, 3, 9, 2, 9)[0] == [False, True, True, True, True, False]


def test_one_token_can_open_and_close():
    assert strictness(MarsConfig(strict_spans=((5, 5),)), 5, 9, 5, 9)[0] == [
        False,
        True,
        True,
        False,
    ]


def test_a_span_without_an_end_lasts():
    assert strictness(MarsConfig(strict_spans=((6, None),)), 6, 1, 2, 6)[0][1:] == [True] * 3


def test_two_spans_may_share_their_end():
    config = MarsConfig(strict_spans=((1, 9), (2, 9)))
    assert strictness(config, 2, 9, 1, 9, 0)[0] == [False, True, False, True, False]


def test_only_thinking_is_relaxed():
    config = MarsConfig(scope="reasoning", thinking=(7, 8))
    found, _ = strictness(config, 0, 7, 0, 8, 0)
    assert found == [True, True, False, False, True]
    # A prompt that ends in the start marker.
    assert strictness(config, 0, 8, 0, state=THINKING)[0] == [False, False, True]


def test_a_span_is_strict_inside_the_thinking_section_too():
    config = MarsConfig(scope="reasoning", thinking=(7, 8), strict_spans=((1, 2),))
    assert strictness(config, 7, 0, 1, 0, 2, 0)[0] == [True, False, False, True, True, False]


def test_nothing_is_strict_without_sections():
    assert not Sections(MarsConfig())
    assert Sections(MarsConfig(strict_spans=((1, 2),)))


@given(
    tokens=st.lists(st.integers(0, 12), min_size=65, max_size=300),
    scope=st.sampled_from(["all", "reasoning"]),
    state=st.sampled_from([0, 1, THINKING, THINKING + 3]),
)
def test_a_long_prompt_leads_where_its_tokens_lead_one_by_one(tokens, scope, state):
    spans = ((1, 2), (3, 4), (5, 5), (6, None))
    walk = Sections(MarsConfig(strict_spans=spans, scope=scope, thinking=(7, 8)))
    expected = state
    for token in tokens:
        expected = walk.advance(expected, [token])
    assert walk.advance(state, tokens) == expected
