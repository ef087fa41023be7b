"""Table of all counters, from which layout, kernel offsets and Prometheus metrics follow."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal, NamedTuple

from vllm_mars.kernels.budget import UNIT
from vllm_mars.kernels.interface import REFUSALS

# Upper bounds of the loss buckets in nats; one more bucket is unbounded. Ray accepts no bound of 0.
BUCKETS = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
# Metric labels, in the order of `REFUSALS`.
REASONS = tuple(verdict.name.lower() for verdict in REFUSALS)


class Counter(NamedTuple):
    """One counter, or a vector of counters."""

    # Prometheus name; empty if not exported directly
    metric: str = ""
    # Prometheus help text
    text: str = ""
    # Dimension of a vector
    by: Literal["", "position", "reason", "bucket"] = ""
    # Factor from an entry to the metric's unit
    unit: float = 1.0


# Positions after the end of a request are not counted, nor is a whole step of a request that ended
# before it, which asynchronous scheduling runs.
COUNTERS = {
    "relaxed": Counter(
        "vllm:mars_relaxed_tokens",
        "Draft tokens that the rule accepted outright, by position.",
        by="position",
    ),
    "verified": Counter(
        "vllm:mars_verified_positions",
        "Draft positions looked at: up to and including the first rejected one, by position.",
        by="position",
    ),
    # vLLM's metric also counts those after an answer's end.
    "accepted": Counter(
        "vllm:mars_accepted_tokens",
        "Accepted draft tokens that belong to an answer, by position.",
        by="position",
    ),
    "relaxable": Counter(
        "vllm:mars_relaxable_positions",
        "Verified positions of requests that are not strict: at which something could be gained.",
    ),
    "refused": Counter(
        "vllm:mars_refused_positions",
        "Verified positions at which the rule was not applied, by what forbade it.",
        by="reason",
    ),
    # Greedy: z1 - z[x] of relaxed tokens. Sampled: KL(m || p) at each verified position.
    "lost": Counter(
        "vllm:mars_lost_nats",
        "What answers lost, in nats: log-probability below the target's first choices where "
        "requests are greedy, KL(served || target) where they sample.",
        unit=UNIT,
    ),
    # Greedy: relaxed tokens. Sampled: the gain of `served_dist`, which can be below 0 with
    # probabilistic drafts, because m can be below p.
    "gained": Counter(
        "vllm:mars_gained_acceptance",
        "What the rule added to the probability of acceptance at verified positions: draft tokens "
        "gained, as expected before any draw.",
        unit=UNIT,
    ),
    "drift_up": Counter(
        "vllm:mars_drift_up_nats",
        "By how much less probable than the target's own answers became, in nats, as expected "
        "before any draw: where requests sample E[-log p] of what was served, less the target's "
        "entropy, at the positions where that is above 0; what is lost where they are greedy.",
        unit=UNIT,
    ),
    "drift_down": Counter(
        "vllm:mars_drift_down_nats",
        "By how much more probable, at the positions where it is below 0.",
        unit=UNIT,
    ),
    # Ended requests and their loss; together they form one Prometheus histogram.
    "ended": Counter(by="bucket"),
    "ended_lost": Counter(
        "vllm:mars_request_lost_nats",
        "What requests had lost when they ended, in nats.",
        by="bucket",
        unit=UNIT,
    ),
}
_SIZES = {"": 1, "reason": len(REFUSALS), "bucket": len(BUCKETS) + 1}
BY_POSITION = [name for name, counter in COUNTERS.items() if counter.by == "position"]


class CounterLayout:
    """Layout of `StepCounters.counts`: each name in `COUNTERS` is an attribute, a slice of it."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        # Number of entries of the counts.
        self.size = 0
        # Counters by position come first, so that all others have offsets that depend on K only
        # by a common shift.
        for name in (*BY_POSITION, *(name for name in COUNTERS if name not in BY_POSITION)):
            size = _SIZES.get(COUNTERS[name].by, num_speculative_tokens)
            setattr(self, name, slice(self.size, self.size + size))
            self.size += size

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> slice: ...


def _counter_offsets() -> SimpleNamespace:
    layout = CounterLayout(0)
    offsets = {name: getattr(layout, name).start for name in COUNTERS}
    return SimpleNamespace(**offsets | {name: n for n, name in enumerate(BY_POSITION)})


# Offsets for kernels. Counter number n by position starts at n * K; any other counter's offset is
# relative to the end of these, len(BY_POSITION) * K.
COUNTER_OFFSETS = _counter_offsets()
