"""The rule at the draft positions of one request, in plain Python: the definition.

`rules.fused` follows it line by line in Triton; `accept` runs it as it is, on a CPU. At one draft
position let z be the target's processed logits, x the draft token, z1 >= z2 the two largest logits,
p the softmax of z, r = z1 - z[x] in nats, S the tokens that are kept: the protected ones, those
that end the request, and by a price, where it samples, those that followed the last token before
the position earlier in the answer (`Guarded`).

Greedy requests (temperature 0)

    theta        a runner-up is PAYABLE where z2 > theta * z1 and z1 > 0
    price        every x with a finite logit is PAYABLE

    A position is strict where x or the first choice is kept, and by a price where x completes a
    longer n-gram of the answer than the first choice would (REPEAT). What is PAYABLE becomes LOSS
    where its r does not fit into what the request may still lose.
    theta        what is PAYABLE is RELAXED
    price        with V = 0 behind the draft, going backwards
                     FIRST    V_i = price + V_(i+1)
                     PAYABLE  V_i = max(0, price + V_(i+1) - r_i), RELAXED where that is above 0
                     others   V_i = 0

Requests that sample: one distribution m for each position, which depends on its row and on the
tokens before it. A kept token has the target's own probability, m(s) = p(s). Let R be the rest of
p, 1 - p(S).

    theta        what the margin accepts, the first choice included, is accepted outright: RELAXED,
                 strict where x or the first choice is kept. Its loss is -log p(x). The draft is not
                 drawn.
    price        Of a draft that is not drawn, b_i = price + V_(i+1) is added to the logit of x:
                     Z = 1 - p(x) / R + p(x) / R exp(b_i),  V_i = R log Z
                     m(x) = p(x) exp(b_i) / Z,  m(y) = p(y) / Z of other y outside S
                 At a strict position, as where x is kept, b_i = 0 and V_i = p(x) (price + V_(i+1)).
                 The loss is KL(m || p) = m(x) b - R log Z, at most R b**2 / 8; so b is at most
                 sqrt(8 * what the request may still lose).
                 Of drafts that are drawn see `clip`.

Drafts that are drawn are verified by blocks, losslessly towards the product of the m_i; of a strict
request that is the target. With x_1 .. x_n the draft, q_i what x_i was drawn from, p_0 = 1:

    p_i = min(p_(i-1) m_i(x_i) / q_i(x_i), 1)          `reach`: the chance that i drafts stay
    S_i = sum over y of max(p_i m_(i+1)(y) - q_(i+1)(y), 0)
    h_i = S_i / (S_i + 1 - p_i), but h_n = p_n         `stays`

Of random numbers u_1 .. u_n the largest i with u_i <= h_i stays, or nothing. Behind it comes a draw
from max(p_i m_(i+1) - q_(i+1), 0), behind a whole draft the target's bonus token. A token that was
drawn and then struck out, by a grammar, has m = 0; one that was never drawn (-1) ends the draft.
What the rule gains is the sum of p_i less the same sum with p in the place of m.

The drift of a position is E_m[-log p] - H(p), by how much less probable than the target's own the
token becomes that is served there, on average: (1 - 1 / Z) (R (-log p(x)) - H) with H the sum of
-p log p outside S, and of a token that is accepted outright -log p(x) - H(p). Greedily it is the
loss.

Greedy is the limit of the price rule as the temperature goes to 0.

A price looks no further than the answer can go: at its last token nothing can be gained, nor where
a draft that is given (of a greedy request, or not drawn) ends it; the position is strict, V_i = 0.
A drawn draft is not looked at: what is served must not depend on what was drawn.

Source: arXiv 2601.15498 for theta, 2403.10444 for blocks; the prices are this project's
(docs/rule.md).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_mars.kernels.ledger.naive import (
    _UNIT,
    Allowance,
    nearest_units,
    units_of,
)
from vllm_mars.kernels.rows.naive import Rows
from vllm_mars.kernels.rules import RuleName
from vllm_mars.kernels.verdicts import Verdict


class Position(NamedTuple):
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


def num_gainful(rows: Rows, begin: int, end: int, allowed: Allowance) -> int:
    """How many positions of a given draft can be followed by a further token of the answer."""
    most = min(end - begin, allowed.room)
    return next((offset for offset in range(most) if rows.is_end[begin + offset]), most)


def greedy(rows: Rows, begin: int, end: int, name: RuleName, allowed: Allowance) -> list[Verdict]:
    """The verdicts at the positions of a greedy request's draft."""
    verdicts: list[Verdict] = []
    gainful = num_gainful(rows, begin, end, allowed)
    lost = 0
    for offset, i in enumerate(range(begin, end)):
        pays = may_pay = rows.is_small[i]
        if name == "price":
            may_pay = rows.is_finite[i] and allowed.price > 0 and offset < gainful
            pays = rows.loss[i] < allowed.price
        verdict = Verdict.NONE
        if rows.draft[i] == rows.argmax[i]:
            verdict = Verdict.FIRST
        elif may_pay:
            verdict = Verdict.PAYABLE
            if reason := rows.forbids(i, looks_at_first=True):
                verdict = reason if pays else Verdict.NONE
            elif lost + rows.loss[i] > allowed.at(offset):
                verdict = Verdict.LOSS
            else:
                lost += rows.loss[i]
        verdicts.append(verdict)
    ahead = 0
    for offset in reversed(range(end - begin)):
        verdict = verdicts[offset]
        is_reached = verdict == Verdict.FIRST and offset < gainful
        value = allowed.price + ahead if is_reached else 0
        if verdict == Verdict.PAYABLE:
            value = max(0, allowed.price + ahead - rows.loss[begin + offset])
            is_worth_it = value > 0 or name != "price"
            verdicts[offset] = Verdict.RELAXED if is_worth_it else Verdict.NONE
        ahead = value
    return verdicts


def sampled(rows: Rows, begin: int, end: int, name: RuleName, allowed: Allowance) -> list[Position]:
    """What is decided at the positions of a draft, not drawn, of a request that samples.

    Without a price the probabilities are not read.
    """
    if name == "price" and not allowed.price:
        return [Position(Verdict.NONE)] * (end - begin)
    # Behind these positions nothing can be gained.
    gainful = num_gainful(rows, begin, end, allowed)
    reasons = [rows.forbids(i, looks_at_first=name == "theta") for i in range(begin, end)]
    value = 0.0
    biases = [0.0] * (end - begin)
    for offset in reversed(range(gainful)):
        log_p, rest = rows.log_p[begin + offset], rows.rest[begin + offset]
        bias = allowed.price * _UNIT + value
        if not log_p > -math.inf:
            value = 0.0
        elif reasons[offset]:
            value = math.exp(log_p) * bias
        else:
            biases[offset], value = bias, rest * log_partition(log_p, rest, bias)
    positions: list[Position] = []
    lost = 0
    for offset, (i, reason) in enumerate(zip(range(begin, end), reasons, strict=True)):
        log_p, left = rows.log_p[i], allowed.at(offset) - lost
        position = Position(Verdict.NONE)
        if name == "price":
            if biases[offset] > 0:
                # Rounded down by more than a float can be off.
                most = math.sqrt(8 * max(left, 0) * _UNIT) * (1 - 2**-20)
                own = log_p, rows.rest[i], rows.rest_entropy[i]
                position = _tilted(*own, min(biases[offset], most), left)
            elif reason and log_p > -math.inf and allowed.price and offset < gainful:
                position = Position(reason)
        elif rows.is_small[i] and log_p > -math.inf:
            loss = units_of(-log_p)
            if reason:
                position = Position(reason)
            elif loss > left:
                position = Position(Verdict.LOSS)
            else:
                gained = round((1 - math.exp(log_p)) / _UNIT)
                # The draft token's share of m is 1: log m - log p is -log p.
                drift = nearest_units(-log_p - rows.entropy[i])
                position = Position(Verdict.RELAXED, math.inf, log_p, loss, gained, drift)
        lost += position.loss
        positions.append(position)
    return positions


def log_ratio(position: Position, is_draft: bool, is_kept: bool = False) -> float:
    """log m - log p of a token at a position of a draft that is not drawn.

    Of one that is drawn see `clip`.
    """
    if is_kept:
        return 0.0
    # Where the draft token is accepted outright, log Z is its log p.
    bias = position.bias if is_draft and position.verdict != Verdict.RELAXED else 0.0
    return bias - position.log_z


def log_partition(log_p: float, rest: float, bias: float) -> float:
    """log Z of a token of log-probability `log_p` in (-inf, 0], of which p(S) leaves `rest`."""
    log_share = _log_share(log_p, rest)
    # Exactly 0 without a bias, which a sum of rounded logarithms is not.
    if log_share >= 0 or not bias:
        return bias
    others, tilted = math.log1p(-math.exp(log_share)), log_share + bias
    most = max(others, tilted)
    return most + math.log1p(math.exp(min(others, tilted) - most))


def _log_share(log_p: float, rest: float) -> float:
    """The logarithm of a token's share of what is not kept."""
    return min(log_p - math.log(rest), 0.0) if rest > 0 else 0.0


def _tilted(log_p: float, rest: float, entropy: float, bias: float, left: int) -> Position:
    log_z, log_share = log_partition(log_p, rest, bias), _log_share(log_p, rest)
    share = math.exp(min(log_share + bias - log_z, 0.0))
    # By Hoeffding's lemma it is no more than what is left; a float may say a unit more.
    loss = min(units_of(rest * max(share * bias - log_z, 0.0)), max(left, 0))
    gained = max(round(rest * (share - math.exp(log_share)) / _UNIT), 0)
    drift = nearest_units(-math.expm1(-log_z) * (-log_p * rest - entropy))
    return Position(Verdict.NONE, bias, log_z, loss, gained, drift)


def drawn_prices(
    rows: Rows, begin: int, end: int, allowed: Allowance, num_speculative_tokens: int
) -> list[float]:
    """The price in nats at each position of a drawn draft of a request that samples.

    What the request may still lose is shared by the positions at which something can be gained, so
    that their losses, each at most price**2 / 8, fit whichever of them are reached. Those of the
    longest draft: where this one ends can depend on its tokens, on which no price may.
    """
    room = allowed.room
    each = max(allowed.at(0), 0) // max(min(num_speculative_tokens, room), 1)
    price = min(allowed.price * _UNIT, math.sqrt(8 * each * _UNIT) * (1 - 2**-20))
    return [price if i < begin + room and not rows.blocked[i] else 0.0 for i in range(begin, end)]


def reach(before: float, m: float, q: float) -> float:
    """p_i of a drawn draft, from p_(i-1) and the two probabilities of its token.

    A token that the draft does not hold, and what is no number, is not accepted.
    """
    return min(before * m / q, 1.0) if m > 0 and q > 0 else 0.0


def stays(reach: float, residual: float) -> float:
    """h_i of a drawn draft that goes on, from p_i and S_i."""
    # Where both are 0 all that is left is rounding.
    whole = residual + 1 - reach
    return residual / whole if whole > 0 else 1.0


def num_staying(
    reaches: Sequence[float],
    residual: Callable[[int], float],
    accepts: Callable[[int, float], bool],
) -> int:
    """How many tokens of a drawn draft stay.

    Args:
        reaches: p_1 .. p_n.
        residual: gives S_i.
        accepts: whether u_i is at most a chance.
    """
    for i in range(len(reaches), 0, -1):
        reached = reaches[i - 1]
        # h is at most p, and S takes a row to find.
        if not accepts(i, reached):
            continue
        if accepts(i, stays(reached, residual(i)) if i < len(reaches) else reached):
            return i
    return 0
