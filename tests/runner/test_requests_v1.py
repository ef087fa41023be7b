"""How a batch of model runner V1 follows its requests' options, limits, spans and repetition."""

import math
import sys

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from test_requests import PRICE, THETA, params
from vllm_mars import MarsConfig
from vllm_mars.kernels.terms import NO_BOUND, Drafts, Records, Verdict
from vllm_mars.runner.records import GREEDY_C2, SAMPLED_C2, price_scale
from vllm_mars.runner.requests_v1 import RequestsV1


def step(state, *drafts):
    """What a batch with these drafts brings: its requests, and why positions are strict."""
    ids = torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32)
    ends = torch.tensor([len(draft) for draft in drafts]).cumsum(0).int()
    return state.step(Drafts(torch.empty(0, 0), ids, ends))


def records(state, batch):
    """The records of the first requests, each field by place; and their slots."""
    requests, _ = step(state, *[[]] * batch)
    slots = requests.slots.long()
    return Records(*(values[slots] for values in requests.records)), slots


def values(state, batch):
    return [round(value, 4) for value in records(state, batch)[0].threshold.tolist()]


def change(state, size, removed=(), added=(), moved=()):
    """Tells the state of a change: `added` are places with parameters and outputs."""
    new = [(place, params, None, output) for place, params, output in added]
    state.update_state(BatchUpdate(size, removed=list(removed), added=new, moved=list(moved)))


def answering(config, *outputs, prompt=None):
    """A batch of up to four requests that have given these outputs so far."""
    state = RequestsV1(config, 4, torch.device("cpu"))
    added = [(place, params(), prompt, output) for place, output in enumerate(outputs)]
    state.update_state(BatchUpdate(len(outputs), removed=[], added=added, moved=[]))
    return state


SWAP = (0, 1, MoveDirectionality.SWAP)


class TestV1Batch:
    """The V1 batch tells what was removed, added and moved; records stay, the index follows."""

    @pytest.fixture
    def batch(self):
        state = RequestsV1(THETA, 8, torch.device("cpu"))
        change(state, 2, added=[(0, params(), []), (1, params(mars_theta=0.8), [])])
        return state

    def test_added(self, batch):
        assert values(batch, 2) == [0.9, 0.8]
        batch.update_state(None)
        assert values(batch, 2) == [0.9, 0.8]

    def test_swapped_and_moved(self, batch):
        before = records(batch, 2)[1]
        change(batch, 2, moved=[SWAP])
        assert values(batch, 2) == [0.8, 0.9]
        assert records(batch, 2)[1].tolist() == before.flip(0).tolist()
        change(batch, 4, moved=[(0, 3, MoveDirectionality.UNIDIRECTIONAL)])
        assert values(batch, 4) == [0.9, 0.9, 0.9, 0.8]

    def test_removed_and_replaced(self, batch):
        change(batch, 1, removed=[1])
        assert values(batch, 1) == [0.9]
        # vLLM does not list a place as removed that a new request takes at once.
        change(batch, 2, added=[(0, params(mars_theta=1), []), (1, params(), [])])
        assert values(batch, 2) == [1.0, 0.9]
        assert len(set(records(batch, 2)[1].tolist())) == 2

    def test_a_full_batch_has_a_record_for_each(self):
        state = RequestsV1(THETA, 4, torch.device("cpu"))
        for _ in range(3):
            change(state, 4, added=[(place, params(), []) for place in range(4)])
            assert sorted(records(state, 4)[1].tolist()) == [0, 1, 2, 3]

    def test_an_earlier_step_keeps_its_slots(self, batch):
        before, _ = step(batch, [], [])
        slots = before.slots.tolist()
        change(batch, 2, moved=[SWAP])
        assert before.slots.tolist() == slots

    def test_a_price_and_one_that_follows_the_bound(self):
        state = RequestsV1(PRICE, 8, torch.device("cpu"))
        change(state, 2, added=[(0, params(), []), (1, params(mars_price=0.5), [])])
        assert records(state, 2)[0].price.tolist() == [2**14, 2**15]
        assert not records(state, 2)[0].price_scale.any()
        state = RequestsV1(MarsConfig(max_loss=0.5), 8, torch.device("cpu"))
        sampled = SamplingParams(temperature=1.0)
        own = [(0, params(), []), (1, params(mars_price=0.25), []), (2, sampled, [])]
        change(state, 3, added=[*own, (3, params(mars_max_loss=0), [])])
        found, _ = records(state, 4)
        assert found.price.tolist() == [0, 2**14, 0, 0]
        rate, burst = 2**29, 2**17
        scales = [price_scale(GREEDY_C2, rate, burst), 0, price_scale(SAMPLED_C2, rate, burst), 0]
        assert found.price_scale.tolist() == scales
        # c * sqrt(b * left / B), with all of the burst left.
        price = math.isqrt(scales[0] * burst) * 2**-16
        assert price == pytest.approx(math.sqrt(GREEDY_C2 * 0.5), rel=1e-3)


class TestV1LossBound:
    """Half a nat per token and one beyond; what was lost stays with its request."""

    CONFIG = MarsConfig(theta=0.9, max_loss=0.5, loss_burst=1.0)

    @staticmethod
    def lost(state, batch):
        return records(state, batch)[0].lost.tolist()

    @staticmethod
    def lose(state, *units):
        requests, _ = step(state, *[[]] * len(units))
        requests.records.lost[requests.slots.long()] += torch.tensor(units)

    def test_what_the_record_says(self):
        output = []
        state = answering(self.CONFIG, [], output)
        self.lose(state, 70_000, 0)
        # Too many to be counted exactly in float32.
        self.lose(state, 2**40 + 1, 7)
        output += [6, 6, 6]
        assert self.lost(state, 2) == [2**40 + 70_001, 7]
        assert step(state, [], [])[0].produced.tolist() == [0, 3]
        assert records(state, 2)[0].rate.tolist() == [2**29] * 2

    def test_a_request_that_comes_back_has_lost_all_that_it_could(self):
        assert self.lost(answering(self.CONFIG, [1] * 9, []), 2) == [11 * 2**15, 0]

    def test_the_largest_bound_is_one(self):
        config = MarsConfig(theta=0.9, max_loss=sys.float_info.max, loss_burst=16384.0)
        state = answering(config, [1] * 4)
        assert records(state, 1)[0].rate.tolist() == [NO_BOUND - 1]
        assert self.lost(state, 1) == [(4 * (NO_BOUND - 1) >> 14) + 2**30]

    def test_swapped_moved_and_replaced(self):
        state = answering(self.CONFIG, [1], [2], [3])
        before = self.lost(state, 3)[0]
        self.lose(state, 1, 2, 3)
        change(state, 4, removed=[2], moved=[SWAP])
        assert self.lost(state, 2) == [before + 2, before + 1]
        change(state, 4, added=[(0, params(), [1] * 8)])
        assert self.lost(state, 2) == [10 * 2**15, before + 1]

    def test_a_bound_of_one_request_binds_no_other(self):
        told = []
        state = RequestsV1(THETA, 4, torch.device("cpu"), need_output_tokens=told.append)
        bound = (1, params(mars_max_loss=0.25), [])
        change(state, 1, added=[(0, params(), [1] * 5)])
        change(state, 2, added=[bound])
        assert records(state, 2)[0].rate.tolist() == [NO_BOUND, 2**28]
        self.lose(state, 5, 6)
        change(state, 1, removed=[1])
        # Not what the request lost that had this place before.
        change(state, 2, added=[bound])
        assert self.lost(state, 2) == [5, 0]
        assert told == [False, True, False, True]

    def test_the_shadow_mode_is_strict(self):
        state = answering(MarsConfig(price=0.5, shadow=(0.9,), max_loss=0.1), [])
        assert records(state, 1)[0].price.tolist() == [0]


class TestV1Sections:
    """Strict positions of a draft, by the tokens before it: 8 opens a strict span, 9 closes it."""

    CONFIG = MarsConfig(strict_spans=((8, 9),))

    @staticmethod
    def blocked(state, *drafts):
        return step(state, *drafts)[1]

    def test_spans_of_prompt_output_and_draft(self):
        state = RequestsV1(self.CONFIG, 4, torch.device("cpu"))
        output = []
        added = [(0, params(), [1, 8], output), (1, params(), [1, 8, 9], [])]
        state.update_state(BatchUpdate(2, removed=[], added=added, moved=[]))
        span = int(Verdict.SPAN)
        assert self.blocked(state, [3, 9, 3], [8, 3]) == [span, span, 0, 0, span]
        output += [4, 9, 4]
        assert self.blocked(state, [3], []) == [0]
        output += [8]
        assert self.blocked(state, [3], [3]) == [span, 0]

    def test_structured_requests_are_strict_throughout(self):
        state = RequestsV1(MarsConfig(), 4, torch.device("cpu"))
        constrained = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
        added = [(0, params(), [1], []), (1, constrained, [1], [])]
        state.update_state(BatchUpdate(2, removed=[], added=added, moved=[]))
        structured = int(Verdict.STRUCTURED)
        assert self.blocked(state, [3], [3, 4]) == [0, structured, structured]

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
        found = step(state, [1, 2, 3, 1, 2], [2, 7, 3])[1]
        assert found == [0, 0, 0, 0, self.REPEAT, *[self.REPEAT] * 2, 0]
        output += [5, 6]
        assert step(state, [5], [])[1] == [0]
        output += [5]
        assert step(state, [6, 5, 6], [])[1] == [self.REPEAT] * 3

    def test_tokens_that_are_taken_back_are_forgotten(self):
        """As after a failed load of the KV cache."""
        output = [5, 8, 6]
        state = answering(MarsConfig(repeat_guard=2, strict_spans=((8, 9),)), output)
        assert step(state, [7])[1] == [self.SPAN]
        del output[1:]
        assert step(state, [7, 8])[1] == [0, 0]
        output += [6]
        assert step(state, [5, 6])[1] == [0, self.REPEAT]

    def test_ngrams_move_with_their_request(self):
        state = self.state([5, 6, 5], [8, 9, 8])
        step(state, [6], [9])
        swap = BatchUpdate(2, removed=[], added=[], moved=[(0, 1, MoveDirectionality.SWAP)])
        state.update_state(swap)
        assert step(state, [6], [9])[1] == [0, 0]
        assert step(state, [9], [6])[1] == [self.REPEAT] * 2
        added = [(0, params(), None, [])]
        state.update_state(BatchUpdate(2, removed=[], added=added, moved=[]))
        assert step(state, [9], [6])[1] == [0, self.REPEAT]

    def test_another_reason_stays(self):
        state = self.state([5, 6, 5], strict_spans=((6, None),))
        # The span is open from the answer on.
        assert step(state, [6, 5])[1] == [self.SPAN] * 2

    def test_off(self):
        state = RequestsV1(MarsConfig(theta=0.5), 4, torch.device("cpu"))
        assert not state.needs_output_tokens
        assert step(state, [5, 5, 5, 5, 5])[1] is None
