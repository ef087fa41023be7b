"""The kernels on a real GPU: exact, without a sync, without allocations, inside a CUDA graph."""

import math

import pytest
import torch

from vllm_mars import verify_greedy
from vllm_mars.kernels import reference
from vllm_mars.kernels.terms import Drafts, Margin, RelaxedBudget, Verdict, new_output
from vllm_mars.verify import judge_drafts, verify_drafts

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

DEVICE = torch.device("cuda")
VOCABS = [111, 32_000, 49_152, 128_256, 151_936]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def batch(vocab, dtype, lengths, seed=0):
    """Drafts and margin with near and exact ties, padding drafts, NaN and -inf."""
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
    drafts = Drafts(
        logits,
        drafts,
        torch.tensor(lengths, device=DEVICE).cumsum(0).int(),
        target_rows=target_rows,
        bonus_rows=torch.randperm(rows, generator=generator, device=DEVICE)[: len(lengths)],
        max_draft_len=max(lengths),
    )
    margin = Margin(
        random(len(lengths)).clamp(min=0.1),
        protected=random(vocab) < 0.01,
        blocked=(random(sum(lengths)) < 0.1).to(torch.int8) * Verdict.SPAN,
        budget=RelaxedBudget(
            0.3,
            torch.zeros(len(lengths), dtype=torch.int32, device=DEVICE),
            torch.full((len(lengths),), 7, dtype=torch.int32, device=DEVICE),
        ),
    )
    return drafts, margin


def call(given, **more):
    return verify_drafts(*given, with_verdicts=True, backend="triton", **more)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("lengths", [[5], [0, 3, 8, 1] * 16, [128, 0, 7], [2] * 1024], ids=len)
def test_equals_reference(vocab, dtype, lengths):
    if len(lengths) * vocab > 1024 * 50_000:
        pytest.skip("the reference's copies would not fit")
    given = batch(vocab, dtype, lengths)
    out = new_output(given[0], with_verdicts=True)
    for buffer in out:
        buffer.fill_(-7)
    call(given, out=out)
    wanted = reference.verify_greedy(*given, with_verdicts=True)
    for buffer, expected in zip(out, wanted, strict=True):
        torch.testing.assert_close(buffer, expected, rtol=0, atol=0, equal_nan=True)
    ours, theirs = (
        judge_drafts(*given, with_top2_values=True, backend=backend)
        for backend in ("triton", "torch")
    )
    assert torch.equal(ours.verdicts, theirs.verdicts)
    torch.testing.assert_close(ours.top2_values, theirs.top2_values, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_input_token_layout(dtype):
    logits = batch(128_256, dtype, [3] * 8)[0].logits
    inputs = logits.float().topk(2).indices[:, 1].roll(1).int()
    ends = torch.arange(4, len(logits) + 1, 4, device=DEVICE).int()
    given = Drafts(logits, inputs, ends, max_draft_len=3, bonus_row_is_last=True), Margin(0.9)
    output = verify_drafts(*given, backend="triton")
    expected = verify_drafts(*given, backend="torch")
    for ours, theirs in zip(output[:3], expected[:3], strict=True):
        assert torch.equal(ours, theirs)


def test_rows_past_2_to_the_31_elements():
    vocab = 151_936
    rows = 2**31 // vocab + 2
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device=DEVICE)
    logits[-1, 7], logits[-1, 9] = 20.0, 19.5
    output = verify_greedy(
        logits,
        torch.tensor([9], device=DEVICE),
        torch.tensor([1], dtype=torch.int32, device=DEVICE),
        None,
        0.9,
        target_rows=torch.tensor([rows - 1], device=DEVICE),
        max_draft_len=1,
        backend="triton",
    )
    assert output.output_token_ids.tolist() == [[9, -1]]
    assert output.num_relaxed.tolist() == [1]


def test_no_sync_and_no_allocation_once_warm():
    given = batch(128_256, torch.bfloat16, [5] * 8)
    out = call(given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(given, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_replays_in_a_cuda_graph():
    first, second = (batch(49_152, torch.bfloat16, [4] * 16, seed) for seed in (1, 2))
    out = call(first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(first, out=out)
    for ours, theirs in zip(first, second, strict=True):
        for tensor, other in zip(ours, theirs, strict=True):
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(other)
    for buffer in out:
        buffer.fill_(-7)
    graph.replay()
    wanted = reference.verify_greedy(*second, with_verdicts=True)
    for buffer, expected in zip(out, wanted, strict=True):
        torch.testing.assert_close(buffer, expected, rtol=0, atol=0, equal_nan=True)
