"""The kernels of `accept_kernel`, run by the interpreter, against the CPU's form of the rule."""

import math

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from calls import (
    CPU,
    LONGEST,
    Call,
    close,
    on_cpu,
    recorded,
    same,
    sampled_step,
    sampling_inputs_of,
)
from vllm_mars.kernels import fused
from vllm_mars.kernels.accept import fused as accept_kernel
from vllm_mars.kernels.budget import NO_BOUND
from vllm_mars.kernels.constraints import fused as constraints_kernel
from vllm_mars.kernels.counters.table import CounterLayout
from vllm_mars.kernels.interface import (
    MAX_STOP_IDS,
    EngineParams,
    Protected,
    Records,
    SamplingInputs,
    SamplingTensors,
    VerifyInputs,
    encode_value,
)
from vllm_mars.kernels.row_stats import fused as rows_kernel
from vllm_mars.kernels.rules import THETA
from vllm_mars.kernels.served_dist import fused as clip_kernel
from vllm_mars.kernels.served_dist.naive import TOLERANCE

pytestmark = pytest.mark.interpreted


def test_the_kernels_are_interpreted():
    """Here, and so in the other files of tests that are marked."""
    for module in (accept_kernel, clip_kernel, constraints_kernel, rows_kernel):
        kernels = [value for name, value in vars(module).items() if name.endswith("_kernel")]
        assert kernels and all(isinstance(kernel, InterpretedFunction) for kernel in kernels)


@pytest.mark.parametrize("name", ["theta", "price"])
@pytest.mark.parametrize("count", [10, pytest.param(400, marks=pytest.mark.nightly)])
def test_greedy_steps_equal_those_of_a_cpu(name, count):
    for number in range(count):
        call = Call(number, name)
        expected, mine = on_cpu(call, wanted := call.step_counters())
        found, (step, constraints) = call.step_counters(), call.step()
        output = fused.verify(step, call.engine_params, constraints, found)
        assert torch.equal(output.output_token_ids, expected.output_token_ids.long()), number
        assert torch.equal(output.num_emitted, expected.num_emitted)
        assert torch.equal(output.num_relaxed, expected.num_relaxed)
        assert torch.equal(output.lost, expected.lost)
        same(found, wanted)
        assert torch.equal(step.records.lost, mine.lost)
        # Without an account nothing is counted.
        plain = fused.verify(call.step()[0], call.engine_params, constraints)
        assert torch.equal(plain.output_token_ids, output.output_token_ids)


@pytest.mark.parametrize("name", ["theta", "price", "drawn"])
@pytest.mark.parametrize("count", [10, pytest.param(400, marks=pytest.mark.nightly)])
def test_sampled_steps_equal_those_of_a_cpu(monkeypatch, name, count):
    """Whatever is drawn, it is written down as a CPU writes it down."""
    monkeypatch.setattr(clip_kernel, "TOLERANCE", TOLERANCE)
    accepted = 0
    for number in range(count):
        call = Call(number, "theta" if name == "theta" else "price", sampled=True)
        q, step, constraints, sampling_inputs = sampled_step(call, name == "drawn")
        before, found = step.logits.clone(), call.step_counters()
        output = fused.verify(step, call.engine_params, constraints, found, sampling_inputs)
        assert torch.equal(step.logits.nan_to_num(), before.nan_to_num())
        accepted += int(output.num_accepted.sum())
        wanted, lost = recorded(call, q, output.output_token_ids)
        close(found, wanted, 20 * LONGEST, 1e-4)
        assert (step.records.lost - lost).abs().max() <= 3 * LONGEST, number
    assert accepted > 0


@pytest.mark.parametrize("name", ["price", "theta"])
def test_a_strict_request_loses_nothing(name):
    call = Call(5, name, sampled=True)
    strict = Records(call.records.table.clone())
    for column in (strict.value, strict.lost):
        column.zero_()
    strict.rate.fill_(NO_BOUND)
    step = call.step()[0]._replace(records=strict)
    table = torch.empty(len(call.slots), 2, LONGEST + 1)
    step_counters = call.step_counters()._replace(table=table)
    call.temperature.fill_(1.0)
    fused.verify(step, call.engine_params, None, step_counters, sampling_inputs_of(call))
    layout = CounterLayout(LONGEST)
    assert (
        step_counters.counts[layout.verified].any() and not step_counters.counts[layout.relaxable]
    )
    assert not strict.lost.any()
    assert not step_counters.counts[layout.lost] and not step_counters.counts[layout.gained]
    assert not table.nan_to_num().any()


def test_large_vocabulary():
    """Several splits and a last one that is not full; the maximum near the end of each row."""
    vocab = 32_001
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, vocab, generator=generator) + 1
    logits[:, -1], logits[:, vocab // 2] = 12.0, 11.5
    # Greedy, so that none is left out as a bonus row.
    zeros = torch.zeros(4, dtype=torch.int32)
    sampling_inputs = SamplingInputs(
        SamplingTensors(torch.zeros(1), zeros[:1].long()), zeros, zeros, zeros
    )
    records, one = Records.new(1, CPU), zeros[:1]
    records.stop_ids[0, 0], mask = vocab - 1, torch.zeros(vocab, dtype=torch.bool)
    mask[: MAX_STOP_IDS + 1] = True
    ids = torch.tensor([0, 3, vocab - 1, -1], dtype=torch.int32)
    step = VerifyInputs(logits, ids, one + 4, records, one, one, one, 3)
    engine_params = EngineParams(THETA, Protected.of(mask, CPU))
    *_, partials, splits = rows_kernel.reduce_rows(step, engine_params, None, sampling_inputs)
    mask[-1] = True
    assert partials.logit[:4].tolist() == [logits[0, 3], logits[1, -1], -math.inf, -math.inf]
    largest, kept, kept_moments = partials.preserved[:12].view(4, 3).double().T
    torch.testing.assert_close(
        largest + kept.log(), logits[:, mask].double().logsumexp(-1), rtol=1e-6, atol=1e-6
    )
    below = logits[:, mask].double() - largest[:, None]
    torch.testing.assert_close(kept_moments, (below.exp() * below).sum(-1), rtol=1e-5, atol=1e-5)
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
    logits[1, 40] = 9.5
    records = Records.new(1, CPU)
    records.value.fill_(encode_value(THETA, 0.9))
    records.rate.fill_(NO_BOUND)
    records.max_tokens.fill_(99)
    ids, slot = torch.tensor([7, 99], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    step = VerifyInputs(logits, ids, slot + 2, records, slot, slot, slot, 1)
    output = fused.verify(step, EngineParams(THETA))
    assert output.output_token_ids.tolist() == [[99, 40]]
