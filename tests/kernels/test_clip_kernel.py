"""The clip kernel of probabilistic drafts in the interpreter, against the torch reference."""

import math

import pytest
import torch

import clip_cases
from clip_cases import PRESERVED
from vllm_mars.kernels.budget import NO_BOUND
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

# p = q = 0 past the vocabulary and for masked tokens, whose ratio the kernel replaces.
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow)"),
]
# Multiples of the unit of prices, 2**-16.
PRICES = (torch.tensor([0.0, 0.05, 0.5, 1.0, 2.0, 1000.0]) * 2**16).round() / 2**16
SLOTS = torch.tensor([3, 5, 0, 4, 2, 1])
DRAFT_TEMPERATURE = torch.tensor([0.7, 1.0, 1.3, 0.9, 1.1, 0.8])


def served(target, draft, stats):
    """Converts the kernel's statistics to the reference's results."""
    # The first five are base-2 logarithms.
    log_w, price, log_total, target_lse, draft_lse = math.log(2) * stats[:, :5].T[..., None]
    losses, drift = stats[:, 5:7].T
    log_p = target.float() - target_lse
    ratio = (draft - draft_lse - log_p).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    ratio = ratio.clamp(log_w, log_w + price) - log_total
    ratio[:, PRESERVED[PRESERVED < target.shape[1]]] = 0
    ratio[draft == -math.inf] = 0
    m = torch.where(price > 0, (log_p + ratio).exp(), target.float().softmax(-1))
    return clip_cases.Rows(m, losses, drift)


def clip_both(target, draft, prices=PRICES):
    """Clips with the kernel and the reference; also returns q."""
    vocab = draft.shape[1]
    drafts = torch.full((6, 2, vocab + 3), math.nan, dtype=draft.dtype)
    drafts[SLOTS, 0, :vocab] = draft
    stats = clip(target, drafts[..., :vocab], prices, torch.ones(6))
    scaled = draft.float() / DRAFT_TEMPERATURE[SLOTS][:, None]
    q = scaled.softmax(-1)
    return served(target, scaled, stats), clip_cases.clip_rows(target.float(), q, prices), q


def clip(target, drafts, prices, temperature):
    """Clips the rows of requests with one draft token each."""
    vocab = target.shape[1]
    rows = target.new_full((12, target.stride(0)), math.nan)[:, :vocab]
    rows[::2], ids = target, torch.zeros(12, dtype=torch.int32)
    records = Records.new(6, ids.device)
    records.value[SLOTS] = (prices * 2**16).long()
    records.rate.fill_(NO_BOUND)
    records.max_tokens.fill_(9)
    # Stop tokens, protected tokens, and one token that is both.
    records.stop_ids[:, :2] = PRESERVED[:2]
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[PRESERVED[1:][PRESERVED[1:] < vocab]] = True
    zeros = ids[:6]
    step = VerifyInputs(rows, ids, 2 * torch.arange(1, 7).int(), records, SLOTS, zeros, zeros, 1)
    sampling = SamplingTensors(temperature, zeros.long(), drafts, DRAFT_TEMPERATURE * temperature)
    positions = torch.arange(2).repeat(6).int()
    sampling_inputs = SamplingInputs(sampling, ids.long(), SLOTS.repeat_interleave(2), positions)
    engine_params = EngineParams(PRICE, Protected.of(mask, mask.device))
    row_stats = reduce_rows(step, engine_params, None, sampling_inputs)
    return clip_kernel.clip_rows(row_stats, sampling_inputs)[:12:2].clone()


def assert_close(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=5e-5, rtol=1e-4, equal_nan=True)


@pytest.fixture
def exact(monkeypatch):
    """Lets the kernel iterate as long as the reference."""
    monkeypatch.setattr(clip_kernel, "TOLERANCE", TOLERANCE)


@pytest.mark.parametrize("vocab", [1, 111, 4096, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_equals_the_reference(exact, vocab, dtype):
    target, draft = clip_cases.rows(6, vocab, seed=vocab)
    # Misaligned rows with NaN between them.
    wide = torch.full((6, vocab + 3), math.nan, dtype=dtype)
    wide[:, :vocab] = target
    target = wide[:, :vocab]
    clipped, expected, _ = clip_both(target, draft.log().clamp(min=-60.0).to(dtype))
    assert_close(clipped, expected)
    clip_cases.check(clipped, target.float(), PRICES)


@pytest.mark.parametrize("share", [0.1, 0.83, 1.0])
def test_tokens_outside_the_drafts_vocabulary_are_preserved(exact, share):
    """Nothing can be gained if that is the whole vocabulary."""
    target, draft = clip_cases.rows(6, 5000, seed=7)
    is_outside = torch.rand(5000, generator=torch.Generator().manual_seed(1)) < share
    is_outside[17] = False
    draft = draft.log().clamp(min=-60.0).masked_fill(is_outside, -math.inf)
    clipped, expected, q = clip_both(target, draft)
    assert_close(clipped, expected)
    assert torch.equal(q == 0, is_outside.expand(6, -1))
    clip_cases.check(clipped, target, PRICES, is_outside.nonzero()[:, 0])


def test_rows_of_one_token_and_of_nan(exact):
    target, draft = clip_cases.nan_rows()
    clipped, expected, _ = clip_both(target, draft.log(), torch.ones(6))
    assert_close(clipped, expected)


def test_the_kernels_tolerance_keeps_the_loss_bound_and_99_percent_of_the_gain():
    gains = []
    for seed in range(4):
        target, draft = clip_cases.rows(6, 2_000, seed=seed)
        prices = torch.full((6,), 0.64)
        clipped, expected, q = clip_both(target, draft.log().clamp(min=-60.0), prices)
        clip_cases.check(clipped, target, prices)
        strict = target.softmax(-1).minimum(q).sum()
        gains.append(
            [
                0.64 * (rows.m.minimum(q).sum() - strict) - rows.losses.sum()
                for rows in (clipped, expected)
            ]
        )
    rough, exact = torch.tensor(gains).sum(0)
    assert 0.99 * exact < rough < exact
