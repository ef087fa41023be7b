"""Block verification of a probabilistic draft in plain Python.

It is lossless with respect to the product of the m_i (`served_dist`), which is the target in strict
requests. With draft x_1 .. x_n, draft distributions q_i, and p_0 = 1,

    p_i = min(p_(i-1) m_i(x_i) / q_i(x_i), 1)               `update_joint_ratio`
    S_i = sum over y of max(p_i m_(i+1)(y) - q_(i+1)(y), 0)
    h_i = S_i / (S_i + 1 - p_i), but h_n = p_n              `accept_threshold`

With uniform u_1 .. u_n, i tokens are accepted for the largest i with u_i <= h_i, else none. The
next token is sampled from max(p_i m_(i+1) - q_(i+1), 0), or is the bonus token if i = n. A sampled
token that a grammar forbids has m = 0; a placeholder (-1) ends the draft. The rule's gain is the
sum of p_i minus the same sum with p instead of m.

Source: arXiv 2403.10444.
"""

from collections.abc import Callable, Sequence


def update_joint_ratio(previous: float, m: float, q: float) -> float:
    """p_i from p_(i-1) and the probabilities of x_i; 0 if one of these is 0 or NaN."""
    return min(previous * m / q, 1.0) if m > 0 and q > 0 else 0.0


def accept_threshold(ratio: float, residual: float) -> float:
    """h_i from p_i and S_i, for i < n."""
    # If the sum is 0 only rounding is left.
    total = residual + 1 - ratio
    return residual / total if total > 0 else 1.0


def num_accepted(
    # p_1 .. p_n
    joint_ratios: Sequence[float],
    # Returns S_i
    residual: Callable[[int], float],
    # Returns whether u_i is at most a probability
    accepts: Callable[[int, float], bool],
) -> int:
    """Number of accepted draft tokens."""
    for i in range(len(joint_ratios), 0, -1):
        ratio = joint_ratios[i - 1]
        # h is at most p, and computing S reads a row.
        if not accepts(i, ratio):
            continue
        if accepts(i, accept_threshold(ratio, residual(i)) if i < len(joint_ratios) else ratio):
            return i
    return 0
