"""The terms of verification: what every backend takes and gives, and nothing of how."""

import enum
import math
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


def price_units(price: float | torch.Tensor) -> int | torch.Tensor:
    """A price, in float32, in units of 2**-LOSS_BITS nats, rounded down; a tensor's as int64."""
    if isinstance(price, torch.Tensor):
        return (price * 2**LOSS_BITS).floor().clamp(max=MOST_PRICE).long()
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
    def of(cls, rule: str, value: float | torch.Tensor, **limits: Any) -> "Margin":
        """That of a rule: a price stands in the place of theta and gap.

        Args:
            rule: "theta", "gap" or "price".
            value: of the rule; a float, or float32 `[batch]`.
            limits: the other attributes.
        """
        return cls(**{"theta": 1.0, rule: value}, **limits)

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
        max_draft_len: the longest draft of a request, or more, which sets the width of what is
            emitted; None to read it from the prefix sum, which waits for the device.
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

    def by_position(self) -> "Drafts":
        """These; a bonus row that is a request's last is a position with a padding draft.

        That is always rejected, so the row emits its argmax.
        """
        if not self.bonus_row_is_last:
            return self
        last = self.cu_num_draft_tokens.long() - 1
        ids = self.draft_token_ids.roll(-1).index_fill(0, last, -1)
        return self._replace(draft_token_ids=ids, bonus_row_is_last=False)

    def locate(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The request of each position and the offset within its draft; int64 `[num_draft]`."""
        ends = self.cu_num_draft_tokens.long()
        position = torch.arange(len(self.draft_token_ids), device=ends.device)
        # Requests without a draft end where the one before does, and are passed over.
        request = torch.searchsorted(ends, position, right=True)
        starts = torch.cat([ends.new_zeros(1), ends])
        return request, position - starts[request]


class Slots(NamedTuple):
    """The requests of a step, and the tokens that each has so far.

    Attributes:
        idx_mapping: `[batch]` int32, slot of each request.
        all_token_ids: `[max_num_reqs, width]` int32, prompt and answer by slot.
        prompt_len: `[max_num_reqs]` int32.
        total_len: `[max_num_reqs]` int32, of prompt and answer.
    """

    idx_mapping: torch.Tensor
    all_token_ids: torch.Tensor
    prompt_len: torch.Tensor
    total_len: torch.Tensor


class Markers(NamedTuple):
    """What `vllm_mars.runner.sections` walks by, on a device.

    Attributes:
        opens: int32 `[largest marker + 1]`, the number of the span that a token opens, or 0.
        closes: int32 of that shape, the spans that it closes, as a bit mask.
        thinking: the tokens that begin and end the thinking section; -1 for none.
        only_thinking: whether all outside that section is strict.
    """

    opens: torch.Tensor
    closes: torch.Tensor
    thinking: tuple[int, int]
    only_thinking: bool


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


# What `vllm_mars.runner.counters` counts at the positions of a step, in the order of the entries;
# `CounterLayout` there says what each is.
COUNTS = (
    *("verified", "accepted", "relaxed", "low_margin"),
    *("ratio", "ratio_sum", "lost", "refused"),
)
