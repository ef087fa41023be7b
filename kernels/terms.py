"""The terms of verification: what every backend takes and gives, and nothing of how."""

import enum
import math
from typing import NamedTuple

import numpy as np
import torch

from vllm_mars.config import MOST_ENDS, RuleName

# Losses and prices are integers in units of 2**-LOSS_BITS nats, so that every backend agrees:
# losses rounded up, prices down.
LOSS_BITS = 16
# What an output token adds to a request's allowance is an integer in units of 2**-RATE_BITS nats.
RATE_BITS = 30
# The largest loss of one position, and the largest price, in units: 16,384 and 8,192 nats.
MOST_LOSS = 1 << 30
MOST_PRICE_UNITS = 1 << 29
# With a bound of b nats per token an answer of n tokens loses at most b (n + BURST_TOKENS).
BURST_TOKENS = 100
# The rate of a request without a bound, and what it may lose.
NO_BOUND = 1 << 40
NO_LIMIT = 1 << 61

# Added to the state of a request (see `vllm_mars.runner.strictness`) for each token that its
# opening, which is strict, still has.
OPENING = 1 << 9
# The same while its thinking section is open.
THINKING = 1 << 8
# What a token marks: see `Markers`.
OPENS, THINKING_END, CLOSES = 31, 32, 6
THINKING_START = 1 << 40
# What of a request's answer may be relaxed, where that is not all of it.
IN_THINKING, IN_ANSWER = 1, 2
# The guard against repetition looks at so many of an answer's last tokens, a power of 2, and lists
# so many of those that followed one of them: in texts as long no token had more than 131.
GUARD_WINDOW = 4096
MOST_FOLLOWERS = 256

# In the place of a draft token that was drawn and that a grammar has struck out since.
STRUCK = -2


class Verdict(enum.IntEnum):
    """What verification says about the draft token at one position.

    NONE: only a draw, or nothing, accepts it. PAYABLE: the rule may accept it, if the tokens behind
    it are worth its loss. RELAXED: the rule accepts it. FIRST: it is the target's first choice
    (greedy requests). All others: the rule would accept it, but for this reason must not; REPEAT,
    since it repeats what the answer holds: see `Guard`.
    """

    NONE = 0
    PAYABLE = 1
    RELAXED = 2
    FIRST = 3
    PROTECTED = 4
    SPAN = 5
    LOSS = 6
    REPEAT = 7
    OPENING = 8
    SCOPE = 9


# Why the rule was not applied where it would have accepted the draft token.
REFUSALS = tuple(verdict for verdict in Verdict if verdict >= Verdict.PROTECTED)


def loss_rate(nats_per_token: float) -> int:
    """What an output token adds to a request's allowance, in units of 2**-RATE_BITS, rounded down.

    Infinity is `NO_BOUND`, and any number less.
    """
    if nats_per_token == math.inf:
        return NO_BOUND
    return min(_units(nats_per_token, RATE_BITS, NO_BOUND), NO_BOUND - 1)


def most_lost(rate: int, num_output_tokens: int) -> int:
    """What so many output tokens may lose, in units of 2**-LOSS_BITS nats."""
    if rate == NO_BOUND:
        return NO_LIMIT
    return rate * (num_output_tokens + BURST_TOKENS) >> (RATE_BITS - LOSS_BITS)


def loss_units(nats: float) -> int:
    """Nats in units of 2**-LOSS_BITS, rounded down, at most MOST_LOSS."""
    return _units(nats, LOSS_BITS, MOST_LOSS)


def price_units(price: float) -> int:
    """A price, in float32, in units of 2**-LOSS_BITS nats, rounded down."""
    return loss_units(float(np.float32(min(max(0.0, price), MOST_PRICE_UNITS / 2**LOSS_BITS))))


def _units(nats: float, bits: int, most: int) -> int:
    """Nats in units of 2**-bits, rounded down to one in [0, most]; 0 where they are no number."""
    # In this order, in which a NaN gives way to 0 and an integer of any size is only compared.
    return math.floor(min(max(0.0, nats), most / 2**bits) * 2**bits)


class Protected(NamedTuple):
    """The tokens that keep their probability in every request.

    Attributes:
        mask: bool `[vocab]`, which they are.
        ids: int32 `[num_ids]`, the same as a list, behind them -1.
        num_ids: a multiple of MOST_ENDS, for tensors of few sizes.
    """

    mask: torch.Tensor
    ids: torch.Tensor
    num_ids: int

    @classmethod
    def of(cls, mask: torch.Tensor, device: torch.device) -> "Protected":
        """Those of a mask on the host, on a device."""
        found = mask.nonzero().flatten().int()
        size = -(-max(len(found), 1) // MOST_ENDS) * MOST_ENDS
        ids = torch.nn.functional.pad(found, (0, size - len(found)), value=-1)
        return cls(mask.to(device), ids.to(device), size)


class Rule(NamedTuple):
    """What holds for all requests of a step.

    Attributes:
        name: "theta" accepts a runner-up where z2 > threshold * z1 and z1 > 0, "price" weighs a
            prefix of the draft against its loss.
        protected: the tokens that keep their probability, or None.
    """

    name: RuleName
    protected: Protected | None = None


class Column(enum.IntEnum):
    """Where the record of a request, int64 `[RECORD_SIZE]`, holds what.

    PRICE: in units of 2**-LOSS_BITS nats per token gained; 0 is strict.
    RATE: what an output token adds to the allowance: see `loss_rate`.
    LOST: what the request has lost, in units of 2**-LOSS_BITS nats. A step adds to it.
    MOST_TOKENS: output tokens at which the request ends.
    THRESHOLD: theta, as the bits of a float32; not read with a price.
    STATE: of `vllm_mars.runner.strictness`, after the first SCANNED tokens.
    BEGUN: that after the prompt.
    SCANNED: tokens of prompt and output that the state has taken in.
    HELD: tokens up to which the ring of the guard has been filled; it begins at the prompt's end.
    SCOPE: IN_THINKING or IN_ANSWER where that alone may be relaxed, else 0.
    ENDS: the first of MOST_ENDS tokens that end the request, each once; behind them -1.
    """

    PRICE = 0
    RATE = 1
    LOST = 2
    MOST_TOKENS = 3
    THRESHOLD = 4
    STATE = 5
    BEGUN = 6
    SCANNED = 7
    HELD = 8
    SCOPE = 9
    ENDS = 16


RECORD_SIZE = Column.ENDS + MOST_ENDS


class Records(NamedTuple):
    """The records of all slots; the properties are views of a column.

    Attributes:
        table: int64 `[S, RECORD_SIZE]`.
    """

    table: torch.Tensor

    @classmethod
    def new(cls, num_slots: int, device: torch.device) -> "Records":
        """Records that relax nothing."""
        records = cls(torch.zeros((num_slots, RECORD_SIZE), dtype=torch.int64, device=device))
        records.ends.fill_(-1)
        return records

    @property
    def price(self) -> torch.Tensor:
        """int64 `[S]`."""
        return self.table[:, Column.PRICE]

    @property
    def rate(self) -> torch.Tensor:
        """int64 `[S]`."""
        return self.table[:, Column.RATE]

    @property
    def lost(self) -> torch.Tensor:
        """int64 `[S]`."""
        return self.table[:, Column.LOST]

    @property
    def most_tokens(self) -> torch.Tensor:
        """int64 `[S]`."""
        return self.table[:, Column.MOST_TOKENS]

    @property
    def threshold(self) -> torch.Tensor:
        """float32 `[S]`."""
        return self.table.view(torch.float32)[:, 2 * Column.THRESHOLD]

    def relaxes(self, name: RuleName) -> torch.Tensor:
        """bool `[S]`, whether a request is not strict, whatever is left of its bound."""
        return self.threshold < 1 if name == "theta" else self.price != 0

    @property
    def ends(self) -> torch.Tensor:
        """int64 `[S, MOST_ENDS]`."""
        return self.table[:, Column.ENDS :]


def float_bits(value: float) -> int:
    """A float32 as a record holds it."""
    return int(np.float32(value).view(np.uint32))


class Step(NamedTuple):
    """A step as every backend takes it, in the layout of vLLM's Model Runner V2.

    A request's rows are those of its draft tokens, then its bonus row.

    Attributes:
        logits: `[num_rows, vocab]` float32, bfloat16 or float16, any row stride.
        input_ids: `[num_rows]` int32 or int64, the model's input tokens: a row's draft token is the
            next entry; outside [0, vocab) is padding, but where drafts are drawn STRUCK. That of a
            request's first row is the last token before the step, or -1.
        cu_num_logits: `[batch]` int32, inclusive prefix sum of the requests' rows.
        records: of all slots.
        slots: int32 or int64 `[batch]`, the slot of each request.
        total_len: int32 `[S]`, tokens of prompt and output before this step, by slot.
        prompt_len: int32 `[S]`.
        num_speculative_tokens: K, the longest draft of a request, or more, which sets the width of
            what is emitted.
    """

    logits: torch.Tensor
    input_ids: torch.Tensor
    cu_num_logits: torch.Tensor
    records: Records
    slots: torch.Tensor
    total_len: torch.Tensor
    prompt_len: torch.Tensor
    num_speculative_tokens: int


class Guard(NamedTuple):
    """What the text before each row asks of its position, as a kernel takes it.

    A CPU's form is `rule.Guarded`. That of a bonus row asks nothing.

    Attributes:
        blocked: int8 `[num_rows]`, a `Verdict` where the draft token must stay strict, else 0.
        repeats: int8 `[num_rows]`, whether the draft token followed the last token before it
            somewhere earlier in the answer.
        num_followers: int32 `[num_rows]`.
        followers: int32 `[num_rows, MOST_FOLLOWERS]`, each token once; what lies behind
            `num_followers` of them is not read. Of a request that samples all tokens that followed
            the last one. Of a greedy request, where the draft token repeats, those that complete an
            n-gram as long as it does: beside one of these it may be relaxed. Of a strict request
            nothing that repeats is looked for. Sorted.
    """

    blocked: torch.Tensor
    repeats: torch.Tensor
    num_followers: torch.Tensor
    followers: torch.Tensor


class Markers(NamedTuple):
    """What `vllm_mars.runner.strictness` walks by, on a device.

    Attributes:
        table: int64 `[largest marker + 1]`, what a token marks: among OPENS the number of the span
            that it opens, THINKING_START and THINKING_END of what begins and ends the thinking
            section, and from bit CLOSES the spans that it closes, the first of them there.
        opening: strict tokens at the begin of an answer, and behind its thinking section.
    """

    table: torch.Tensor
    opening: int


class Sampling(NamedTuple):
    """How the requests of all slots sample.

    Attributes:
        temperature: float32 `[S]`; a request of temperature 0 is greedy. The logits have been
            divided by it.
        seeds: int64 `[S]`, of the random numbers.
        draft_logits: `[S, steps, vocab]`, contiguous, before temperature, where drafts are drawn.
        drawn_at: float32 `[S]`, with `draft_logits`: the temperature that they are drawn at; 0 of a
            greedy request, of which nothing is read there. On the device, where `temperature` lies
            in the host's memory.
        next_seeds: int64 `[S]`, where drafts are drawn: a step writes there with which seed the
            next draft is drawn. None where vLLM sees to it.
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    draft_logits: torch.Tensor | None = None
    drawn_at: torch.Tensor | None = None
    next_seeds: torch.Tensor | None = None


class Draws(NamedTuple):
    """What the draws of a step read, as Model Runner V2 has it.

    Attributes:
        sampling: of all slots.
        pos: int64 `[num_rows]`, which the random numbers of a row are made of, too.
        row_slots: int32 or int64 `[num_rows]`, the slot of each row.
        row_places: int32 `[num_rows]`, its place within its request.
        use_fp64: whether the noise of a draw is float64.
    """

    sampling: Sampling
    pos: torch.Tensor
    row_slots: torch.Tensor
    row_places: torch.Tensor
    use_fp64: bool = False


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


# The most nats that a request of a bucket lost; those of one more lost more. Ray takes no 0.
BUCKETS = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


class CounterLayout:
    """Which entries of `Account.counts` count what, each a slice.

    What lies behind a token that ends the request, or behind its last one, is left out, and all of
    a step of a request that had ended before: asynchronous scheduling runs one.

    Args:
        num_speculative_tokens: K, the longest draft of the engine, >= 1.

    Attributes:
        verified: positions looked at, up to and including the first rejected one; an entry per
            position, as of the next two.
        accepted: accepted draft tokens.
        relaxed: draft tokens that the rule accepted outright.
        lost: nats, in units of 2**-LOSS_BITS: greedily z1 - z[x] of relaxed tokens, sampled
            KL(m || p) at each position looked at.
        gained: by how much the rule raised the expected number of accepted draft tokens, in those
            units: see `rule`; of greedy requests the relaxed tokens. Of a probabilistic draft it
            can fall: m is below p where the draft is.
        drift_up: the drift of the positions at which it is above 0, in those units: see `rule`;
            greedily what is lost.
        drift_down: the rest, without its sign.
        relaxable: positions looked at, of requests that are not strict.
        refused: positions by reason, as in `REFUSALS`.
        ended, ended_lost: requests that ended, and what they lost, by bucket of `BUCKETS`.
        size: of the counts.
    """

    verified: slice
    accepted: slice
    relaxed: slice
    lost: slice
    gained: slice
    drift_up: slice
    drift_down: slice
    relaxable: slice
    refused: slice
    ended: slice
    ended_lost: slice

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens, self.size = num_speculative_tokens, 0
        by_position, by_bucket = [num_speculative_tokens] * 3, [len(BUCKETS) + 1] * 2
        sizes = [*by_position, 1, 1, 1, 1, 1, len(REFUSALS), *by_bucket]
        for name, size in zip(CounterLayout.__annotations__, sizes, strict=True):
            setattr(self, name, slice(self.size, self.size + size))
            self.size += size


class VerifyOutput(NamedTuple):
    """What one verification step emits.

    Attributes:
        output_token_ids: `[batch, K + 1]` int32; the accepted drafts, then the
            corrected or the bonus token, then -1.
        num_emitted: `[batch]` int32, accepted draft tokens and the token behind them.
        num_relaxed: `[batch]` int32, those of them that only the rule accepted.
        lost: `[batch]` int64, what these lost against the first choice, in units of 2**-LOSS_BITS
            nats.
    """

    output_token_ids: torch.Tensor
    num_emitted: torch.Tensor
    num_relaxed: torch.Tensor
    lost: torch.Tensor

    @property
    def num_accepted(self) -> torch.Tensor:
        """Accepted draft tokens; int32 `[batch]`."""
        return self.num_emitted - 1

    @property
    def loss(self) -> torch.Tensor:
        """`lost` in nats: the sum of log p(first choice) - log p(token); float32 `[batch]`."""
        return self.lost.float() / 2**LOSS_BITS
