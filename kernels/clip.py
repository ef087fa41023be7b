"""Drawn drafts with a price: what is served in the place of the target, and its plain torch form.

At a position, p is the target's distribution, q the draft's, and b >= 0 the price in nats. Of all
distributions m, the largest `b * sum_y min(m(y), q(y)) - KL(m || p)`, which is the price times the
chance that rejection sampling of q accepts, less what is lost, is that of

    m(y) = clip(q(y), w p(y), w e^b p(y)),    w such that m sums to 1

Serving m is verifying losslessly against it: log m stands in the place of the target's logits. A
masked token (p = 0) stays masked. The rule is that of mentored decoding (github.com/vivien000/
mentored_decoding, arXiv 2609.30474), with a price in the place of its bound on the KL.

With r = q / p, m is p clip(r, w, w e^b). Its sum F(w) rises piecewise linearly, and F(e^-b) <= 1
<= F(1) for any q. Newton's method from w = 1 goes, with `flat` the part of F that neither end
clips,

    w <- w (1 - flat) / (F(w) - flat)

and bisects log w where that leaves what is known to hold the root. At last m is divided by F(w).
So m sums to 1 and m / p spans no more than e^b, whatever w is; by Hoeffding's lemma KL <= b^2 / 8.
What F(w) was off by costs the objective about b times that.

`clip_kernel` has the Triton form. This one is for the CPU: beside one exp and one log of a row it
takes 7 cheap operations on it for each step of Newton's method, 2 for the last, and 14 more.
"""

import math
from typing import NamedTuple

import torch

# What F(w) may be off by before the division by it.
TOLERANCE = 1e-5
# 2 to 5 for a real vocabulary and a price up to 1. The most that were seen are 17, for a few tokens
# of very different probability.
STEPS = 20
# Beyond it e^b p leaves float32. There m is q already, as far as p has any of it.
MOST_PRICE = 60.0
# Under 1/8 by more than float32 rounds b^2 / 8 up.
EIGHTH = 0.12499995


class Clipped(NamedTuple):
    """What is served in the place of target rows.

    Attributes:
        logits: `[num_rows, vocab]` float32. With a price log m, which sums to 1. Without one, or
            where the target's log-sum-exp is not finite, the target's row as it is.
        losses: `[num_rows]` float32, KL(m || p) in nats, in [0, price**2 / 8].
        gained: `[num_rows]` float32, sum min(m, q) - sum min(p, q): by how much acceptance is more
            probable under m; >= 0.
        drift: `[num_rows]` float32, E_m[-log p] - H(p) in nats: see `rule`.
        target_lse: `[num_rows]` float32, log-sum-exp of the target's row. With a price,
            `logits[y] - target_logits[y] + target_lse` is log m(y) - log p(y).
    """

    logits: torch.Tensor
    losses: torch.Tensor
    gained: torch.Tensor
    drift: torch.Tensor
    target_lse: torch.Tensor


def clip_rows(
    target_logits: torch.Tensor, draft_probs: torch.Tensor, prices: torch.Tensor
) -> Clipped:
    """The distribution to verify each row's drawn draft token against.

    Args:
        target_logits: `[num_rows, vocab]` float32, processed (temperature, top-k, top-p, masks);
            any row stride.
        draft_probs: `[num_rows, vocab]` float32. What is no number counts as the target's own
            probability.
        prices: `[num_rows]` float32, >= 0. At 0 the draft is not read and m is p.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
    """
    _check(target_logits, draft_probs, prices)
    logits = target_logits.to(torch.float32, copy=True)
    losses, gained, drift, target_lse = logits.new_zeros(4, logits.shape[0])
    # Row by row: the buffers stay in the cache, and no row depends on those beside it.
    buffers = logits.new_empty(4, logits.shape[1])
    for row, price in enumerate(prices.tolist()):
        target = logits[row]
        largest, log_sum = _softmax(target, buffers[0])
        target_lse[row] = largest + log_sum
        if price > 0 and math.isfinite(largest + log_sum):
            # In this order the sum of m is exact also where the logits are large.
            target.sub_(largest).sub_(log_sum)
            found = _clip_row(target, draft_probs[row], price, buffers)
            losses[row], gained[row], drift[row] = found
    return Clipped(logits, losses, gained, drift, target_lse)


def _softmax(logits: torch.Tensor, p: torch.Tensor) -> tuple[float, float]:
    """Writes the softmax of a row; returns the two terms of its log-sum-exp."""
    largest = logits.amax()
    total = torch.sub(logits, largest, out=p).exp_().sum()
    p.div_(total)
    return float(largest), float(total.log())


def _clip_row(
    log_p: torch.Tensor, q: torch.Tensor, price: float, buffers: torch.Tensor
) -> tuple[float, float, float]:
    """Writes log m over log p, whose p is in the first buffer.

    Returns:
        The loss, what acceptance gains, and the drift.
    """
    p, ratio, clipped, spare = buffers
    price = min(price, MOST_PRICE)
    # Where p = q = 0 there is no number; where p alone is 0, r is infinite. Neither adds to m.
    torch.div(q, p, out=ratio).nan_to_num_(nan=1.0, posinf=math.inf)
    spread = math.exp(price)
    low, high, w = 1 / spread, 1.0, 1.0
    for step in range(STEPS):
        torch.clamp(ratio, w, w * spread, out=clipped)
        total = float(torch.dot(p, clipped))
        if abs(total - 1) <= TOLERANCE or step == STEPS - 1:
            break
        # 1 above, -1 below, 0 between: p's parts above and below follow from its sum and that of
        # its square.
        side = torch.sub(ratio, clipped, out=spare).sign_()
        difference = float(torch.dot(p, side))
        clips = float(torch.dot(p, side.mul_(side)))
        slope = ((clips - difference) + spread * (clips + difference)) / 2
        low, high = (w, high) if total < 1 else (low, w)
        w += (1 - total) / slope if slope > 0 else math.inf
        if not low < w < high:
            w = math.sqrt(low * high)

    # min(m, q) - min(p, q) over p.
    gains = torch.minimum(clipped, ratio, out=spare).sub_(ratio.clamp_(max=1))
    gained = float(torch.dot(p, gains))
    log_ratio = torch.log(clipped, out=ratio)
    share = torch.mul(p, clipped, out=spare)
    # Not by `dot`, whose float32 sum is too coarse for what m is divided by.
    total = float(share.sum())
    loss = float(torch.dot(share, log_ratio)) / total - math.log(total)
    # Where p is 0 so is m.
    finite = log_p.clamp(min=torch.finfo(log_p.dtype).min)
    drift = float(torch.dot(p.sub_(share, alpha=1 / total), finite))
    log_p.add_(log_ratio).sub_(math.log(total))
    return min(max(loss, 0.0), EIGHTH * price * price), max(gained, 0.0), drift


def _check(target_logits: torch.Tensor, draft_probs: torch.Tensor, prices: torch.Tensor) -> None:
    """Raises ValueError for tensors that `clip_rows` would misread."""
    num_rows = target_logits.shape[0]
    wanted = {
        "target_logits": (target_logits, (num_rows, -1)),
        "prices": (prices, (num_rows,)),
        "draft_probs": (draft_probs, tuple(target_logits.shape)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} is {tensor.dtype}, but must be torch.float32.")
        if len(shape) != tensor.ndim or any(
            size not in (-1, found) for size, found in zip(shape, tensor.shape, strict=True)
        ):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, but must be {list(shape)} (-1: any)."
            )
        if tensor.device != target_logits.device:
            raise ValueError(f"{name} is on {tensor.device}, not on {target_logits.device}.")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension, not 1.")
