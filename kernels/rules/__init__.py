"""Rules by which verification accepts draft tokens that are not the target's choice.

`RULES` is the only place that names them. The functions of a rule are in `naive/NAME.py`, which is
the definition, and in `fused/NAME.py` for Triton; both are imported on first use.
"""

import functools
import importlib
from collections.abc import Collection
from types import ModuleType
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """Rule with one value, which sets how much it relaxes."""

    # Name in options, modules and tables
    name: str
    # Value at which the rule relaxes nothing: one end of its range
    strict: float
    # Largest value. The smallest is 0, which is excluded unless it is strict.
    most: int
    # Whether the value is in nats per token, and so encoded in units; else it is a float32
    in_nats: bool
    # Whether the rule also accepts tokens with certainty in sampled requests. Then no token is
    # preserved, repetition is not prevented, and drafts must be fixed.
    outright: bool
    # Whether it needs the second largest logit
    needs_second: bool = False

    @property
    def option(self) -> str:
        """Name of the user's option for the value."""
        return f"mars_{self.name}"

    @property
    def plain(self) -> Any:
        """Functions of the rule in plain Python: see `rules.naive`."""
        return _module(f"naive.{self.name}")

    @property
    def jitted(self) -> Any:
        """Functions of the rule in Triton: see `rules.fused`."""
        return _module(f"fused.{self.name}")

    def loosest(self, values: Collection[float]) -> float:
        """Returns the value that relaxes most."""
        return min(values) if self.strict else max(values)

    def is_looser(self, value: float, other: float) -> bool:
        """Whether a value relaxes more than another."""
        return self.loosest((value, other)) != other


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


# The rule of arXiv 2601.15498: the runner-up is accepted if z2 > theta * z1.
THETA = Rule("theta", strict=1.0, most=1, in_nats=False, outright=True, needs_second=True)
# Accepts the prefix that maximizes price * length - loss. A bound on the loss sets the price.
PRICE = Rule("price", strict=0.0, most=8192, in_nats=True, outright=False)
RULES = {rule.name: rule for rule in (THETA, PRICE)}
