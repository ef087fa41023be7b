"""What the rule needs to know of each row, by NumPy: the form of `rows_kernel` for a CPU.

NumPy's vectorised argmax takes a third of the time of torch's, and its small operations a quarter,
which counts for a single request. A step reads the rows of greedy requests once, for the argmax; a
rule may look at some of them again. float32 logits are read in place; others are converted first.
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
    """What the rule reads of the logits at each draft position of a step; each a list.

    Attributes:
        draft: the draft token, -1 for padding, GRAMMAR_REJECTED for one that was drawn and struck
            out.
        argmax: the target's first choice, of equal logits the lowest id; of a row that holds a NaN
            the first NaN.
        loss: z1 - z[x] in units of 2**-LOSS_BITS nats, rounded up, at most MAX_LOSS; 0 at padding
            and where that is no number.
        is_finite: whether z[x] is above -inf and z1 a finite number.
        is_end: whether x ends the request.
        is_preserved: whether x ends the request or is protected.
        is_argmax_preserved: whether the first choice does or is.
        repeats: whether x followed the last token; of a greedy request, with no token listed there
            as its first choice.
        blocked: the reason for which the position must stay strict, or NONE.
        logits: of each row that is read float32 `[vocab]`, divided by the temperature.
        log_p: log p(x), -inf for padding; NaN where it is no number. This and what follows is read
            of requests that sample, with drafts that are not drawn.
        rest: R.
        entropy: H(p) in nats; read where log_p is a number above -inf.
        rest_entropy: of the tokens outside S.
    """

    draft: Sequence[int]
    argmax: Sequence[int]
    loss: Sequence[int]
    is_finite: Sequence[bool]
    is_end: Sequence[bool]
    is_preserved: Sequence[bool]
    is_argmax_preserved: Sequence[bool]
    repeats: Sequence[bool]
    blocked: Sequence[int]
    logits: Mapping[int, np.ndarray]
    log_p: Sequence[float] = ()
    rest: Sequence[float] = ()
    entropy: Sequence[float] = ()
    rest_entropy: Sequence[float] = ()

    def forbids(self, i: int, *, checks_argmax: bool) -> Verdict:
        """Why a position is strict, or NONE."""
        if self.blocked[i]:
            return Verdict(self.blocked[i])
        if self.is_preserved[i] or (checks_argmax and self.is_argmax_preserved[i]):
            return Verdict.PROTECTED
        return Verdict.REPEAT if self.repeats[i] else Verdict.NONE


def num_extendable(rows: Rows, begin: int, end: int, budget: LossBudget) -> int:
    """How many positions of a given draft can be followed by a further token of the answer."""
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
    """What the rule reads, of all rows of a step; a bonus row has no draft token.

    Of requests that sample the logits are looked at by rules that accept outright alone.

    Args:
        step: with float32 logits.
        engine_params: of the engine.
        constraints: what the text before each row asks; or None, where it asks nothing.
        temperature: of each request, see `CpuSamplingInputs`; None if all are greedy.
        with_bonus: whether to look for the first choice of the bonus rows, too.
    """
    z, vocab = step.logits.numpy(), step.logits.shape[1]
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
    # Row by row: indexing with the list would copy the rows, which costs more.
    of_read = [z[i] if divisors[i] == 1 else z[i] / divisors[i] for i in read]
    argmax = np.zeros(len(ids), dtype=np.int64)
    argmax[read] = [row.argmax() for row in of_read]
    first, logit = np.zeros((2, len(ids)), dtype=np.float32)
    with np.errstate(invalid="ignore"):
        first[read] = z[read, argmax[read]] / divisors[read]
        logit[read] = z[read, safe[read]] / divisors[read]
        loss = first - logit
        units = np.ceil(np.minimum(loss * np.float32(2**LOSS_BITS), np.float32(MAX_LOSS)))
        units = np.where(in_vocab & (loss == loss), units, 0)
    is_end = in_vocab & _is_among(safe, stop_ids)
    is_preserved, is_argmax_preserved = is_end, _is_among(argmax, stop_ids)
    if engine_params.protected is not None:
        mask = engine_params.protected.mask.numpy()
        is_preserved, is_argmax_preserved = (
            is_preserved | (in_vocab & mask[safe]),
            is_argmax_preserved | mask[argmax],
        )
    constraints = constraints or CpuConstraints.of([(0, False, ())] * len(ids))
    repeats = [
        found and (scale != 0 or first not in listed)
        for found, scale, first, listed in zip(
            constraints.repeats, scales, argmax.tolist(), constraints.followers, strict=True
        )
    ]
    return Rows(
        np.where(in_vocab, ids, np.where(ids == GRAMMAR_REJECTED, GRAMMAR_REJECTED, -1)).tolist(),
        argmax.tolist(),
        units.astype(np.int64).tolist(),
        (in_vocab & (logit > -np.inf) & (first < np.inf)).tolist(),
        is_end.tolist(),
        is_preserved.tolist(),
        (in_vocab & is_argmax_preserved).tolist(),
        repeats,
        constraints.blocked,
        dict(zip(read.tolist(), of_read, strict=True)),
    )


def _is_among(token: np.ndarray, stop_ids: np.ndarray) -> np.ndarray:
    """Whether each position's token is one of those that end its request; bool `[num_draft]`."""
    found: np.ndarray = (stop_ids == token[:, None]).any(axis=1)
    return found


def read_probabilities(
    rows: Rows, row: int, z: torch.Tensor, p: torch.Tensor, preserved: Sequence[torch.Tensor]
) -> Rows:
    """What the rule reads where a request samples, with drafts that are not drawn, from row on.

    Args:
        rows: of the step.
        row: the request's first one.
        z: float32 `[n, vocab]`, its logits.
        p: their softmax.
        preserved: of each row int64 `[m]`, the tokens of S, each once.
    """
    at = np.arange(len(z))
    draft = np.asarray(rows.draft[row : row + len(z)], dtype=np.int64)
    argmax = z.numpy().argmax(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        # That of the first choice never underflows.
        log_first = np.log(p.numpy()[at, argmax])
        first = z.numpy()[at, argmax]
        log_p = np.minimum(z.numpy()[at, np.maximum(draft, 0)] - first + log_first, 0.0)
        entropy = [_entropy(*of) for of in zip(p.numpy(), z.numpy(), first, log_first, strict=True)]
    log_p[draft < 0] = -math.inf
    of_preserved = [p_row[own].double() for p_row, own in zip(p, preserved, strict=True)]
    rest = [max(1 - float(own.sum()), 0.0) for own in of_preserved]
    parts = [float(torch.special.entr(own).sum()) for own in of_preserved]
    rest_entropy = [whole - part for whole, part in zip(entropy, parts, strict=True)]
    before = [0.0] * row
    return rows._replace(
        log_p=before + log_p.tolist(),
        rest=before + rest,
        entropy=before + entropy,
        rest_entropy=before + rest_entropy,
    )


def _entropy(p: np.ndarray, logits: np.ndarray, first: float, log_first: float) -> float:
    """The entropy in nats of p, the softmax of a row of which `first` is the largest logit."""
    found = float(p.dot(first - logits) - log_first)
    # Where something is forbidden that was 0 times infinity. Logarithms take four times as long.
    return found if found == found else float(torch.special.entr(torch.from_numpy(p)).sum())
