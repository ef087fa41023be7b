"""What a wrong guess costs in training: two losses per position, in nats.

With z the target's logits over the draft vocabulary and l the head's, p = softmax(z) and
q = softmax(l):

    distil    -sum_x p(x) log q(x)
    price     -log sum_x q(x) w(x),    w(x) = exp(-r(x) / price),    r(x) = max z - z(x)

r(x) is what the price rule charges for x (docs/rule.md). Say that a guess x is right with
probability w(x): always if it is the target's first choice, e^-1 of the time where it loses one
price. Then the sum is the probability that a guess drawn from q is right. Since
w(x) = (p(x) / max p)^(1 / price), it is also q's overlap with the target at temperature `price`.

The gradients by l(x) are

    distil    q(x) - p(x)
    price     q(x) - t(x),    t(x) = q(x) w(x) / sum_y q(y) w(y)

so the goal t of "price" is the head's own guess, given that it is right: of several cheap tokens
the head keeps to the one that it finds, where "distil" wants the target's share of each, and of all
expensive ones as well.

    price -> 0         w is 1 at the first choice alone: -log q(argmax z), the hard label
    price -> infinity  w is 1 everywhere: 0, and no gradient; the loss is at most E_q[r] / price

A maximum over the whole vocabulary would shift r by a constant, and change no gradient.

What "price" does not see: the rule weighs a token against all drafts that follow, and the loss
takes each position alone. And a drafting step is trained after the target's own tokens; behind a
draft that the rule paid for, the target goes on from another text, which is in no shard. So w is
what the rule reads for the first token that a step pays for, and stands in for it behind.
"""

import torch
from torch.nn import functional


def distillation_loss(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with the target's distribution.

    Args:
        logits: [positions, draft_vocab] float32, the head's.
        target_logits: [positions, draft_vocab] float32.

    Returns:
        [positions] float32.
    """
    return functional.cross_entropy(logits, target_logits.softmax(-1), reduction="none")


def price_loss(logits: torch.Tensor, target_logits: torch.Tensor, price: float) -> torch.Tensor:
    """Negative log of the probability that a guess is right, at w(x) = exp(-r(x) / price).

    Args:
        logits: [positions, draft_vocab] float32, the head's.
        target_logits: [positions, draft_vocab] float32.
        price: nats, above 0.

    Returns:
        [positions] float32, at least 0.
    """
    log_right = (target_logits - target_logits.amax(-1, keepdim=True)) / price
    return logits.logsumexp(-1) - (logits + log_right).logsumexp(-1)
