"""The law of what is sampled: the distribution m that is served at one position, in plain Python.

There p is the target's distribution, x the draft token, q what it was drawn from, S the tokens that
are kept, R = 1 - p(S), and b >= 0 the price in nats. Of all distributions m with m = p on S that
one is served for which the price times the chance that rejection sampling of q accepts, less what
is lost, `b * sum_y min(m(y), q(y)) - KL(m || p)`, is largest:

    m(y) = p(y)                              in S
    m(y) = clip(q(y), w p(y), w e^b p(y))    outside S, with w such that m sums to 1

A masked token (p = 0) stays masked. Verifying losslessly against m, which stands in the place of p,
serves it. Of a position this tells

    log-ratio    log m(y) - log p(y) of a token y: 0 in S
    loss         KL(m || p), by Hoeffding's lemma at most R b^2 / 8: see `max_bias`
    drift        E_m[-log p] - H(p), by how much less probable than the target's own the token
                 becomes that is served, on average
    gain         by how much m raises the chance that x stays

A draft that is not drawn is the point q(x) = 1. Of it w has a closed form, `point_mass_dist`:
outside S

    1 / w = Z = 1 - p(x) / R + p(x) / R e^b
    m(x) = p(x) e^b / Z,    m(y) = p(y) / Z of other tokens
    loss = m(x) b - R log Z,    drift = (1 - 1 / Z) (-R log p(x) - H),    gain = m(x) - p(x)

with H the sum of -p log p outside S. With b without end x is accepted outright: m(x) = 1.

Of a draft that is drawn all that it cannot propose (q = 0) is in S as well. With r = q / p, m is p
clip(r, w, w e^b) outside S. Its sum there, divided by R, F(w), rises piecewise linearly, and
F(e^-b) <= 1 <= F(1) for any q. Newton's method, `clip_row`, goes, with `flat` the part of F that
neither end clips,

    w <- w (1 - flat) / (F(w) - flat)

and bisects log w where that leaves what is known to hold the root. At last m is divided by F(w)
outside S. So m sums to 1 and m / p spans no more than e^b there, whatever w is. What F(w) was off
by costs the objective about b times that.

The rule is that of mentored decoding (github.com/vivien000/mentored_decoding, arXiv 2609.30474),
with a price in the place of its bound on the KL, and with tokens that are kept. `served_dist.fused`
has the Triton form. `clip_row` takes beside one log of a row 6 cheap operations on it for each step
of Newton's method, 2 for the last, and 13 more.
"""

import math
from typing import NamedTuple

import torch

from vllm_mars.kernels.budget import UNIT, LossBudget, ceil_units, round_units
from vllm_mars.kernels.interface import Verdict
from vllm_mars.kernels.row_stats.naive import Rows

# What F(w) may be off by before the division by it.
TOLERANCE = 1e-5
# Newton's method starts at exp(START * b), where w is for most rows.
START = -0.3
# 2 to 5 for a real vocabulary and a price up to 1. The most that were seen are 17, for a few tokens
# of very different probability.
STEPS = 20
# Beyond it e^b p leaves float32. There m is q already, as far as p has any of it.
MAX_CLIP_PRICE = 60.0
# With less of p outside S than this, nothing is gained there, and m is p.
LEAST_REST = 1e-4
# Under 1/8 by more than float32 rounds b^2 / 8 up.
EIGHTH = 0.12499995


class RowDecision(NamedTuple):
    """What was decided at one draft position of a request that samples.

    Attributes:
        verdict: RELAXED where the draft token is accepted outright, NONE where the draw decides,
            else why the rule was not applied.
        bias: b, what is added to the draft token's logit; infinity where it is accepted outright.
        log_z: log Z with this b; where the draft token is accepted outright its log p.
        loss: in units of 2**-LOSS_BITS nats.
        gained: what the rule adds to the probability of acceptance, in those units.
        drift: in those units, rounded to the nearest.
    """

    verdict: Verdict
    bias: float = 0.0
    log_z: float = 0.0
    loss: int = 0
    gained: int = 0
    drift: int = 0


class Clipped(NamedTuple):
    """What is served in the place of one row where its draft is drawn.

    Attributes:
        m: float32 `[vocab]`, which sums to 1.
        loss: KL(m || p) in nats, in [0, price**2 / 8].
        drift: E_m[-log p] - H(p) in nats.
    """

    m: torch.Tensor
    loss: float = 0.0
    drift: float = 0.0


def max_bias(units: int) -> float:
    """The largest b that loses no more than so many units, by Hoeffding's lemma, in nats."""
    # Rounded down by more than a float can be off.
    return math.sqrt(8 * max(units, 0) * UNIT) * (1 - 2**-20)


def clip_prices(
    rows: Rows, begin: int, end: int, budget: LossBudget, num_speculative_tokens: int
) -> list[float]:
    """The price in nats at each position of a drawn draft of a request that samples.

    What the request may still lose is shared by the positions at which something can be gained, so
    that their losses, each at most price**2 / 8, fit whichever of them are reached. Those of the
    longest draft: where this one ends can depend on its tokens, on which no price may.
    """
    tokens_left = budget.tokens_left
    each = max(budget.at(0), 0) // max(min(num_speculative_tokens, tokens_left), 1)
    price = min(budget.value * UNIT, max_bias(each))
    return [
        price if i < begin + tokens_left and not rows.blocked[i] else 0.0 for i in range(begin, end)
    ]


def log_ratio(decision: RowDecision, is_draft: bool, is_preserved: bool = False) -> float:
    """log m - log p of a token at a position of a draft that is not drawn."""
    if is_preserved:
        return 0.0
    # Where the draft token is accepted outright, log Z is its log p.
    bias = decision.bias if is_draft and decision.verdict != Verdict.RELAXED else 0.0
    return bias - decision.log_z


def log_partition(log_p: float, rest: float, bias: float) -> float:
    """log Z of a token of log-probability `log_p` in (-inf, 0], of which p(S) leaves `rest`."""
    log_share = _log_share(log_p, rest)
    # Exactly 0 without a bias, which a sum of rounded logarithms is not.
    if log_share >= 0 or not bias:
        return bias
    others, biased = math.log1p(-math.exp(log_share)), log_share + bias
    largest = max(others, biased)
    return largest + math.log1p(math.exp(min(others, biased) - largest))


def _log_share(log_p: float, rest: float) -> float:
    """The logarithm of a token's share of what is not kept."""
    return min(log_p - math.log(rest), 0.0) if rest > 0 else 0.0


def point_mass_dist(
    log_p: float, rest: float, entropy: float, bias: float, left: int
) -> RowDecision:
    """What is served where q is a point.

    Args:
        log_p: of the draft token, in (-inf, 0].
        rest: R.
        entropy: H.
        bias: b, no more than `max_bias` of what is left.
        left: what may be lost, in units.
    """
    log_z, log_share = log_partition(log_p, rest, bias), _log_share(log_p, rest)
    share = math.exp(min(log_share + bias - log_z, 0.0))
    # By Hoeffding's lemma it is no more than what is left; a float may say a unit more.
    loss = min(ceil_units(rest * max(share * bias - log_z, 0.0)), max(left, 0))
    gained = max(round(rest * (share - math.exp(log_share)) / UNIT), 0)
    drift = round_units(-math.expm1(-log_z) * (-log_p * rest - entropy))
    return RowDecision(Verdict.NONE, bias, log_z, loss, gained, drift)


def clip_row(
    logits: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor,
    price: float,
    preserved: torch.Tensor,
    out: torch.Tensor,
    buffers: torch.Tensor,
) -> Clipped:
    """The distribution to verify a row's drawn draft token against.

    Args:
        logits: float32 `[vocab]`, processed (temperature, top-k, top-p, masks).
        p: their softmax.
        q: float32 `[vocab]`, what the draft was drawn from. What is no number counts as p.
        price: >= 0; at 0 the draft is not read and m is p itself.
        preserved: int64 `[n]`, the tokens of S but for those that the draft cannot propose, each
            once.
        out: float32 `[vocab]`, written: m, unless that is p itself.
        buffers: float32 `[3, vocab]`, written.
    """
    outside, ratio, clipped = buffers
    rest = 0.0
    if price > 0:
        torch.mul(p, q != 0, out=outside)[preserved] = 0.0
        rest = float(outside.sum())
    # Where the row holds a NaN or an infinity that is no number.
    if not rest > LEAST_REST:
        return Clipped(p)
    torch.div(q, p, out=ratio)
    if not math.isfinite(float(torch.dot(outside, ratio))):
        # Where p = q = 0 there is no number; where p alone is 0, r is infinite. Neither adds to m.
        ratio.nan_to_num_(nan=1.0, posinf=math.inf)
    price = min(price, MAX_CLIP_PRICE)
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
