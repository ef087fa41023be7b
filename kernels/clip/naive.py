"""Drawn drafts with a price: what is served in the place of the target, and its plain torch form.

At a position, p is the target's distribution, q the draft's, S the tokens that are kept, all that
the draft cannot propose (q = 0) among them, and b >= 0 the price in nats. Of all distributions m
with m = p on S, the largest `b * sum_y min(m(y), q(y)) - KL(m || p)`, which is the price times the
chance that rejection sampling of q accepts, less what is lost, is that of

    m(y) = clip(q(y), w p(y), w e^b p(y)) outside S,    w such that m sums to 1

Serving m is verifying losslessly against it: m stands in the place of p. A masked token (p = 0)
stays masked. A draft is verified by blocks (`rule`), which accepts more, towards this same m. The
rule is that of mentored decoding (github.com/vivien000/mentored_decoding, arXiv
2609.30474), with a price in the place of its bound on the KL, and with tokens that are kept.

Let R = 1 - p(S). With r = q / p, m is p clip(r, w, w e^b). Its sum outside S, divided by R, F(w),
rises piecewise linearly, and F(e^-b) <= 1 <= F(1) for any q. Newton's method goes, with `flat` the
part of F that neither end clips,

    w <- w (1 - flat) / (F(w) - flat)

and bisects log w where that leaves what is known to hold the root. At last m is divided by F(w)
outside S. So m sums to 1 and m / p spans no more than e^b there, whatever w is; by Hoeffding's
lemma KL <= R b^2 / 8. What F(w) was off by costs the objective about b times that.

`clip_kernel` has the Triton form. This one is for the CPU: beside one log of a row it takes 6 cheap
operations on it for each step of Newton's method, 2 for the last, and 13 more.
"""

import math
from typing import NamedTuple

import torch

# What F(w) may be off by before the division by it.
TOLERANCE = 1e-5
# Newton's method starts at exp(START * b), where w is for most rows.
START = -0.3
# 2 to 5 for a real vocabulary and a price up to 1. The most that were seen are 17, for a few tokens
# of very different probability.
STEPS = 20
# Beyond it e^b p leaves float32. There m is q already, as far as p has any of it.
MOST_CLIP_PRICE = 60.0
# With less of p outside S than this, nothing is gained there, and m is p.
LEAST_REST = 1e-4
# Under 1/8 by more than float32 rounds b^2 / 8 up.
EIGHTH = 0.12499995


class Clipped(NamedTuple):
    """What is served in the place of one row.

    Attributes:
        m: float32 `[vocab]`, which sums to 1.
        loss: KL(m || p) in nats, in [0, price**2 / 8].
        drift: E_m[-log p] - H(p) in nats: see `rule`.
    """

    m: torch.Tensor
    loss: float = 0.0
    drift: float = 0.0


def clip_row(
    logits: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor,
    price: float,
    kept: torch.Tensor,
    out: torch.Tensor,
    buffers: torch.Tensor,
) -> Clipped:
    """The distribution to verify a row's drawn draft token against.

    Args:
        logits: float32 `[vocab]`, processed (temperature, top-k, top-p, masks).
        p: their softmax.
        q: float32 `[vocab]`, what the draft was drawn from. What is no number counts as p.
        price: >= 0; at 0 the draft is not read and m is p itself.
        kept: int64 `[n]`, the tokens of S but for those that the draft cannot propose, each once.
        out: float32 `[vocab]`, written: m, unless that is p itself.
        buffers: float32 `[3, vocab]`, written.
    """
    outside, ratio, clipped = buffers
    rest = 0.0
    if price > 0:
        torch.mul(p, q != 0, out=outside)[kept] = 0.0
        rest = float(outside.sum())
    # Where the row holds a NaN or an infinity that is no number.
    if not rest > LEAST_REST:
        return Clipped(p)
    torch.div(q, p, out=ratio)
    if not math.isfinite(float(torch.dot(outside, ratio))):
        # Where p = q = 0 there is no number; where p alone is 0, r is infinite. Neither adds to m.
        ratio.nan_to_num_(nan=1.0, posinf=math.inf)
    price = min(price, MOST_CLIP_PRICE)
    spread = math.exp(price)
    low, high, w = 1 / spread, 1.0, math.exp(START * price)
    for step in range(STEPS):
        torch.clamp(ratio, w, w * spread, out=clipped)
        total = float(torch.dot(outside, clipped)) / rest
        if abs(total - 1) <= TOLERANCE or step == STEPS - 1:
            break
        # 1 above, -1 below, 0 between: p's parts above and below follow from its sum and that of
        # its absolute value.
        side = torch.sub(ratio, clipped, out=out).sign_()
        difference = float(torch.dot(outside, side))
        clips = float(torch.dot(outside, side.abs_()))
        slope = ((clips - difference) + spread * (clips + difference)) / (2 * rest)
        low, high = (w, high) if total < 1 else (low, w)
        w += (1 - total) / slope if slope > 0 else math.inf
        if not low < w < high:
            w = math.sqrt(low * high)

    m = torch.mul(outside, clipped, out=out)
    # Not by `dot`, whose float32 sum is too coarse for what m is divided by.
    total = float(m.sum()) / rest
    m.div_(total)
    loss = float(torch.dot(m, clipped.div_(total).log_()))
    # m and p have as much outside S, so that any number may be added to the logits.
    torch.sub(outside, m, out=clipped)
    drift = float(torch.dot(clipped, logits))
    if not math.isfinite(drift):
        # A masked token adds nothing.
        lowest = torch.finfo(p.dtype).min
        drift = float(torch.dot(clipped, (logits - logits.amax()).clamp_(min=lowest)))
    # Of a token of S `outside` is 0, so that nothing is rounded.
    m.add_(torch.sub(p, outside, out=clipped))
    return Clipped(m, min(max(loss, 0.0), EIGHTH * price * price), drift)
