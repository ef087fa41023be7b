"""The rules in Triton, function by function as `rules.naive` has them, for one request of a step.

`accept_kernel` gets the two functions of the engine's rule as constants:

    greedy(rows, splits, value, remaining, extendable, offset, length, SPLITS)    verdicts
    sampled(rows, logprobs, splits, value, remaining, extendable, offset, length, SPLITS)
        returns `served_dist.fused.RowDecisions`

Here `splits` are the partial results of the rows, where these are, and of how many splits, of which
a rule joins what it alone needs; `value` is the rule's as the record holds it, `remaining` what may
be lost up to each position, in units, and `extendable` how many positions can be followed by a
further token. Vectors have POSITIONS entries, one for each row of the request: its draft positions,
then its bonus row, then padding. Nats are integers in units of 2**-LOSS_BITS where a name says
units, or where they decide of a greedy request. Launched without fusion, so that products are
rounded as in torch.
"""
