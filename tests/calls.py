"""Random verification steps for the kernels and the CPU reference."""

import math
from typing import Any, NamedTuple

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
    """A random step whose rows hold each request's drafts, then its bonus token.

    Args:
        sampled: allows sampled requests, whose logits are finite or -inf.
        vocab: 0 chooses a small random vocabulary.
        dtype: dtype of a sampled step; a greedy step chooses one at random.
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
        # The row stride may exceed the vocabulary.
        wide = torch.full((rows, vocab + int(rng.choice([0, 3]))), math.nan).to(dtype)
        wide[:, :vocab] = torch.from_numpy(logits)
        self.logits = wide[:, :vocab]
        self.is_bonus = torch.cat([torch.arange(n + 1) == n for n in self.lengths])
        self.rows = (~self.is_bonus).nonzero().squeeze(1)
        # `topk` breaks ties differently between versions of torch.
        best = self.logits[self.rows].float().sort(descending=True, stable=True).indices[:, :3]
        ids = best.gather(1, torch.from_numpy(rng.integers(0, best.shape[1], (size, 1))))[:, 0]
        # A grammar may have rejected drafts of a sampled step.
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
        # Both are drawn for either rule: the golden tokens depend on the order of random numbers.
        thetas, prices = rng.choice(THETAS, slots), rng.choice([0, 20_000, 50_000, 1 << 17], slots)
        self.records.value.copy_(torch.tensor([encode_value(THETA, theta) for theta in thetas]))
        if name == PRICE.name:
            self.records.value.copy_(torch.from_numpy(prices))
        for column, values in (
            (self.records.rate, rates),
            (self.records.lost, [0, 1_000, 1 << 17]),
            (self.records.max_tokens, [20, 45, 48, 99]),
        ):
            column.copy_(torch.from_numpy(rng.choice(values, slots)))
        ends = np.sort(rng.choice([-1, -1, *range(vocab)], (slots, 2)))[:, ::-1].copy()
        # Distinct tokens, padded with -1.
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
        """Random constraints; only the price rule has followers."""
        constraints = CpuConstraints.of([(0, False, ())] * len(self.logits))
        for row, token in zip(self.rows.tolist(), self.ids.tolist(), strict=True):
            constraints.blocked[row] = int(self.rng.choice(REASONS))
            if name == PRICE.name and self.rng.random() < 0.6:
                count = self.rng.integers(0, min(vocab, MAX_FOLLOWERS) + 1)
                followers = self.rng.permutation(vocab)[:count].tolist()
                constraints.followers[row] = followers
                constraints.repeats[row] = token in followers
        return constraints

    def step_counters(self) -> StepCounters:
        table = torch.full((self.batch, 2, LONGEST + 1), -7.0) if self.has_table else None
        return StepCounters(torch.zeros(CounterLayout(LONGEST).size, dtype=torch.int64), table)

    def step(self) -> tuple[VerifyInputs, Constraints | None]:
        """Inputs with a copy of the records, and the constraints."""
        inputs = torch.empty(len(self.logits), dtype=torch.int32)
        inputs[self.is_bonus.roll(1)] = self.last
        inputs[self.rows + 1] = self.ids
        ends = (torch.tensor(self.lengths) + 1).cumsum(0).int()
        total = torch.zeros_like(self.records.lost, dtype=torch.int32) + 3
        total[self.slots.long()] += self.produced
        step = VerifyInputs(
            self.logits,
            inputs,
            ends,
            Records(self.records.table.clone()),
            self.slots,
            total,
            torch.full_like(total, 3),
            LONGEST,
        )
        return step, None if self.constraints is None else tensors_of(self.constraints)


def tensors_of(constraints: CpuConstraints) -> Constraints:
    """The kernels' form; followers past the count are invalid token ids."""
    followers = torch.full((len(constraints.blocked), MAX_FOLLOWERS), 1 << 30, dtype=torch.int32)
    for row, tokens in zip(followers, constraints.followers, strict=True):
        row[: len(tokens)] = torch.tensor([*tokens])
    counts = torch.tensor([len(tokens) for tokens in constraints.followers]).int()
    return Constraints(
        torch.tensor(constraints.blocked).to(torch.int8),
        torch.tensor(constraints.repeats).to(torch.int8),
        counts,
        followers,
    )


def listed(constraints: Constraints, num_rows: int) -> list[tuple]:
    """`(blocked, repeats, followers)` of each row; the kernel must list followers sorted."""
    blocked, repeats, counts, followers = (column[:num_rows].tolist() for column in constraints)
    listed = [row[:count] for row, count in zip(followers, counts, strict=True)]
    assert listed == [sorted({*row}) for row in listed]
    return [*zip(blocked, map(bool, repeats), map(set, listed), strict=True)]


def to(device: torch.device | str, values: Any) -> Any:
    """Moves the tensors of a possibly nested named tuple to a device."""
    if isinstance(values, tuple):
        return type(values)(*(to(device, value) for value in values))
    return values.to(device) if isinstance(values, torch.Tensor) else values


def sampling_inputs_of(call: Call, draft_temperature: float = 0.0) -> SamplingInputs:
    """Sampling inputs of the call; a draft temperature above 0 makes drafts probabilistic."""
    slots = len(call.records.lost)
    temperature = torch.ones(slots)
    temperature[call.slots.long()] = call.temperature
    counts = torch.tensor(call.lengths) + 1
    sampling = SamplingTensors(temperature, torch.from_numpy(call.rng.integers(0, 2**62, slots)))
    if draft_temperature:
        shape = slots, LONGEST, call.logits.shape[1]
        draft_logits = torch.from_numpy(call.rng.normal(0, 2, shape)).float()
        # Tokens that a draft cannot propose, as with a draft head of a smaller vocabulary.
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


class SampledStep(NamedTuple):
    """A sampled step; `q` `[num_drafts, vocab]` holds the draft probabilities for the CPU."""

    q: torch.Tensor | None
    inputs: VerifyInputs
    constraints: Constraints | None
    sampling_inputs: SamplingInputs


def sampled_step(call: Call, is_probabilistic: bool) -> SampledStep:
    sampling_inputs, q = sampling_inputs_of(call, 0.8 * is_probabilistic), None
    if is_probabilistic:
        sampling = sampling_inputs.sampling
        slots = sampling_inputs.expanded_idx_mapping[call.rows].long()
        positions = sampling_inputs.expanded_local_pos[call.rows].long()
        scaled = sampling.draft_logits[slots, positions] / sampling.draft_temperature[slots, None]
        q = scaled.softmax(-1)
    return SampledStep(q, *call.step(), sampling_inputs)


class Replay(accept.CpuSamplingInputs):
    """Repeats the random decisions that led to given tokens."""

    def __init__(self, call: Call, tokens: torch.Tensor, q: torch.Tensor | None) -> None:
        # The logits are already divided by the temperature.
        super().__init__(call.temperature.sign(), np.zeros(0), q)
        accepted = (tokens >= 0).sum(1) - 1
        offsets = (torch.arange(length) for length in call.lengths)
        self.accepted = torch.cat([row < n for row, n in zip(offsets, accepted, strict=True)])
        self.next_ids = tokens.gather(1, accepted[:, None].long())[:, 0].tolist()

    def accepts(self, draft_idx: int, _: float) -> bool:
        return bool(self.accepted[draft_idx])

    def sample_token(self, req_idx: int, _: torch.Tensor) -> int:
        return self.next_ids[req_idx]


def on_cpu(
    call: Call, step_counters: StepCounters, sampling_inputs: accept.CpuSamplingInputs | None = None
) -> tuple:
    """The CPU's output, and the records after the step."""
    bonus = None if sampling_inputs is None else torch.zeros(call.batch)
    step, _ = call.step()
    return reference.verify(
        step, call.engine_params, call.constraints, step_counters, sampling_inputs, bonus
    ), step.records


def recorded(call: Call, q: torch.Tensor | None, tokens: torch.Tensor) -> tuple:
    """The CPU's counters and lost units for a sampled step that emits the tokens."""
    step_counters = call.step_counters()
    output, records = on_cpu(call, step_counters, Replay(call, tokens, q))
    assert torch.equal(output.output_token_ids >= 0, tokens >= 0)
    return step_counters, records.lost


def same(actual: StepCounters, expected: StepCounters, atol: float = 0.0) -> None:
    assert actual.counts.tolist() == expected.counts.tolist()
    if expected.table is not None:
        torch.testing.assert_close(actual.table, expected.table, rtol=0, atol=atol, equal_nan=True)


def close(actual: StepCounters, expected: StepCounters, units: int, atol: float) -> None:
    """Compares counters up to float32 rounding."""
    counts, expected_counts = actual.counts.clone(), expected.counts.clone()
    for name in ("lost", "gained", "drift_up", "drift_down"):
        entry = getattr(CounterLayout(LONGEST), name)
        assert abs(counts[entry] - expected_counts[entry]) <= units
        counts[entry] = expected_counts[entry] = 0
    same(actual._replace(counts=counts), expected._replace(counts=expected_counts), atol=atol)
