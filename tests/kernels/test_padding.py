"""A batch of a fixed size, filled up by slots of -1, is verified as its requests alone are."""

import pytest
import torch

# vLLM's CPU worker puts its stand-ins for pinned memory and streams in place, before the V2 modules
# take them.
import vllm.v1.worker.cpu.shm  # noqa: F401  # isort: skip

from benchmarks.kernel_step import Shape, step_of
from benchmarks.step_v2 import Step
from vllm_mars import MarsConfig
from vllm_mars.kernels.account.naive import Account
from vllm_mars.worker.requests_v2 import BatchRows

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow)"),
]

REQUESTS, SIZE, K, VOCAB = 3, 5, 3, 1_000
CONFIG = MarsConfig(max_loss=0.5, strict_opening=0, strict_spans=((5, 6),))


def verify(step: Step, size: int):
    """Tokens of the step, and all that is kept of its requests and counted.

    Args:
        step: of REQUESTS.
        size: requests of the batch; what stands behind the step's is of an earlier one.
    """
    verifier = step.verification(CONFIG).func.__self__
    batch, more = step.batch(), (size - REQUESTS) * (K + 1)
    rubbish = torch.randn(more, VOCAB).to(step.logits.dtype)
    logits = torch.cat([step.logits, rubbish])
    inputs = torch.cat([batch.input_ids, torch.full((more,), 17, dtype=torch.int32)])
    pos = torch.cat([batch.positions, torch.full((more,), 9)])
    slots = torch.full((size,), -1)
    slots[:REQUESTS] = batch.idx_mapping
    ends = torch.arange(1, size + 1, dtype=torch.int32) * (K + 1)
    row_slots = slots.repeat_interleave(K + 1)
    places = torch.arange(K + 1, dtype=torch.int32).repeat(size)
    rows = BatchRows(inputs, ends, slots, pos, row_slots, places)
    by_slot = verifier.requests.by_slot(verifier.sampler.sampling_states)
    counts = verifier.reports.counters.device_counts
    account = Account(counts, torch.full((size, 2, K + 1), 0.25))
    samples = step.requests[0].sampling.temperature > 0
    output = verifier.verify(logits, step.draft_logits, rows, by_slot, samples, account)
    table = account.table.nan_to_num(7.0)
    assert (table[REQUESTS:] == 0.25).all()
    kept = [verifier.requests.records.table, counts]
    kept += [] if step.draft_logits is None else verifier.requests.drawn_with
    tokens = [output.output_token_ids[:REQUESTS], output.num_emitted[:REQUESTS]]
    return [*tokens, output.lost[:REQUESTS], table[:REQUESTS], *kept]


@pytest.mark.parametrize(("temperature", "is_drawn"), [(0.0, False), (1.0, False), (1.0, True)])
def test_slots_of_minus_one_are_not_there(temperature, is_drawn):
    step = step_of(Shape(temperature, is_drawn, REQUESTS, K, VOCAB), torch.device("cpu"))
    alone, filled = verify(step, REQUESTS), verify(step, SIZE)
    for one, other in zip(alone, filled, strict=True):
        assert torch.equal(one, other)
    # Something has been lost, so that it is seen.
    assert alone[2].any()
