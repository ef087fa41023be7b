"""Where a step writes down what it did."""

from typing import NamedTuple

import torch

from vllm_mars.kernels.verdicts import REFUSALS

# The most nats that a request of a bucket lost; those of one more lost more. Ray takes no 0.
BUCKETS = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


class Account(NamedTuple):
    """Where a step writes down what it did, beside `Records.lost`.

    Attributes:
        counts: int64 `[size]`, added into; see `CounterLayout`.
        table: float32 `[batch, 2, K + 1]`, written, or None. First, of a greedy request what each
            relaxed token lost, in nats; of one that samples log m - log p of each token, where m is
            the distribution that was served. NaN elsewhere. Second, the drift of each token of a
            request that samples, in nats; 0 elsewhere.
    """

    counts: torch.Tensor
    table: torch.Tensor | None


class CounterLayout:
    """Which entries of `Account.counts` count what, each a slice.

    What lies behind a token that ends the request, or behind its last one, is left out, and all of
    a step of a request that had ended before: asynchronous scheduling runs one.

    Args:
        num_speculative_tokens: K, the longest draft of the engine, >= 1.

    Attributes:
        verified: positions looked at, up to and including the first rejected one; an entry per
            position, as of the next two.
        accepted: accepted draft tokens.
        relaxed: draft tokens that the rule accepted outright.
        lost: nats, in units of 2**-LOSS_BITS: greedily z1 - z[x] of relaxed tokens, sampled
            KL(m || p) at each position looked at.
        gained: by how much the rule raised the expected number of accepted draft tokens, in those
            units: see `law` and `blocks`; of greedy requests the relaxed tokens. Of a probabilistic
            draft it can fall: m is below p where the draft is.
        drift_up: the drift of the positions at which it is above 0, in those units: see `law`;
            greedily what is lost.
        drift_down: the rest, without its sign.
        relaxable: positions looked at, of requests that are not strict.
        refused: positions by reason, as in `REFUSALS`.
        ended, ended_lost: requests that ended, and what they lost, by bucket of `BUCKETS`.
        size: of the counts.
    """

    verified: slice
    accepted: slice
    relaxed: slice
    lost: slice
    gained: slice
    drift_up: slice
    drift_down: slice
    relaxable: slice
    refused: slice
    ended: slice
    ended_lost: slice

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens, self.size = num_speculative_tokens, 0
        by_position, by_bucket = [num_speculative_tokens] * 3, [len(BUCKETS) + 1] * 2
        sizes = [*by_position, 1, 1, 1, 1, 1, len(REFUSALS), *by_bucket]
        for name, size in zip(CounterLayout.__annotations__, sizes, strict=True):
            setattr(self, name, slice(self.size, self.size + size))
            self.size += size
