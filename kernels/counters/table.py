"""The table of all counters, and the layout of the counts.

The layout, the metrics of Prometheus and the kernels' offsets follow from `COUNTERS`.
"""

from types import SimpleNamespace
from typing import Literal, NamedTuple

from vllm_mars.kernels.budget import UNIT
from vllm_mars.kernels.interface import REFUSALS

# The most nats that a request of a bucket lost; those of one more lost more. Ray takes no 0.
BUCKETS = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
# What the reasons are called for which the rule was not applied, in the order of `REFUSALS`.
REASONS = tuple(verdict.name.lower() for verdict in REFUSALS)


class Counter(NamedTuple):
    """What is counted under a name.

    Attributes:
        metric: what Prometheus calls it; empty for what it is not told as it stands.
        text: what Prometheus says it is.
        by: what it has an entry for each of; nothing for a single one.
        unit: of an entry.
    """

    metric: str = ""
    text: str = ""
    by: Literal["", "position", "reason", "bucket"] = ""
    unit: float = 1.0


# What lies behind a token that ends the request, or behind its last one, is left out, and all of a
# step of a request that had ended before: asynchronous scheduling runs one.
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
    # Draft tokens, as vLLM's own metric has them.
    "accepted": Counter(by="position"),
    "relaxable": Counter(
        "vllm:mars_relaxable_positions",
        "Verified positions of requests that are not strict: at which something could be gained.",
    ),
    "refused": Counter(
        "vllm:mars_refused_positions",
        "Verified positions at which the rule was not applied, by what forbade it.",
        by="reason",
    ),
    # Greedily z1 - z[x] of relaxed tokens, sampled KL(m || p) at each position looked at.
    "lost": Counter(
        "vllm:mars_lost_nats",
        "What answers lost, in nats: log-probability below the target's first choices where "
        "requests are greedy, KL(served || target) where they sample.",
        unit=UNIT,
    ),
    # See `rules.naive`; of greedy requests the relaxed tokens. Of a probabilistic draft it can
    # fall: m is below p where the draft is.
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
    # Requests that ended, and what they lost; together they are a histogram of Prometheus's.
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
    """Which entries of `StepCounters.counts` count what: an attribute for each of `COUNTERS`, a
    slice.

    Args:
        num_speculative_tokens: K, the longest draft of the engine.

    Attributes:
        size: of the counts.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens, self.size = num_speculative_tokens, 0
        self._entries: dict[str, slice] = {}
        # Those by position first: behind them, each counter has the same place for all K.
        for name in (*BY_POSITION, *(name for name in COUNTERS if name not in BY_POSITION)):
            size = _SIZES.get(COUNTERS[name].by, num_speculative_tokens)
            self._entries[name] = slice(self.size, self.size + size)
            self.size += size

    def __getattr__(self, name: str) -> slice:
        # Before there are any, a copy asks for special methods.
        entries: dict[str, slice] = self.__dict__.get("_entries", {})
        if name not in entries:
            raise AttributeError(name)
        return entries[name]


def _counter_offsets() -> SimpleNamespace:
    layout = CounterLayout(0)
    offsets = {name: getattr(layout, name).start for name in COUNTERS}
    return SimpleNamespace(**offsets | {name: n for n, name in enumerate(BY_POSITION)})


# Where a kernel finds a counter: the first entry, behind those of counters by position; of these
# the number, for each has K entries.
COUNTER_OFFSETS = _counter_offsets()
