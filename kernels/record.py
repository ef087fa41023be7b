"""What the workers keep of each request, by slot."""

import enum
from typing import NamedTuple

import numpy as np
import torch

from vllm_mars.kernels.ledger.naive import LOSS_BITS, MOST_PRICE_UNITS, price_units
from vllm_mars.kernels.rules import Rule

# Tokens that end a request which its record holds, a power of 2; with more, a request is strict.
MOST_ENDS = 32


class Column(enum.IntEnum):
    """Where the record of a request, int64 `[RECORD_SIZE]`, holds what.

    VALUE: of the rule, see `held`; 0 is strict.
    RATE: what an output token adds to the allowance: see `loss_rate`.
    LOST: what the request has lost, in units of 2**-LOSS_BITS nats. A step adds to it.
    MOST_TOKENS: output tokens at which the request ends.
    STATE: of `vllm_mars.kernels.strictness.naive`, after the first SCANNED tokens.
    BEGUN: that after the prompt.
    SCANNED: tokens of prompt and output that the state has taken in.
    HELD: tokens up to which the ring of the guard has been filled; it begins at the prompt's end.
    SCOPE: IN_THINKING or IN_ANSWER where that alone may be relaxed, else 0.
    ENDS: the first of MOST_ENDS tokens that end the request, each once; behind them -1.
    """

    VALUE = 0
    RATE = 1
    LOST = 2
    MOST_TOKENS = 3
    STATE = 4
    BEGUN = 5
    SCANNED = 6
    HELD = 7
    SCOPE = 8
    ENDS = 16


RECORD_SIZE = Column.ENDS + MOST_ENDS


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def held(rule: Rule, value: float) -> int:
    """A rule's value as a record holds it: 0 is strict, and the larger the looser.

    Nats are in units of 2**-LOSS_BITS, rounded down; of others it is how many float32 lie between
    the value and the strict one.
    """
    return price_units(value) if rule.in_nats else abs(_bits(rule.strict) - _bits(value))


def float_of(rule: Rule, found: int) -> np.float32:
    """The float32 that a record holds so."""
    return np.uint32(abs(_bits(rule.strict) - found)).view(np.float32)


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
    def value(self) -> torch.Tensor:
        """int64 `[S]`."""
        return self.table[:, Column.VALUE]

    def write_values(self, rule: Rule, values: torch.Tensor) -> None:
        """Writes the rule's value of each slot, as `held` has it; float32 `[S]`."""
        if rule.in_nats:
            units = (values * 2**LOSS_BITS).floor().clamp(max=MOST_PRICE_UNITS)
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
    def most_tokens(self) -> torch.Tensor:
        """int64 `[S]`."""
        return self.table[:, Column.MOST_TOKENS]

    @property
    def relaxes(self) -> torch.Tensor:
        """bool `[S]`, whether a request is not strict, whatever is left of its bound."""
        return self.value != 0

    @property
    def ends(self) -> torch.Tensor:
        """int64 `[S, MOST_ENDS]`."""
        return self.table[:, Column.ENDS :]
