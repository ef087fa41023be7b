"""What the samplers count: one vector of integers per engine, kept on the device.

The vector only grows. The worker takes its increase off now and then, without waiting for the
device, and sends it along with a step's output (`vllm_mars.runner.outputs`). `CounterLayout` says
which entry is what, for the kernels that add into it and for the front end that exports it.
"""

import itertools
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch

from vllm_mars.config import MarsConfig
from vllm_mars.kernels.terms import LOSS_BITS, Drafts, Judgement, Margin, Verdict, price_units
from vllm_mars.verify import Backend, resolve_backend

# Upper edges of the histogram of z2/z1, inclusive; above the last one is infinity. They lie close
# where a threshold would be chosen.
RATIO_EDGES = (
    *(0.0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.84, 0.86),
    *(0.88, 0.9, 0.92, 0.94, 0.96, 0.98, 1.0),
)
# One unit of the sum of ratios: an int64 lasts for 2**47 positions.
RATIO_UNIT = 2.0**-16
# One unit of the sum of losses, in nats.
LOSS_UNIT = 2.0**-LOSS_BITS
# Seconds between two copies from an accelerator.
INTERVAL = 1.0

# Why the margin was not applied where it would have accepted the draft token, in the order of the
# entries, and the label values of these reasons.
REFUSALS = tuple(v for v in Verdict if Verdict.PROTECTED <= v <= Verdict.REPEAT)
REASONS = tuple(verdict.name.lower() for verdict in REFUSALS)


class CounterLayout:
    """Which entries of the vector count what.

    Args:
        num_speculative_tokens: K, the longest draft, >= 1.
        shadowed: values of the rule that the shadow mode counts; none outside it.
        rule: that they belong to.

    Attributes:
        verified: K entries, one per draft position: positions that verification looked at, up to
            and including the first rejected one.
        accepted: K entries, accepted draft tokens.
        relaxed: K entries, those accepted only by the margin.
        low_margin: K entries, verified positions with z2 > theta * z1 - gap, whatever the draft
            token is.
        ratio: verified positions with z1 > 0 by z2/z1, an entry per edge of `RATIO_EDGES` and one
            for what is above; not cumulated.
        ratio_sum: one entry, the sum of those ratios in `RATIO_UNIT`, each clamped to [0, 1].
        lost: one entry, what the relaxed tokens lost against the first choices, in `LOSS_UNIT`.
        refused: verified positions that would have been relaxed, an entry per reason of `REASONS`.
        shadow: draft tokens that verification with each of `shadowed` would have accepted, K
            entries per threshold, one threshold after the other.
        starts: where each of `COUNTS` begins.
        size: number of entries.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        shadowed: tuple[float, ...] = (),
        rule: str = "theta",
    ) -> None:
        self.num_speculative_tokens = longest = num_speculative_tokens
        self.shadowed = shadowed
        self.rule = rule
        lengths = [*[longest] * 4, len(RATIO_EDGES) + 1, 1, 1, len(REASONS)]
        lengths.append(longest * len(shadowed))
        *counted, self.shadow = (
            slice(end - length, end)
            for length, end in zip(lengths, itertools.accumulate(lengths), strict=True)
        )
        self.verified, self.accepted, self.relaxed, self.low_margin = counted[:4]
        self.ratio, self.ratio_sum, self.lost, self.refused = counted[4:]
        self.starts = tuple(entries.start for entries in counted)
        self.size: int = self.shadow.stop


class Counters:
    """The vector of one engine on its device, and what has been taken from it.

    Args:
        layout: which entry is what.
        device: where it is counted.
        interval: seconds between two copies to the host, >= 0; by default `INTERVAL` on an
            accelerator and 0 on a CPU, where nothing is copied.
        clock: gives the time in seconds.
    """

    def __init__(
        self,
        layout: CounterLayout,
        device: torch.device,
        interval: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout = layout
        self.device = device
        self._on_host = device.type == "cpu"
        if interval is None:
            interval = 0.0 if self._on_host else INTERVAL
        self._interval = interval
        self._clock = clock
        self._next_copy = clock()
        self._taken = np.zeros(layout.size, dtype=np.int64)
        # Recorded behind the copy that is under way.
        self._copied: Any = None

    # Built on first use: what is allocated while the model is loaded can be memory that vLLM's
    # sleep mode throws away.
    @cached_property
    def device_counts(self) -> torch.Tensor:
        """int64 `[layout.size]`, to be added into; it never shrinks and never moves."""
        return torch.zeros(self.layout.size, dtype=torch.int64, device=self.device)

    @cached_property
    def ratio_edges(self) -> torch.Tensor:
        """`RATIO_EDGES` as float32 on the device."""
        return torch.tensor(RATIO_EDGES, dtype=torch.float32, device=self.device)

    @cached_property
    def shadowed(self) -> torch.Tensor:
        """The layout's thresholds as float32 on the device."""
        return torch.tensor(self.layout.shadowed, dtype=torch.float32, device=self.device)

    @cached_property
    def _host_counts(self) -> torch.Tensor:
        return torch.zeros(self.layout.size, dtype=torch.int64, pin_memory=True)

    def take_delta(self, flush: bool = False) -> list[int] | None:
        """The increase since the last one that was returned, if it is at hand.

        On an accelerator a call starts a copy to the host, at most every `interval` seconds, and
        a later one returns its result; in between, and while the copy runs, there is none. What
        is not returned now is part of a later increase.

        Args:
            flush: whether to copy now and wait for it; only for when nothing is left to do.

        Returns:
            An entry per counter, or None if nothing has been counted or the copy is not there.
        """
        if self._copied is None or flush:
            now = self._clock()
            if not flush and now < self._next_copy:
                return None
            self._next_copy = now + self._interval
            if self._on_host:
                return self._increase(self.device_counts)
            self._start_copy()
        if flush:
            self._copied.synchronize()
        elif not self._copied.query():
            return None
        self._copied = None
        return self._increase(self._host_counts)

    def _start_copy(self) -> None:
        self._host_counts.copy_(self.device_counts, non_blocking=True)
        self._copied = torch.Event(self.device)
        self._copied.record()

    def _increase(self, counts: torch.Tensor) -> list[int] | None:
        now = counts.numpy().copy()
        increase, self._taken = now - self._taken, now
        entries: list[int] = increase.tolist()
        return entries if any(entries) else None


def layout_of(config: MarsConfig, speculative_config: Any) -> CounterLayout:
    """Which counter is what in an engine.

    Args:
        config: its options.
        speculative_config: vLLM's `SpeculativeConfig`.
    """
    return CounterLayout(speculative_config.num_speculative_tokens, config.shadow, config.rule)


def count_positions(
    counters: Counters,
    drafts: Drafts,
    judgement: Judgement,
    num_accepted: torch.Tensor,
    margin: Margin,
    *,
    dry_run: bool = False,
    backend: Backend = "auto",
) -> None:
    """Adds the positions of one step, without waiting for the device.

    Args:
        counters: what is added to; all tensors are on its device.
        drafts: the step's, each as long as the layout's K at most; -1 is padding and no position.
            The logits are not read.
        judgement: verdicts, values of the top 2 and losses at the draft positions; what is marked
            behind a request's first rejected position does not count.
        num_accepted: `[batch]` int32, accepted draft tokens of each request, the bonus token not
            among them.
        margin: of which theta and gap say what is low-margin; with 1 and 0 no position is.
        dry_run: whether verification was strict, so that no token counts as relaxed or refused.
        backend: "triton", "torch", or "auto": Triton on an accelerator, torch on a CPU.
    """
    if not len(judgement.verdicts):
        return
    layout = counters.layout
    if resolve_backend(backend, counters.device.type) == "triton":
        from vllm_mars.kernels.counting import count_positions as count

        count(
            drafts,
            judgement,
            num_accepted,
            margin,
            dry_run=dry_run,
            counts=counters.device_counts,
            starts=layout.starts,
            ratio_edges=counters.ratio_edges,
            ratio_unit=RATIO_UNIT,
        )
        return
    # On a CPU, where NumPy's small operations cost a fifth of torch's.
    verdicts, accepted = judgement.verdicts.numpy(), num_accepted.numpy()
    ends = drafts.cu_num_draft_tokens.numpy()
    row = np.arange(len(verdicts))
    request = np.searchsorted(ends, row, side="right")
    position = row - np.concatenate(([0], ends[:-1]))[request]
    is_accepted = position < accepted[request]
    is_verified = (position <= accepted[request]) & (drafts.draft_token_ids.numpy() >= 0)

    largest, second = judgement.top2_values.numpy().T
    theta, gap = (
        value.numpy()[request] if isinstance(value, torch.Tensor) else np.float32(value)
        for value in (margin.theta, margin.gap)
    )
    with np.errstate(all="ignore"):
        is_low = is_verified & (second > theta * largest - gap)
        ratio = second / largest
    has_ratio = is_verified & (largest > 0) & ~np.isnan(ratio)
    ratio = np.where(has_ratio, ratio, np.float32(0))
    units = np.floor(ratio.clip(0, 1) * np.float32(1 / RATIO_UNIT) + np.float32(0.5))

    added = [
        (position + layout.verified.start, is_verified),
        (position + layout.accepted.start, is_accepted),
        (position + layout.low_margin.start, is_low),
        (np.searchsorted(counters.ratio_edges.numpy(), ratio) + layout.ratio.start, has_ratio),
        (np.full_like(position, layout.ratio_sum.start), units),
    ]
    if not dry_run:
        is_refused = (verdicts >= REFUSALS[0]) & (verdicts <= REFUSALS[-1])
        is_relaxed = (verdicts == Verdict.RELAXED) & is_accepted
        lost = is_relaxed * judgement.losses.numpy()
        refusal = verdicts.astype(np.int64).clip(REFUSALS[0], REFUSALS[-1]) - REFUSALS[0]
        added += [
            (position + layout.relaxed.start, is_relaxed),
            (np.full_like(position, layout.lost.start), lost),
            (refusal + layout.refused.start, is_verified & is_refused),
        ]
    entries, amounts = zip(*added, strict=True)
    counts = counters.device_counts.numpy()
    np.add.at(counts, np.concatenate(entries), np.concatenate(amounts).astype(np.int64))


def count_shadow(
    counters: Counters,
    drafts: Drafts,
    judgement: Judgement,
    num_accepted: torch.Tensor,
    *,
    is_greedy: torch.Tensor | bool = False,
) -> None:
    """Adds what each threshold of the shadow mode would have accepted of one step's drafts.

    Greedily this is exact for the step. A sampled position behind the first one that strict
    verification rejected counts where the margin accepts it, and not where a draw would have to:
    there the count is a lower bound. Neither spends a budget.

    Args:
        counters: what is added to; all tensors are on its device.
        drafts: the step's; -1 is padding. The logits are not read.
        judgement: by a margin that any draft token passes which one of the thresholds can accept,
            with the values at all positions.
        num_accepted: of strict verification.
        is_greedy: bool `[batch]`, or one for all: whether a price weighs the prefixes of a request,
            as in greedy verification; else a position stands alone.
    """
    verdicts = judgement.verdicts
    if not len(verdicts):
        return
    layout = counters.layout
    longest = layout.num_speculative_tokens
    request, position = drafts.locate()
    is_draft = drafts.draft_token_ids >= 0
    strict = is_draft & ((verdicts == Verdict.FIRST) | (position < num_accepted[request]))
    relaxed = is_draft & (verdicts == Verdict.RELAXED) & ~strict

    def by_request(values: torch.Tensor) -> torch.Tensor:
        """`[thresholds or 1, batch, longest + 1]`: a stop may be behind the last position."""
        shape = (len(values), len(num_accepted), longest + 1)
        table = torch.zeros(shape, dtype=values.dtype, device=values.device)
        table[:, request, position] = values
        return table

    if isinstance(is_greedy, bool):
        is_greedy = torch.full_like(num_accepted, is_greedy, dtype=torch.bool)
    threshold = counters.shadowed[:, None]
    if layout.rule == "price":
        assert judgement.losses is not None, "verdicts come with losses"
        gain = price_units(threshold) - judgement.losses * relaxed
        is_small = (gain > 0) | is_greedy[request]
    else:
        largest, second = judgement.top2_values.unbind(1)
        is_ratio = layout.rule == "theta"
        limit = threshold * largest if is_ratio else largest - threshold
        is_small = (second > limit) & ((largest > 0) | (not is_ratio))
    reached = by_request(strict | relaxed & is_small).cumprod(2)
    stop = reached.sum(2)
    if layout.rule == "price":
        gain = by_request(gain)
        # Of a stop: what comes before it. argmax takes the first of equals.
        value = gain.cumsum(2) - gain
        is_reached = torch.cat([torch.ones_like(reached[..., :1]), reached[..., :-1]], 2) > 0
        best = torch.where(is_reached & ~by_request(strict[None]), value, -1).argmax(2)
        stop = torch.where(is_greedy, best, stop)
    is_accepted = torch.arange(longest, device=stop.device) < stop[..., None]
    counters.device_counts[layout.shadow] += is_accepted.sum(1).flatten()
