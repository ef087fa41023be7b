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

from vllm_mars.kernels import record, step
from vllm_mars.kernels.account import naive as account
from vllm_mars.kernels.law import naive as law
from vllm_mars.kernels.ledger import naive as ledger
from vllm_mars.kernels.record import Column
from vllm_mars.kernels.strictness import naive as strictness
from vllm_mars.kernels.verdicts import Verdict


class OfRow(enum.IntEnum):
    """What `clip_kernel` finds of a row of a drawn draft, and behind it `mass_kernel`.

    LOG_W, PRICE, LOG_TOTAL: log w, the price, and log F(w). TARGET_LSE, DRAFT_LSE: log-sum-exps.
    LOSS, DRIFT: KL(m || p), and the drift. RATIO, OF_DRAFT: of the draft token log m - log p, and
    log m - log q, -inf where it cannot stay. BEFORE, STRICT_BEFORE: log p_i of the draft before the
    row, and the same with p in the place of m; not of a request's first row, where they are 0.
    """

    LOG_W = 0
    PRICE = 1
    LOG_TOTAL = 2
    TARGET_LSE = 3
    DRAFT_LSE = 4
    LOSS = 5
    DRIFT = 6
    RATIO = 7
    OF_DRAFT = 8
    BEFORE = 9
    STRICT_BEFORE = 10


def _names(of: type[enum.IntEnum]) -> SimpleNamespace:
    return SimpleNamespace(**{name: member.value for name, member in of.__members__.items()})


class Constants(NamedTuple):
    """Fields without a comment are those of the same name where they are defined."""

    # By name verdicts, columns of a record, and what is found of a row; sizes of the last two.
    VERDICT: Any = _names(Verdict)
    COLUMN: Any = _names(Column)
    OF_ROW: Any = _names(OfRow)
    RECORD_SIZE: int = record.RECORD_SIZE
    CLIPPED: int = len(OfRow)

    # Counters, by name, and how many have an entry for each position.
    COUNTER: Any = account.PLACES
    BY_POSITION: int = len(account.BY_POSITION)

    # Nats of a unit, units of a nat, and what parts a rate from units.
    UNIT: float = ledger.UNIT
    PER_NAT: float = 2.0**ledger.LOSS_BITS
    RATE_SHIFT: int = ledger.RATE_BITS - ledger.LOSS_BITS
    MOST_LOSS: float = float(ledger.MOST_LOSS)
    NO_BOUND: int = ledger.NO_BOUND
    NO_LIMIT: int = ledger.NO_LIMIT
    BURST_TOKENS: int = ledger.BURST_TOKENS
    # Rounded down by more than a float can be off.
    CAUTION: float = 1 - 2**-20

    # Tokens.
    STRUCK: int = step.STRUCK
    MOST_ENDS: int = record.MOST_ENDS
    MOST_FOLLOWERS: int = strictness.MOST_FOLLOWERS
    OPENING: int = strictness.OPENING
    OPENS: int = strictness.OPENS
    THINKING: int = strictness.THINKING
    THINKING_START: int = strictness.THINKING_START
    THINKING_END: int = strictness.THINKING_END
    IN_THINKING: int = strictness.IN_THINKING
    IN_ANSWER: int = strictness.IN_ANSWER
    CLOSES: int = strictness.CLOSES
    # Kept tokens that are read at a time, those of most models are fewer; listed tokens of each
    # position; places of an answer.
    KEPT_CHUNK: int = 256
    LISTED: int = 32
    ANSWER_BLOCK: int = 1024

    # As `law` has it.
    START: float = law.START
    STEPS: int = law.STEPS
    MOST_CLIP_PRICE: float = law.MOST_CLIP_PRICE
    LEAST_REST: float = law.LEAST_REST
    EIGHTH: float = law.EIGHTH

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
