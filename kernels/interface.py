"""Inputs and outputs of verification, and what the kernels and the samplers share."""

import enum
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_mars.kernels.budget import LOSS_BITS, MAX_PRICE_UNITS, UNIT, price_units
from vllm_mars.kernels.rules import Rule


class Verdict(enum.IntEnum):
    """What verification says about the draft token at one position.

    NONE: only a draw, or nothing, accepts it. PAYABLE: the rule may accept it, if the tokens behind
    it are worth its loss. RELAXED: the rule accepts it. FIRST: it is the target's first choice
    (greedy requests). All others: the rule would accept it, but for this reason must not; REPEAT,
    since it repeats what the answer holds: see `Constraints`.
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

# Tokens that end a request which its record holds, a power of 2; with more, a request is strict.
MAX_STOP_IDS = 32


class Column(enum.IntEnum):
    """Where the record of a request, int64 `[RECORD_SIZE]`, holds what.

    VALUE: of the rule, see `encode_value`; 0 is strict.
    RATE: what an output token adds to the allowance: see `loss_rate`.
    LOST: what the request has lost, in units of 2**-LOSS_BITS nats. A step adds to it.
    MAX_TOKENS: output tokens at which the request ends.
    STATE: of `vllm_mars.kernels.constraints.markers`, after the first NUM_SCANNED tokens.
    PROMPT_STATE: that after the prompt.
    NUM_SCANNED: tokens of prompt and output that the state has taken in.
    RING_END: tokens up to which the ring of the guard has been filled; it begins at the prompt's
    end. SCOPE: IN_THINKING or IN_ANSWER where that alone may be relaxed, else 0.
    STOP_IDS: the first of MAX_STOP_IDS tokens that end the request, each once; behind them -1.
    """

    VALUE = 0
    RATE = 1
    LOST = 2
    MAX_TOKENS = 3
    STATE = 4
    PROMPT_STATE = 5
    NUM_SCANNED = 6
    RING_END = 7
    SCOPE = 8
    STOP_IDS = 16


RECORD_SIZE = Column.STOP_IDS + MAX_STOP_IDS


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def encode_value(rule: Rule, value: float) -> int:
    """A rule's value as a record holds it: 0 is strict, and the larger the looser.

    Nats are in units of 2**-LOSS_BITS, rounded down; of others it is how many float32 lie between
    the value and the strict one.
    """
    return price_units(value) if rule.in_nats else abs(_bits(rule.strict) - _bits(value))


def decode_value(rule: Rule, encoded: int) -> np.float32:
    """The float32 that a record holds so."""
    return np.uint32(abs(_bits(rule.strict) - encoded)).view(np.float32)


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
        records.stop_ids.fill_(-1)
        return records

    @property
    def value(self) -> torch.Tensor:
        """int64 `[S]`."""
        return self.table[:, Column.VALUE]

    def write_values(self, rule: Rule, values: torch.Tensor) -> None:
        """Writes the rule's value of each slot, as `encode_value` has it; float32 `[S]`."""
        if rule.in_nats:
            units = (values * 2**LOSS_BITS).floor().clamp(max=MAX_PRICE_UNITS)
            self.value.copy_(units)
        else:
            self.value.copy_((_bits(rule.strict) - values.view(torch.int32).long()).abs())

    @property
    def rate(self) -> torch.Tensor:
        """int64 `[S]`."""
        return self.table[:, Column.RATE]

    @property
    def lost(self) -> torch.Tensor:
        """int64 `[S]`."""
        return self.table[:, Column.LOST]

    @property
    def max_tokens(self) -> torch.Tensor:
        """int64 `[S]`."""
        return self.table[:, Column.MAX_TOKENS]

    @property
    def relaxes(self) -> torch.Tensor:
        """bool `[S]`, whether a request is not strict, whatever is left of its bound."""
        return self.value != 0

    @property
    def stop_ids(self) -> torch.Tensor:
        """int64 `[S, MAX_STOP_IDS]`."""
        return self.table[:, Column.STOP_IDS :]


class Protected(NamedTuple):
    """The tokens that keep their probability in every request.

    Attributes:
        mask: bool `[vocab]`, which they are.
        ids: int32 `[num_ids]`, the same as a list, behind them -1.
        num_ids: a multiple of MAX_STOP_IDS, for tensors of few sizes.
    """

    mask: torch.Tensor
    ids: torch.Tensor
    num_ids: int

    @classmethod
    def of(cls, mask: torch.Tensor, device: torch.device) -> "Protected":
        """Those of a mask on the host, on a device."""
        found = mask.nonzero().flatten().int()
        size = -(-max(len(found), 1) // MAX_STOP_IDS) * MAX_STOP_IDS
        ids = torch.nn.functional.pad(found, (0, size - len(found)), value=-1)
        return cls(mask.to(device), ids.to(device), size)


# In the place of a draft token that was drawn and that a grammar has struck out since.
GRAMMAR_REJECTED = -2


class EngineParams(NamedTuple):
    """What holds for all requests of an engine.

    Attributes:
        rule: by which their drafts are verified.
        protected: the tokens that keep their probability, or None.
    """

    rule: Rule
    protected: Protected | None = None


class VerifyInputs(NamedTuple):
    """A step as every backend takes it, in the layout of vLLM's Model Runner V2.

    A request's rows are those of its draft tokens, then its bonus row.

    Attributes:
        logits: `[num_rows, vocab]` float32, bfloat16 or float16, any row stride.
        input_ids: `[num_rows]` int32 or int64, the model's input tokens: a row's draft token is the
            next entry; outside [0, vocab) is padding, but where drafts are drawn GRAMMAR_REJECTED.
            That of a request's first row is the last token before the step, or -1.
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


class SamplingTensors(NamedTuple):
    """How the requests of all slots sample.

    Attributes:
        temperature: float32 `[S]`; a request of temperature 0 is greedy.
        seeds: int64 `[S]`, of the random numbers.
        draft_logits: `[S, steps, vocab]`, contiguous, before temperature, where drafts are drawn.
        draft_temperature: float32 `[S]`, with `draft_logits`: the temperature that they are drawn
            at; 0 of a greedy request, of which nothing is read there. On the device, where
            `temperature` lies in the host's memory.
        next_seeds: int64 `[S]`, where drafts are drawn: a step writes there with which seed the
            next draft is drawn. None where vLLM sees to it.
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    draft_logits: torch.Tensor | None = None
    draft_temperature: torch.Tensor | None = None
    next_seeds: torch.Tensor | None = None


class SamplingInputs(NamedTuple):
    """What the draws of a step read, as Model Runner V2 has it.

    Attributes:
        sampling: of all slots.
        pos: int64 `[num_rows]`, which the random numbers of a row are made of, too.
        expanded_idx_mapping: int32 or int64 `[num_rows]`, the slot of each row.
        expanded_local_pos: int32 `[num_rows]`, its place within its request.
        use_fp64: whether the noise of a draw is float64.
        apply_temperature: whether the logits are divided by the temperature here, as vLLM's kernel
            does it; else they have been.
    """

    sampling: SamplingTensors
    pos: torch.Tensor
    expanded_idx_mapping: torch.Tensor
    expanded_local_pos: torch.Tensor
    use_fp64: bool = False
    apply_temperature: bool = False


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
        return self.lost.float() * UNIT


class StepCounters(NamedTuple):
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


# The guard against repetition looks at so many of an answer's last tokens, a power of 2, and lists
# so many of those that followed one of them: in texts as long no token had more than 131.
NGRAM_WINDOW = 4096
MAX_FOLLOWERS = 256


class CpuConstraints(NamedTuple):
    """What the text before each row asks of its position: a CPU's form of `Constraints`.

    Attributes:
        blocked: a `Verdict` where the draft token must stay strict, else 0.
        repeats: whether the draft token is among those that followed the last token before it.
        followers: the tokens that are listed there.
    """

    blocked: Sequence[int]
    repeats: Sequence[bool]
    followers: Sequence[Collection[int]]

    @classmethod
    def of(cls, rows: Iterable[tuple[int, bool, Collection[int]]]) -> "CpuConstraints":
        """The entries of each row."""
        known = [*rows]
        return cls([row[0] for row in known], [row[1] for row in known], [row[2] for row in known])


class Constraints(NamedTuple):
    """What the text before each row asks of its position, as a kernel takes it.

    A CPU's form is `CpuConstraints`. That of a bonus row asks nothing.

    Attributes:
        blocked: int8 `[num_rows]`, a `Verdict` where the draft token must stay strict, else 0.
        repeats: int8 `[num_rows]`, whether the draft token followed the last token before it
            somewhere earlier in the answer.
        num_followers: int32 `[num_rows]`.
        followers: int32 `[num_rows, MAX_FOLLOWERS]`, each token once; what lies behind
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
    """What `vllm_mars.kernels.constraints.markers` walks by, on a device.

    Attributes:
        table: int64 `[largest marker + 1]`, what a token marks: among OPENS the number of the span
            that it opens, THINKING_START and THINKING_END of what begins and ends the thinking
            section, and from bit CLOSES the spans that it closes, the first of them there.
        opening: strict tokens at the begin of an answer, and behind its thinking section.
    """

    table: torch.Tensor
    opening: int
