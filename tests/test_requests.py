"""A request's own options: what is read, what is refused, and how a batch follows them."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from vllm_mars import MarsConfig
from vllm_mars.config import OPTION, STRICT, Threshold, split_speculative_config
from vllm_mars.engine.options import check_request
from vllm_mars.kernels.terms import NO_BOUND, Drafts, Margin, Verdict
from vllm_mars.local.drafts import CHOSEN_BY_REQUESTS
from vllm_mars.requests import RequestOptions, in_force, options_of
from vllm_mars.runner.requests_v1 import RequestsV1

RATIO = MarsConfig(theta=0.9, theta_min=0.8)
GAP = MarsConfig(metric="gap", theta=1.0, gap=0.5, gap_max=2.0)
PRICE = MarsConfig(metric="price", price=0.25, price_max=0.5, repeat_guard=0)
BOUND = MarsConfig(max_loss=0.5)


def params(**extra_args):
    return SamplingParams(temperature=0, extra_args=extra_args or None)


def served_with(config):
    """As much of vLLM's config as carries the options."""
    return SimpleNamespace(additional_config={"mars": config.to_json()})


@pytest.mark.parametrize(
    ("config", "extra_args", "expected"),
    [
        (RATIO, {}, (0.9, 0.0, 0.0)),
        (RATIO, {"mars_theta": 1}, (1.0, 0.0, 0.0)),
        (RATIO, {"mars_theta": 0.8}, (0.8, 0.0, 0.0)),
        # Without a limit a request may be stricter than the server.
        (MarsConfig(theta=0.9), {"mars_theta": 0.95}, (0.95, 0.0, 0.0)),
        (MarsConfig(theta=0.9), {"mars_theta": 0.9}, (0.9, 0.0, 0.0)),
        (MarsConfig(metric="gap", gap=0.5), {"mars_gap": 0.5}, (1.0, 0.5, 0.0)),
        (MarsConfig(metric="price", price=0.25), {"mars_price": 0.25}, (1.0, 0.0, 0.25)),
        (RATIO, {"other": "x"}, (0.9, 0.0, 0.0)),
        (GAP, {}, (1.0, 0.5, 0.0)),
        (GAP, {"mars_gap": 0}, (1.0, 0.0, 0.0)),
        (GAP, {"mars_gap": 2}, (1.0, 2.0, 0.0)),
        (PRICE, {}, (1.0, 0.0, 0.25)),
        (PRICE, {"mars_price": 0}, (1.0, 0.0, 0.0)),
        (PRICE, {"mars_price": 0.5}, (1.0, 0.0, 0.5)),
    ],
)
def test_thresholds(config, extra_args, expected):
    assert options_of(params(**extra_args), config).threshold == expected


@pytest.mark.parametrize(
    ("config", "extra_args", "message"),
    [
        (RATIO, {"mars_theta": 0}, r"mars_theta=0 is outside \(0, 1\]; 1 switches the relaxation"),
        (RATIO, {"mars_theta": -1}, r"mars_theta=-1 is outside \(0, 1\]"),
        (RATIO, {"mars_theta": 2.0}, r"mars_theta=2.0 is outside \(0, 1\]"),
        (RATIO, {"mars_theta": float("nan")}, r"mars_theta=nan is outside \(0, 1\]"),
        (RATIO, {"mars_theta": 2**63}, r"mars_theta=9223372036854775808 is outside \(0, 1\]"),
        (RATIO, {"mars_theta": "x"}, "mars_theta='x' is a str, but must be a number"),
        (RATIO, {"mars_theta": [0.9]}, r"mars_theta=\[0.9\] is a list, but must be a number"),
        (RATIO, {"mars_theta": True}, "mars_theta=True is a bool, but must be a number"),
        (RATIO, {"mars_theta": None}, "mars_theta=None is a NoneType, but must be a number"),
        (RATIO, {"mars_theta": 0.7}, r"below this server's limit of 0.8; choose .* \[0.8, 1\]"),
        (RATIO, {"mars_tehta": 0.9}, "mars_tehta is not an option of a request; .* mars_theta?"),
        (RATIO, {"mars_return": 2}, "mars_return=2 is not true or false"),
        (RATIO, {"mars_return": "yes"}, "mars_return='yes' is not true or false"),
        (RATIO, {"mars_speculate": None}, "mars_speculate=None is not .*; false answers without"),
        (
            RATIO,
            {"mars_gap": 1},
            "mars_gap=1 belongs to mars_metric='gap', but this server's is 'ratio'; "
            "choose mars_theta or leave it out",
        ),
        (
            GAP,
            {"mars_theta": 0.9},
            "mars_theta=0.9 belongs to mars_metric='ratio', but this server's is 'gap'; "
            "choose mars_gap or leave it out",
        ),
        (GAP, {"mars_gap": 2.5}, r"mars_gap=2.5 is above this server's limit of 2.0"),
        (PRICE, {"mars_price": 0.75}, r"mars_price=0.75 is above this server's limit of 0.5"),
        (
            MarsConfig(theta=0.9),
            {"mars_theta": 0.89},
            r"mars_theta=0.89 is below this server's own 0.9, but a request may only be stricter "
            r"than its server; choose a value in \[0.9, 1\], or have the server started with "
            "mars_theta_min",
        ),
        (
            MarsConfig(metric="gap", gap=0.5),
            {"mars_gap": 0.6},
            r"mars_gap=0.6 is above this server's own 0.5, .* in \[0, 0.5\], or .* mars_gap_max",
        ),
        (
            MarsConfig(metric="price", price=0.25),
            {"mars_price": 0.3},
            r"mars_price=0.3 is above this server's own 0.25, .* 0.25\], or .* mars_price_max",
        ),
        (MarsConfig(theta=1.0), {"mars_theta": 0.99}, r"this server's own 1.0, .* in \[1.0, 1\]"),
        (PRICE, {"mars_price": -1}, r"mars_price=-1 is outside \[0, inf\)"),
        (
            PRICE,
            {"mars_theta": 0.9},
            "mars_theta=0.9 belongs to mars_metric='ratio', but this server's is 'price'; "
            "choose mars_price or leave it out",
        ),
        (GAP, {"mars_gap": -1}, r"mars_gap=-1 is outside \[0, inf\)"),
        (GAP, {"mars_gap": float("inf")}, r"mars_gap=inf is outside \[0, inf\)"),
        (BOUND, {"mars_max_loss": 0.75}, r"mars_max_loss=0.75 is above this server's bound of 0.5"),
        (RATIO, {"mars_max_loss": -1}, r"mars_max_loss=-1 is outside \[0, inf\); leave it out"),
        (RATIO, {"mars_max_loss": float("inf")}, r"mars_max_loss=inf is outside \[0, inf\)"),
        (RATIO, {"mars_max_loss": float("nan")}, r"mars_max_loss=nan is outside \[0, inf\)"),
        (RATIO, {"mars_max_loss": "x"}, "mars_max_loss='x' is a str, but must be a number"),
        (RATIO, {"mars_loss_burst": 1}, "mars_loss_burst is not an option of a request"),
        (MarsConfig(client_control=False), {"mars_max_loss": 0}, "mars_max_loss: this server does"),
        (
            MarsConfig(client_control=False),
            {"mars_theta": 1},
            "this server does not let requests choose their verification",
        ),
    ],
)
def test_refused(config, extra_args, message):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=message) as raised:
        check_request(params(**extra_args), served_with(config))
    assert raised.value.parameter == "vllm_xargs"


def test_a_server_whose_requests_choose_allows_everything():
    for metric, option in OPTION.items():
        config, _ = split_speculative_config(CHOSEN_BY_REQUESTS[metric])
        assert config.clients_may_relax and not config.lossy
        for value in (1e-6, 1.0) if metric == "ratio" else (0.0, 1000.0):
            chosen = options_of(params(**{option: value}), config).threshold
            assert chosen.value(metric) == value


def test_a_bound_is_the_servers_or_a_smaller_one():
    assert options_of(params(), RATIO).max_loss == math.inf
    assert options_of(params(mars_max_loss=7), RATIO).max_loss == 7
    assert options_of(params(), BOUND).max_loss == 0.5
    assert options_of(params(mars_max_loss=0.5), BOUND).max_loss == 0.5
    assert options_of(params(mars_max_loss=0), BOUND).max_loss == 0


def test_the_lock_holds_for_requests(monkeypatch):
    from vllm.exceptions import VLLMValidationError

    monkeypatch.setenv("VLLM_MARS_LOCK", "strict")
    strict = MarsConfig(theta=1.0)
    assert options_of(params(mars_theta=1), strict).threshold.theta == 1
    loose = MarsConfig(theta=1.0, theta_min=0.5), MarsConfig(metric="gap", theta=1.0, gap_max=2.0)
    for config, chosen in zip(loose, ({"mars_theta": 0.9}, {"mars_gap": 1}), strict=True):
        ((key, value),) = chosen.items()
        message = f"{key}={value} is lossy, but this server is locked"
        with pytest.raises(VLLMValidationError, match=message):
            check_request(params(**chosen), served_with(config))
        # In an engine whose front end is not locked.
        assert options_of(params(**chosen), config).threshold == STRICT
    check_request(params(mars_theta=1), served_with(strict))


@pytest.mark.parametrize(("structured", "is_strict"), [("strict", True), ("relaxed", False)])
def test_structured_output(structured, is_strict):
    config = MarsConfig(theta=0.85, structured=structured)
    constrained = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="a+"), extra_args={"mars_theta": 0.85}
    )
    options = options_of(constrained, config)
    assert options == RequestOptions(Threshold(0.85), is_structured=is_strict)
    assert in_force(options, config) == {"theta": 1.0 if is_strict else 0.85}


def test_options_are_parsed_once_until_they_change():
    request = params(mars_theta=0.85)
    options = options_of(request, RATIO)
    assert options_of(request, RATIO) is options
    request.extra_args["mars_theta"] = 0.95
    assert options_of(request, RATIO).threshold.theta == 0.95
    request.structured_outputs = StructuredOutputsParams(regex="a+")
    assert options_of(request, RATIO).is_structured
    with pytest.raises(ValueError, match="below this server's limit of 0.97"):
        options_of(request, MarsConfig(theta_min=0.97))


def test_what_is_in_force():
    assert in_force(options_of(params(), RATIO), RATIO) == {"theta": 0.9}
    assert in_force(options_of(params(mars_gap=1), GAP), GAP) == {"gap": 1.0}
    assert in_force(options_of(params(), PRICE), PRICE) == {"price": 0.25}
    shadow = MarsConfig(theta=0.9, shadow=True)
    assert in_force(options_of(params(mars_theta=0.95), shadow), shadow) == {"theta": 1.0}


@pytest.mark.parametrize(("value", "wanted"), [(True, True), (1, True), (False, False), (0, False)])
def test_return_is_asked_for(value, wanted):
    # Where clients may not choose their verification they may still ask what it did.
    closed = MarsConfig(client_control=False)
    assert options_of(params(mars_return=value), closed).wants_return == wanted


@pytest.mark.parametrize(("own", "drafted"), [({}, True), ({"mars_speculate": 0}, False)])
def test_drafts_may_be_declined(own, drafted):
    assert options_of(params(**own), RATIO).speculates == drafted


def margin(state, *drafts):
    """What a batch with these drafts may relax."""
    ids = torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32)
    ends = torch.tensor([len(draft) for draft in drafts]).cumsum(0).int()
    return state.margin(Drafts(torch.empty(0, 0), ids, ends))


def spent(*num_relaxed, lost=()):
    """What a step relaxed of each request, and what that lost."""
    lost = lost or [0] * len(num_relaxed)
    return torch.tensor(num_relaxed, dtype=torch.int32), torch.tensor(lost)


def thresholds(state, batch):
    """Theta and gap of a batch without drafts."""
    return margin(state, *[[]] * batch)[:2]


class TestV1Batch:
    """The V1 batch tells what was removed, added and moved."""

    @pytest.fixture
    def batch(self):
        state = RequestsV1(RATIO, 8, torch.device("cpu"))
        added = [(0, params(), None, []), (1, params(mars_theta=0.8), None, [])]
        state.update_state(BatchUpdate(2, removed=[], added=added, moved=[]))
        return state

    @staticmethod
    def theta(state, size):
        theta, gap = thresholds(state, size)
        assert torch.equal(gap, torch.zeros(size))
        return [round(value, 4) for value in theta.tolist()]

    def test_the_servers_own_stay_floats(self):
        state = RequestsV1(RATIO, 8, torch.device("cpu"))
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


class TestV1Budget:
    """No more than a quarter of a request's tokens; what was relaxed moves with its request."""

    CONFIG = MarsConfig(max_relaxed_share=0.25)

    def state(self, *outputs, config=CONFIG):
        state = RequestsV1(config, 4, torch.device("cpu"))
        added = [(place, params(), None, output) for place, output in enumerate(outputs)]
        state.update_state(BatchUpdate(len(outputs), removed=[], added=added, moved=[]))
        return state

    @staticmethod
    def budget(state, batch):
        budget = margin(state, *[[]] * batch).budget
        assert budget.num_relaxed.dtype == budget.num_output_tokens.dtype == torch.int32
        return budget.num_relaxed.tolist(), budget.num_output_tokens.tolist()

    def test_counts_follow_the_output(self):
        output = [5, 5]
        state = self.state([], output)
        state.spend(*spent(3, 1))
        output += [6, 6, 6]
        assert self.budget(state, 2) == ([3, 1], [0, 5])

    def test_a_request_that_comes_back_has_used_its_budget_up(self):
        assert self.budget(self.state([1] * 9, []), 2) == ([2, 0], [9, 0])

    def test_swapped_moved_and_replaced(self):
        state = self.state([1], [2], [3])
        state.spend(*spent(1, 2, 3))
        swap = (0, 1, MoveDirectionality.SWAP)
        move = (2, 3, MoveDirectionality.UNIDIRECTIONAL)
        state.update_state(BatchUpdate(4, removed=[2], added=[], moved=[swap]))
        assert self.budget(state, 2)[0] == [2, 1]
        added = [(0, params(), None, [1] * 8)]
        state.update_state(BatchUpdate(4, removed=[], added=added, moved=[move]))
        assert self.budget(state, 4)[0] == [2, 1, 3, 3]

    def test_without_a_budget_nothing_is_kept(self):
        state = RequestsV1(RATIO, 2, torch.device("cpu"))
        state.spend(*spent(3))
        assert margin(state, [])[-3:-1] == (None, None)

    def test_the_shadow_mode_has_none(self):
        state = self.state([], config=MarsConfig(shadow=True, max_relaxed_share=0.25))
        assert margin(state, []).budget is None
        assert not state.needs_output_tokens


class TestV1LossBound:
    """Half a nat per token and one beyond; what was lost moves with its request."""

    CONFIG = MarsConfig(max_loss=0.5, loss_burst=1.0)

    def state(self, *outputs, config=CONFIG):
        state = RequestsV1(config, 4, torch.device("cpu"))
        added = [(place, params(), None, output) for place, output in enumerate(outputs)]
        state.update_state(BatchUpdate(len(outputs), removed=[], added=added, moved=[]))
        return state

    @staticmethod
    def lost(state, batch):
        bound = margin(state, *[[]] * batch).loss_budget
        assert bound.rate.dtype == bound.lost.dtype == torch.int64
        assert bound.num_output_tokens.dtype == torch.int32
        return bound.lost.tolist()

    def test_losses_add_up(self):
        output = []
        state = self.state([], output)
        state.spend(*spent(1, 0, lost=(70_000, 0)))
        # Too many to be counted exactly in float32.
        state.spend(*spent(1, 1, lost=(2**40 + 1, 7)))
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
        state.spend(*spent(1, 1, 1, lost=(1, 2, 3)))
        swap = (0, 1, MoveDirectionality.SWAP)
        move = (2, 3, MoveDirectionality.UNIDIRECTIONAL)
        state.update_state(BatchUpdate(4, removed=[2], added=[], moved=[swap]))
        assert self.lost(state, 2) == [before + 2, before + 1]
        added = [(0, params(), None, [1] * 8)]
        state.update_state(BatchUpdate(4, removed=[], added=added, moved=[move]))
        assert self.lost(state, 4) == [10 * 2**15, before + 1, before + 3, before + 3]

    def test_a_bound_of_one_request_binds_no_other(self):
        told = []
        state = RequestsV1(RATIO, 4, torch.device("cpu"), need_output_tokens=told.append)
        free, bound = (0, params(), None, [1] * 5), (1, params(mars_max_loss=0.25), None, [])
        state.update_state(BatchUpdate(1, removed=[], added=[free], moved=[]))
        assert margin(state, []).loss_budget is None
        state.spend(*spent(1, lost=(5,)))
        state.update_state(BatchUpdate(2, removed=[], added=[bound], moved=[]))
        assert margin(state, [], []).loss_budget.rate.tolist() == [NO_BOUND, 2**28]
        state.spend(*spent(1, 1, lost=(5, 6)))
        assert self.lost(state, 2) == [5, 6]
        state.update_state(BatchUpdate(1, removed=[1], added=[], moved=[]))
        assert margin(state, []).loss_budget is None
        # Not what the request lost that had this place before.
        state.update_state(BatchUpdate(2, removed=[], added=[bound], moved=[]))
        assert self.lost(state, 2) == [0, 0]
        assert told == [False, True, False, True]

    def test_the_shadow_mode_is_not_bound(self):
        state = self.state([], config=MarsConfig(shadow=True, max_loss=0.0))
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
        state = RequestsV1(MarsConfig(repeat_guard=2, **options), 4, torch.device("cpu"))
        added = [(place, params(), [1, 2, 3], output) for place, output in enumerate(outputs)]
        state.update_state(BatchUpdate(len(outputs), removed=[], added=added, moved=[]))
        return state

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
