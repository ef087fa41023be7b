"""What verification says about a draft token."""

import enum


class Verdict(enum.IntEnum):
    """What verification says about the draft token at one position.

    NONE: only a draw, or nothing, accepts it. PAYABLE: the rule may accept it, if the tokens behind
    it are worth its loss. RELAXED: the rule accepts it. FIRST: it is the target's first choice
    (greedy requests). All others: the rule would accept it, but for this reason must not; REPEAT,
    since it repeats what the answer holds: see `Guard`.
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
