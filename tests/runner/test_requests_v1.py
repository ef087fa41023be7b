"""How a batch of model runner V1 follows its requests' options, limits, spans and repetition."""

import sys

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from test_requests import PRICE, THETA, params
from vllm_mars import MarsConfig
from vllm_mars.kernels.terms import NO_BOUND, Drafts, Margin, Verdict
from vllm_mars.runner.requests_v1 import RequestsV1


def margin(state, *drafts):
    """What a batch with these drafts may relax."""
    ids = torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32)
    ends = torch.tensor([len(draft) for draft in drafts]).cumsum(0).int()
    return state.margin(Drafts(torch.empty(0, 0), ids, ends))


def lost(*units):
    """What a step lost of each request."""
    return torch.tensor(units)


def thresholds(state, batch):
    """Theta and gap of a batch without drafts."""
    return margin(state, *[[]] * batch)[:2]


def answering(config, *outputs, prompt=None):
    """A batch of up to four requests that have given these outputs so far."""
    state = RequestsV1(config, 4, torch.device("cpu"))
    added = [(place, params(), prompt, output) for place, output in enumerate(outputs)]
    state.update_state(BatchUpdate(len(outputs), removed=[], added=added, moved=[]))
    return state


class TestV1Batch:
    """The V1 batch tells what was removed, added and moved."""

    @pytest.fixture
    def batch(self):
        state = RequestsV1(THETA, 8, torch.device("cpu"))
        added = [(0, params(), None, []), (1, params(mars_theta=0.8), None, [])]
        state.update_state(BatchUpdate(2, removed=[], added=added, moved=[]))
        return state

    @staticmethod
    def theta(state, size):
        theta, gap = thresholds(state, size)
        assert gap == 0
        return [round(value, 4) for value in theta.tolist()]

    def test_the_servers_own_stay_floats(self):
        state = RequestsV1(THETA, 8, torch.device("cpu"))
        state.update_state(BatchUpdate(1, removed=[], added=[(0, params(), None, [])], moved=[]))
        assert thresholds(state, 1) == (0.9, 0.0)

    def test_a_price_stands_in_the_place_of_both(self):
        state = RequestsV1(PRICE, 8, torch.device("cpu"))
        added = [(0, params(), None, []), (1, params(mars_price=0.5), None, [])]
        state.update_state(BatchUpdate(1, removed=[], added=added[:1], moved=[]))
        assert margin(state, []) == Margin(1.0, price=0.25)
        state.update_state(BatchUpdate(2, removed=[], added=added[1:], moved=[]))
        both = margin(state, [], [])
        assert (both.theta, both.gap, both.price.tolist()) == (1.0, 0.0, [0.25, 0.5])

    def test_added(self, batch):
        assert self.theta(batch, 2) == [0.9, 0.8]

    def test_no_change(self, batch):
        batch.update_state(None)
        assert self.theta(batch, 2) == [0.9, 0.8]

    def test_swapped_and_moved(self, batch):
        swap = BatchUpdate(2, removed=[], added=[], moved=[(0, 1, MoveDirectionality.SWAP)])
        batch.update_state(swap)
        assert self.theta(batch, 2) == [0.8, 0.9]
        move = (0, 3, MoveDirectionality.UNIDIRECTIONAL)
        batch.update_state(BatchUpdate(4, removed=[], added=[], moved=[move]))
        assert self.theta(batch, 4) == [0.9, 0.9, 0.9, 0.8]

    def test_removed(self, batch):
        batch.update_state(BatchUpdate(1, removed=[1], added=[], moved=[]))
        assert thresholds(batch, 1) == (0.9, 0.0)

    def test_replaced(self, batch):
        """vLLM does not list a place as removed that a new request takes at once."""
        added = [(1, params(mars_theta=1), None, [])]
        batch.update_state(BatchUpdate(2, removed=[], added=added, moved=[]))
        assert self.theta(batch, 2) == [0.9, 1.0]

    def test_an_earlier_step_keeps_its_values(self, batch):
        theta, _ = thresholds(batch, 2)
        added = [(0, params(mars_theta=1), None, [])]
        batch.update_state(BatchUpdate(2, removed=[], added=added, moved=[]))
        thresholds(batch, 2)
        assert round(theta[0].item(), 4) == 0.9


class TestV1LossBound:
    """Half a nat per token and one beyond; what was lost moves with its request."""

    CONFIG = MarsConfig(max_loss=0.5, loss_burst=1.0)

    def state(self, *outputs, config=CONFIG):
        return answering(config, *outputs)

    @staticmethod
    def lost(state, batch):
        bound = margin(state, *[[]] * batch).loss_budget
        assert bound.rate.dtype == bound.lost.dtype == torch.int64
        assert bound.num_output_tokens.dtype == torch.int32
        return bound.lost.tolist()

    def test_losses_add_up(self):
        output = []
        state = self.state([], output)
        state.spend(lost(70_000, 0))
        # Too many to be counted exactly in float32.
        state.spend(lost(2**40 + 1, 7))
        output += [6, 6, 6]
        bound = margin(state, [], []).loss_budget
        assert self.lost(state, 2) == [2**40 + 70_001, 7]
        assert bound.num_output_tokens.tolist() == [0, 3]
        assert bound.rate.tolist() == [2**29] * 2
        assert bound.burst == 2**16

    def test_a_request_that_comes_back_has_lost_all_that_it_could(self):
        assert self.lost(self.state([1] * 9, []), 2) == [11 * 2**15, 0]

    def test_the_largest_bound_is_one(self):
        config = MarsConfig(max_loss=sys.float_info.max, loss_burst=16384.0)
        bound = margin(self.state([1] * 4, config=config), []).loss_budget
        assert bound.rate.tolist() == [NO_BOUND - 1]
        assert bound.lost.tolist() == [(4 * (NO_BOUND - 1) >> 14) + 2**30]

    def test_swapped_moved_and_replaced(self):
        state = self.state([1], [2], [3])
        before = self.lost(state, 3)[0]
        state.spend(lost(1, 2, 3))
        swap = (0, 1, MoveDirectionality.SWAP)
        move = (2, 3, MoveDirectionality.UNIDIRECTIONAL)
        state.update_state(BatchUpdate(4, removed=[2], added=[], moved=[swap]))
        assert self.lost(state, 2) == [before + 2, before + 1]
        added = [(0, params(), None, [1] * 8)]
        state.update_state(BatchUpdate(4, removed=[], added=added, moved=[move]))
        assert self.lost(state, 4) == [10 * 2**15, before + 1, before + 3, before + 3]

    def test_a_bound_of_one_request_binds_no_other(self):
        told = []
        state = RequestsV1(THETA, 4, torch.device("cpu"), need_output_tokens=told.append)
        free, bound = (0, params(), None, [1] * 5), (1, params(mars_max_loss=0.25), None, [])
        state.update_state(BatchUpdate(1, removed=[], added=[free], moved=[]))
        assert margin(state, []).loss_budget is None
        state.spend(lost(5))
        state.update_state(BatchUpdate(2, removed=[], added=[bound], moved=[]))
        assert margin(state, [], []).loss_budget.rate.tolist() == [NO_BOUND, 2**28]
        state.spend(lost(5, 6))
        assert self.lost(state, 2) == [5, 6]
        state.update_state(BatchUpdate(1, removed=[1], added=[], moved=[]))
        assert margin(state, []).loss_budget is None
        # Not what the request lost that had this place before.
        state.update_state(BatchUpdate(2, removed=[], added=[bound], moved=[]))
        assert self.lost(state, 2) == [0, 0]
        assert told == [False, True, False, True]

    def test_the_shadow_mode_is_not_bound(self):
        state = self.state([], config=MarsConfig(shadow=(0.9,), max_loss=0.0))
        assert margin(state, []).loss_budget is None


class TestV1Sections:
    """Strict positions of a draft, by the tokens before it: 8 opens a strict span, 9 closes it."""

    CONFIG = MarsConfig(strict_spans=((8, 9),))

    @staticmethod
    def blocked(state, *drafts):
        return margin(state, *drafts).blocked

    def test_spans_of_prompt_output_and_draft(self):
        state = RequestsV1(self.CONFIG, 4, torch.device("cpu"))
        output = []
        added = [(0, params(), [1, 8], output), (1, params(), [1, 8, 9], [])]
        state.update_state(BatchUpdate(2, removed=[], added=added, moved=[]))
        span = int(Verdict.SPAN)
        found = self.blocked(state, [3, 9, 3], [8, 3])
        assert found.tolist() == [span, span, 0, 0, span]
        assert found.dtype == torch.int8
        output += [4, 9, 4]
        assert self.blocked(state, [3], []).tolist() == [0]
        output += [8]
        assert self.blocked(state, [3], [3]).tolist() == [span, 0]

    def test_structured_requests_are_strict_throughout(self):
        state = RequestsV1(MarsConfig(), 4, torch.device("cpu"))
        constrained = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
        added = [(0, params(), [1], []), (1, constrained, [1], [])]
        state.update_state(BatchUpdate(2, removed=[], added=added, moved=[]))
        structured = int(Verdict.STRUCTURED)
        assert self.blocked(state, [3], [3, 4]).tolist() == [0, structured, structured]

    def test_nothing_is_blocked_where_nothing_can_be(self):
        state = RequestsV1(MarsConfig(), 4, torch.device("cpu"))
        state.update_state(BatchUpdate(1, removed=[], added=[(0, params(), [8], [])], moved=[]))
        assert self.blocked(state, [3]) is None


class TestV1RepeatGuard:
    """No draft token completes a pair of tokens that its answer holds."""

    SPAN, REPEAT = int(Verdict.SPAN), int(Verdict.REPEAT)

    @staticmethod
    def state(*outputs, **options):
        return answering(MarsConfig(repeat_guard=2, **options), *outputs, prompt=[1, 2, 3])

    def test_the_answer_is_followed_and_the_prompt_may_be_copied(self):
        output = []
        state = self.state(output, [1, 2, 7, 1])
        assert state.needs_output_tokens
        found = margin(state, [1, 2, 3, 1, 2], [2, 7, 3]).blocked
        assert found.tolist() == [0, 0, 0, 0, self.REPEAT, *[self.REPEAT] * 2, 0]
        assert found.dtype == torch.int8
        output += [5, 6]
        assert margin(state, [5], []).blocked.tolist() == [0]
        output += [5]
        assert margin(state, [6, 5, 6], []).blocked.tolist() == [self.REPEAT] * 3

    def test_ngrams_move_with_their_request(self):
        state = self.state([5, 6, 5], [8, 9, 8])
        margin(state, [6], [9])
        swap = BatchUpdate(2, removed=[], added=[], moved=[(0, 1, MoveDirectionality.SWAP)])
        state.update_state(swap)
        assert margin(state, [6], [9]).blocked.tolist() == [0, 0]
        assert margin(state, [9], [6]).blocked.tolist() == [self.REPEAT] * 2
        added = [(0, params(), None, [])]
        state.update_state(BatchUpdate(2, removed=[], added=added, moved=[]))
        assert margin(state, [9], [6]).blocked.tolist() == [0, self.REPEAT]

    def test_another_reason_stays(self):
        state = self.state([5, 6, 5], strict_spans=((6, None),))
        # The span is open from the answer on.
        assert margin(state, [6, 5]).blocked.tolist() == [self.SPAN] * 2

    def test_off(self):
        state = RequestsV1(MarsConfig(theta=0.5), 4, torch.device("cpu"))
        assert not state.needs_output_tokens
        assert margin(state, [5, 5, 5, 5, 5]).blocked is None
