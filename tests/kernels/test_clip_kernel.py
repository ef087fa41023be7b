"""The kernel of the rule for drawn drafts, run by the interpreter, against its torch form."""

import math

import pytest
import torch

import clip_cases
from clip_cases import KEPT
from vllm_mars.kernels.budget import NO_BOUND
from vllm_mars.kernels.constants import C
from vllm_mars.kernels.interface import (
    EngineParams,
    Protected,
    Records,
    SamplingInputs,
    SamplingTensors,
    VerifyInputs,
)
from vllm_mars.kernels.row_stats.fused import reduce_rows
from vllm_mars.kernels.rules import PRICE
from vllm_mars.kernels.served_dist import fused as clip_kernel
from vllm_mars.kernels.served_dist.naive import TOLERANCE

# p = q = 0 behind the vocabulary and where a token is masked: the ratio is replaced.
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow)"),
]
# Multiples of what a price is counted in.
PRICES = (torch.tensor([0.0, 0.05, 0.5, 1.0, 2.0, 1000.0]) * 2**16).round() / 2**16
SLOTS = torch.tensor([3, 5, 0, 4, 2, 1])
DRAWN_AT = torch.tensor([0.7, 1.0, 1.3, 0.9, 1.1, 0.8])


def served(target, draft, found):
    """What the kernel found, as the torch form gives it."""
    # The first five to the base 2.
    log_w, price, log_total, target_lse, draft_lse = math.log(2) * found[:, :5].T[..., None]
    sums = found[:, 5:7].T
    log_p = target.float() - target_lse
    ratio = (draft - draft_lse - log_p).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    ratio = ratio.clamp(log_w, log_w + price) - log_total
    ratio[:, KEPT[KEPT < target.shape[1]]] = 0
    ratio[draft == -math.inf] = 0
    m = torch.where(price > 0, (log_p + ratio).exp(), target.float().softmax(-1))
    return clip_cases.Rows(m, *sums)


def clip_both(target, draft, prices=PRICES):
    """Both forms; their roots may differ by what they may be off by."""
    vocab = draft.shape[1]
    drafts = torch.full((6, 2, vocab + 3), math.nan, dtype=draft.dtype)
    drafts[SLOTS, 0, :vocab] = draft
    found = clip(target, drafts[..., :vocab], prices, torch.ones(6))
    scaled = draft.float() / DRAWN_AT[SLOTS][:, None]
    q = scaled.softmax(-1)
    return served(target, scaled, found), clip_cases.clip_rows(target.float(), q, prices), q


def clip(target, drafts, prices, temperature):
    """What the kernel finds of the rows, each of a request with one draft token."""
    vocab = target.shape[1]
    rows = target.new_full((12, target.stride(0)), math.nan)[:, :vocab]
    rows[::2], ids = target, torch.zeros(12, dtype=torch.int32)
    records = Records.new(6, ids.device)
    records.value[SLOTS] = (prices * 2**16).long()
    records.rate.fill_(NO_BOUND)
    records.max_tokens.fill_(9)
    # Some kept tokens end a request, some are protected, and some both.
    records.stop_ids[:, :2] = KEPT[:2]
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[KEPT[1:][KEPT[1:] < vocab]] = True
    zeros = ids[:6]
    step = VerifyInputs(rows, ids, 2 * torch.arange(1, 7).int(), records, SLOTS, zeros, zeros, 1)
    sampling = SamplingTensors(temperature, zeros.long(), drafts, DRAWN_AT * temperature)
    places = torch.arange(2).repeat(6).int()
    sampling_inputs = SamplingInputs(sampling, ids.long(), SLOTS.repeat_interleave(2), places)
    engine_params = EngineParams(PRICE, Protected.of(mask, mask.device))
    found = clip_kernel.clip_rows(
        reduce_rows(step, engine_params, None, sampling_inputs), sampling_inputs
    )
    return found[:12:2].clone()


@pytest.fixture
def exact(monkeypatch):
    monkeypatch.setattr(clip_kernel, "TOLERANCE", TOLERANCE)


@pytest.mark.parametrize("vocab", [1, 111, 4096, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows(exact, vocab, dtype):
    target, draft = clip_cases.rows(6, vocab, seed=vocab)
    # Rows that start at odd places, with what must not be read between them.
    wide = torch.full((6, vocab + 3), math.nan, dtype=dtype)
    wide[:, :vocab] = target
    target = wide[:, :vocab]
    found, expected, q = clip_both(target, draft.log().clamp(min=-60.0).to(dtype))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-4, equal_nan=True)
    clip_cases.check(found, target.float(), PRICES)


@pytest.mark.parametrize("share", [0.1, 0.83, 1.0])
def test_what_the_draft_cannot_propose(exact, share):
    """Some of it is kept anyway; at last all is, so that nothing is left to gain."""
    target, draft = clip_cases.rows(6, 5000, seed=7)
    is_outside = torch.rand(5000, generator=torch.Generator().manual_seed(1)) < share
    is_outside[17] = False
    draft = draft.log().clamp(min=-60.0).masked_fill(is_outside, -math.inf)
    found, expected, q = clip_both(target, draft)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-4)
    assert torch.equal(q == 0, is_outside.expand(6, -1))
    clip_cases.check(found, target, PRICES, is_outside.nonzero()[:, 0])


def test_rows_of_one_token_and_of_no_numbers(exact):
    target, draft = clip_cases.no_numbers()
    found, expected, _ = clip_both(target, draft.log(), torch.ones(6))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-4, equal_nan=True)


def test_nothing_is_found_of_rows_that_are_not_asked_for(monkeypatch):
    target, draft = clip_cases.rows(6, 50)
    poison = torch.full((256, C.value.NUM_CLIP_STATS), -7.0)
    monkeypatch.setattr(clip_kernel, "_cached_clipped", lambda *_: poison)
    temperature = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    found = clip(target, draft.expand(6, 2, 6, 50)[:, :, 0], PRICES, temperature)
    assert (found == -7.0).all(1).tolist() == (temperature[SLOTS] == 0).tolist()


def test_a_rough_root_keeps_what_is_promised_and_99_percent_of_the_gain():
    gains = []
    for seed in range(4):
        target, draft = clip_cases.rows(6, 2_000, seed=seed)
        prices = torch.full((6,), 0.64)
        found, expected, q = clip_both(target, draft.log().clamp(min=-60.0), prices)
        clip_cases.check(found, target, prices)
        gained = [
            of.m.minimum(q).sum() - target.softmax(-1).minimum(q).sum() for of in (found, expected)
        ]
        losses = [of.losses.sum() for of in (found, expected)]
        gains.append([0.64 * gain - loss for gain, loss in zip(gained, losses, strict=True)])
    rough, exact = torch.tensor(gains).sum(0)
    assert 0.99 * exact < rough < exact
