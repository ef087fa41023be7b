"""The kernel of the rule for drawn drafts, run by the interpreter, against its torch form.

Run by `tests/kernels/test_kernel_interpreted.py`, with TRITON_INTERPRET=1 set before triton loads.
"""

import math

import pytest
import torch

import clip_cases
from vllm_mars.kernels.clip import clip_rows

# p = q = 0 behind the vocabulary and where a token is masked: the ratio is replaced.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow)")
PRICES = torch.tensor([0.0, 0.05, 0.5, 1.0, 2.0, 1000.0])


def check_equal(*arguments, **options):
    """Both forms; their roots may differ by what they may be off by."""
    found = clip_rows(*arguments, **options, backend="triton")
    expected = clip_rows(*arguments, **options, backend="torch")
    assert torch.equal(found.logits.isneginf(), expected.logits.isneginf())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-4, equal_nan=True)
    return found


@pytest.mark.parametrize("vocab", [1, 111, 4096, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_probabilities(vocab, dtype):
    target, draft = clip_cases.rows(6, vocab, seed=vocab)
    # Rows that start at odd places, with what must not be read between them.
    wide = torch.full((6, vocab + 3), math.nan, dtype=dtype)
    wide[:, :vocab] = target
    target = wide[:, :vocab]
    found = check_equal(target, draft, PRICES)
    assert torch.equal(found.logits[0], target[0].float())
    clip_cases.check(found, target.float(), draft, PRICES)


@pytest.mark.parametrize("draft_vocab", [97, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_by_slot(draft_vocab, dtype):
    """Bonus rows name a step that is not there, and greedy requests a temperature of 0."""
    target, _ = clip_cases.rows(6, 300)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 2, draft_vocab, generator=generator).to(dtype)
    rows = torch.tensor([3, 3, 3, 0, 0, 0]).int(), torch.tensor([0, 1, 2, 0, 1, 2]).int()
    prices = torch.tensor([0.5, 1.0, 0.0, 2.0, 0.1, 0.0])
    temperature = torch.tensor([0.7, 0.0, 1.0, 1.3])
    check_equal(target, logits, prices, draft_rows=rows, temperature=temperature)


def test_rows_of_one_token_and_of_no_numbers():
    target, draft = clip_cases.no_numbers()
    prices = torch.ones(6)
    found = clip_rows(target, draft, prices, backend="triton")
    expected = clip_rows(target, draft, prices, backend="torch")
    for row in (0, 2, 3):
        assert torch.equal(found.logits[row].nan_to_num(5), target[row].nan_to_num(5))
    for a, b in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-4, equal_nan=True)


def test_no_rows():
    empty = torch.empty(0, 8)
    assert clip_rows(empty, empty, torch.empty(0), backend="triton").logits.shape == (0, 8)
