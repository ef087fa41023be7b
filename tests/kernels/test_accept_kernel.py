"""The verification kernels in Triton's interpreter, against the CPU reference."""

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
)
from vllm_mars.kernels import fused
from vllm_mars.kernels.accept import fused as accept_kernel
from vllm_mars.kernels.budget import NO_BOUND
from vllm_mars.kernels.constraints import fused as constraints_kernel
from vllm_mars.kernels.interface import (
    EngineParams,
    Records,
    VerifyInputs,
    encode_value,
)
from vllm_mars.kernels.row_stats import fused as rows_kernel
from vllm_mars.kernels.rules import THETA
from vllm_mars.kernels.served_dist import fused as clip_kernel
from vllm_mars.kernels.served_dist.naive import TOLERANCE

pytestmark = pytest.mark.interpreted
# A vocabulary of three splits of a row, the last one partial.
SEVERAL_SPLITS = 9_001


def test_the_kernels_are_interpreted():
    """Holds for every file whose tests have the `interpreted` mark."""
    for module in (accept_kernel, clip_kernel, constraints_kernel, rows_kernel):
        kernels = [value for name, value in vars(module).items() if name.endswith("_kernel")]
        assert kernels and all(isinstance(kernel, InterpretedFunction) for kernel in kernels)


@pytest.mark.parametrize("name", ["theta", "price"])
@pytest.mark.parametrize("count", [10, pytest.param(400, marks=pytest.mark.nightly)])
def test_greedy_steps_equal_those_of_a_cpu(name, count):
    for number in range(count):
        call = Call(number, name, vocab=0 if number else SEVERAL_SPLITS)
        expected, expected_records = on_cpu(call, expected_counters := call.step_counters())
        step_counters, (step, constraints) = call.step_counters(), call.step()
        output = fused.verify(step, call.engine_params, constraints, step_counters)
        assert torch.equal(output.output_token_ids, expected.output_token_ids.long()), number
        assert torch.equal(output.num_emitted, expected.num_emitted)
        assert torch.equal(output.num_relaxed, expected.num_relaxed)
        assert torch.equal(output.lost, expected.lost)
        same(step_counters, expected_counters)
        assert torch.equal(step.records.lost, expected_records.lost)
        uncounted = fused.verify(call.step()[0], call.engine_params, constraints)
        assert torch.equal(uncounted.output_token_ids, output.output_token_ids)


@pytest.mark.parametrize("name", ["theta", "price", "probabilistic"])
@pytest.mark.parametrize("count", [10, pytest.param(400, marks=pytest.mark.nightly)])
def test_sampled_steps_equal_those_of_a_cpu(monkeypatch, name, count):
    """The CPU counts the same for the sampled tokens."""
    monkeypatch.setattr(clip_kernel, "TOLERANCE", TOLERANCE)
    accepted = 0
    for number in range(count):
        rule = "theta" if name == "theta" else "price"
        call = Call(number, rule, sampled=True, vocab=0 if number else SEVERAL_SPLITS)
        q, step, constraints, sampling_inputs = sampled_step(call, name == "probabilistic")
        logits, step_counters = step.logits.clone(), call.step_counters()
        before = step.records.lost.clone()
        output = fused.verify(step, call.engine_params, constraints, step_counters, sampling_inputs)
        assert torch.equal(step.logits.nan_to_num(), logits.nan_to_num())
        accepted += int(output.num_accepted.sum())
        expected_counters, lost = recorded(call, q, output.output_token_ids)
        close(step_counters, expected_counters, 20 * LONGEST, 1e-4)
        assert (step.records.lost - lost).abs().max() <= 3 * LONGEST, number
        strict = step.records.value == 0
        assert torch.equal(step.records.lost[strict], before[strict])
        if step_counters.table is not None:
            assert not step_counters.table[strict[step.slots.long()], 0].nan_to_num().any()
    assert accepted > 0


def test_rows_past_2_to_the_31_elements():
    """The second row starts past 2**31 elements; untouched pages take no memory."""
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
