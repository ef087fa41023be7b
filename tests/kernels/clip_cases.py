"""Rows for the tests of `clip_row` in torch and in Triton."""

from typing import NamedTuple

import torch

from vllm_mars.kernels.served_dist.naive import clip_row

INF = torch.inf


def rows(num_rows, vocab, seed=0, spread=3.0, off=1.0, masked=0.3):
    """Target logits with masked tokens, and draft probabilities near their softmax."""
    generator = torch.Generator().manual_seed(seed)
    shape = num_rows, vocab
    target = spread * torch.randn(shape, generator=generator)
    draft = (target + off * torch.randn(shape, generator=generator)).softmax(-1)
    is_masked = torch.rand(shape, generator=generator) < masked
    is_masked[:, 0] = False
    return target.masked_fill(is_masked, -INF), draft


def nan_rows():
    """Rows with NaN, inf or a single finite token; the last two have such drafts instead."""
    nan, one, none = [1.0, torch.nan, 2.0], [-INF, 7.0, -INF], [-INF] * 3
    target = torch.tensor([nan, one, none, [INF, 1.0, 2.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    return target, torch.tensor([[0.5, 0.25, 0.25]] * 4 + [[torch.nan] * 3, [0.0, 1.0, 0.0]])


PRESERVED = torch.tensor([0, 5, 33])


class Rows(NamedTuple):
    """`served_dist.naive.Clipped`, stacked over rows."""

    m: torch.Tensor
    losses: torch.Tensor
    drift: torch.Tensor


def clip_rows(target, draft, prices, preserved=PRESERVED):
    clipped = [
        clip_row(
            row,
            row.softmax(-1),
            q,
            float(price),
            preserved[preserved < len(row)],
            torch.empty_like(row),
            row.new_empty(3, len(row)),
        )
        for row, q, price in zip(target, draft, prices, strict=True)
    ]
    losses, drift = torch.tensor([row[1:] for row in clipped]).T
    return Rows(torch.stack([row.m for row in clipped]), losses, drift)


def check(clipped, target, prices, preserved=PRESERVED):
    """Checks that m sums to 1, preserves tokens, spans at most e^b, and reports its loss."""
    p, m = target.double().softmax(-1), clipped.m.double()
    preserved = preserved[preserved < p.shape[1]]
    assert ((m.sum(-1) - 1).abs() < 2e-6).all()
    assert torch.allclose(m[:, preserved], p[:, preserved], rtol=1e-5, atol=1e-30)
    assert m[p == 0].sum() == 0
    is_free = p > 1e-30
    log_ratio = torch.where(is_free, (m / p.clamp(min=1e-300)).log(), 0.0)
    loss = (m * log_ratio).sum(-1)
    is_free[:, preserved] = False
    highest = torch.where(is_free, log_ratio, -INF).amax(-1)
    lowest = torch.where(is_free, log_ratio, INF).amin(-1)
    # Rounding a logit of 100 to float32 costs 4e-6.
    assert (highest - lowest <= prices.double() + 5e-5).all()
    assert torch.allclose(clipped.losses.double(), loss, atol=2e-6, rtol=1e-4)
    assert (clipped.losses >= 0).all()
    assert (clipped.losses.double() <= prices.double() ** 2 / 8).all()
    drift = (p - m).mul(p.log().clamp(min=-1e9)).sum(-1)
    assert torch.allclose(clipped.drift.double(), drift, atol=1e-4)
