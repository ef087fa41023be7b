"""What a threshold costs on prompts that were held out, beside strict decoding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_mars.experiments.calibrate.offline import Conversation
from vllm_mars.experiments.calibrate.simulate import CONFIDENCE, Floats, Point, resamples
from vllm_mars.experiments.quality.scores import task_scores
from vllm_mars.experiments.sweep.datasets import Item
from vllm_mars.local.intervals import interval


@dataclass(frozen=True)
class Measure:
    """A loss on the held-out prompts in nats per token, or the share of a score that is left.

    Attributes:
        value: over all prompts.
        low, high: 2.5th and 97.5th percentile of the bootstrap samples.
        kept_share: share of bootstrap samples within the budget.
    """

    value: float
    low: float
    high: float
    kept_share: float


@dataclass(frozen=True)
class Confirmation:
    """What a threshold did, on prompts that were held out.

    Attributes:
        predicted: the simulation's cost for it.
        cost: mean of log p(first choice) - log p(token).
        nll_increase: increase of the mean NLL per token over the strict answers.
        recovery: task score / strict task score, where that is the budget.
        relaxed: relaxed tokens per token.
        nll, strict_nll: mean NLL per token with the threshold and strictly.
        tokens, strict_tokens: tokens of all answers.
        changed: conversations whose text differs from the strict one.
    """

    threshold: float
    predicted: float
    cost: Measure
    nll_increase: Measure
    relaxed: float
    nll: float
    strict_nll: float
    tokens: int
    strict_tokens: int
    changed: int
    recovery: Measure | None = None

    @property
    def kept_share(self) -> float:
        """Share of bootstrap samples within the budget; the smaller one of the two in nats."""
        if self.recovery is not None:
            return self.recovery.kept_share
        return min(self.cost.kept_share, self.nll_increase.kept_share)

    @property
    def kept(self) -> bool:
        """Whether the budget is kept in enough bootstrap samples."""
        return self.kept_share >= CONFIDENCE


def compare(
    strict: Sequence[Conversation],
    relaxed: Sequence[Conversation],
    candidate: Point,
    budget: float,
) -> Confirmation:
    """Compares the same prompts, answered strictly and with a threshold."""

    def column(conversations: Sequence[Conversation], name: str) -> Floats:
        return np.array([getattr(item, name) for item in conversations], float)

    chosen = resamples(len(strict))
    tokens, strict_tokens = column(relaxed, "tokens"), column(strict, "tokens")
    nll, strict_nll = column(relaxed, "nll"), column(strict, "nll")
    cost = column(relaxed, "cost")

    def measure(numerator: Floats, minus: Floats) -> Measure:
        """Of numerator / tokens - minus / strict tokens."""
        samples = numerator[chosen].sum(1) / tokens[chosen].sum(1) - (
            minus[chosen].sum(1) / strict_tokens[chosen].sum(1)
        )
        return Measure(
            float(numerator.sum() / tokens.sum() - minus.sum() / strict_tokens.sum()),
            *interval(samples),
            kept_share=float((samples <= budget).mean()),
        )

    return Confirmation(
        threshold=candidate.threshold,
        predicted=candidate.cost,
        cost=measure(cost, np.zeros_like(cost)),
        nll_increase=measure(nll, strict_nll),
        relaxed=float(column(relaxed, "relaxed").sum() / tokens.sum()),
        nll=float(nll.sum() / tokens.sum()),
        strict_nll=float(strict_nll.sum() / strict_tokens.sum()),
        tokens=int(tokens.sum()),
        strict_tokens=int(strict_tokens.sum()),
        changed=sum(one.texts != other.texts for one, other in zip(strict, relaxed, strict=True)),
    )


def scores(conversations: Sequence[Conversation], tasks: Mapping[str, Item]) -> Floats:
    """`[conversations]`, the least of each answer's task scores: a task is done as a whole."""
    found = [task_scores(tasks[item.prompt.id], item.texts[0]) for item in conversations]
    return np.array([min(item.values()) for item in found])


def recovery(relaxed: Floats, strict: Floats, wanted: float) -> Measure:
    """How much of a task score is left.

    Args:
        relaxed, strict: `[prompts]`, scores of the same prompts; not all strict ones are 0.
        wanted: share that must be left.

    Returns:
        The share, its interval over the bootstrap samples in which strict scores something, and
        how many of all samples have what is wanted.
    """
    chosen = resamples(len(strict))
    left, whole = relaxed[chosen].sum(1), strict[chosen].sum(1)
    return Measure(
        float(relaxed.sum() / strict.sum()),
        *interval(left[whole > 0] / whole[whole > 0]),
        kept_share=float((left >= wanted * whole).mean()),
    )
