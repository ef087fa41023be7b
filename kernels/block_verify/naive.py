"""How many tokens of a drawn draft stay: verification by blocks, in plain Python.

It is lossless towards the product of the m_i (`served_dist`); of a strict request that is the
target. With x_1 .. x_n the draft, q_i what x_i was drawn from, p_0 = 1:

    p_i = min(p_(i-1) m_i(x_i) / q_i(x_i), 1)          `update_joint_ratio`: the chance that i
    drafts stay S_i = sum over y of max(p_i m_(i+1)(y) - q_(i+1)(y), 0)
    h_i = S_i / (S_i + 1 - p_i), but h_n = p_n         `accept_threshold`

Of random numbers u_1 .. u_n the largest i with u_i <= h_i stays, or nothing. Behind it comes a draw
from max(p_i m_(i+1) - q_(i+1), 0), behind a whole draft the target's bonus token. A token that was
drawn and then struck out, by a grammar, has m = 0; one that was never drawn (-1) ends the draft.
What the rule gains is the sum of p_i less the same sum with p in the place of m.

Source: arXiv 2403.10444.
"""

from collections.abc import Callable, Sequence


def update_joint_ratio(before: float, m: float, q: float) -> float:
    """p_i of a drawn draft, from p_(i-1) and the two probabilities of its token.

    A token that the draft does not hold, and what is no number, is not accepted.
    """
    return min(before * m / q, 1.0) if m > 0 and q > 0 else 0.0


def accept_threshold(ratio: float, residual: float) -> float:
    """h_i of a drawn draft that goes on, from p_i and S_i."""
    # Where both are 0 all that is left is rounding.
    whole = residual + 1 - ratio
    return residual / whole if whole > 0 else 1.0


def num_accepted(
    joint_ratios: Sequence[float],
    residual: Callable[[int], float],
    accepts: Callable[[int, float], bool],
) -> int:
    """How many tokens of a drawn draft stay.

    Args:
        joint_ratios: p_1 .. p_n.
        residual: gives S_i.
        accepts: whether u_i is at most a chance.
    """
    for i in range(len(joint_ratios), 0, -1):
        ratio = joint_ratios[i - 1]
        # h is at most p, and S takes a row to find.
        if not accepts(i, ratio):
            continue
        if accepts(i, accept_threshold(ratio, residual(i)) if i < len(joint_ratios) else ratio):
            return i
    return 0
