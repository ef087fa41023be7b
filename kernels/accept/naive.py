"""Acceptance of draft tokens on a CPU.

Rows of sampled requests get temperature and softmax here, one request at a time: up to the first
placeholder of a probabilistic draft; all rows of a fixed draft, since the rule looks ahead, but in
strict requests only rows that are reached.
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
    """Sampling parameters and random numbers of a step.

    Args:
        temperature: float32 `[batch]`; 0 is greedy, 1 if rows have been divided already.
        uniform: float64 `[num_draft]`, in [0, 1).
        draft_probs: float32 `[num_draft, vocab]`; None for fixed drafts.
        noise: `[vocab]` by batch index, reciprocals of the exponential random numbers of vLLM's
            sampler, to emit the same token as that. Other requests use one uniform number.
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
        """Whether a draft token is accepted, given its acceptance probability."""
        return bool(probability > 0 and probability >= self._uniform[draft_idx])

    def sample_token(self, req_idx: int, weights: torch.Tensor) -> int:
        """Samples a token by weight; float32 `[vocab]`, not all 0."""
        if req_idx in self._noise:
            return int((weights * self._noise[req_idx]).argmax())
        sums = weights.cumsum(0, dtype=torch.float64)
        u = torch.rand((), dtype=torch.float64, generator=self._generators.get(req_idx))
        # u * sums[-1] is below the sum, so the token has a weight above 0; `min` is for NaN.
        return min(int(torch.searchsorted(sums, u * sums[-1], right=True)), len(sums) - 1)


class Emitted(NamedTuple):
    """Output of a step for one request."""

    # Number of accepted draft tokens
    accepted: int
    # The token after these, or None if all draft tokens are accepted
    token: int | None
    # Of positions that were reached
    decisions: Sequence[RowDecision]
    # log m - log p of each emitted token, if sampled
    log_ratios: Sequence[float] = ()
    # The rule's gain in each acceptance probability of a probabilistic draft, also of positions
    # that were not reached; in units of 2**-LOSS_BITS
    gained: Sequence[int] = ()


def loss_budgets(step: VerifyInputs) -> Iterator[LossBudget]:
    slots = step.slots.long()
    columns = [Column.VALUE, Column.RATE, Column.LOST, Column.MAX_TOKENS]
    records = step.records.table[slots][:, columns].tolist()
    produced = (step.total_len[slots] - step.prompt_len[slots]).tolist()
    inputs = step.input_ids.tolist()
    last = [inputs[first] for first in [0, *step.cu_num_logits.tolist()[:-1]]] if records else []
    stop_ids = step.records.stop_ids[slots].tolist()
    for req_idx, (value, rate, lost, max_tokens) in enumerate(records):
        num_output = produced[req_idx]
        is_end = num_output > 0 and last[req_idx] >= 0 and last[req_idx] in stop_ids[req_idx]
        yield LossBudget(
            value=value,
            rate=rate,
            produced=num_output,
            lost=lost,
            tokens_left=max(max_tokens - num_output - 1, 0),
            has_ended=is_end or num_output >= max_tokens,
        )


def accept(
    rows: Rows,
    budget: LossBudget,
    step: VerifyInputs,
    engine_params: EngineParams,
    req_idx: int,
    sampling_inputs: CpuSamplingInputs | None,
    constraints: CpuConstraints | None,
) -> Emitted:
    """Decides which draft tokens of a request are accepted, and the token after them."""
    cu_num_logits = step.cu_num_logits
    begin = int(cu_num_logits[req_idx - 1]) if req_idx else 0
    end = int(cu_num_logits[req_idx]) - 1
    if sampling_inputs is None or not sampling_inputs.temperature[req_idx]:
        return _greedy(rows, begin, end, budget, engine_params.rule)
    followers = () if constraints is None else constraints.followers[begin:end]
    sampled_draft = SampledDraft(
        step=step,
        engine_params=engine_params,
        sampling_inputs=sampling_inputs,
        req_idx=req_idx,
        begin=begin,
        end=end,
        followers=followers,
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


# Cached by width: allocating rows takes as long as reading them.
_BUFFERS: dict[int, torch.Tensor] = {}


def _buffers(num_rows: int, vocab: int) -> torch.Tensor:
    """Scratch rows, float32 `[num_rows, vocab]`, the same memory for each call."""
    buffers = _BUFFERS.get(vocab)
    if buffers is None or len(buffers) < num_rows:
        # A tensor made in inference mode, which engines run in, could not be written to outside it.
        with torch.inference_mode(False):
            buffers = _BUFFERS[vocab] = torch.empty(num_rows, vocab)
    return buffers[:num_rows]


class SampledDraft:
    """Draft and rows of a sampled request; `step` has float32 logits.

    Attributes:
        z: float32 `[n, vocab]`, logits divided by the temperature once they are read.
        p: float32 `[n, vocab]`, softmax of z.
        q: float32 `[n, vocab]`, draft probabilities; None for a fixed draft.
        preserved: int64 `[m]` per row, distinct preserved tokens.
        buffers: float32 `[3 + n, vocab]`, scratch.
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
        self.begin = begin
        self.end = end
        # K, the longest draft of a request
        self.max_draft_len = step.num_speculative_tokens
        length = end - begin
        vocab = step.logits.shape[1]
        self._temperature = float(sampling_inputs.temperature[req_idx])
        self._req_idx = req_idx
        self._sampling_inputs = sampling_inputs
        # Draft tokens are indexed without the bonus rows.
        self._first = begin - req_idx
        self._logits = step.logits[begin:end]
        self.q = None
        if sampling_inputs.draft_probs is not None:
            self.q = sampling_inputs.draft_probs[self._first : self._first + length]
        buffers = _buffers(3 + 3 * length, vocab)
        self.buffers, self.p, z = buffers.tensor_split([3 + length, 3 + 2 * length])
        self.z = self._logits if self._temperature == 1 else z
        preserved = set(step.records.stop_ids[int(step.slots[req_idx])].tolist())
        if engine_params.protected is not None:
            preserved.update(engine_params.protected.ids.tolist())
        self.preserved = [
            torch.tensor(
                sorted(token for token in preserved.union(row_followers) if 0 <= token < vocab),
                dtype=torch.int64,
            )
            for row_followers in followers or [()] * length
        ]

    def read(self, rows: slice) -> None:
        if self._temperature != 1:
            torch.div(self._logits[rows], self._temperature, out=self.z[rows])
        torch.softmax(self.z[rows], dim=-1, out=self.p[rows])

    def accepts(self, offset: int, probability: float) -> bool:
        return self._sampling_inputs.accepts(self._first + offset, probability)

    def sample_token(self, weights: torch.Tensor) -> int:
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
        # Strict positions compare the same number as vLLM.
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
            # Divides the other tokens by Z instead of multiplying preserved ones by it, which could
            # overflow.
            preserved_weights = weights[sampled_draft.preserved[offset]]
            weights *= math.exp(log_ratio(decision, is_draft=False))
            weights[sampled_draft.preserved[offset]] = preserved_weights
        # Only rounding leaves no mass.
        token = sampled_draft.sample_token(weights) if weights.any() or draft < 0 else draft
        is_preserved = token in sampled_draft.preserved[offset]
        log_ratios.append(log_ratio(decision, token == draft, is_preserved))
        return Emitted(offset, token, decisions[: offset + 1], log_ratios)
    return Emitted(end - begin, None, decisions, [*log_ratios, 0.0])


def _probabilistic(rows: Rows, budget: LossBudget, sampled_draft: SampledDraft) -> Emitted:
    begin, end, q = sampled_draft.begin, sampled_draft.end, sampled_draft.q
    assert q is not None
    prices = clip_prices(rows, begin, end, budget, sampled_draft.max_draft_len)
    extendable = num_extendable(rows, begin, end, budget)
    drafts = rows.draft[begin:end]
    # A placeholder ends the draft.
    length = next((i for i, draft in enumerate(drafts) if draft == -1), end - begin)
    # Also the row at `length`, at which a token may be sampled.
    sampled_draft.read(slice(length + 1))
    z = sampled_draft.z
    p = sampled_draft.p
    buffers = sampled_draft.buffers
    served = []
    joint_ratios = []
    gained = []
    joint_ratio = strict_joint_ratio = 1.0
    for i in range(length):
        clipped = clip_row(
            logits=z[i],
            p=p[i],
            q=q[i],
            price=prices[i],
            preserved=sampled_draft.preserved[i],
            out=buffers[3 + i],
            buffers=buffers[:3],
        )
        x = drafts[i]
        p_x, m_x, q_x = (float(dist[x]) if x >= 0 else 0.0 for dist in (p[i], clipped.m, q[i]))
        joint_ratio = update_joint_ratio(joint_ratio, m_x, q_x)
        strict_joint_ratio = update_joint_ratio(strict_joint_ratio, p_x, q_x)
        served.append(clipped)
        joint_ratios.append(joint_ratio)
        gained.append(round_units(joint_ratio - strict_joint_ratio))

    # max(p_i m - q, 0) of the row after i accepted tokens.
    def residual(i: int) -> torch.Tensor:
        m = torch.mul(served[i].m, joint_ratios[i - 1] if i else 1.0, out=buffers[0])
        return m.sub_(q[i]).clamp_(min=0)

    accepted = num_accepted(
        joint_ratios,
        residual=lambda i: float(residual(i).sum()),
        accepts=lambda i, probability: sampled_draft.accepts(i - 1, probability),
    )
    token: int | None = None
    if accepted < length:
        weights = residual(accepted)
        # Only rounding leaves no mass.
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
        if drafts[i] >= 0 and budget.value > 0 and i < extendable:
            verdict = rows.forbids(begin + i, checks_argmax=False)
        if i == length:
            decisions.append(RowDecision(verdict))
            break
        loss = ceil_units(served[i].loss)
        drift = round_units(served[i].drift)
        decisions.append(RowDecision(verdict, loss=loss, drift=drift))
        emitted = drafts[i] if i < accepted else token
        ratio = float(served[i].m[emitted] / p[i, emitted])
        # A row with a NaN may emit any token.
        is_known = 0 < ratio < math.inf and emitted not in sampled_draft.preserved[i]
        log_ratios.append(math.log(ratio) if is_known else 0.0)
    if accepted == length:
        log_ratios.append(0.0)
    return Emitted(accepted, token, decisions, log_ratios, gained)
