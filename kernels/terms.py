"""The terms of verification: what every backend takes and gives, and nothing of how."""

import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

# What a budget allows per output token is an integer in units of 2**-SHARE_BITS, of a token or of a
# nat, so that every backend agrees.
SHARE_BITS = 30
# So are losses and prices, in units of 2**-LOSS_BITS nats: losses rounded up, prices down.
LOSS_BITS = 16
# The largest loss of one position, and the largest price, in those units: 16,384 and 8,192 nats.
MOST_LOSS = 1 << 30
MOST_PRICE = 1 << 29
# A rate that nothing reaches, for a request without a bound among others that have one.
NO_BOUND = 1 << 40

# Added to the state of a request (see `vllm_mars.runner.sections`) inside its thinking section.
THINKING = 1 << 8


class Verdict(enum.IntEnum):
    """What the margin says about the draft token at one position.

    NONE where the margin does not accept it, RELAXED where it does and nothing forbids it, else
    what forbids it. Greedy verification asks the margin only where the draft token is not the
    target's FIRST choice.
    """

    NONE = 0
    RELAXED = 1
    PROTECTED = 2
    SPAN = 3
    BUDGET = 4
    STRUCTURED = 5
    LOSS = 6
    REPEAT = 7
    FIRST = 8


def most_relaxed(share: float, num_output_tokens: int) -> int:
    """How many of so many output tokens may be relaxed: their share, rounded down."""
    return share_units(share) * num_output_tokens >> SHARE_BITS


def share_units(share: float) -> int:
    """A share in [0, 1] in units of 2**-SHARE_BITS, rounded up."""
    return math.ceil(share * 2**SHARE_BITS)


def loss_rate(nats_per_token: float) -> int:
    """What `LossBudget` adds per output token, in units of 2**-SHARE_BITS nats, rounded down.

    Infinity is `NO_BOUND`, and any number less.
    """
    if nats_per_token == math.inf:
        return NO_BOUND
    return math.floor(min(nats_per_token * 2**SHARE_BITS, NO_BOUND - 1))


def most_lost(rate: int, burst: int, num_output_tokens: int) -> int:
    """What so many output tokens may lose, in units of 2**-LOSS_BITS nats."""
    return (rate * num_output_tokens >> (SHARE_BITS - LOSS_BITS)) + burst


def lost_before(rate: int, burst: int, num_output_tokens: int) -> int:
    """What a request is taken to have lost of the output that it comes with: all that it could.

    A new request, and one without a bound, has lost nothing.
    """
    known = num_output_tokens > 0 and rate < NO_BOUND
    return most_lost(rate, burst, num_output_tokens) if known else 0


def loss_units(nats: float) -> int:
    """Nats in units of 2**-LOSS_BITS, rounded down."""
    return math.floor(nats * 2**LOSS_BITS)


def price_units(price: float) -> int:
    """A price, as float32 like a tensor's, in units of 2**-LOSS_BITS nats, rounded down."""
    return min(loss_units(float(np.float32(price))), MOST_PRICE)


class RelaxedBudget(NamedTuple):
    """How many of a request's output tokens may be relaxed.

    The token at offset j of a step may be relaxed if, with it, no more than
    `floor(share * (num_output_tokens + j + 1))` output tokens of the request are.

    Attributes:
        share: in [0, 1]; 1 allows all, 0 none.
        num_relaxed: `[batch]` int32, relaxed tokens of each request before this step.
        num_output_tokens: `[batch]` int32, output tokens of each request before this step.
    """

    share: float
    num_relaxed: torch.Tensor
    num_output_tokens: torch.Tensor

    @property
    def share_units(self) -> int:
        """The share as an integer."""
        return share_units(self.share)


class LossBudget(NamedTuple):
    """How many nats the relaxed tokens of a request may lose.

    The token at offset j of a step may be relaxed if, with it, the relaxed tokens of the request
    have lost no more than `rate * (num_output_tokens + j + 1) + burst`. So that holds for each
    prefix of the output.

    Attributes:
        rate: what an output token adds, as `loss_rate` gives it; an int, or int64 `[batch]`.
        burst: what is there from the start, as `loss_units` gives it; an int >= 0.
        lost: int64 `[batch]`, what each request lost before this step, in units of 2**-LOSS_BITS.
        num_output_tokens: `[batch]` int32, output tokens of each request before this step.
    """

    rate: int | torch.Tensor
    burst: int
    lost: torch.Tensor
    num_output_tokens: torch.Tensor


class Margin(NamedTuple):
    """What may be relaxed in a step, unless something forbids it.

    The rule goes by position, `z2 > theta * z1 - gap`, or, where there is a price, by prefix.

    Attributes:
        theta: float in (0, 1] or float32 `[batch]`; 1 with gap 0 is strict.
        gap: float >= 0 in nats or float32 `[batch]`.
        protected: bool `[vocab]`, tokens at which the rule stays strict, or None.
        blocked: int8 `[num_draft]`, a `Verdict` where the rule stays strict, else 0; or None.
        budget: how many output tokens of each request may be relaxed, or None for no limit.
        loss_budget: how many nats they may lose, or None for no limit.
        price: nats per token gained, a float >= 0 or float32 `[batch]`, beside theta 1 and gap 0;
            0 is strict. None for the rule by position.
    """

    theta: float | torch.Tensor
    gap: float | torch.Tensor = 0.0
    protected: torch.Tensor | None = None
    blocked: torch.Tensor | None = None
    budget: RelaxedBudget | None = None
    loss_budget: LossBudget | None = None
    price: float | torch.Tensor | None = None

    @classmethod
    def of(cls, metric: str, threshold: Sequence[Any], **limits: Any) -> "Margin":
        """That of a metric: a price stands in the place of theta and gap.

        Args:
            metric: "ratio", "gap" or "price".
            threshold: theta, gap and price; each a float, or float32 `[batch]`.
            limits: the other attributes.
        """
        theta, gap, price = threshold
        if metric == "price":
            return cls(1.0, price=price, **limits)
        return cls(theta, gap, **limits)

    @property
    def is_strict(self) -> bool:
        """Whether the host knows that nothing is relaxed; a tensor's values it does not know."""
        values = self.theta, self.gap, 0.0 if self.price is None else self.price
        return not any(isinstance(value, torch.Tensor) for value in values) and values == (1, 0, 0)


class Drafts(NamedTuple):
    """The draft tokens of a step and the target logits to verify them with.

    Attributes:
        logits: `[num_rows, vocab]` float32, bfloat16 or float16, any row stride.
        draft_token_ids: `[num_draft]` int32 or int64; outside [0, vocab) is padding.
        cu_num_draft_tokens: `[batch]` int32, inclusive prefix sum of the drafts' lengths.
        target_rows: `[num_draft]` int32 or int64, the row of each position, or None for the first
            rows in order.
        bonus_token_ids: `[batch]` or `[batch, 1]` int32 or int64, what follows a draft of which all
            is accepted; or None.
        bonus_rows: `[batch]` int32 or int64, rows whose argmax is that; or None.
        max_draft_len: the longest draft of a request, which sets the width of what is emitted; None
            to read it from the prefix sum, which waits for the device.
        bonus_row_is_last: whether this is the layout of vLLM's Model Runner V2:
            `draft_token_ids` are the model's input tokens, so that a row's draft token stands one
            entry behind it, and `cu_num_draft_tokens` counts a request's bonus row, its last, too.
    """

    logits: torch.Tensor
    draft_token_ids: torch.Tensor
    cu_num_draft_tokens: torch.Tensor
    target_rows: torch.Tensor | None = None
    bonus_token_ids: torch.Tensor | None = None
    bonus_rows: torch.Tensor | None = None
    max_draft_len: int | None = None
    bonus_row_is_last: bool = False


class Judgement(NamedTuple):
    """What the margin says of a step's positions.

    Attributes:
        verdicts: `[num_draft]` int8, a `Verdict` each. Judged without being verified, the target's
            first choice is RELAXED, too, where the margin is small.
        top2_values: `[num_draft, 2]` float32 or None, z1 and z2 of each draft position. A row that
            holds a NaN gives NaN for both.
        losses: int32 `[num_draft]` or None, what the draft token of each position loses against the
            first choice, in units of 2**-LOSS_BITS nats: z1 - z[x], rounded up, at most MOST_LOSS;
            0 at padding and where that is no number.
    """

    verdicts: torch.Tensor
    top2_values: torch.Tensor | None = None
    losses: torch.Tensor | None = None


class VerifyOutput(NamedTuple):
    """What one verification step emits.

    Attributes:
        output_token_ids: `[batch, max_draft_len + 1]` int32; the accepted drafts, then the
            corrected or the bonus token, then -1.
        num_accepted: `[batch]` int32, accepted draft tokens.
        num_relaxed: `[batch]` int32, those of them that only the margin accepted.
        lost: `[batch]` int64, what these lost against the first choice: the sum of their `losses`.
        top2_values: as in `Judgement`.
        verdicts: `[num_draft]` int8 or None, a `Verdict` each.
        losses: as in `Judgement`.
    """

    output_token_ids: torch.Tensor
    num_accepted: torch.Tensor
    num_relaxed: torch.Tensor
    lost: torch.Tensor
    top2_values: torch.Tensor | None = None
    verdicts: torch.Tensor | None = None
    losses: torch.Tensor | None = None

    @property
    def loss(self) -> torch.Tensor:
        """`lost` in nats: the sum of log p(first choice) - log p(token); float32 `[batch]`."""
        return self.lost.float() / 2**LOSS_BITS

    @property
    def judgement(self) -> Judgement | None:
        """The verdicts with what goes with them, or None where they were not asked for."""
        if self.verdicts is None:
            return None
        return Judgement(self.verdicts, self.top2_values, self.losses)


def new_output(
    drafts: Drafts, with_verdicts: bool = False, token_dtype: torch.dtype = torch.int32
) -> VerifyOutput:
    """An uninitialised `VerifyOutput` with the buffers that are wanted."""
    batch, num_draft = drafts.cu_num_draft_tokens.shape[0], drafts.draft_token_ids.shape[0]

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=drafts.logits.device)

    return VerifyOutput(
        empty(batch, drafts.max_draft_len + 1, dtype=token_dtype),
        empty(batch),
        empty(batch),
        empty(batch, dtype=torch.int64),
        empty(num_draft, 2, dtype=torch.float32) if with_verdicts else None,
        empty(num_draft, dtype=torch.int8) if with_verdicts else None,
        empty(num_draft) if with_verdicts else None,
    )


class CounterStarts(NamedTuple):
    """Where the counts of `vllm_mars.runner.counters.CounterLayout` begin in their vector.

    Those of the first four are by draft position; the others' meaning is the layout's.
    """

    verified: int
    accepted: int
    relaxed: int
    low_margin: int
    ratio: int
    ratio_sum: int
    lost: int
    refused: int
