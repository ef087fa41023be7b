"""The kernels on a real GPU: equal to the definition, without a sync, inside a CUDA graph."""

import math

import numpy as np
import pytest
import torch

from vllm_mars import verify_greedy
from vllm_mars.kernels import accept, cpu
from vllm_mars.kernels.context import blocked_positions, new_state
from vllm_mars.kernels.terms import (
    NO_BOUND,
    Account,
    Drafts,
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


def sampled_step(rule, device, vocab=49_152):
    """A step in which some requests sample, with what it is written down in."""
    generator = torch.Generator().manual_seed(1)
    size, requests = sum(LENGTHS), len(LENGTHS)
    logits = torch.randn(size, vocab, generator=generator) * 3
    ids = logits.topk(3).indices[torch.arange(size), torch.randint(3, (size,), generator=generator)]
    ends = torch.tensor(LENGTHS).cumsum(0).int()
    value, price = RULES[rule], int(0.7 * 2**16)
    records = Records(
        torch.full((requests,), value),
        torch.full((requests,), price),
        torch.zeros(requests).long(),
        torch.tensor([NO_BOUND, 1 << 24] * (requests // 2)),
        torch.zeros(requests).long(),
        torch.full((requests,), 99).int(),
        torch.full((requests, 1), -1).int(),
    )
    slots = torch.arange(requests).int()
    given = Requests(Records(*(t.to(device) for t in records)), slots.to(device), slots.to(device))
    drafts = Drafts(logits.to(device), ids.int().to(device), ends.to(device), max_draft_len=LONGEST)
    counts = torch.zeros(count_size(LONGEST), dtype=torch.int64, device=device)
    account = Account(counts, torch.empty(requests, 2, LONGEST + 1, device=device), LONGEST)
    temperature = torch.tensor([0.0, 1.0, 1.0] * (requests // 3), device=device)
    return drafts, given, account, temperature


@pytest.mark.parametrize("rule", RULES)
def test_sampled_steps_equal_those_of_a_cpu(rule):
    outputs = torch.full((len(LENGTHS), LONGEST + 1), -1, dtype=torch.int32)
    outputs[:, 0] = 1
    results = []
    for device, kernels in ((torch.device("cpu"), cpu), (DEVICE, accept)):
        drafts, requests, account, temperature = sampled_step(rule, device)
        before = drafts.logits.clone()
        plan = kernels.plan(drafts, requests, Rule(rule, 1 << 16), temperature)
        served = drafts.logits.cpu()
        kernels.settle(plan, drafts, requests, outputs.to(device), account)
        assert torch.equal(drafts.logits, before), "restored, bit for bit"
        results.append((served, account.table.cpu(), requests.records.lost.cpu()))
    for one, other in zip(*results, strict=True):
        # What a request lost is counted in units that float32 rounds.
        atol = 1e-3 if one.is_floating_point() else 9
        torch.testing.assert_close(one, other, rtol=1e-4, atol=atol, equal_nan=True)


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
