"""The tokens that the kernels draw have the distribution that is served, m, and not the target's.

On a GPU 100,000 draws; in the interpreter, at 10 a second, as many as show the difference.
"""

import numpy as np
import pytest
import torch

import clip_cases
import oracle
from golden_tokens import DEVICE, IS_INTERPRETED
from vllm_mars.kernels import fused
from vllm_mars.kernels.budget import NO_BOUND
from vllm_mars.kernels.interface import (
    EngineParams,
    Protected,
    Records,
    SamplingInputs,
    SamplingTensors,
    VerifyInputs,
)
from vllm_mars.kernels.rules import RULES

pytestmark = [pytest.mark.interpreted] if IS_INTERPRETED else []

VOCAB, LENGTH = 64, 2
KEPT = torch.tensor([0, 5, 33])
PRICE = 2.0
DRAWN_AT = 0.75
NUM = [pytest.param(200, marks=pytest.mark.nightly)] if IS_INTERPRETED else [100_000]
BATCH = 20_000


def rows():
    """The target's logits behind each draft token, and the draft's."""
    rng = np.random.default_rng(0)
    target = rng.normal(0, 1.5, (LENGTH + 1, VOCAB))
    draft = target[:LENGTH] + rng.normal(0, 1, (LENGTH, VOCAB))
    target[:, 7] = -np.inf
    return torch.from_numpy(target).float(), torch.from_numpy(draft).float()


def drawn(num, is_probabilistic):
    """The first token of each request: all have the same rows, and seeds of their own.

    Returns:
        How often each token came, and what its share should be.
    """
    target, draft = rows()
    q = (draft / DRAWN_AT).softmax(-1)
    fixed = target[:LENGTH].topk(3).indices[:, 2]
    kept = frozenset(KEPT.tolist())
    assert not kept & {*fixed.tolist()}
    if is_probabilistic:
        m = clip_cases.clip_rows(target[:1], q[:1], [PRICE], KEPT).m[0]
    else:
        own = target[:LENGTH].tolist(), fixed.tolist()
        bias = oracle.tilts(*own, PRICE, [False] * LENGTH, LENGTH, [kept] * LENGTH)[0]
        m = torch.tensor(oracle.served(target[0].tolist(), int(fixed[0]), bias, kept))
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[KEPT] = True
    engine_params, rng = (
        EngineParams(RULES["price"], Protected.of(mask, DEVICE)),
        np.random.default_rng(1),
    )
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    for begin in range(0, num, BATCH):
        size = min(BATCH, num - begin)
        slots = torch.arange(size, device=DEVICE, dtype=torch.int32)
        ids = torch.zeros((size, LENGTH + 1), dtype=torch.int32)
        ids[:, 1:] = fixed
        if is_probabilistic:
            columns = [rng.choice(VOCAB, size, p=of / of.sum()) for of in q.double().numpy()]
            ids[:, 1:] = torch.from_numpy(np.stack(columns, 1))
        records = Records.new(size, DEVICE)
        records.value.fill_(int(PRICE * 2**16))
        records.rate.fill_(NO_BOUND)
        records.max_tokens.fill_(99)
        step = VerifyInputs(
            target.to(DEVICE).repeat(size, 1),
            ids.flatten().to(DEVICE),
            (slots + 1) * (LENGTH + 1),
            records,
            slots,
            torch.ones_like(slots),
            torch.ones_like(slots),
            LENGTH,
        )
        seeds = torch.from_numpy(rng.integers(0, 2**62, size)).to(DEVICE)
        sampling = SamplingTensors(torch.ones(size, device=DEVICE), seeds)
        if is_probabilistic:
            sampling = sampling._replace(
                draft_logits=draft.to(DEVICE).repeat(size, 1, 1),
                draft_temperature=torch.full((size,), DRAWN_AT, device=DEVICE),
            )
        places = torch.arange(LENGTH + 1, device=DEVICE, dtype=torch.int32).repeat(size)
        expanded_idx_mapping = slots.repeat_interleave(LENGTH + 1)
        sampling_inputs = SamplingInputs(sampling, places.long() + 5, expanded_idx_mapping, places)
        tokens = fused.verify(step, engine_params, None, None, sampling_inputs).output_token_ids[
            :, 0
        ]
        counts += torch.bincount(tokens.cpu(), minlength=VOCAB)
    return counts, m, target[0].softmax(-1)


def deviation(counts, shares):
    """Pearson's chi-square in standard deviations, by Wilson and Hilferty's approximation."""
    expected = counts.sum() * shares.double()
    assert not counts[shares == 0].any()
    is_rare = expected < 5
    observed, expected = (
        torch.cat([of[~is_rare], of[is_rare].sum()[None]]).double() for of in (counts, expected)
    )
    freedom = len(observed) - 1
    statistic = float(((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum())
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - 1 + spread) / spread**0.5


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow)")
@pytest.mark.parametrize("is_probabilistic", [False, True])
@pytest.mark.parametrize("num", NUM)
def test_tokens_have_the_shares_that_are_served(num, is_probabilistic):
    counts, m, p = drawn(num, is_probabilistic)
    of_served, of_strict = deviation(counts, m), deviation(counts, p)
    print(f"{num} draws: {of_served:.2f} standard deviations from m, {of_strict:.2f} from p")
    # By chance once in 30,000 runs.
    assert of_served < 4 < of_strict
