"""Random steps of verification, which the kernels and a CPU are given alike."""

import math
from typing import Any

import numpy as np
import torch

from vllm_mars.kernels import reference
from vllm_mars.kernels.accept import naive as accept
from vllm_mars.kernels.budget import loss_rate
from vllm_mars.kernels.counters.table import CounterLayout
from vllm_mars.kernels.interface import (
    GRAMMAR_REJECTED,
    MAX_FOLLOWERS,
    Constraints,
    CpuConstraints,
    EngineParams,
    Protected,
    Records,
    SamplingInputs,
    SamplingTensors,
    StepCounters,
    Verdict,
    VerifyInputs,
    encode_value,
)
from vllm_mars.kernels.rules import PRICE, RULES, THETA

CPU = torch.device("cpu")
LONGEST = 6
THETAS = [1.0, 0.9, 0.5, 0.05]
REASONS = [0, 0, 0, Verdict.SPAN, Verdict.OPENING, Verdict.REPEAT]


class Call:
    """A random step: rows of logits, the last of each request for its bonus token.

    Args:
        number: of the call, which seeds it.
        name: of the rule, in `RULES`.
        sampled: whether requests may sample: then logits are finite numbers or -inf.
        vocab: of the logits; a small one by default.
        dtype: of the logits where requests may sample.
    """

    def __init__(
        self,
        number: int,
        name: str,
        sampled: bool = False,
        vocab: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.rng = rng = np.random.default_rng([number, len(name)])
        vocab = vocab or int(rng.choice([2, 5, 33, 70] if sampled else [1, 2, 5, 33, 70]))
        self.lengths = rng.integers(0, LONGEST, size=rng.integers(1, 5)).tolist()
        self.batch, size = len(self.lengths), sum(self.lengths)
        rows = size + self.batch
        mean, scale = rng.choice([0.0, 2.0, 20.0]), rng.choice([0.3, 2.0, 8.0])
        logits = rng.normal(mean, scale, (rows, vocab))
        if rng.random() < 0.4:
            logits = logits.round()
        specials = [-math.inf, -0.0] + ([] if sampled else [math.inf, math.nan])
        for value in rng.choice(specials, size=rng.integers(0, 3)):
            logits[rng.random((rows, vocab)) < 0.2] = value
        if sampled:
            logits[~np.isfinite(logits).any(1), 0] = 0.0
        if not sampled:
            dtype = rng.choice([torch.float32, torch.bfloat16])
        # Rows with a stride of their own.
        wide = torch.full((rows, vocab + int(rng.choice([0, 3]))), math.nan).to(dtype)
        wide[:, :vocab] = torch.from_numpy(logits)
        self.logits = wide[:, :vocab]
        self.is_bonus = torch.cat([torch.arange(n + 1) == n for n in self.lengths])
        self.rows = (~self.is_bonus).nonzero().squeeze(1)
        # Of equal logits `topk` takes one or another, by torch's version.
        best = self.logits[self.rows].float().sort(descending=True, stable=True).indices[:, :3]
        ids = best.gather(1, torch.from_numpy(rng.integers(0, best.shape[1], (size, 1))))[:, 0]
        # Where drafts are drawn some have been struck out.
        absent = torch.from_numpy(rng.choice([-1, GRAMMAR_REJECTED] if sampled else [-1], size))
        ids = torch.where(torch.from_numpy(rng.random(size) < 0.1), absent, ids)
        if not sampled:
            ids[torch.from_numpy(rng.random(size) < 0.05)] = vocab + 7
        self.ids = ids.int()
        self.ends = torch.tensor(self.lengths).cumsum(0).int()
        slots = self.batch + 2
        self.slots = torch.from_numpy(rng.permutation(slots)[: self.batch]).int()
        rates = [loss_rate(value) for value in (0.0, 0.005, 0.02, 0.3, math.inf)]
        self.records = Records.new(slots, CPU)
        # Golden tokens are those of steps that draw a value of each rule.
        thetas, prices = rng.choice(THETAS, slots), rng.choice([0, 20_000, 50_000, 1 << 17], slots)
        self.records.value.copy_(torch.tensor([encode_value(THETA, it) for it in thetas]))
        if name == PRICE.name:
            self.records.value.copy_(torch.from_numpy(prices))
        for column, values in (
            (self.records.rate, rates),
            (self.records.lost, [0, 1_000, 1 << 17]),
            (self.records.max_tokens, [20, 45, 48, 99]),
        ):
            column.copy_(torch.from_numpy(rng.choice(values, slots)))
        ends = np.sort(rng.choice([-1, -1, *range(vocab)], (slots, 2)))[:, ::-1].copy()
        # Each once, and behind those that there are -1.
        ends[ends[:, 1] == ends[:, 0], 1] = -1
        self.records.stop_ids[:, :2] = torch.from_numpy(ends)
        self.produced = torch.from_numpy(rng.integers(0, 50, self.batch)).int()
        self.last = torch.from_numpy(rng.integers(0, vocab, self.batch)).int()
        protected = None
        if rng.random() < 0.6:
            protected = Protected.of(torch.from_numpy(rng.random(vocab) < 0.1), CPU)
        self.engine_params = EngineParams(RULES[name], protected)
        self.has_table = rng.random() < 0.6
        self.temperature = torch.from_numpy(rng.choice([0.0, 0.7, 1.0], self.batch)).float()
        self.constraints = self._constraints(name, vocab) if rng.random() < 0.5 else None

    def _constraints(self, name: str, vocab: int) -> CpuConstraints:
        """What text could ask of each row; by theta nothing is listed."""
        found = CpuConstraints.of([(0, False, ())] * len(self.logits))
        for row, token in zip(self.rows.tolist(), self.ids.tolist(), strict=True):
            found.blocked[row] = int(self.rng.choice(REASONS))
            if name == PRICE.name and self.rng.random() < 0.6:
                count = self.rng.integers(0, min(vocab, MAX_FOLLOWERS) + 1)
                own = self.rng.permutation(vocab)[:count].tolist()
                found.followers[row], found.repeats[row] = own, token in own
        return found

    def step_counters(self) -> StepCounters:
        table = torch.full((self.batch, 2, LONGEST + 1), -7.0) if self.has_table else None
        return StepCounters(torch.zeros(CounterLayout(LONGEST).size, dtype=torch.int64), table)

    def step(self) -> tuple[VerifyInputs, Constraints | None]:
        """The step, whose records are its own, and what the text asks of its rows."""
        inputs = torch.empty(len(self.logits), dtype=torch.int32)
        inputs[self.is_bonus.roll(1)] = self.last
        inputs[self.rows + 1] = self.ids
        ends = (torch.tensor(self.lengths) + 1).cumsum(0).int()
        total = torch.zeros_like(self.records.lost, dtype=torch.int32) + 3
        total[self.slots.long()] += self.produced
        own = Records(self.records.table.clone()), self.slots, total, torch.full_like(total, 3)
        constraints = None if self.constraints is None else tensors_of(self.constraints)
        return VerifyInputs(self.logits, inputs, ends, *own, LONGEST), constraints


def tensors_of(constraints: CpuConstraints) -> Constraints:
    """As the kernels take it; what is not read is no token."""
    followers = torch.full((len(constraints.blocked), MAX_FOLLOWERS), 1 << 30, dtype=torch.int32)
    for row, own in zip(followers, constraints.followers, strict=True):
        row[: len(own)] = torch.tensor([*own])
    counts = torch.tensor([len(own) for own in constraints.followers]).int()
    return Constraints(
        torch.tensor(constraints.blocked).to(torch.int8),
        torch.tensor(constraints.repeats).to(torch.int8),
        counts,
        followers,
    )


def listed(constraints: Constraints, num_rows: int) -> list[tuple]:
    """The entries that a kernel has found of each row; it lists each token once, in order."""
    blocked, repeats, counts, followers = (column[:num_rows].tolist() for column in constraints)
    own = [row[:count] for row, count in zip(followers, counts, strict=True)]
    assert own == [sorted({*row}) for row in own]
    return [*zip(blocked, map(bool, repeats), map(set, own), strict=True)]


def to(device: torch.device | str, values: Any) -> Any:
    """A named tuple of tensors, of such tuples and of other values, on a device."""
    if isinstance(values, tuple):
        return type(values)(*(to(device, value) for value in values))
    return values.to(device) if isinstance(values, torch.Tensor) else values


def sampling_inputs_of(call: Call, draft_temperature: float = 0.0) -> SamplingInputs:
    """Of the call; with a share of the temperature drafts are drawn at that."""
    slots = len(call.records.lost)
    temperature = torch.ones(slots)
    temperature[call.slots.long()] = call.temperature
    counts = torch.tensor(call.lengths) + 1
    sampling = SamplingTensors(temperature, torch.from_numpy(call.rng.integers(0, 2**62, slots)))
    if draft_temperature:
        shape = slots, LONGEST, call.logits.shape[1]
        draft_logits = torch.from_numpy(call.rng.normal(0, 2, shape)).float()
        # What a draft cannot propose, such as all but the vocabulary of a head.
        is_outside = torch.from_numpy(call.rng.random(shape) < call.rng.choice([0.0, 0.3, 0.9]))
        is_outside[..., 0] = False
        draft_logits.masked_fill_(is_outside, -math.inf)
        sampling = sampling._replace(
            draft_logits=draft_logits, draft_temperature=temperature * draft_temperature
        )
    return SamplingInputs(
        sampling,
        torch.arange(len(call.logits)) + 5,
        call.slots.repeat_interleave(counts),
        torch.cat([torch.arange(count) for count in counts.tolist()]).int(),
        bool(call.rng.random() < 0.3),
    )


def sampled_step(call: Call, is_probabilistic: bool) -> tuple:
    """The probabilities of the drafts for a CPU, the step, its guard, and the draws."""
    sampling_inputs, q = sampling_inputs_of(call, 0.8 * is_probabilistic), None
    if is_probabilistic:
        of = sampling_inputs.sampling
        slots, places = (
            sampling_inputs.expanded_idx_mapping[call.rows].long(),
            sampling_inputs.expanded_local_pos[call.rows].long(),
        )
        q = (of.draft_logits[slots, places] / of.draft_temperature[slots, None]).softmax(-1)
    return q, *call.step(), sampling_inputs


class Replay(accept.CpuSamplingInputs):
    """Decides as it was decided before."""

    def __init__(self, call: Call, tokens: torch.Tensor, q: torch.Tensor | None) -> None:
        # The logits have been divided.
        super().__init__(call.temperature.sign(), np.zeros(0), q)
        accepted = (tokens >= 0).sum(1) - 1
        offsets = (torch.arange(length) for length in call.lengths)
        self.accepted = torch.cat([own < n for own, n in zip(offsets, accepted, strict=True)])
        self.next_ids = tokens.gather(1, accepted[:, None].long())[:, 0].tolist()

    def accepts(self, draft_idx: int, _: float) -> bool:
        return bool(self.accepted[draft_idx])

    def sample_token(self, req_idx: int, _: torch.Tensor) -> int:
        return self.next_ids[req_idx]


def on_cpu(
    call: Call, step_counters: StepCounters, sampling_inputs: accept.CpuSamplingInputs | None = None
) -> tuple:
    """What a CPU emits of the call, and the records behind it."""
    bonus = None if sampling_inputs is None else torch.zeros(call.batch)
    step, _ = call.step()
    return reference.verify(
        step, call.engine_params, call.constraints, step_counters, sampling_inputs, bonus
    ), step.records


def recorded(call: Call, q: torch.Tensor | None, tokens: torch.Tensor) -> tuple:
    """What a CPU writes down of a sampled step that emits the tokens, and what was lost."""
    step_counters = call.step_counters()
    output, records = on_cpu(call, step_counters, Replay(call, tokens, q))
    assert torch.equal(output.output_token_ids >= 0, tokens >= 0)
    return step_counters, records.lost


def same(found: StepCounters, expected: StepCounters, atol: float = 0.0) -> None:
    assert found.counts.tolist() == expected.counts.tolist()
    if expected.table is not None:
        torch.testing.assert_close(found.table, expected.table, rtol=0, atol=atol, equal_nan=True)


def close(found: StepCounters, expected: StepCounters, units: int, atol: float) -> None:
    """Equal but for what float32 rounds."""
    counts, wanted = found.counts.clone(), expected.counts.clone()
    for name in ("lost", "gained", "drift_up", "drift_down"):
        entry = getattr(CounterLayout(LONGEST), name)
        assert abs(counts[entry] - wanted[entry]) <= units
        counts[entry] = wanted[entry] = 0
    same(found._replace(counts=counts), expected._replace(counts=wanted), atol=atol)
