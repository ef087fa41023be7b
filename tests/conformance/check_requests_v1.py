"""What V1's requests bring to a step on an accelerator, against what they bring on a CPU.

Run by `test_sampler_v2.py`, in a process whose Triton is the interpreter.
"""

import numpy as np
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from vllm_mars import MarsConfig
from vllm_mars.kernels.terms import Drafts, Verdict
from vllm_mars.runner.requests_v1 import RequestsV1
from vllm_mars.runner.sections import Sections

CPU = torch.device("cpu")
STRUCTURED = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))


def test_strict_positions_are_those_of_a_cpu(monkeypatch):
    """Over steps in which requests grow, swap places, go and come; the markers are copied once."""
    markers, copies = Sections.markers, []
    monkeypatch.setattr(Sections, "markers", lambda *args: copies.append(0) or markers(*args))
    rng = np.random.default_rng(0)
    config = MarsConfig(price=0.5, strict_spans=((3, 4),), repeat_guard=2)
    on_cpu, elsewhere = RequestsV1(config, 4, CPU), RequestsV1(config, 4, CPU)
    elsewhere._on_host = False

    def some(most):
        return rng.integers(0, 5, rng.integers(0, most)).tolist()

    outputs = [some(9) for _ in range(3)]
    params = [SamplingParams(), STRUCTURED, SamplingParams()]
    added = [(place, params[place], some(9), outputs[place]) for place in range(3)]
    swap = (0, 2, MoveDirectionality.SWAP)
    update = BatchUpdate(3, removed=[], added=added, moved=[swap])
    outputs.reverse()
    found = set()
    for _ in range(8):
        drafts = [some(6) for _ in outputs]
        ids = torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32)
        ends = torch.tensor([len(draft) for draft in drafts]).cumsum(0).int()
        step = Drafts(torch.empty(0, 0), ids, ends)
        for requests in (on_cpu, elsewhere):
            requests.update_state(update)
        expected = on_cpu.margin(step).blocked.tolist()
        assert elsewhere.margin(step).blocked.tolist() == expected
        found.update(expected)
        for output, draft in zip(outputs, drafts, strict=True):
            output += draft
        place = int(rng.integers(3))
        outputs[place] = some(9)
        added = [(place, SamplingParams(), some(9), outputs[place])]
        update = BatchUpdate(3, removed=[], added=added, moved=[])
    assert found == {0, Verdict.SPAN, Verdict.STRUCTURED, Verdict.REPEAT}
    assert len(copies) == 1
