"""Inputs and outputs of verification, shared by all backends and the samplers."""

import enum
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_mars.kernels.budget import LOSS_BITS, MAX_PRICE_UNITS, UNIT, price_units
from vllm_mars.kernels.rules import Rule


class Verdict(enum.IntEnum):
    """Result of the rule for one draft token."""

    # Not accepted by the rule; in sampled requests random numbers decide.
    NONE = 0
    # Accepted if the following tokens are worth its loss.
    PAYABLE = 1
    # Accepted by the rule.
    RELAXED = 2
    # The target argmax, in greedy requests.
    FIRST = 3
    # From here on: refused for this reason although the rule would accept the token.
    PROTECTED = 4
    SPAN = 5
    LOSS = 6
    # Would repeat an n-gram of the answer: see `Constraints`.
    REPEAT = 7
    OPENING = 8
    SCOPE = 9


REFUSALS = tuple(verdict for verdict in Verdict if verdict >= Verdict.PROTECTED)

# Stop ids that fit in a record, a power of 2; a request with more is strict.
MAX_STOP_IDS = 32


class Column(enum.IntEnum):
    """Columns of a request's record, int64 `[RECORD_SIZE]`."""

    # The rule's value: see `encode_value`; 0 is strict.
    VALUE = 0
    # Budget per output token: see `loss_rate`.
    RATE = 1
    # Loss so far, in units of 2**-LOSS_BITS nats; each step adds to it.
    LOST = 2
    # Number of output tokens at which the request ends.
    MAX_TOKENS = 3
    # Marker states (`kernels.constraints.markers`): after NUM_SCANNED tokens, after the prompt.
    STATE = 4
    PROMPT_STATE = 5
    # Tokens of prompt and output that STATE covers.
    NUM_SCANNED = 6
    # Tokens of prompt and output up to which the ring buffer is filled; it starts after the prompt.
    RING_END = 7
    # IN_THINKING or IN_ANSWER if only that section may be relaxed, else 0.
    SCOPE = 8
    # First of MAX_STOP_IDS columns: distinct tokens that end the request, then -1.
    STOP_IDS = 16


RECORD_SIZE = Column.STOP_IDS + MAX_STOP_IDS


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def encode_value(rule: Rule, value: float) -> int:
    """Encodes a rule's value as an integer: 0 is strict, larger is looser."""
    # Nats in units, rounded down; other values as their distance from strict in float32 steps.
    return price_units(value) if rule.in_nats else abs(_bits(rule.strict) - _bits(value))


def decode_value(rule: Rule, encoded: int) -> np.float32:
    """Inverts `encode_value` for a rule whose value is not in nats."""
    return np.uint32(abs(_bits(rule.strict) - encoded)).view(np.float32)


class Records(NamedTuple):
    """Records of all S slots; the properties are views of columns, int64 `[S]`."""

    # int64 [S, RECORD_SIZE]
    table: torch.Tensor

    @classmethod
    def new(cls, num_slots: int, device: torch.device) -> "Records":
        """Returns strict records."""
        records = cls(torch.zeros((num_slots, RECORD_SIZE), dtype=torch.int64, device=device))
        records.stop_ids.fill_(-1)
        return records

    @property
    def value(self) -> torch.Tensor:
        return self.table[:, Column.VALUE]

    def write_values(self, rule: Rule, values: torch.Tensor) -> None:
        """Encodes and writes the rule's value of each slot, float32 `[S]`."""
        if rule.in_nats:
            units = (values * 2**LOSS_BITS).floor().clamp(max=MAX_PRICE_UNITS)
            self.value.copy_(units)
        else:
            self.value.copy_((_bits(rule.strict) - values.view(torch.int32).long()).abs())

    @property
    def rate(self) -> torch.Tensor:
        return self.table[:, Column.RATE]

    @property
    def lost(self) -> torch.Tensor:
        return self.table[:, Column.LOST]

    @property
    def max_tokens(self) -> torch.Tensor:
        return self.table[:, Column.MAX_TOKENS]

    @property
    def relaxes(self) -> torch.Tensor:
        """Whether each request is lossy, even if its budget is spent; bool `[S]`."""
        return self.value != 0

    @property
    def stop_ids(self) -> torch.Tensor:
        return self.table[:, Column.STOP_IDS :]


class Protected(NamedTuple):
    """Tokens that are preserved in every request."""

    # bool [vocab]
    mask: torch.Tensor
    # int32 [num_ids], the same tokens as a list, padded with -1
    ids: torch.Tensor
    # Rounded up to a multiple of MAX_STOP_IDS, so that few sizes occur.
    num_ids: int

    @classmethod
    def of(cls, mask: torch.Tensor, device: torch.device) -> "Protected":
        """Copies the tokens of a mask on the host to a device."""
        ids = mask.nonzero().flatten().int()
        num_ids = -(-max(len(ids), 1) // MAX_STOP_IDS) * MAX_STOP_IDS
        ids = torch.nn.functional.pad(ids, (0, num_ids - len(ids)), value=-1)
        return cls(mask.to(device), ids.to(device), num_ids)


# Replaces a token of a probabilistic draft that a grammar rejects.
GRAMMAR_REJECTED = -2


class EngineParams(NamedTuple):
    """Parameters that all requests of an engine share."""

    rule: Rule
    protected: Protected | None = None


class VerifyInputs(NamedTuple):
    """Inputs of a step for all backends, in the layout of vLLM's Model Runner V2.

    A request has one row per draft token, then its bonus row.
    """

    # [num_rows, vocab] float32, bfloat16 or float16, any row stride
    logits: torch.Tensor
    # [num_rows] int32 or int64, input token of each row; entry i + 1 is row i's draft token. Ids
    # outside [0, vocab) are padding, except GRAMMAR_REJECTED in probabilistic drafts. A request's
    # first entry is its last token, or -1.
    input_ids: torch.Tensor
    # [batch] int32, inclusive prefix sum of the requests' rows
    cu_num_logits: torch.Tensor
    records: Records
    # [batch] int32 or int64
    slots: torch.Tensor
    # [S] int32, tokens of prompt and output before this step
    total_len: torch.Tensor
    # [S] int32
    prompt_len: torch.Tensor
    # K, an upper bound on draft length; outputs have K + 1 columns
    num_speculative_tokens: int


class SamplingTensors(NamedTuple):
    """Sampling parameters of all slots; the optional ones are for probabilistic drafts."""

    # [S] float32; 0 is greedy. In host memory with Model Runner V2.
    temperature: torch.Tensor
    # [S] int64
    seeds: torch.Tensor
    # [S, steps, vocab], contiguous, before temperature
    draft_logits: torch.Tensor | None = None
    # [S] float32 on the device, the temperature at which drafts are sampled; 0 if greedy, and then
    # no draft logits are read
    draft_temperature: torch.Tensor | None = None
    # [S] int64, output: the seed of each slot's next draft. None if vLLM sets it.
    next_seeds: torch.Tensor | None = None


class SamplingInputs(NamedTuple):
    """Sampling inputs of a step, named as in Model Runner V2."""

    sampling: SamplingTensors
    # [num_rows] int64, positions, which key each row's RNG
    pos: torch.Tensor
    # [num_rows] int32 or int64, the slot of each row
    expanded_idx_mapping: torch.Tensor
    # [num_rows] int32, index of each row within its request
    expanded_local_pos: torch.Tensor
    # Whether the Gumbel noise is float64.
    use_fp64: bool = False
    # Whether the logits are still to be divided by the temperature.
    apply_temperature: bool = False


class VerifyOutput(NamedTuple):
    """Output of a verification step.

    Attributes:
        output_token_ids: `[batch, K + 1]` int32: the accepted draft tokens, then the recovered or
            bonus token, then -1.
        num_emitted: `[batch]` int32: accepted draft tokens plus 1.
        num_relaxed: `[batch]` int32: draft tokens that only the rule accepted.
        lost: `[batch]` int64: loss of these tokens against the argmax, in units of 2**-16 nats.
    """

    output_token_ids: torch.Tensor
    num_emitted: torch.Tensor
    num_relaxed: torch.Tensor
    lost: torch.Tensor

    @property
    def num_accepted(self) -> torch.Tensor:
        """Number of accepted draft tokens; int32 `[batch]`."""
        return self.num_emitted - 1

    @property
    def loss(self) -> torch.Tensor:
        """`lost` in nats: the sum of log p(argmax) - log p(token); float32 `[batch]`."""
        return self.lost.float() * UNIT


class StepCounters(NamedTuple):
    """Counters and report rows that a step updates."""

    # int64 [size], added to; see `CounterLayout`
    counts: torch.Tensor
    # float32 [batch, 2, K + 1], written. Row 0: loss of each relaxed token if greedy, log m - log p
    # of each token if sampled, else NaN. Row 1: drift of each token if sampled, else 0. In nats.
    table: torch.Tensor | None


# Last tokens of an answer that the n-gram check reads, a power of 2.
NGRAM_WINDOW = 4096
# Tokens that may be listed at a position; in texts of NGRAM_WINDOW tokens at most 131 occurred.
MAX_FOLLOWERS = 256


class CpuConstraints(NamedTuple):
    """Constraints of each row on the CPU; fields as in `Constraints`."""

    blocked: Sequence[int]
    repeats: Sequence[bool]
    followers: Sequence[Collection[int]]

    @classmethod
    def of(cls, rows: Iterable[tuple[int, bool, Collection[int]]]) -> "CpuConstraints":
        """Transposes rows of these fields."""
        listed = list(rows)
        return cls(
            blocked=[blocked for blocked, _, _ in listed],
            repeats=[repeats for _, repeats, _ in listed],
            followers=[followers for _, _, followers in listed],
        )


class Constraints(NamedTuple):
    """Constraints that the preceding text puts on each row; bonus rows have none."""

    # [num_rows] int8, a `Verdict` if the position is strict, else 0
    blocked: torch.Tensor
    # [num_rows] int8, whether the draft token has followed the token before it earlier in the
    # answer; 0 in strict requests
    repeats: torch.Tensor
    # [num_rows] int32
    num_followers: torch.Tensor
    # [num_rows, MAX_FOLLOWERS] int32, distinct and sorted; entries from num_followers on are not
    # read. If sampled: all tokens that have followed the last token. If greedy and the draft token
    # repeats: the tokens that complete an n-gram as long as the draft token does, which may be
    # relaxed if the argmax is one of them. If strict: none.
    followers: torch.Tensor


class ConstraintInputs(NamedTuple):
    """The text of requests and the options that depend on it."""

    # [S, width] int32, from `constraints.fused.new_ring`; the width is a power of 2
    ring: torch.Tensor
    # [S, max_len] int32, the tokens of each slot
    tokens: torch.Tensor
    # [S] float32
    temperature: torch.Tensor
    markers: "Markers | None"
    # Longest n-gram that is checked, in tokens, >= 2; 0 for none.
    ngram: int
    # Whether the drafter repeats the last token if it has no proposal.
    pads_with_last_token: bool = False


class Markers(NamedTuple):
    """Markers of `kernels.constraints.markers` as a table on a device."""

    # int64 [largest marker + 1], bit fields: OPENS, the number of the span that the token opens;
    # THINKING_START and THINKING_END; from bit CLOSES on, one bit per span that the token closes
    table: torch.Tensor
    # Strict tokens at the start of an answer and after its thinking section
    opening: int
