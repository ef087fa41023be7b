"""The rules: what verification accepts beside the target's own choice.

A rule is a value. `RULES` lists all of them; options, samplers, kernels and the laboratory read the
table, and nothing else names a rule. Its functions stand in `naive/NAME.py` in plain Python, which
is the definition, and in `fused/NAME.py` for Triton, function by function. Nothing of these is
imported before it is needed.
"""

import functools
import importlib
from collections.abc import Collection
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    from vllm_mars.kernels.budget import LossBudget
    from vllm_mars.kernels.interface import Verdict
    from vllm_mars.kernels.row_stats.naive import Rows
    from vllm_mars.kernels.served_dist.naive import RowDecision


class Needs(NamedTuple):
    """What a rule reads of a row of logits beside the first choice and the draft token's logit.

    Attributes:
        second: the second largest logit.
        sums: the sum of exponentials and its first moment, which give log p and the entropy; they
            are there for each rule where requests sample.
    """

    second: bool = False
    sums: bool = False


class Plain(Protocol):
    """The functions of a rule in plain Python.

    `greedy` gives the verdicts at the positions of a greedy request's draft, `sampled` what is
    decided at those of a request that samples, whose draft is not drawn.
    """

    def greedy(
        self, rows: "Rows", begin: int, end: int, budget: "LossBudget"
    ) -> "list[Verdict]": ...

    def sampled(
        self, rows: "Rows", begin: int, end: int, budget: "LossBudget"
    ) -> "list[RowDecision]": ...


class Rule(NamedTuple):
    """A rule.

    Attributes:
        name: by which options, modules and tables name it.
        strict: the value at which it relaxes nothing, which is one end of its range.
        most: its largest value. The other end is 0, which is outside where it is not strict.
        in_nats: whether the value is a number of nats per token, which a record holds in units;
            else it is a float32.
        outright: whether the rule accepts a token outright where its request samples, too. It keeps
            no promise about what else the target gives weight: no token keeps its probability,
            nothing guards against repetition, and drafts cannot be drawn.
        needs: what it reads of each row.
    """

    name: str
    strict: float
    most: int
    in_nats: bool
    outright: bool
    needs: Needs = Needs()

    @property
    def option(self) -> str:
        """The user's option for its value."""
        return f"mars_{self.name}"

    @property
    def plain(self) -> Plain:
        """Its functions in plain Python."""
        return cast(Plain, _module(f"naive.{self.name}"))

    @property
    def jitted(self) -> Any:
        """The same in Triton: see `rules.fused`."""
        return _module(f"fused.{self.name}")

    def loosest(self, values: Collection[float]) -> float:
        """The value among these at which it relaxes most."""
        return min(values) if self.strict else max(values)

    def is_looser(self, value: float, other: float) -> bool:
        """Whether it relaxes more at a value than at another."""
        return self.loosest((value, other)) != other


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


# The paper's: a runner-up is accepted where z2 > theta * z1.
THETA = Rule("theta", strict=1.0, most=1, in_nats=False, outright=True, needs=Needs(second=True))
# A prefix of the draft is accepted that is worth most, at a price for each token gained. A bound on
# the loss sets the value of this rule.
PRICE = Rule("price", strict=0.0, most=8192, in_nats=True, outright=False)
RULES = {rule.name: rule for rule in (THETA, PRICE)}
