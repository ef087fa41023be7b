"""Row statistics for the rules in NumPy: the CPU version of `rows_kernel`.

NumPy's vectorised argmax takes a third of the time of torch's and its small operations a quarter,
which matters for a single request. A step reads the rows of greedy requests once, for the argmax; a
rule may read some of them again. float32 logits are read in place; others are converted first.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_mars.kernels.budget import LOSS_BITS, MAX_LOSS, LossBudget
from vllm_mars.kernels.interface import (
    GRAMMAR_REJECTED,
    CpuConstraints,
    EngineParams,
    Verdict,
    VerifyInputs,
)


class Rows(NamedTuple):
    """Row statistics at each position of a step, as lists; x is the draft token."""

    # x; -1 for padding, GRAMMAR_REJECTED for a sampled token that a grammar forbids
    draft: Sequence[int]
    # Target argmax, lowest id on ties, or the first NaN of the row
    argmax: Sequence[int]
    # z1 - z[x] in units of 2**-LOSS_BITS nats, rounded up, at most MAX_LOSS; 0 if NaN or padding
    loss: Sequence[int]
    # Whether z[x] is above -inf and z1 is finite
    is_finite: Sequence[bool]
    is_end: Sequence[bool]
    # Whether x, or the argmax, ends the request or is protected
    is_preserved: Sequence[bool]
    is_argmax_preserved: Sequence[bool]
    # Whether x completes a repeated n-gram; if greedy, only if the argmax completes none as long
    repeats: Sequence[bool]
    # `Verdict` for which the position must be strict, or NONE
    blocked: Sequence[int]
    # float32 [vocab] of each row that is read, divided by the temperature
    logits: Mapping[int, np.ndarray]
    # Only for fixed drafts of sampled requests: log p(x), -inf for padding, may be NaN
    log_p: Sequence[float] = ()
    # R = 1 - p(S)
    rest: Sequence[float] = ()
    # H(p) in nats, valid if log p(x) is above -inf, and its part outside S
    entropy: Sequence[float] = ()
    rest_entropy: Sequence[float] = ()

    def forbids(self, i: int, *, checks_argmax: bool) -> Verdict:
        """Reason why a position is strict, or NONE."""
        if self.blocked[i]:
            return Verdict(self.blocked[i])
        if self.is_preserved[i] or (checks_argmax and self.is_argmax_preserved[i]):
            return Verdict.PROTECTED
        return Verdict.REPEAT if self.repeats[i] else Verdict.NONE


def num_extendable(rows: Rows, begin: int, end: int, budget: LossBudget) -> int:
    """Number of leading draft positions after which another token may follow."""
    limit = min(end - begin, budget.tokens_left)
    return next((offset for offset in range(limit) if rows.is_end[begin + offset]), limit)


def read_rows(
    step: VerifyInputs,
    engine_params: EngineParams,
    constraints: CpuConstraints | None = None,
    temperature: Sequence[float] | None = None,
    *,
    with_bonus: bool = False,
) -> Rows:
    """Row statistics of all rows of a step; bonus rows have no draft token.

    Args:
        step: logits are float32.
        temperature: as in `CpuSamplingInputs`; None if all requests are greedy. Rows of sampled
            requests are read only for outright rules.
        with_bonus: whether to find the argmax of bonus rows.
    """
    z = step.logits.numpy()
    vocab = z.shape[1]
    counts = np.diff(step.cu_num_logits.numpy(), prepend=0)
    row_slots = np.repeat(step.slots.numpy(), counts)
    stop_ids = step.records.stop_ids.numpy()[row_slots]
    # A step may have no rows.
    ids = np.append(step.input_ids.numpy()[1:], -1)[: len(z)]
    is_bonus = np.zeros(len(ids), dtype=bool)
    is_bonus[np.cumsum(counts) - 1] = True
    ids[is_bonus] = -1
    in_vocab = (ids >= 0) & (ids < vocab)
    safe = np.where(in_vocab, ids, 0)
    is_read = ~is_bonus | with_bonus
    scales = np.zeros(len(ids), dtype=np.float32)
    if temperature is not None:
        scales = np.repeat(np.asarray(temperature, dtype=np.float32), counts)
        if not engine_params.rule.outright:
            is_read &= scales == 0
    divisors = np.where(scales == 0, np.float32(1), scales)
    read = np.flatnonzero(is_read)
    # Row by row, because indexing with the list would copy the rows.
    read_logits = [z[i] if divisors[i] == 1 else z[i] / divisors[i] for i in read]
    argmax = np.zeros(len(ids), dtype=np.int64)
    argmax[read] = [row.argmax() for row in read_logits]
    first, logit = np.zeros((2, len(ids)), dtype=np.float32)
    with np.errstate(invalid="ignore"):
        first[read] = z[read, argmax[read]] / divisors[read]
        logit[read] = z[read, safe[read]] / divisors[read]
        loss = first - logit
        units = np.ceil(np.minimum(loss * np.float32(2**LOSS_BITS), np.float32(MAX_LOSS)))
        units = np.where(in_vocab & (loss == loss), units, 0)
    is_end = in_vocab & _is_among(safe, stop_ids)
    is_preserved = is_end
    is_argmax_preserved = _is_among(argmax, stop_ids)
    if engine_params.protected is not None:
        mask = engine_params.protected.mask.numpy()
        is_preserved = is_preserved | (in_vocab & mask[safe])
        is_argmax_preserved = is_argmax_preserved | mask[argmax]
    constraints = constraints or CpuConstraints.of([(0, False, ())] * len(ids))
    repeats = [
        is_repeat and (scale != 0 or argmax_id not in followers)
        for is_repeat, scale, argmax_id, followers in zip(
            constraints.repeats, scales, argmax.tolist(), constraints.followers, strict=True
        )
    ]
    draft = np.where(in_vocab, ids, np.where(ids == GRAMMAR_REJECTED, GRAMMAR_REJECTED, -1))
    return Rows(
        draft=draft.tolist(),
        argmax=argmax.tolist(),
        loss=units.astype(np.int64).tolist(),
        is_finite=(in_vocab & (logit > -np.inf) & (first < np.inf)).tolist(),
        is_end=is_end.tolist(),
        is_preserved=is_preserved.tolist(),
        is_argmax_preserved=(in_vocab & is_argmax_preserved).tolist(),
        repeats=repeats,
        blocked=constraints.blocked,
        logits=dict(zip(read.tolist(), read_logits, strict=True)),
    )


def _is_among(token: np.ndarray, stop_ids: np.ndarray) -> np.ndarray:
    is_stop: np.ndarray = (stop_ids == token[:, None]).any(axis=1)
    return is_stop


def read_probabilities(
    rows: Rows, row: int, z: torch.Tensor, p: torch.Tensor, preserved: Sequence[torch.Tensor]
) -> Rows:
    """Adds the probabilities of a sampled request with a fixed draft.

    Args:
        row: first row of the request.
        z: float32 `[n, vocab]`, processed logits.
        p: softmax of z.
        preserved: int64 `[m]` per row, the distinct tokens of S.
    """
    rows_range = np.arange(len(z))
    draft = np.asarray(rows.draft[row : row + len(z)], dtype=np.int64)
    argmax = z.numpy().argmax(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        # log p of the argmax never underflows.
        log_first = np.log(p.numpy()[rows_range, argmax])
        first = z.numpy()[rows_range, argmax]
        log_p = np.minimum(z.numpy()[rows_range, np.maximum(draft, 0)] - first + log_first, 0.0)
        entropy = [*map(_entropy, p.numpy(), z.numpy(), first, log_first)]
    log_p[draft < 0] = -math.inf
    preserved_p = [p_row[tokens].double() for p_row, tokens in zip(p, preserved, strict=True)]
    rest = [max(1 - float(probs.sum()), 0.0) for probs in preserved_p]
    preserved_entropy = [float(torch.special.entr(probs).sum()) for probs in preserved_p]
    rest_entropy = [total - part for total, part in zip(entropy, preserved_entropy, strict=True)]
    padding = [0.0] * row
    return rows._replace(
        log_p=padding + log_p.tolist(),
        rest=padding + rest,
        entropy=padding + entropy,
        rest_entropy=padding + rest_entropy,
    )


def _entropy(p: np.ndarray, logits: np.ndarray, first: float, log_first: float) -> float:
    """Entropy of p in nats; `first` is the largest logit and `log_first` its log p."""
    entropy = float(p.dot(first - logits) - log_first)
    # Masked tokens give 0 * inf = NaN. `entr` is exact there, but its logarithms take four times as
    # long.
    if math.isnan(entropy):
        entropy = float(torch.special.entr(torch.from_numpy(p)).sum())
    return entropy
