"""The served distribution m of one position in plain Python.

p is the target distribution, x the draft token, q its draft distribution, S the set of preserved
tokens, R = 1 - p(S), and b >= 0 the price in nats. Among all m with m = p on S, the served one
maximizes the price times the acceptance probability minus the loss,
`b * sum_y min(m(y), q(y)) - KL(m || p)`:

    m(y) = p(y)                              in S
    m(y) = clip(q(y), w p(y), w e^b p(y))    outside S, with w such that m sums to 1

A masked token (p = 0) stays masked. m is served by verifying losslessly against it. The log-ratio
of a token is log m - log p, the loss KL(m || p), at most R b^2 / 8 by Hoeffding's lemma, the drift
E_m[-log p] - H(p), and the gain the increase of the acceptance probability of x.

`point_mass_dist` is for fixed drafts, with q(x) = 1, `clip_row` for probabilistic ones.
Source: mentored decoding (github.com/vivien000/mentored_decoding, arXiv 2609.30474), with a price
instead of its bound on the KL, and with preserved tokens.
"""

import math
from typing import NamedTuple

import torch

from vllm_mars.kernels.budget import UNIT, LossBudget, ceil_units, round_units
from vllm_mars.kernels.interface import Verdict
from vllm_mars.kernels.row_stats.naive import Rows

# Largest error of F(w) before the division by it.
TOLERANCE = 1e-5
# Newton's method starts at w = exp(START * b), near the root of most rows.
START = -0.3
# Real vocabularies take 2 to 5 at prices up to 1. The most seen are 17, for a few tokens of very
# different probability.
STEPS = 20
# Above it e^b p overflows float32, and m already equals q wherever p > 0.
MAX_CLIP_PRICE = 60.0
# If R is less, nothing can be gained and m is p.
LEAST_REST = 1e-4
# Below 1/8 by more than the rounding of b^2 / 8 in float32.
EIGHTH = 0.12499995


class RowDecision(NamedTuple):
    """Decision at one draft position."""

    # RELAXED if the draft token is accepted outright, NONE if its random number decides, else the
    # reason why the rule was not applied
    verdict: Verdict
    # b, added to the logit of the draft token; infinity if it is accepted outright
    bias: float = 0.0
    # log Z with this b; log p of the draft token if it is accepted outright
    log_z: float = 0.0
    # All three in units of 2**-LOSS_BITS nats, or of a probability
    loss: int = 0
    gained: int = 0
    drift: int = 0


class Clipped(NamedTuple):
    """Distribution that is served at a row of a probabilistic draft."""

    # float32 [vocab], sums to 1
    m: torch.Tensor
    # KL(m || p) in nats, in [0, price**2 / 8]
    loss: float = 0.0
    # E_m[-log p] - H(p) in nats
    drift: float = 0.0


def max_bias(units: int) -> float:
    """Largest b in nats whose loss is at most `units`, by Hoeffding's lemma."""
    # Rounded down by more than the error of a float.
    return math.sqrt(8 * max(units, 0) * UNIT) * (1 - 2**-20)


def clip_prices(
    rows: Rows, begin: int, end: int, budget: LossBudget, num_speculative_tokens: int
) -> list[float]:
    """Price in nats at each position of a probabilistic draft."""
    tokens_left = budget.tokens_left
    # Positions that can gain share the budget, so their losses, each at most price**2 / 8, fit it.
    # They are counted in the longest possible draft: the length of this one can depend on its
    # tokens, and a price must not.
    num_positions = max(min(num_speculative_tokens, tokens_left), 1)
    price = min(budget.value * UNIT, max_bias(max(budget.at(0), 0) // num_positions))
    return [
        price if i < begin + tokens_left and not rows.blocked[i] else 0.0 for i in range(begin, end)
    ]


def log_ratio(decision: RowDecision, is_draft: bool, is_preserved: bool = False) -> float:
    """log m - log p of a token at a position of a fixed draft."""
    if is_preserved:
        return 0.0
    # For a token that is accepted outright log Z is its log p, so its log-ratio is -log p.
    bias = decision.bias if is_draft and decision.verdict != Verdict.RELAXED else 0.0
    return bias - decision.log_z


def log_partition(log_p: float, rest: float, bias: float) -> float:
    """log Z for a token with `log_p` in (-inf, 0], and `rest` = R."""
    log_share = _log_share(log_p, rest)
    # Exactly 0 without a bias, unlike a sum of rounded logarithms.
    if log_share >= 0 or not bias:
        return bias
    others = math.log1p(-math.exp(log_share))
    biased = log_share + bias
    largest = max(others, biased)
    return largest + math.log1p(math.exp(min(others, biased) - largest))


def _log_share(log_p: float, rest: float) -> float:
    """Log of a token's share of R."""
    return min(log_p - math.log(rest), 0.0) if rest > 0 else 0.0


def point_mass_dist(
    log_p: float, rest: float, entropy: float, bias: float, left: int
) -> RowDecision:
    """Served distribution of a fixed draft: bias b, `rest` = R.

    Args:
        log_p: log p of the draft token, in (-inf, 0].
        entropy: H, the sum of -p log p outside S.
        bias: at most `max_bias(left)`; as it goes to infinity, x is accepted with certainty.
        left: remaining budget in units.
    """
    # 1 / w = Z = 1 - p(x) / R + p(x) / R e^b
    log_z = log_partition(log_p, rest, bias)
    log_share = _log_share(log_p, rest)
    # m(x) = p(x) e^b / Z, and m(y) = p(y) / Z for other tokens outside S
    share = math.exp(min(log_share + bias - log_z, 0.0))
    # loss = m(x) b - R log Z, gain = m(x) - p(x), drift = (1 - 1 / Z) (-R log p(x) - H).
    # The loss is at most `left` by Hoeffding's lemma; rounding may exceed it by a unit.
    loss = min(ceil_units(rest * max(share * bias - log_z, 0.0)), max(left, 0))
    gained = max(round(rest * (share - math.exp(log_share)) / UNIT), 0)
    drift = round_units(-math.expm1(-log_z) * (-log_p * rest - entropy))
    return RowDecision(
        verdict=Verdict.NONE,
        bias=bias,
        log_z=log_z,
        loss=loss,
        gained=gained,
        drift=drift,
    )


def clip_row(
    logits: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor,
    price: float,
    preserved: torch.Tensor,
    out: torch.Tensor,
    buffers: torch.Tensor,
) -> Clipped:
    """Served distribution of a row of a probabilistic draft.

    Besides one log, it takes 6 cheap operations on the row for each Newton step, 2 for the last,
    and 13 more.

    Args:
        logits: float32 `[vocab]`, processed (temperature, top-k, top-p, masks).
        p: float32 `[vocab]`, softmax of the logits.
        q: float32 `[vocab]`, draft probabilities. NaN counts as p.
        price: >= 0; at 0, q is not read and m is p itself.
        preserved: int64 `[n]`, distinct tokens of S, except those with q = 0.
        out: float32 `[vocab]`, receives m unless m is p itself.
        buffers: float32 `[3, vocab]`, scratch.
    """
    outside, ratio, clipped = buffers
    rest = 0.0
    if price > 0:
        torch.mul(p, q != 0, out=outside)[preserved] = 0.0
        rest = float(outside.sum())
    # NaN if the row holds NaN or infinity.
    if not rest > LEAST_REST:
        return Clipped(p)
    torch.div(q, p, out=ratio)
    if not math.isfinite(float(torch.dot(outside, ratio))):
        # 0 / 0 is NaN; if only p is 0, r is infinite. Neither adds to m.
        ratio.nan_to_num_(nan=1.0, posinf=math.inf)
    # Tokens with q = 0 are in S. With r = q / p, m = p clip(r, w, w e^b) outside S. F(w), the sum
    # of that divided by R, is increasing and piecewise linear, and F(e^-b) <= 1 <= F(1) for any q.
    # Newton's method bisects log w if a step leaves the bracket of the root.
    price = min(price, MAX_CLIP_PRICE)
    spread = math.exp(price)
    low = 1 / spread
    high = 1.0
    w = math.exp(START * price)
    for step in range(STEPS):
        torch.clamp(ratio, w, w * spread, out=clipped)
        total = float(torch.dot(outside, clipped)) / rest
        if abs(total - 1) <= TOLERANCE or step == STEPS - 1:
            break
        # 1 above, -1 below, 0 between: the sums of p times `side` and of p times its absolute value
        # give the parts of p above and below.
        side = torch.sub(ratio, clipped, out=out).sign_()
        difference = float(torch.dot(outside, side))
        clips = float(torch.dot(outside, side.abs_()))
        slope = ((clips - difference) + spread * (clips + difference)) / (2 * rest)
        if total < 1:
            low = w
        else:
            high = w
        w += (1 - total) / slope if slope > 0 else math.inf
        if not low < w < high:
            w = math.sqrt(low * high)

    # Divided by F(w), m sums to 1 and m / p spans at most e^b, for any w. The error of F(w) costs
    # the objective about b times as much.
    m = torch.mul(outside, clipped, out=out)
    # `dot` sums in float32, too coarse for a divisor of m.
    total = float(m.sum()) / rest
    m.div_(total)
    loss = float(torch.dot(m, clipped.div_(total).log_()))
    # m and p have the same mass outside S, so an offset of the logits cancels.
    torch.sub(outside, m, out=clipped)
    drift = float(torch.dot(clipped, logits))
    if not math.isfinite(drift):
        # Masked tokens have no mass: 0 * -inf must give 0.
        lowest = torch.finfo(p.dtype).min
        drift = float(torch.dot(clipped, (logits - logits.amax()).clamp_(min=lowest)))
    # `outside` is 0 in S, so p is added there without rounding.
    m.add_(torch.sub(p, outside, out=clipped))
    return Clipped(m, min(max(loss, 0.0), EIGHTH * price * price), drift)
