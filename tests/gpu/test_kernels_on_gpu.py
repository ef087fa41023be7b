"""The kernels on a real GPU: equal to the definition, without a sync, inside a CUDA graph."""

import functools
import math

import numpy as np
import pytest
import torch

from vllm_mars import verify_greedy
from vllm_mars.kernels import accept, clip_kernel, cpu
from vllm_mars.kernels.clip import TOLERANCE, clip_rows
from vllm_mars.kernels.context import blocked_positions, new_state
from vllm_mars.kernels.terms import (
    NO_BOUND,
    Account,
    Drafts,
    Draws,
    Markers,
    Records,
    Requests,
    Rule,
    Verdict,
    count_size,
)
from vllm_mars.runner.repeats import AnswerNgrams

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

DEVICE = torch.device("cuda")
VOCABS = [111, 32_000, 49_152, 128_256, 151_936]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [5, 0, 1, 5, 3, 2]
RULES = {"theta": 0.9, "price": 0.7}
LONGEST = 5


def batch(vocab, dtype, lengths=LENGTHS, seed=0):
    """Arguments of `verify_greedy`: near and exact ties, padding drafts, NaN and -inf."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def random(*shape):
        return torch.rand(*shape, generator=generator, device=DEVICE)

    size, rows = sum(lengths), sum(lengths) + len(lengths)
    logits = (torch.randn(rows, vocab, generator=generator, device=DEVICE) * 2 + 2).to(dtype)
    logits[:, vocab // 3] = 20
    logits[random(rows) < 0.7, vocab - 1] = 19.5
    logits[random(rows) < 0.2, vocab - 2] = 20
    logits[random(rows) < 0.05, vocab // 2] = math.nan
    logits[random(rows) < 0.05, 1:] = -math.inf
    target_rows = torch.randperm(rows, generator=generator, device=DEVICE)[:size].int()
    best = logits[target_rows].float().topk(3).indices
    drafts = best.gather(1, (random(size, 1) * 3).long()).squeeze(1).int()
    drafts[random(size) < 0.05] = -1
    return {
        "logits": logits,
        "draft_token_ids": drafts,
        "cu_num_draft_tokens": torch.tensor(lengths, device=DEVICE).cumsum(0).int(),
        "bonus_token_ids": None,
        "target_rows": target_rows,
        "bonus_rows": torch.randperm(rows, generator=generator, device=DEVICE)[: len(lengths)],
        "protected": random(vocab) < 0.01,
        "blocked": (random(size) < 0.1).to(torch.int8) * Verdict.SPAN,
        "max_draft_len": max(lengths),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("rule", RULES)
def test_greedy_steps_equal_the_reference(rule, vocab, dtype):
    for seed in range(5):
        call = {**batch(vocab, dtype, seed=seed), rule: RULES[rule]}
        found, wanted = (verify_greedy(**call, backend=name) for name in ("triton", "torch"))
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.cpu(), other.cpu()), seed


def to(device, values):
    """A named tuple of tensors and other values, on a device."""
    return type(values)(*(v.to(device) if isinstance(v, torch.Tensor) else v for v in values))


class Sampled:
    """A step of Model Runner V2 in which some requests sample, on the CPU."""

    def __init__(self, rule, is_drawn, dtype, vocab=49_152):
        generator = torch.Generator().manual_seed(1)
        counts, requests = torch.tensor(LENGTHS) + 1, len(LENGTHS)
        rows, slots = int(counts.sum()), torch.arange(requests).int()
        self.logits = (torch.randn(rows, vocab, generator=generator) * 3).to(dtype)
        best = self.logits.float().topk(3).indices
        ids = best[torch.arange(rows), torch.randint(3, (rows,), generator=generator)].int()
        places = torch.cat([torch.arange(count) for count in counts.tolist()]).int()
        self.is_draft = torch.cat([places[1:], torch.zeros(1)]) > 0
        # A row's draft token is the next row's input.
        inputs = ids.roll(1)
        self.drafts = Drafts(
            self.logits,
            inputs,
            counts.cumsum(0).int(),
            max_draft_len=LONGEST,
            bonus_row_is_last=True,
        )
        self.of_cpu = Drafts(
            self.logits[self.is_draft].float(),
            ids[self.is_draft],
            torch.tensor(LENGTHS).cumsum(0).int(),
            max_draft_len=LONGEST,
        )
        self.records = Records(
            torch.full((requests,), RULES[rule]),
            torch.full((requests,), int(0.7 * 2**16)),
            torch.zeros(requests).long(),
            torch.tensor([NO_BOUND, 1 << 24] * (requests // 2)),
            torch.zeros(requests).long(),
            torch.full((requests,), 99).int(),
            torch.full((requests, 1), -1).int(),
        )
        self.slots, temperature = slots, torch.tensor([0.0, 1.0, 1.0] * (requests // 3))
        self.draws = Draws(
            temperature,
            torch.arange(requests) + 7,
            torch.arange(rows),
            slots.repeat_interleave(counts),
            places,
        )
        self.clip = None
        if is_drawn:
            draft_logits = torch.randn(requests, LONGEST, vocab, generator=generator) * 3
            self.draws = self.draws._replace(
                draft_logits=draft_logits, drawn_at=torch.full((requests,), 0.8)
            )
            where = self.draws.row_slots[self.is_draft].long(), places[self.is_draft].long()
            q = (draft_logits[where] / 0.8).softmax(-1)
            self.clip = functools.partial(clip_rows, self.of_cpu.logits, q)

    def account(self, device):
        counts = torch.zeros(count_size(LONGEST), dtype=torch.int64, device=device)
        table = torch.empty(len(LENGTHS), 2, LONGEST + 1, device=device)
        return Account(counts, table, LONGEST)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rule", "is_drawn"), [*((name, False) for name in RULES), ("price", True)]
)
def test_sampled_steps_equal_those_of_a_cpu(monkeypatch, rule, is_drawn, dtype):
    """Whatever is drawn, it is written down as a CPU writes it down; and nothing waits."""
    monkeypatch.setattr(clip_kernel, "TOLERANCE", TOLERANCE)
    step, cpu_device = Sampled(rule, is_drawn, dtype), torch.device("cpu")
    given, draws = to(DEVICE, step.drafts), to(DEVICE, step.draws)
    slots = step.slots.to(DEVICE)
    # The first one compiles.
    for mode in ("default", "error"):
        records, found = to(DEVICE, step.records), step.account(DEVICE)
        requests = Requests(records, slots, None, slots, torch.zeros_like(slots))
        torch.cuda.set_sync_debug_mode(mode)
        try:
            output = accept.sample(given, requests, Rule(rule, 1 << 16), draws, None, found)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(given.logits.cpu(), step.logits)
    assert int(output.num_accepted.sum()) > len(LENGTHS)

    mine, wanted = Requests(step.records, step.slots, step.slots), step.account(cpu_device)
    plan = cpu.plan(step.of_cpu, mine, Rule(rule, 1 << 16), step.draws.temperature, None, step.clip)
    cpu.settle(plan, step.of_cpu, mine, output.output_token_ids.cpu().int(), wanted)
    torch.testing.assert_close(
        found.table.cpu(), wanted.table, rtol=1e-4, atol=1e-3, equal_nan=True
    )
    # Counted in units that float32 rounds.
    assert (found.counts.cpu() - wanted.counts).abs().max() <= 100 * LONGEST
    assert (requests.records.lost.cpu() - step.records.lost).abs().max() <= 20 * LONGEST


def test_nothing_waits_and_a_graph_replays():
    call = {**batch(32_000, torch.bfloat16), "price": torch.full((len(LENGTHS),), 0.7).cuda()}
    expected = verify_greedy(**call, backend="triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        verify_greedy(**call, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = verify_greedy(**call, backend="triton")
    graph.replay()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("length", [10, 3_000, 9_000])
def test_the_guard_equals_its_definition(length):
    """The ring is filled, then overrun."""
    rng = np.random.default_rng(length)
    answer, draft = rng.integers(0, 30, length).tolist(), rng.integers(0, 30, 16).tolist()

    def ids(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    zero = ids([0])
    records = Records(zero.float(), *(zero.long() for _ in range(4)), zero, zero[None])
    # The token before the draft, and its bonus row.
    inputs, ends = ids([answer[-1], *draft]), ids([len(draft) + 1])
    drafts = Drafts(torch.empty(0, 0), inputs, ends, bonus_row_is_last=True)
    found = blocked_positions(
        new_state(1, True, DEVICE),
        ids([answer]),
        Requests(records, zero, None, ids([length]), zero),
        drafts,
        Markers(zero, zero, (-1, -1), only_thinking=False, opening=0),
        3,
    )
    expected = [Verdict.REPEAT * is_held for is_held in AnswerNgrams(3).repeated(answer, draft)]
    assert found[:-1].tolist() == expected
