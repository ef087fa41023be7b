"""The kernels of `accept`, run by the interpreter, against the CPU's form of the rule.

Run by `tests/kernels/test_kernel_interpreted.py`, with TRITON_INTERPRET=1 set before triton loads.
"""

import functools
import math

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from vllm_mars.kernels import accept, clip_kernel, context, cpu, top2
from vllm_mars.kernels.accept_kernel import integer_root
from vllm_mars.kernels.clip import TOLERANCE, clip_rows
from vllm_mars.kernels.terms import (
    MOST_BALANCE,
    Account,
    Drafts,
    Draws,
    Records,
    Requests,
    Rule,
    Verdict,
    count_size,
    loss_rate,
    loss_units,
)

LONGEST = 6
REASONS = [0, 0, 0, Verdict.SPAN, Verdict.STRUCTURED, Verdict.REPEAT]


def test_the_kernels_are_interpreted():
    """Here, and in the other files of checks, which run in this process."""
    for module in (accept, clip_kernel, context, top2):
        kernels = [value for name, value in vars(module).items() if name.endswith("_kernel")]
        assert kernels and all(isinstance(kernel, InterpretedFunction) for kernel in kernels)


class Call:
    """A random step: rows of logits, the last of each request for its bonus token.

    Args:
        number: of the call, which seeds it.
        name: of the rule.
        sampled: whether requests may sample: then logits are float32, and finite numbers or -inf.
    """

    def __init__(self, number: int, name: str, sampled: bool = False) -> None:
        self.rng = rng = np.random.default_rng([number, len(name)])
        vocab = int(rng.choice([2, 5, 33, 70] if sampled else [1, 2, 5, 33, 70]))
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
        dtype = torch.float32 if sampled else rng.choice([torch.float32, torch.bfloat16])
        # Rows with a stride of their own.
        wide = torch.full((rows, vocab + int(rng.choice([0, 3]))), math.nan).to(dtype)
        wide[:, :vocab] = torch.from_numpy(logits)
        self.logits = wide[:, :vocab]
        self.is_bonus = torch.cat([torch.arange(n + 1) == n for n in self.lengths])
        self.rows = (~self.is_bonus).nonzero().squeeze(1)
        best = self.logits[self.rows].float().topk(min(3, vocab)).indices
        ids = best.gather(1, torch.from_numpy(rng.integers(0, best.shape[1], (size, 1))))[:, 0]
        ids[torch.from_numpy(rng.random(size) < 0.1)] = -1
        if not sampled:
            ids[torch.from_numpy(rng.random(size) < 0.05)] = vocab + 7
        self.ids = ids.int()
        self.ends = torch.tensor(self.lengths).cumsum(0).int()
        slots = self.batch + 2
        self.slots = torch.from_numpy(rng.permutation(slots)[: self.batch]).int()
        thresholds = [1.0, 0.9, 0.5, 0.05] if name == "theta" else [0.0, 0.3, 2.0]
        self.burst = loss_units(float(rng.choice([0.0, 0.5, 2.0])))
        rates = [loss_rate(value) for value in (0.0, 0.02, 0.3, math.inf)]
        self.records = Records(
            torch.from_numpy(rng.choice(thresholds, slots)).float(),
            torch.from_numpy(rng.choice([0, 20_000, 50_000, 1 << 17], slots)),
            torch.from_numpy(rng.choice([0, 0, 5_000, MOST_BALANCE], slots)),
            torch.from_numpy(rng.choice(rates, slots)),
            torch.from_numpy(rng.choice([0, 1_000, 1 << 17], slots)),
            torch.from_numpy(rng.choice([20, 45, 48, 99], slots)).int(),
            torch.from_numpy(rng.choice([-1, -1, *range(vocab)], (slots, 2))).int(),
        )
        self.produced = torch.from_numpy(rng.integers(0, 50, self.batch)).int()
        protected = torch.from_numpy(rng.random(vocab) < 0.1) if rng.random() < 0.6 else None
        self.rule = Rule(name, self.burst, protected)
        self.blocked = rng.choice(REASONS, size).tolist() if rng.random() < 0.5 else None
        self.has_table = rng.random() < 0.6
        self.temperature = torch.from_numpy(rng.choice([0.0, 0.7, 1.0], self.batch)).float()

    def requests(self) -> Requests:
        """As on V1; what was lost is this step's own."""
        records = self.records._replace(lost=self.records.lost.clone())
        return Requests(records, self.slots, self.produced)

    def requests_v2(self) -> Requests:
        """The same, with output tokens by slot."""
        total = torch.zeros_like(self.records.lost, dtype=torch.int32) + 3
        total[self.slots.long()] += self.produced
        prompt = torch.full_like(total, 3)
        return self.requests()._replace(produced=None, total_len=total, prompt_len=prompt)

    def account(self) -> Account:
        table = torch.full((self.batch, 2, LONGEST + 1), -7.0) if self.has_table else None
        return Account(torch.zeros(count_size(LONGEST), dtype=torch.int64), table, LONGEST)

    def on_device(self) -> torch.Tensor | None:
        return None if self.blocked is None else torch.tensor(self.blocked, dtype=torch.int8)

    def in_v2(self, drafts: Drafts) -> tuple[Drafts, torch.Tensor | None]:
        """The drafts and what blocks them in the other layout, with all rows as logits."""
        inputs = torch.full((len(self.logits),), 1, dtype=torch.int32)
        inputs[self.rows + 1] = self.ids
        ends = (torch.tensor(self.lengths) + 1).cumsum(0).int()
        blocked = None
        if self.blocked is not None:
            blocked = torch.zeros(len(self.logits), dtype=torch.int8)
            blocked[self.rows] = self.on_device()
        given = Drafts(
            self.logits, inputs, ends, max_draft_len=drafts.max_draft_len, bonus_row_is_last=True
        )
        return given, blocked


def same(found: Account, expected: Account, atol: float = 0.0) -> None:
    assert found.counts.tolist() == expected.counts.tolist()
    if expected.table is not None:
        torch.testing.assert_close(found.table, expected.table, rtol=0, atol=atol, equal_nan=True)


@pytest.mark.parametrize("name", ["theta", "price"])
@pytest.mark.parametrize("count", [10, pytest.param(400, marks=pytest.mark.nightly)])
def test_greedy_steps_equal_those_of_a_cpu(name, count):
    for number in range(count):
        call = Call(number, name)
        bonus_rows = call.is_bonus.nonzero().squeeze(1)
        drafts = Drafts(*(call.logits, call.ids, call.ends, call.rows.int()), max_draft_len=LONGEST)
        bonus = number % 3
        if bonus == 1:
            drafts = drafts._replace(bonus_token_ids=torch.arange(call.batch)[:, None])
        elif bonus == 2:
            drafts = drafts._replace(bonus_rows=bonus_rows)
        wanted, mine = call.account(), call.requests()
        expected = cpu.accept(drafts, mine, call.rule, call.blocked, wanted)

        found, ours = call.account(), call.requests()
        out = accept.accept(drafts, ours, call.rule, call.on_device(), found)
        for tensor, value in zip(out, expected, strict=True):
            assert torch.equal(tensor, value), number
        same(found, wanted)
        assert torch.equal(ours.records.lost, mine.records.lost)
        # Without an account nothing is counted.
        plain = accept.accept(drafts, call.requests(), call.rule, call.on_device())
        assert torch.equal(plain.output_token_ids, expected.output_token_ids)
        if bonus != 2:
            continue

        given, blocked = call.in_v2(drafts)
        found, ours = call.account(), call.requests_v2()
        output = accept.accept(given, ours, call.rule, blocked, found)
        assert torch.equal(output.output_token_ids, expected.output_token_ids.long())
        assert torch.equal(output.num_accepted, expected.num_accepted + 1)
        same(found, wanted)
        assert torch.equal(ours.records.lost, mine.records.lost)


def draws_of(call: Call, **drawn: torch.Tensor) -> Draws:
    """Of the call in V2's layout."""
    slots = len(call.records.lost)
    temperature = torch.ones(slots)
    temperature[call.slots.long()] = call.temperature
    counts = torch.tensor(call.lengths) + 1
    return Draws(
        temperature,
        torch.from_numpy(call.rng.integers(0, 2**62, slots)),
        torch.arange(len(call.logits)) + 5,
        call.slots.repeat_interleave(counts),
        torch.cat([torch.arange(count) for count in counts.tolist()]).int(),
        bool(call.rng.random() < 0.3),
        **drawn,
    )


@pytest.mark.parametrize("name", ["theta", "price", "drawn"])
@pytest.mark.parametrize("count", [10, pytest.param(400, marks=pytest.mark.nightly)])
def test_sampled_steps_equal_those_of_a_cpu(monkeypatch, name, count):
    """Whatever is drawn, it is written down as a CPU writes it down."""
    monkeypatch.setattr(clip_kernel, "TOLERANCE", TOLERANCE)
    accepted = 0
    for number in range(count):
        call = Call(number, "price" if name == "drawn" else name, sampled=True)
        logits = call.logits[call.rows].float()
        drafts = Drafts(logits, call.ids, call.ends, max_draft_len=LONGEST)
        given, blocked = call.in_v2(drafts)
        draws, clip = draws_of(call), None
        if name == "drawn":
            shape = len(call.records.lost), LONGEST, logits.shape[1]
            draft_logits = torch.from_numpy(call.rng.normal(0, 2, shape)).float()
            drawn_at = draws.temperature * 0.8
            draws = draws._replace(draft_logits=draft_logits, drawn_at=drawn_at)
            slots, places = draws.row_slots[call.rows].long(), draws.row_places[call.rows].long()
            q = (draft_logits[slots, places] / drawn_at[slots, None]).softmax(-1)
            clip = functools.partial(clip_rows, logits, q)

        before = given.logits.clone()
        found, ours = call.account(), call.requests_v2()
        output = accept.sample(given, ours, call.rule, draws, blocked, found)
        assert torch.equal(given.logits.nan_to_num(), before.nan_to_num())
        accepted += int((output.num_accepted - 1).sum())

        wanted, mine = call.account(), call.requests()
        plan = cpu.plan(drafts, mine, call.rule, call.temperature, call.blocked, clip)
        cpu.settle(plan, drafts, mine, output.output_token_ids.int(), wanted)
        close(found, wanted)
        difference = (ours.records.lost - mine.records.lost).abs().max()
        assert difference <= 3 * LONGEST, number
    assert accepted > 0


def close(found: Account, expected: Account) -> None:
    """Equal but for what float32 rounds."""
    counts, wanted = found.counts.clone(), expected.counts.clone()
    sums = slice(3 * LONGEST, 3 * LONGEST + 4)
    assert (counts[sums] - wanted[sums]).abs().max() <= 20 * LONGEST
    counts[sums] = wanted[sums] = 0
    same(found._replace(counts=counts), expected._replace(counts=wanted), atol=1e-4)


@pytest.mark.parametrize("name", ["price", "theta"])
def test_a_strict_request_loses_nothing(name):
    call = Call(5, name, sampled=True)
    strict = Records(
        torch.ones_like(call.records.threshold),
        *torch.zeros((4, len(call.records.lost))).long(),
        *call.records[-2:],
    )
    requests = call.requests_v2()._replace(records=strict)
    given, _ = call.in_v2(Drafts(call.logits, call.ids, call.ends, max_draft_len=LONGEST))
    rule = call.rule._replace(burst=1 << 20)
    table = torch.empty(len(call.slots), 2, LONGEST + 1)
    account = call.account()._replace(table=table)
    call.temperature.fill_(1.0)
    accept.sample(given, requests, rule, draws_of(call), None, account)
    assert not strict.lost.any() and not account.counts[3 * LONGEST : 3 * LONGEST + 2].any()
    assert not table.nan_to_num().any()


def test_large_vocabulary():
    """Several splits and a last one that is not full; the maximum near the end of each row."""
    vocab = 32_001
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, vocab, generator=generator) + 1
    logits[:, -1], logits[:, vocab // 2] = 12.0, 11.5
    ids = torch.tensor([vocab - 1, vocab // 2, 3, vocab // 2], dtype=torch.int32)
    drafts = Drafts(logits, ids, torch.tensor([3, 4], dtype=torch.int32), max_draft_len=3)
    # Greedy, so that none is left out as a bonus row.
    zeros = torch.zeros(4, dtype=torch.int32)
    partials = top2.reduce_rows(drafts, True, (zeros, zeros, torch.zeros(1)))
    splits = partials.num_splits
    assert splits > 1
    sums, moments = partials.sums[: 8 * splits].view(4, splits, 2).unbind(-1)
    firsts = torch.stack([part.amax(-1) for part in logits.split(4096, -1)], -1).double()
    logs = sums.double().log() + firsts
    total = logs.logsumexp(-1)
    torch.testing.assert_close(total, logits.double().logsumexp(-1), rtol=1e-6, atol=1e-6)
    shares = (logs - total[:, None]).exp()
    entropy = total - (shares * (moments.double() / sums + firsts)).sum(-1)
    p = logits.double().softmax(-1)
    torch.testing.assert_close(entropy, torch.special.entr(p).sum(-1), rtol=1e-5, atol=1e-5)


def test_rows_past_2_to_the_31_elements():
    """The second row starts past 2**31 elements; only the pages that are touched take memory."""
    stride = 2**31 + 64
    storage = torch.empty(stride + 128, dtype=torch.bfloat16)
    logits = storage.as_strided((2, 100), (stride, 1))
    logits[:] = torch.linspace(1, 8, 100).to(torch.bfloat16)
    logits[:, 99] = 9.0
    logits[:, 40] = 8.9
    ids = torch.tensor([99, 40], dtype=torch.int32)
    drafts = Drafts(logits, ids, torch.tensor([2], dtype=torch.int32), max_draft_len=2)
    values = torch.tensor([0.9])
    zero = torch.zeros(1, dtype=torch.int64)
    no_ends = torch.full((1, 1), -1, dtype=torch.int32)
    cap = torch.full((1,), 99, dtype=torch.int32)
    records = Records(values, zero, zero, zero + (1 << 40), zero.clone(), cap, no_ends)
    requests = Requests(records, torch.zeros(1, dtype=torch.int32), torch.zeros(1).int())
    output = accept.accept(drafts, requests, Rule("theta"))
    assert output.output_token_ids.tolist() == [[99, 40, -1]]


def test_the_integer_root():
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(out_ptr, in_ptr, SIZE: tl.constexpr):  # noqa: N803
        index = tl.arange(0, SIZE)
        tl.store(out_ptr + index, integer_root(tl.load(in_ptr + index)))

    rng = np.random.default_rng(0)
    roots = rng.integers(0, 2**31, 1000, dtype=np.int64) >> rng.integers(0, 31, 1000)
    squares = np.concatenate(
        [roots**2, roots**2 - 1, roots**2 + 2 * roots, rng.integers(0, 2**62, 1096)]
    ).clip(0, 2**62 - 1)
    given = torch.from_numpy(squares)
    found = torch.empty_like(given)
    kernel[(1,)](found, given, SIZE=4096)
    assert found.tolist() == [math.isqrt(value) for value in squares.tolist()]
