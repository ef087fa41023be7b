"""Compile-time constants of the Triton kernels, as the fields of one constant `C`.

Triton keys its cache by global constants but not by module attributes, so with attributes an
upgrade would run old kernels. Each launch compares every global constant of a kernel, which costs
1 us of host time; one tuple is compared once per module.
"""

import enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import triton.language as tl

from vllm_mars.kernels import budget, interface
from vllm_mars.kernels.constraints import markers
from vllm_mars.kernels.counters import table
from vllm_mars.kernels.interface import Column, Verdict
from vllm_mars.kernels.served_dist import naive as served_dist


class ClipStat(enum.IntEnum):
    """Statistics of a row with a probabilistic draft, from `clip_kernel` and `mass_kernel`."""

    # Base 2: log w, the price, log F(w), and the log-sum-exps of target and draft.
    LOG_W = 0
    PRICE = 1
    LOG_TOTAL = 2
    TARGET_LSE = 3
    DRAFT_LSE = 4
    # In nats: KL(m || p), and the drift.
    LOSS = 5
    DRIFT = 6
    # log m - log p and log m - log q of the draft token; the second is -inf if it must be rejected.
    LOG_RATIO = 7
    LOG_ACCEPT_RATIO = 8
    # By `mass_kernel`: log a_(i-1) of docs/rule.md, and the same with p instead of m. Not written
    # for a request's first row, where both are 0.
    LOG_JOINT_RATIO = 9
    STRICT_LOG_JOINT_RATIO = 10


def _names(enum_type: type[enum.IntEnum]) -> SimpleNamespace:
    return SimpleNamespace(**{name: member.value for name, member in enum_type.__members__.items()})


class Constants(NamedTuple):
    """Constants of the same name in other modules, unless a comment says otherwise."""

    # Enums as namespaces, and the sizes of a record and of a row's statistics.
    VERDICT: Any = _names(Verdict)
    COLUMN: Any = _names(Column)
    CLIP_STAT: Any = _names(ClipStat)
    RECORD_SIZE: int = interface.RECORD_SIZE
    NUM_CLIP_STATS: int = len(ClipStat)

    # Offset of each counter, and the number of counters that have an entry per position.
    COUNTER: Any = table.COUNTER_OFFSETS
    BY_POSITION: int = len(table.BY_POSITION)

    # Nats per unit, units per nat, and the shift from a rate's units to these.
    UNIT: float = budget.UNIT
    PER_NAT: float = 2.0**budget.LOSS_BITS
    RATE_SHIFT: int = budget.RATE_BITS - budget.LOSS_BITS
    MAX_LOSS: float = float(budget.MAX_LOSS)
    NO_BOUND: int = budget.NO_BOUND
    NO_LIMIT: int = budget.NO_LIMIT
    BURST_TOKENS: int = budget.BURST_TOKENS
    # Factor that rounds a float32 down by more than its error.
    CAUTION: float = 1 - 2**-20

    # Tokens.
    GRAMMAR_REJECTED: int = interface.GRAMMAR_REJECTED
    MAX_STOP_IDS: int = interface.MAX_STOP_IDS
    MAX_FOLLOWERS: int = interface.MAX_FOLLOWERS
    OPENING: int = markers.OPENING
    OPENS: int = markers.OPENS
    THINKING: int = markers.THINKING
    THINKING_START: int = markers.THINKING_START
    THINKING_END: int = markers.THINKING_END
    IN_THINKING: int = markers.IN_THINKING
    IN_ANSWER: int = markers.IN_ANSWER
    CLOSES: int = markers.CLOSES
    # Block sizes over preserved tokens (most models have fewer), over the tokens that the n-gram
    # check lists for a position, and over the tokens of an answer.
    PRESERVED_CHUNK: int = 256
    LISTED: int = 32
    ANSWER_BLOCK: int = 1024

    # From `served_dist`.
    START: float = served_dist.START
    STEPS: int = served_dist.STEPS
    MAX_CLIP_PRICE: float = served_dist.MAX_CLIP_PRICE
    LEAST_REST: float = served_dist.LEAST_REST
    EIGHTH: float = served_dist.EIGHTH

    # exp(x) is computed as 2**(x * LOG2_E): libdevice's exp2 is one instruction, `tl.exp` is five
    # because it also handles results that are subnormal in float32.
    INF: float = float("inf")
    LOG2_E: float = 1.4426950408889634
    # Below any logit that contributes to a sum.
    LEAST: float = -3e38
    # Lower limit of a logit minus the largest one: exp is 0 there, and so is its product with the
    # distance, which is NaN at -inf.
    NOTHING: float = -1e4
    # Lower limit of log2 p: it adds nothing to a sum, but -inf would make it NaN.
    LEAST_LOG2: float = -1e4
    # vLLM's `tl_rand32` equals `tl.rand`, except that it returns this number instead of 0.
    LEAST_DRAWN: float = 4.6566127342e-10


class _Fields(tl.constexpr):
    """Constant whose fields can be read even if Triton does not unwrap it."""

    # That is in the interpreter, in Triton 3.6, and in Triton 3.9's search for returns in branches.

    def __getattr__(self, name: str) -> float:
        # `copy` looks attributes up before `value` is set.
        if name == "value":
            raise AttributeError(name)
        field: float = getattr(self.value, name)
        return field

    # Triton compares the constant with a deep copy at each launch: as it is immutable, identity
    # is enough.
    def __deepcopy__(self, memo: object) -> "_Fields":
        return self

    def __ne__(self, other: object) -> bool:
        return self is not other


C: Any = _Fields(Constants())
