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
tokens before it; `law` says what follows from it. Greedily the drift is the loss.

    theta        what the margin accepts, the first choice included, is accepted outright: RELAXED,
                 strict where x or the first choice is kept. Its loss is -log p(x). The draft is not
                 drawn.
    price        m is that of `law`. Of a draft that is not drawn it is found at a price of
                     b_i = price + V_(i+1), but at most the `cap` of what may still be lost
                     V_i = R log Z
                     V_i = p(x) b_i at a strict position, as where x is kept; there m = p
                 Of drafts that are drawn see `drawn_prices`.

Greedy is the limit of the price rule as the temperature goes to 0.

A price looks no further than the answer can go: at its last token nothing can be gained, nor where
a draft that is given (of a greedy request, or not drawn) ends it; the position is strict, V_i = 0.
A drawn draft is not looked at: what is served must not depend on what was drawn.

Source: arXiv 2601.15498 for theta, 2403.10444 for blocks; the prices are this project's
(docs/rule.md).
"""

import math

from vllm_mars.kernels.law.naive import Position, cap, log_partition, tilted
from vllm_mars.kernels.ledger.naive import (
    _UNIT,
    Allowance,
    nearest_units,
    units_of,
)
from vllm_mars.kernels.rows.naive import Rows
from vllm_mars.kernels.rules import RuleName
from vllm_mars.kernels.verdicts import Verdict


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
                own = log_p, rows.rest[i], rows.rest_entropy[i]
                position = tilted(*own, min(biases[offset], cap(left)), left)
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
