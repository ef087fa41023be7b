"""What the workers keep of each request, by slot."""

import enum
from typing import NamedTuple

import numpy as np
import torch

from vllm_mars.kernels.rules import RuleName

# Tokens that end a request which its record holds, a power of 2; with more, a request is strict.
MOST_ENDS = 32


class Column(enum.IntEnum):
    """Where the record of a request, int64 `[RECORD_SIZE]`, holds what.

    PRICE: in units of 2**-LOSS_BITS nats per token gained; 0 is strict.
    RATE: what an output token adds to the allowance: see `loss_rate`.
    LOST: what the request has lost, in units of 2**-LOSS_BITS nats. A step adds to it.
    MOST_TOKENS: output tokens at which the request ends.
    THRESHOLD: theta, as the bits of a float32; not read with a price.
    STATE: of `vllm_mars.kernels.strictness.naive`, after the first SCANNED tokens.
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


def float_bits(value: float) -> int:
    """A float32 as a record holds it."""
    return int(np.float32(value).view(np.uint32))


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
