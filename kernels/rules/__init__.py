"""The rules."""

from typing import Literal

# The rules, each named by the option that holds its value, and the value at which each is strict.
RuleName = Literal["theta", "price"]
