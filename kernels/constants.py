"""What the Triton kernels know at compile time, as one constant.

As fields of one tuple they are part of what a compiled kernel is cached by. (Attributes of a module
are not: an upgrade would run old kernels.) Triton compares each global constant that a kernel uses
whenever it looks for what it has compiled, a microsecond apiece on the host; of one tuple it does
that once for each module whose functions a kernel calls.
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
    """What `clip_kernel` finds of a row of a drawn draft, and behind it `mass_kernel`.

    LOG_W, PRICE, LOG_TOTAL: log w, the price, and log F(w). TARGET_LSE, DRAFT_LSE: log-sum-exps.
    LOSS, DRIFT: KL(m || p), and the drift. LOG_RATIO, LOG_ACCEPT_RATIO: of the draft token log m -
    log p, and log m - log q, -inf where it cannot stay. LOG_JOINT_RATIO, STRICT_LOG_JOINT_RATIO:
    log p_i of the draft before the row, and the same with p in the place of m; not of a request's
    first row, where they are 0.
    """

    LOG_W = 0
    PRICE = 1
    LOG_TOTAL = 2
    TARGET_LSE = 3
    DRAFT_LSE = 4
    LOSS = 5
    DRIFT = 6
    LOG_RATIO = 7
    LOG_ACCEPT_RATIO = 8
    LOG_JOINT_RATIO = 9
    STRICT_LOG_JOINT_RATIO = 10


def _names(of: type[enum.IntEnum]) -> SimpleNamespace:
    return SimpleNamespace(**{name: member.value for name, member in of.__members__.items()})


class Constants(NamedTuple):
    """Fields without a comment are those of the same name where they are defined."""

    # By name verdicts, columns of a record, and what is found of a row; sizes of the last two.
    VERDICT: Any = _names(Verdict)
    COLUMN: Any = _names(Column)
    CLIP_STAT: Any = _names(ClipStat)
    RECORD_SIZE: int = interface.RECORD_SIZE
    NUM_CLIP_STATS: int = len(ClipStat)

    # Counters, by name, and how many have an entry for each position.
    COUNTER: Any = table.COUNTER_OFFSETS
    BY_POSITION: int = len(table.BY_POSITION)

    # Nats of a unit, units of a nat, and what parts a rate from units.
    UNIT: float = budget.UNIT
    PER_NAT: float = 2.0**budget.LOSS_BITS
    RATE_SHIFT: int = budget.RATE_BITS - budget.LOSS_BITS
    MAX_LOSS: float = float(budget.MAX_LOSS)
    NO_BOUND: int = budget.NO_BOUND
    NO_LIMIT: int = budget.NO_LIMIT
    BURST_TOKENS: int = budget.BURST_TOKENS
    # Rounded down by more than a float can be off.
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
    # Preserved tokens that are read at a time, those of most models are fewer; listed tokens of
    # each position; places of an answer.
    PRESERVED_CHUNK: int = 256
    LISTED: int = 32
    ANSWER_BLOCK: int = 1024

    # As `served_dist` has it.
    START: float = served_dist.START
    STEPS: int = served_dist.STEPS
    MAX_CLIP_PRICE: float = served_dist.MAX_CLIP_PRICE
    LEAST_REST: float = served_dist.LEAST_REST
    EIGHTH: float = served_dist.EIGHTH

    # Numbers. exp(x) is 2**(x * LOG2_E): libdevice's 2**x takes one instruction, where `tl.exp`
    # takes five for results that no float32 holds in full.
    INF: float = float("inf")
    LOG2_E: float = 1.4426950408889634
    # Below any logit that counts.
    LEAST: float = -3e38
    # So far below the largest logit, exp is 0 and its product with the distance has to be.
    NOTHING: float = -1e4
    # So small a log2 p adds nothing to a sum, where -inf would make a NaN of it.
    LEAST_LOG2: float = -1e4
    # vLLM's `tl_rand32`, which draws the same numbers as Triton, is never 0 but this.
    LEAST_DRAWN: float = 4.6566127342e-10


class _Fields(tl.constexpr):
    """A constant whose fields are known where Triton does not look into its value.

    So it is in the interpreter, in Triton 3.6, and where Triton 3.9 looks for a return in a branch.
    """

    def __getattr__(self, name: str) -> float:
        # Copies are made before there is a value.
        if name == "value":
            raise AttributeError(name)
        found: float = getattr(self.value, name)
        return found

    # Nothing in it changes. So Triton, which compares it with a copy, sees that at a glance.
    def __deepcopy__(self, memo: object) -> "_Fields":
        return self

    def __ne__(self, other: object) -> bool:
        return self is not other


C: Any = _Fields(Constants())
