"""Paired estimates over prompts: bootstrap intervals and a non-inferiority test."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from scipy import stats

from vllm_mars.experiments.sweep.records import Estimate
from vllm_mars.local.intervals import interval, resamples

ALPHA = 0.05


def estimate(
    name: str,
    values: Mapping[str, float],
    reference: Mapping[str, float] | None = None,
    *,
    margin: float | None = None,
    higher_is_better: bool = True,
) -> Estimate:
    """Estimates a mean score and, beside the reference's, its difference and recovery.

    The interval is the percentile bootstrap over prompts, which are resampled together with their
    reference. The test is a one-sided paired t-test of "the mean loss is at least the margin".

    Args:
        name: of the score.
        values, reference: score by prompt; only prompts in both count. A score that is itself a
            comparison has no reference.
        margin: loss that counts as none, in units of the score, above 0; None does not test.
        higher_is_better: whether a loss is a lower score.

    Returns:
        The estimate. Recovery is there where higher is better and the reference's mean is above 0.

    Raises:
        ValueError: no prompt is in both.
    """
    prompts = [prompt for prompt in values if reference is None or prompt in reference]
    if not prompts:
        raise ValueError(f"{name}: no prompt has a score in both; measure the same prompts.")
    own = np.array([values[prompt] for prompt in prompts], dtype=float)
    rows = resamples(len(own))
    own_means = own[rows].mean(1)
    found = Estimate(name, len(own), float(own.mean()), *interval(own_means))
    if reference is None:
        return found
    other = np.array([reference[prompt] for prompt in prompts], dtype=float)
    other_means = other[rows].mean(1)
    difference = own - other
    low, high = interval(own_means - other_means)
    found = replace(found, reference=float(other.mean()), difference=float(difference.mean()))
    found = replace(found, difference_low=low, difference_high=high)
    if higher_is_better and other.mean() > 0:
        # Resamples whose reference is 0 have no ratio.
        low, high = interval(own_means[other_means > 0] / other_means[other_means > 0])
        recovery = float(own.mean() / other.mean())
        found = replace(found, recovery=recovery, recovery_low=low, recovery_high=high)
    if margin is not None and margin > 0 and len(own) > 1:
        p_value = non_inferiority(difference if higher_is_better else -difference, margin)
        found = replace(found, margin=margin, p_value=p_value, non_inferior=p_value < ALPHA)
    return found


def non_inferiority(gains: np.ndarray, margin: float) -> float:
    """One-sided p-value of "the mean of the paired gains is -margin or less".

    Args:
        gains: per prompt, at least two; a loss is negative.
        margin: above 0.
    """
    if np.ptp(gains) == 0:
        return 0.0 if gains[0] > -margin else 1.0
    return float(stats.ttest_1samp(gains, -margin, alternative="greater").pvalue)
