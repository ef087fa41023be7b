"""A request's own options: what is read, what is refused, and how a batch follows them."""

from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from vllm_mars import MarsConfig
from vllm_mars.plugin import check_request
from vllm_mars.requests import thresholds_of
from vllm_mars.requests_v1 import RequestThresholdsV1

RATIO = MarsConfig(theta=0.9, theta_min=0.8)
GAP = MarsConfig(metric="gap", theta=1.0, gap=0.5, gap_max=2.0)


def params(**extra_args):
    return SamplingParams(temperature=0, extra_args=extra_args or None)


def served_with(config):
    """As much of vLLM's config as carries the options."""
    return SimpleNamespace(additional_config={"mars": config.to_json()})


@pytest.mark.parametrize(
    ("config", "extra_args", "expected"),
    [
        (RATIO, {}, (0.9, 0.0)),
        (RATIO, {"mars_theta": 1}, (1.0, 0.0)),
        (RATIO, {"mars_theta": 0.8}, (0.8, 0.0)),
        (RATIO, {"other": "x"}, (0.9, 0.0)),
        (GAP, {}, (1.0, 0.5)),
        (GAP, {"mars_gap": 0}, (1.0, 0.0)),
        (GAP, {"mars_gap": 2}, (1.0, 2.0)),
    ],
)
def test_thresholds(config, extra_args, expected):
    assert thresholds_of(params(**extra_args), config) == expected


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
        (RATIO, {"mars_gap": 1}, "mars_gap belongs to metric 'gap', but this server's is 'ratio'"),
        (GAP, {"mars_theta": 0.9}, "mars_theta belongs to metric 'ratio', but this server's is"),
        (GAP, {"mars_gap": 2.5}, r"mars_gap=2.5 is above this server's limit of 2.0"),
        (GAP, {"mars_gap": -1}, r"mars_gap=-1 is outside \[0, inf\)"),
        (GAP, {"mars_gap": float("inf")}, r"mars_gap=inf is outside \[0, inf\)"),
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


def test_the_lock_holds_for_requests(monkeypatch):
    monkeypatch.setenv("VLLM_MARS_LOCK", "strict")
    strict = MarsConfig(theta=1.0)
    assert thresholds_of(params(mars_theta=1), strict) == (1.0, 0.0)
    with pytest.raises(ValueError, match="mars_theta=0.9 is lossy, but this server is locked"):
        thresholds_of(params(mars_theta=0.9), strict)
    with pytest.raises(ValueError, match="mars_gap=1 is lossy, but this server is locked"):
        thresholds_of(params(mars_gap=1), MarsConfig(metric="gap", theta=1.0))


@pytest.mark.parametrize(("structured", "theta"), [("strict", 1.0), ("relaxed", 0.85)])
def test_structured_output(structured, theta):
    config = MarsConfig(structured=structured)
    constrained = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="a+"), extra_args={"mars_theta": 0.85}
    )
    assert thresholds_of(constrained, config) == (theta, 0.0)


class TestV1Batch:
    """The V1 batch tells what was removed, added and moved."""

    @pytest.fixture
    def batch(self):
        state = RequestThresholdsV1(RATIO, 8, torch.device("cpu"))
        added = [(0, params(), None, []), (1, params(mars_theta=0.8), None, [])]
        state.update_state(BatchUpdate(2, removed=[], added=added, moved=[]))
        return state

    @staticmethod
    def theta(state, size):
        theta, gap = state.of_batch(size)
        assert torch.equal(gap, torch.zeros(size))
        return [round(value, 4) for value in theta.tolist()]

    def test_the_servers_own_stay_floats(self):
        state = RequestThresholdsV1(RATIO, 8, torch.device("cpu"))
        state.update_state(BatchUpdate(1, removed=[], added=[(0, params(), None, [])], moved=[]))
        assert state.of_batch(1) == (0.9, 0.0)

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
        assert batch.of_batch(1) == (0.9, 0.0)

    def test_replaced(self, batch):
        """vLLM does not list a place as removed that a new request takes at once."""
        added = [(1, params(mars_theta=1), None, [])]
        batch.update_state(BatchUpdate(2, removed=[], added=added, moved=[]))
        assert self.theta(batch, 2) == [0.9, 1.0]

    def test_an_earlier_step_keeps_its_values(self, batch):
        theta, _ = batch.of_batch(2)
        added = [(0, params(mars_theta=1), None, [])]
        batch.update_state(BatchUpdate(2, removed=[], added=added, moved=[]))
        batch.of_batch(2)
        assert round(theta[0].item(), 4) == 0.9
