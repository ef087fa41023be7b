"""Which draft tokens of a request stay, on a CPU.

Where a request samples its rows are divided by the temperature and their softmax is found, one
request at a time: those of a drawn draft up to the first token that was never drawn, all of one
that is not drawn, for what the rule looks ahead to, and of a strict request what is reached.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_mars.kernels.block_verify.naive import num_accepted, update_joint_ratio
from vllm_mars.kernels.budget import LOSS_BITS, LossBudget, ceil_units, round_units
from vllm_mars.kernels.interface import Column, CpuConstraints, EngineParams, Verdict, VerifyInputs
from vllm_mars.kernels.row_stats.naive import Rows, num_extendable, read_probabilities
from vllm_mars.kernels.rules import Rule
from vllm_mars.kernels.served_dist.naive import RowDecision, clip_prices, clip_row, log_ratio


class CpuSamplingInputs:
    """How the requests of a step sample, and the random numbers that decide.

    Args:
        temperature: float32 `[batch]`; 0 is greedy. A row is divided by it when it is reached; 1
            where that has been done.
        uniform: float64 `[num_draft]`, in [0, 1).
        draft_probs: float32 `[num_draft, vocab]`, what drafts were drawn from; None if they were
            not drawn.
        generators: of requests that have one of their own, by place in the batch.
        noise: `[vocab]`, the reciprocals of exponential random numbers that vLLM's sampler draws,
            by place, of requests that are to emit what it emits. Others take one number.
    """

    def __init__(
        self,
        temperature: torch.Tensor,
        uniform: np.ndarray,
        draft_probs: torch.Tensor | None = None,
        generators: Mapping[int, torch.Generator] | None = None,
        noise: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self.temperature = temperature
        self.draft_probs = draft_probs
        self._uniform = uniform
        self._generators = generators or {}
        self._noise = noise or {}

    def accepts(self, draft_idx: int, probability: float) -> bool:
        """Whether the draft token at a position stays that does so with this probability."""
        return bool(probability > 0 and probability >= self._uniform[draft_idx])

    def sample_token(self, req_idx: int, weights: torch.Tensor) -> int:
        """The token that comes instead, by its weight; float32 `[vocab]`, not all 0."""
        if req_idx in self._noise:
            return int((weights * self._noise[req_idx]).argmax())
        sums = weights.cumsum(0, dtype=torch.float64)
        u = torch.rand((), dtype=torch.float64, generator=self._generators.get(req_idx))
        # Below the whole sum, so that a token comes which adds to it. Not so of a NaN.
        return min(int(torch.searchsorted(sums, u * sums[-1], right=True)), len(sums) - 1)


class Emitted(NamedTuple):
    """What a step emits for one request.

    Attributes:
        accepted: draft tokens.
        token: what comes in the place of the first rejected one, or None where all are accepted.
        decisions: what was decided at the positions that were looked at.
        log_ratios: of a request that samples, log m - log p of each token.
        gained: of a drawn draft what the rule adds to the chance that each of its tokens stays, of
            those that were not reached, too; in units of 2**-LOSS_BITS.
    """

    accepted: int
    token: int | None
    decisions: Sequence[RowDecision]
    log_ratios: Sequence[float] = ()
    gained: Sequence[int] = ()


def loss_budgets(step: VerifyInputs) -> Iterator[LossBudget]:
    """What each request of a step may pay and lose."""
    slots = step.slots.long()
    columns = [Column.VALUE, Column.RATE, Column.LOST, Column.MAX_TOKENS]
    records = step.records.table[slots][:, columns].tolist()
    produced = (step.total_len[slots] - step.prompt_len[slots]).tolist()
    inputs = step.input_ids.tolist()
    last = [inputs[first] for first in [0, *step.cu_num_logits.tolist()[:-1]]] if records else []
    stop_ids = step.records.stop_ids[slots].tolist()
    for req_idx, (value, rate, lost, most_tokens) in enumerate(records):
        budget = LossBudget.of(value, rate, lost, produced[req_idx], most_tokens)
        is_end = produced[req_idx] > 0 and last[req_idx] >= 0 and last[req_idx] in stop_ids[req_idx]
        yield budget._replace(has_ended=budget.has_ended or is_end)


def accept(
    rows: Rows,
    budget: LossBudget,
    step: VerifyInputs,
    engine_params: EngineParams,
    req_idx: int,
    sampling_inputs: CpuSamplingInputs | None,
    constraints: CpuConstraints | None,
) -> Emitted:
    """What a step emits for the request at a place of the batch."""
    cu_num_logits = step.cu_num_logits
    begin, end = int(cu_num_logits[req_idx - 1]) if req_idx else 0, int(cu_num_logits[req_idx]) - 1
    if sampling_inputs is None or not sampling_inputs.temperature[req_idx]:
        return _greedy(rows, begin, end, budget, engine_params.rule)
    followers = () if constraints is None else constraints.followers[begin:end]
    sampled_draft = SampledDraft(
        step, engine_params, sampling_inputs, req_idx, begin, end, followers
    )
    if sampling_inputs.draft_probs is None:
        return _fixed(rows, budget, engine_params.rule, sampled_draft)
    return _probabilistic(rows, budget, sampled_draft)


def _greedy(rows: Rows, begin: int, end: int, budget: LossBudget, rule: Rule) -> Emitted:
    verdicts = rule.plain.greedy(rows, begin, end, budget)
    decisions = []
    for offset, verdict in enumerate(verdicts):
        loss = rows.loss[begin + offset]
        decisions.append(RowDecision(verdict, loss=loss, gained=1 << LOSS_BITS, drift=loss))
        if verdict not in (Verdict.FIRST, Verdict.RELAXED):
            return Emitted(offset, rows.argmax[begin + offset], decisions)
    return Emitted(len(verdicts), None, decisions)


# By width, and kept: to get new memory for rows takes as long as to read them.
_BUFFERS: dict[int, torch.Tensor] = {}


def _buffers(num_rows: int, vocab: int) -> torch.Tensor:
    """Rows to write to; float32 `[num_rows, vocab]`, the same ones for each call."""
    found = _BUFFERS.get(vocab)
    if found is None or len(found) < num_rows:
        # What is made in inference mode, where an engine runs, could be written to there alone.
        with torch.inference_mode(False):
            found = _BUFFERS[vocab] = torch.empty(num_rows, vocab)
    return found[:num_rows]


class SampledDraft:
    """The draft of a request that samples, and its rows.

    Args:
        step: with float32 logits.
        engine_params: of the engine.
        sampling_inputs: what decides.
        req_idx: of the request in the batch.
        begin, end: its first row, and its bonus row.
        followers: of each row, what `CpuConstraints` lists; nothing for none.

    Attributes:
        z: float32 `[n, vocab]`, the rows, once they are read divided by the temperature.
        p: likewise, their softmax.
        q: likewise, what a draft was drawn from, or None.
        preserved: of each row int64 `[m]`, the tokens that keep their probability, each once.
        buffers: float32 `[3 + n, vocab]`, to be written.
        max_draft_len: K, the longest draft of a request.
    """

    def __init__(
        self,
        step: VerifyInputs,
        engine_params: EngineParams,
        sampling_inputs: CpuSamplingInputs,
        req_idx: int,
        begin: int,
        end: int,
        followers: Sequence[Collection[int]] = (),
    ) -> None:
        self.begin, self.end = begin, end
        self.max_draft_len = step.num_speculative_tokens
        length, vocab = end - begin, step.logits.shape[1]
        self._temperature = float(sampling_inputs.temperature[req_idx])
        self._req_idx, self._sampling_inputs = req_idx, sampling_inputs
        # The draft tokens of a step have no bonus rows between them.
        self._first = begin - req_idx
        self._logits = step.logits[begin:end]
        self.q = None
        if sampling_inputs.draft_probs is not None:
            self.q = sampling_inputs.draft_probs[self._first : self._first + length]
        buffers = _buffers(3 + 3 * length, vocab)
        self.buffers, self.p, z = buffers.tensor_split([3 + length, 3 + 2 * length])
        self.z = self._logits if self._temperature == 1 else z
        ends = step.records.stop_ids[int(step.slots[req_idx])].tolist()
        own = (
            {*ends}
            if engine_params.protected is None
            else {*ends, *engine_params.protected.ids.tolist()}
        )
        preserved = (own.union(more) for more in followers or [()] * length)
        self.preserved = [
            torch.tensor(sorted(it for it in of_row if 0 <= it < vocab), dtype=torch.int64)
            for of_row in preserved
        ]

    def read(self, rows: slice) -> None:
        """Finds z and p of rows."""
        if self._temperature != 1:
            torch.div(self._logits[rows], self._temperature, out=self.z[rows])
        torch.softmax(self.z[rows], dim=-1, out=self.p[rows])

    def accepts(self, offset: int, probability: float) -> bool:
        """Whether a draft token stays that does so with this probability."""
        return self._sampling_inputs.accepts(self._first + offset, probability)

    def sample_token(self, weights: torch.Tensor) -> int:
        """The token that comes instead, by its weight."""
        return self._sampling_inputs.sample_token(self._req_idx, weights)


def _fixed(rows: Rows, budget: LossBudget, rule: Rule, sampled_draft: SampledDraft) -> Emitted:
    begin, end, p = sampled_draft.begin, sampled_draft.end, sampled_draft.p
    is_strict = not budget.value
    decisions = [RowDecision(Verdict.NONE)] * (end - begin)
    if not is_strict:
        sampled_draft.read(slice(None))
        rows = read_probabilities(rows, begin, sampled_draft.z, p, sampled_draft.preserved)
        decisions = rule.plain.sampled(rows, begin, end, budget)
    log_ratios: list[float] = []
    for offset, decision in enumerate(decisions):
        i = begin + offset
        draft, ratio = rows.draft[i], log_ratio(decision, is_draft=True)
        if is_strict:
            sampled_draft.read(slice(offset, offset + 1))
        # What is strict compares vLLM's own number.
        accepted = float(p[offset, draft]) if draft >= 0 else 0.0
        if decision.bias:
            accepted = math.exp(min(rows.log_p[i] + ratio, 0.0))
        if sampled_draft.accepts(offset, accepted):
            log_ratios.append(ratio)
            continue
        weights = p[offset]
        if draft >= 0:
            weights[draft] = 0.0
        if decision.bias:
            # Not kept tokens times Z, which may be too large for a number.
            of_preserved = weights[sampled_draft.preserved[offset]]
            weights *= math.exp(log_ratio(decision, is_draft=False))
            weights[sampled_draft.preserved[offset]] = of_preserved
        # Only rounding leaves nothing to draw from.
        token = sampled_draft.sample_token(weights) if weights.any() or draft < 0 else draft
        is_preserved = token in sampled_draft.preserved[offset]
        log_ratios.append(log_ratio(decision, token == draft, is_preserved))
        return Emitted(offset, token, decisions[: offset + 1], log_ratios)
    return Emitted(end - begin, None, decisions, [*log_ratios, 0.0])


def _probabilistic(rows: Rows, budget: LossBudget, sampled_draft: SampledDraft) -> Emitted:
    begin, end, q = sampled_draft.begin, sampled_draft.end, sampled_draft.q
    assert q is not None
    prices = clip_prices(rows, begin, end, budget, sampled_draft.max_draft_len)
    gainful = num_extendable(rows, begin, end, budget)
    drafts = rows.draft[begin:end]
    # A token that was never drawn ends the draft.
    length = next((i for i, draft in enumerate(drafts) if draft == -1), end - begin)
    # Nothing is looked at behind it, but that a token is drawn there.
    sampled_draft.read(slice(length + 1))
    z, p, buffers = sampled_draft.z, sampled_draft.p, sampled_draft.buffers
    served, joint_ratios, gained = [], [], []
    joint_ratio = strict = 1.0
    for i in range(length):
        out = buffers[3 + i]
        of_row = clip_row(z[i], p[i], q[i], prices[i], sampled_draft.preserved[i], out, buffers[:3])
        at_draft = (p[i], of_row.m, q[i])
        of_p, of_m, of_q = (float(it[drafts[i]]) if drafts[i] >= 0 else 0.0 for it in at_draft)
        joint_ratio, strict = (
            update_joint_ratio(joint_ratio, of_m, of_q),
            update_joint_ratio(strict, of_p, of_q),
        )
        served.append(of_row)
        joint_ratios.append(joint_ratio)
        gained.append(round_units(joint_ratio - strict))

    def residual(i: int) -> torch.Tensor:
        """What is drawn from behind i drafts."""
        m = torch.mul(served[i].m, joint_ratios[i - 1] if i else 1.0, out=buffers[0])
        return m.sub_(q[i]).clamp_(min=0)

    accepted = num_accepted(
        joint_ratios,
        lambda i: float(residual(i).sum()),
        lambda i, probability: sampled_draft.accepts(i - 1, probability),
    )
    token: int | None = None
    if accepted < length:
        weights = residual(accepted)
        # Only rounding leaves nothing to draw from.
        if weights.any():
            token = sampled_draft.sample_token(weights)
        else:
            token = drafts[accepted] if drafts[accepted] >= 0 else int(z[accepted].argmax())
    elif length < end - begin:
        token = sampled_draft.sample_token(p[length])
    decisions: list[RowDecision] = []
    log_ratios: list[float] = []
    for i in range(min(accepted + 1, end - begin)):
        verdict = Verdict.NONE
        if drafts[i] >= 0 and budget.value > 0 and i < gainful:
            verdict = rows.forbids(begin + i, checks_argmax=False)
        if i == length:
            decisions.append(RowDecision(verdict))
            break
        loss = ceil_units(served[i].loss)
        drift = round_units(served[i].drift)
        decisions.append(RowDecision(verdict, loss=loss, drift=drift))
        emitted = drafts[i] if i < accepted else token
        ratio = float(served[i].m[emitted] / p[i, emitted])
        # Of a row that holds a NaN any token may come.
        is_known = 0 < ratio < math.inf and emitted not in sampled_draft.preserved[i]
        log_ratios.append(math.log(ratio) if is_known else 0.0)
    if accepted == length:
        log_ratios.append(0.0)
    return Emitted(accepted, token, decisions, log_ratios, gained)
