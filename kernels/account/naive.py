"""Where a step writes down what it did: the counters of an engine, and the rows of a report.

`COUNTERS` is the one table of what is counted: the layout of the counts, Prometheus's metrics and
the kernels' places follow from it.
"""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from vllm_mars.kernels.ledger.naive import UNIT
from vllm_mars.kernels.verdicts import REFUSALS, Verdict

if TYPE_CHECKING:
    from vllm_mars.kernels.accept.naive import Emitted

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


class Account(NamedTuple):
    """Where a step writes down what it did, beside `Records.lost`.

    Attributes:
        counts: int64 `[size]`, added into; see `CounterLayout`.
        table: float32 `[batch, 2, K + 1]`, written, or None. First, of a greedy request what each
            relaxed token lost, in nats; of one that samples log m - log p of each token, where m is
            the distribution that was served. NaN elsewhere. Second, the drift of each token of a
            request that samples, in nats; 0 elsewhere.
    """

    counts: torch.Tensor
    table: torch.Tensor | None


class CounterLayout:
    """Which entries of `Account.counts` count what: an attribute for each of `COUNTERS`, a slice.

    Args:
        num_speculative_tokens: K, the longest draft of the engine.

    Attributes:
        size: of the counts.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens, self.size = num_speculative_tokens, 0
        self._entries: dict[str, slice] = {}
        # Those by position first: behind them, each counter has the same place for all K.
        for name in (*BY_POSITION, *(it for it in COUNTERS if it not in BY_POSITION)):
            size = _SIZES.get(COUNTERS[name].by, num_speculative_tokens)
            self._entries[name] = slice(self.size, self.size + size)
            self.size += size

    def __getattr__(self, name: str) -> slice:
        # Before there are any, a copy asks for special methods.
        entries: dict[str, slice] = self.__dict__.get("_entries", {})
        if name not in entries:
            raise AttributeError(name)
        return entries[name]


def _places() -> SimpleNamespace:
    behind = CounterLayout(0)
    places = {name: getattr(behind, name).start for name in COUNTERS}
    return SimpleNamespace(**places | {name: n for n, name in enumerate(BY_POSITION)})


# Where a kernel finds a counter: the first entry, behind those of counters by position; of these
# the number, for each has K entries.
PLACES = _places()


def write_down(
    emitted: "Emitted",
    draft: Sequence[int],
    is_greedy: bool,
    is_relaxable: bool,
    place: int,
    account: Account | None,
    layout: CounterLayout,
) -> tuple[int, int]:
    """Counts a request's step; returns relaxed tokens and loss."""
    num_relaxed = lost = drift_up = drift_down = 0
    gained = sum(emitted.gained)
    table = None if account is None or account.table is None else account.table[place]
    if table is not None:
        table[0] = math.nan
        table[1] = 0
        table[0, : len(emitted.log_ratios)] = torch.tensor(emitted.log_ratios)
    for offset, position in enumerate(emitted.positions):
        is_relaxed = offset < emitted.accepted and position.verdict == Verdict.RELAXED
        num_relaxed += is_relaxed
        if is_relaxed or not is_greedy:
            lost += position.loss
            gained += position.gained
            drift_up += max(position.drift, 0)
            drift_down += max(-position.drift, 0)
        if table is not None and is_relaxed and is_greedy:
            table[0, offset] = position.loss * UNIT
        if table is not None and not is_greedy:
            table[1, offset] = position.drift * UNIT
    if account is not None:
        counts = account.counts.numpy()
        for offset, position in enumerate(emitted.positions):
            if draft[offset] < 0:
                continue
            is_accepted, verdict = offset < emitted.accepted, position.verdict
            counts[layout.verified][offset] += 1
            counts[layout.relaxable] += is_relaxable
            counts[layout.accepted][offset] += is_accepted
            counts[layout.relaxed][offset] += is_accepted and verdict == Verdict.RELAXED
            if verdict >= Verdict.PROTECTED:
                counts[layout.refused][verdict - Verdict.PROTECTED] += 1
        counts[layout.lost] += lost
        counts[layout.gained] += gained
        counts[layout.drift_up] += drift_up
        counts[layout.drift_down] += drift_down
    return num_relaxed, lost


def log_ratios(table: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """log m - log p of a step's tokens: 0 of greedy requests, and behind the last token.

    Args:
        table: float32 `[batch, 2, width]`: see `Account`.
        temperature: `[batch]`; 0 is greedy.
    """
    return table[:, 0].nan_to_num(0.0).masked_fill(temperature[:, None] == 0, 0.0)


def of_sampled(token_ids: torch.Tensor, ratios: torch.Tensor) -> torch.Tensor:
    """What is added to logprobs, so that they are log m of the sampled token in every column.

    Args:
        token_ids: `[rows, columns]`, first the sampled token; the same one may come again.
        ratios: `[rows]`: see `log_ratios`.
    """
    return torch.where(token_ids == token_ids[:, :1], ratios[:, None], 0.0)
