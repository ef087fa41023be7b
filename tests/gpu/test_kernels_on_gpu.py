"""The kernels on a GPU: they equal the reference, never sync, and run in a CUDA graph."""

import math

import numpy as np
import pytest
import torch

from benchmarks.step_v2 import Shape, is_repeated, step_of, tokens_of
from calls import LONGEST, Call, close, listed, recorded, sampled_step, to
from vllm_mars import MarsConfig, verify_greedy
from vllm_mars.kernels import fused
from vllm_mars.kernels.constraints.fused import compute_constraints, new_ring
from vllm_mars.kernels.constraints.markers import IN_THINKING, MarkerTracker
from vllm_mars.kernels.constraints.naive import NgramIndex, cpu_constraints
from vllm_mars.kernels.interface import Column, ConstraintInputs, Records, VerifyInputs
from vllm_mars.kernels.served_dist import fused as clip_kernel
from vllm_mars.kernels.served_dist.naive import TOLERANCE

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

DEVICE = torch.device("cuda")
# Each vocabulary is a variant, which takes seconds to compile.
SHAPES = [
    (111, torch.float32),
    (32_000, torch.bfloat16),
    (49_152, torch.float16),
    (128_256, torch.bfloat16),
    (151_936, torch.float32),
]
LENGTHS = [5, 0, 1, 5, 3, 2]
RULES = {"theta": 0.9, "price": 0.7}


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
    is_bonus = torch.cat([torch.arange(length + 1) == length for length in lengths])
    best = logits[~is_bonus.to(DEVICE)].float().topk(3).indices
    drafts = best.gather(1, (random(size, 1) * 3).long()).squeeze(1).int()
    drafts[random(size) < 0.05] = -1
    return {
        "logits": logits,
        "draft_token_ids": drafts,
        "cu_num_draft_tokens": torch.tensor(lengths, device=DEVICE).cumsum(0).int(),
        "protected": random(vocab) < 0.01,
        "max_draft_len": max(lengths),
    }


@pytest.mark.parametrize(("vocab", "dtype"), SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_greedy_steps_equal_those_of_a_cpu(rule, vocab, dtype):
    for seed in range(5):
        call = {**batch(vocab, dtype, seed=seed), rule: RULES[rule]}
        on_host = {
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in call.items()
        }
        for one, other in zip(verify_greedy(**call), verify_greedy(**on_host), strict=True):
            assert torch.equal(one.cpu(), other.cpu()), seed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["theta", "price", "probabilistic"])
def test_sampled_steps_equal_those_of_a_cpu(monkeypatch, name, dtype):
    """The CPU counts the same for the sampled tokens, and the step never syncs."""
    monkeypatch.setattr(clip_kernel, "TOLERANCE", TOLERANCE)
    rule, accepted = "theta" if name == "theta" else "price", 0
    for number in range(10):
        call = Call(number, rule, True, 49_152, dtype)
        q, inputs, *others = sampled_step(call, name == "probabilistic")
        constraints, sampling_inputs = to(DEVICE, others[0]), to(DEVICE, others[1])
        engine_params = to(DEVICE, call.engine_params)
        # The first run compiles.
        for mode in ("default", "error"):
            counters, step = to(DEVICE, call.step_counters()), to(DEVICE, inputs)
            torch.cuda.set_sync_debug_mode(mode)
            try:
                output = fused.verify(step, engine_params, constraints, counters, sampling_inputs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(step.logits.cpu().nan_to_num(), inputs.logits.nan_to_num())
        accepted += int(output.num_accepted.sum())
        expected_counters, lost = recorded(call, q, output.output_token_ids.cpu())
        close(to("cpu", counters), expected_counters, 100 * LONGEST, 1e-3)
        assert (step.records.lost.cpu() - lost).abs().max() <= 20 * LONGEST
    assert accepted > 0


@pytest.mark.parametrize("is_probabilistic", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_v2_step_equals_vllms_at_price_0_and_never_syncs(temperature, is_probabilistic):
    """vLLM verifies probabilistic drafts with `block`, and others with `standard`."""
    step = step_of(Shape(temperature, is_probabilistic, 5, 4, 49_152), DEVICE)
    strict = tokens_of(step.verification(MarsConfig(price=0.0)))
    if is_repeated(step):
        assert torch.equal(strict, tokens_of(step.verification(step.strict_method)))
    verify = step.verification(MarsConfig(max_loss=0.02))
    verify()
    torch.cuda.set_sync_debug_mode("error")
    try:
        verify()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_greedy_verification_never_syncs_and_replays_in_a_graph():
    call = {**batch(32_000, torch.bfloat16), "price": torch.full((len(LENGTHS),), 0.7).cuda()}
    expected = verify_greedy(**call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        verify_greedy(**call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = verify_greedy(**call)
    graph.replay()
    assert all(map(torch.equal, output, expected))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [10, 3_000, 9_000])
def test_the_constraints_kernel_equals_the_reference(length, temperature):
    """With the ring buffer partly filled, full and overwritten."""
    rng = np.random.default_rng(length)
    answer, draft = rng.integers(0, 30, length).tolist(), rng.integers(0, 30, 16).tolist()
    thinking = {"thinking_start": 6, "thinking_end": 5}
    config = MarsConfig(strict_spans=((1, 2), (3, 4)), strict_opening=3, **thinking)
    tracker = MarkerTracker(config)

    def ids(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    zero = ids([0])
    # The token before the draft, and its bonus row.
    inputs, ends = ids([answer[-1], *draft]), ids([len(draft) + 1])
    records = Records.new(1, DEVICE)
    records.table[0, Column.SCOPE] = IN_THINKING
    records.value.fill_(1)
    logits = torch.empty((len(inputs), 30), device=DEVICE)
    step = VerifyInputs(logits, inputs, ends, records, zero, ids([length]), zero, len(draft))
    constraint_inputs = ConstraintInputs(
        ring=new_ring(1, DEVICE),
        tokens=ids([answer]),
        temperature=torch.full((1,), temperature, device=DEVICE),
        markers=tracker.markers(DEVICE),
        ngram=3,
    )
    found = compute_constraints(step, constraint_inputs)
    state = tracker.advance(0, answer)
    reasons = tracker.blocked(state, draft, IN_THINKING)
    repeated = NgramIndex(3).before(answer, draft)
    expected = [*cpu_constraints(reasons, draft, repeated, temperature > 0), (0, False, ())]
    assert listed(found, len(inputs)) == [(*row[:2], {*row[2]}) for row in expected]
    assert records.table[0, Column.STATE] == state
