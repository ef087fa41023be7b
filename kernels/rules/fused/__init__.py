"""Rules in Triton, for the rows of one request."""

# `accept_kernel` is compiled with two functions of the engine's rule:
#
#     greedy(rows, value, remaining, extendable, offset, length) -> verdicts
#     sampled(rows, logprobs, value, ...) -> `served_dist.fused.RowDecisions`
#
# Vectors are [POSITIONS]: a request's draft positions, then its bonus row, then padding.
#
# rows        `row_stats.combine.Rows`
# logprobs    `row_stats.combine.DraftLogprobs`
# value       the rule's value as encoded in the record
# remaining   budget up to each position, in units
# extendable  number of leading draft positions after which another token may follow
# offset      0 to POSITIONS - 1
# length      number of draft positions
#
# Losses and prices of greedy requests are integers in units of 2**-LOSS_BITS nats. Launches switch
# fusion off, so that products are rounded as in torch.
