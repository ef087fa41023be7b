"""The offline simulation: hand-computed, and against the samplers on the same drafts."""

import math
from collections import OrderedDict

import pytest
import torch
from torch.utils.hooks import RemovableHandle

from vllm_mars import verify_greedy
from vllm_mars.config import STRICT, Threshold
from vllm_mars.experiments.calibrate.losses import compare
from vllm_mars.experiments.calibrate.offline import Conversation
from vllm_mars.experiments.calibrate.recording import FIELDS, RecordingWorker
from vllm_mars.experiments.calibrate.search import loosest
from vllm_mars.experiments.calibrate.simulate import (
    Point,
    margins,
    point,
    resamples,
    simulate,
    steps_of,
)
from vllm_mars.kernels.reference import top2
from vllm_mars.local.prompts import Prompt

# request, step, position, draft, first, draft logit, first logit, second logit
RECORDS = [
    # accepted; relaxed where 9 > theta * 10; first choice.
    ["a", 0, 0, 5, 5, 8.0, 8.0, 1.0],
    ["a", 0, 1, 7, 8, 9.0, 10.0, 9.0],
    ["a", 0, 2, 3, 3, 6.0, 6.0, 5.9],
    # the draft is third: never relaxed.
    ["b", 1, 0, 1, 2, 4.0, 5.0, 4.9],
    ["b", 1, 1, 2, 2, 5.0, 5.0, 4.9],
    # nothing is relaxed below a first logit of 0 where theta is below 1.
    ["b", 2, 0, 1, 2, -1.1, -1.0, -1.1],
    # a protected token; then padding.
    ["a", 3, 0, 0, 4, 9.9, 10.0, 9.9],
    ["a", 4, 0, 4, 4, 3.0, 3.0, 1.0],
    ["a", 4, 1, -1, 4, -math.inf, 3.0, 2.9],
]
GROUPS = {"a": 0, "b": 1}


@pytest.fixture
def steps():
    # Out of order, and with another request's rows, as a recording may bring them.
    other = ["c", 0, 0, 5, 5, 6, 8.0, 8.0, 1.0, 8.1]
    return steps_of([other, *reversed(RECORDS)], GROUPS, [0])


@pytest.mark.parametrize(
    ("threshold", "accepted", "relaxed", "cost"),
    [
        (STRICT, [1, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
        (Threshold(0.91), [1, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
        (Threshold(0.9), [1, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
        (Threshold(0.89), [3, 0, 0, 0, 1], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]),
        (Threshold(0.01), [3, 0, 0, 0, 1], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]),
        (Threshold(gap=0.5), [1, 0, 1, 0, 1], [0, 0, 1, 0, 0], [0, 0, 0.1, 0, 0]),
        (Threshold(gap=1.5), [3, 0, 1, 0, 1], [1, 0, 1, 0, 0], [1, 0, 0.1, 0, 0]),
        # Two more for a nat, and of any rank; what only breaks even is not bought.
        (Threshold(price=0.5), [1, 0, 1, 0, 1], [0, 0, 1, 0, 0], [0, 0, 0.1, 0, 0]),
        (Threshold(price=0.51), [3, 2, 1, 0, 1], [1, 1, 1, 0, 0], [1, 1, 0.1, 0, 0]),
        (Threshold(price=9.0), [3, 2, 1, 0, 1], [1, 1, 1, 0, 0], [1, 1, 0.1, 0, 0]),
    ],
)
def test_by_hand(steps, threshold, accepted, relaxed, cost):
    outcome = simulate(steps, threshold)
    assert outcome.accepted.tolist() == accepted
    assert outcome.relaxed.tolist() == relaxed
    assert outcome.cost.tolist() == pytest.approx(cost, abs=1e-6)


def test_protection_can_be_off():
    outcome = simulate(steps_of(RECORDS, GROUPS, []), Threshold(0.9))
    assert outcome.relaxed.tolist() == [0, 0, 0, 1, 0]


def test_nothing_recorded():
    with pytest.raises(ValueError, match="no draft token was verified, so there is nothing to"):
        steps_of(RECORDS, {"other": 0}, [])


class Recorder(RecordingWorker):
    """The worker's part without a worker: the runner is all that it looks at."""

    def __init__(self, requests):
        self.model_runner = type("Runner", (), {})()
        self.model_runner.input_batch = type("Batch", (), {"req_ids": requests})()
        self._mars_records, self._mars_step = [], 0
        self._mars_hook = RemovableHandle(OrderedDict())


class Metadata:
    def __init__(self, drafts, counts, rows):
        self.draft_token_ids = drafts
        self.num_draft_tokens = counts
        self.target_logits_indices = rows


@pytest.mark.parametrize("vocab", [5, 111, 4096])
@pytest.mark.parametrize(
    "threshold",
    [
        *(STRICT, Threshold(0.97), Threshold(0.8), Threshold(0.01)),
        *(Threshold(gap=0.3), Threshold(gap=5.0)),
        *(Threshold(price=0.3), Threshold(price=2.0), Threshold(price=100.0)),
    ],
    ids=lambda it: "-".join(f"{value:g}" for value in it),
)
def test_against_the_sampler(vocab, threshold):
    """Recorded in some batches, simulated at once: what the sampler accepts, request by request."""
    generator = torch.Generator().manual_seed(vocab)
    requests = [f"r{i}" for i in range(12)]
    recorder = Recorder(requests)
    expected_accepted, expected_relaxed, expected_loss = [], [], []
    protected = [0]
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[protected] = True
    for batch in range(6):
        counts = torch.randint(0, 5, (len(requests),), generator=generator)
        logits = 4 * torch.randn(int(counts.sum()) + 3, vocab, generator=generator)
        # Ties, rows without a positive logit, and masked rows.
        logits[::5] = logits[::5].round()
        logits[::7] -= 50
        logits[3, 1:] = -torch.inf
        rows = torch.randperm(len(logits), generator=generator)[: int(counts.sum())]
        ids = top2(logits[rows])[1].long()
        choice = torch.rand(len(rows), generator=generator)
        drafts = torch.where(choice < 0.4, ids[:, 0], ids[:, 1])
        drafts[choice > 0.8] = torch.randint(
            vocab, (int((choice > 0.8).sum()),), generator=generator
        )
        drafts[choice > 0.98] = -1
        recorder._mars_look(None, (Metadata(drafts, counts.tolist(), rows), None, logits, None))
        output = verify_greedy(
            logits,
            drafts,
            counts.cumsum(0).int(),
            None,
            threshold.theta,
            gap=threshold.gap,
            price=threshold.price,
            protected=mask,
            target_rows=rows,
        )
        expected_accepted += output.num_accepted[counts > 0].tolist()
        expected_relaxed += output.num_relaxed[counts > 0].tolist()
        expected_loss += output.loss[counts > 0].tolist()
        assert batch or sum(expected_accepted)
    groups = {request: i for i, request in enumerate(requests)}
    outcome = simulate(steps_of(recorder.mars_take_records(), groups, protected), threshold)
    assert outcome.accepted.tolist() == expected_accepted
    assert outcome.relaxed.tolist() == expected_relaxed
    # Each relaxed token's loss is rounded up.
    assert outcome.cost == pytest.approx(expected_loss, abs=1e-3)
    assert (sum(expected_relaxed) > 0) == (threshold != STRICT)
    assert recorder.mars_take_records() == []


def test_the_fields_are_what_is_recorded():
    recorder = Recorder(["x"])
    logits = torch.tensor([[0.0, 3.0, 2.0]])
    metadata = Metadata(torch.tensor([2]), [1], torch.tensor([0]))
    recorder._mars_look(None, (metadata, None, logits, None))
    (row,) = recorder.mars_take_records()
    record = dict(zip(FIELDS, row, strict=True))
    assert record == {
        **{"request": "x", "step": 0, "position": 0, "draft": 2, "first": 1},
        **{"draft_logit": 2.0, "first_logit": 3.0, "second_logit": 2.0},
    }


def test_a_point_of_the_curve(steps):
    strict = point(steps, torch.tensor([20.0, 10.0]).numpy(), 1.0, "ratio")
    assert (strict.cost, strict.high, strict.relaxed) == (0, 0, 0)
    assert strict.acceptance_length == 1 + 2 / 5
    relaxed = point(steps, torch.tensor([20.0, 10.0]).numpy(), 0.85, "ratio")
    # Two more tokens, one nat.
    assert relaxed.cost == pytest.approx(1 / 32, abs=1e-6)
    assert relaxed.relaxed == 1 / 32
    # All of it comes from the first group, so it is above the mean where that is drawn twice.
    assert relaxed.high == pytest.approx(1 / 22, abs=1e-6)
    assert relaxed.acceptance_length == 1 + 4 / 5


def test_margins(steps):
    found = margins(steps, bins=10)
    # Behind the first rejection strict verification does not look: step 1 ends at its first draft.
    assert found["positions"] == [0, 1, 0, 1, 0, 0, 0, 0, 0, 4]
    assert found["runner_up"] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert found["not_positive"] == 1
    assert found["probability_ratio"][0] is None
    assert found["probability_ratio"][1] == pytest.approx(math.exp(-7))


def test_the_loosest_point_has_no_worse_one_behind_it():
    curve = [
        Point(theta, cost=high, high=high, relaxed=0.0, acceptance_length=1.0)
        for theta, high in ((0.5, 0.01), (0.6, 0.03), (0.7, 0.02), (0.8, 0.005), (1.0, 0.0))
    ]
    assert loosest(curve, 0.02).threshold == 0.7
    assert loosest(curve, 0.5).threshold == 0.5
    assert loosest(curve, 0.001).threshold == 1.0


def conversation(name, tokens, nll, cost=0.0, relaxed=0):
    prompt = Prompt(name, "", ("?",))
    return Conversation(prompt, [name + str(cost)], [name], tokens, nll, cost, relaxed)


def test_compare():
    strict = [conversation("a", 100, 50.0), conversation("b", 50, 10.0)]
    relaxed = [conversation("a", 100, 53.0, 2.0, 4), conversation("b", 100, 20.0)]
    candidate = Point(0.8, 0.012, 0.02, 0.03, 2.0)
    found = compare(strict, relaxed, candidate, budget=0.01)
    assert found.nll_increase.value == pytest.approx(73 / 200 - 60 / 150)
    assert found.cost.value == 2 / 200
    assert (found.tokens, found.strict_tokens, found.relaxed, found.changed) == (200, 150, 0.02, 1)
    # Only where "a" is drawn twice, a quarter of the samples, both losses are above 0.01.
    twice = (resamples(2).sum(1) == 0).mean()
    assert found.nll_increase.kept_share == pytest.approx(1 - twice)
    assert found.cost.kept_share == pytest.approx(1 - twice)
    assert not found.kept
    assert (found.nll_increase.high, found.cost.high) == pytest.approx((0.03, 0.02))
