"""Sampling of drafts on Model Runner V2, on vLLM's state and kernels."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from benchmarks.step_v2 import Request, Step
from drafted import ASKED, TEMPERATURES, VOCAB, distribution, logits_of
from steps_v2 import params
from vllm_mars import MarsConfig
from vllm_mars.worker.draft_sampling_v2 import wrap_speculator

pytestmark = pytest.mark.interpreted

K, SHARE = 4, 0.5
NAMES = "repetition_penalty", "frequency_penalty", "presence_penalty", "top_k", "top_p"


class Speculator:
    """The sampling part of vLLM's speculator, with stand-ins for its CUDA graphs.

    Attributes:
        called: calls, whether they sampled under parameters, and the number of their graphs.
    """

    draft_watermarker = None

    def __init__(self, batch, vocab, dtype):
        self.draft_tokens = torch.full((batch + 1, K), 7)
        self.draft_logits = torch.zeros(batch + 2, K, vocab, dtype=dtype)
        self.made, self.called = 0, []

    def init_cudagraph_manager(self, mode):
        self.graphs = object.__new__(CudaGraphManager)
        self.graphs.number = self.made = self.made + 1

    def capture(self):
        self.called.append(("capture", self.draft_watermarker is not None, self.graphs.number))

    def propose(self, input_batch, temperature, seeds, is_profile=False):
        number = self.graphs.number if hasattr(self, "graphs") else None
        self.called.append(("propose", self.draft_watermarker is not None, number))
        self.draw = getattr(self.draft_watermarker, "sample", None)


def runner_of(requests, dtype=torch.float32, vocab=VOCAB):
    step = Step(requests, torch.zeros(2 * len(requests), VOCAB), torch.zeros(len(requests), 1, 9))
    config = MarsConfig(price=0.1, draft_temperature=SHARE)
    sampler = step.sampler(config)
    speculator = Speculator(len(requests), vocab, dtype)
    runner = SimpleNamespace(speculator=speculator, sampler=sampler.sampler)
    wrap_speculator(runner, config, sampler.requests)
    temperatures = [request.sampling.temperature * SHARE for request in requests]
    sampler.requests.draft_sampling[0][step.slots] = torch.tensor(temperatures)
    return runner, step, sampler


def requests_under_parameters():
    for temperature, (prompt, output, new, parameters) in zip(TEMPERATURES, ASKED, strict=True):
        options = dict(zip(NAMES, parameters, strict=True))
        options["top_k"] = 0 if options["top_k"] == VOCAB else options["top_k"]
        tokens = [*prompt, *output, *(token for token in new if token >= 0)]
        yield Request(params(temperature, 1, **options), [0], tokens, len(prompt), len(prompt))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [0, 3])
def test_drafts_are_sampled_under_their_requests_parameters(dtype, more):
    """Penalties count earlier draft tokens, and a draft's vocabulary may be larger."""
    runner, step, sampler = runner_of([*requests_under_parameters()], dtype, VOCAB + more)
    speculator, requests = runner.speculator, sampler.requests
    counts = runner.sampler.penalties_state.output_bin_counts
    before, generator = counts.clone(), torch.Generator().manual_seed(3)
    # The last row is padding.
    slots = torch.tensor([*step.slots, -1])
    temperature, batch, drafted = requests.draft_sampling[0], len(ASKED), [[] for _ in ASKED]
    speculator.propose(None, temperature, None, is_profile=True)
    sample = speculator.draw
    for position in range(K):
        logits = torch.full((batch + 1, VOCAB + more), -9.0)
        logits[:, :VOCAB] = logits_of(batch + 1, generator)
        expected_logits = logits.double().numpy()
        sampled = sample(
            logits.to(dtype),
            slots,
            temperature,
            requests.draft_sampling[1],
            torch.full((batch + 1,), 9),
            apply_temperature=True,
            is_drafting=True,
            logits_cache=speculator.draft_logits,
            logits_cache_col=torch.tensor(position),
            use_fp64=False,
        )
        speculator.draft_tokens[:, position] = sampled
        assert torch.equal(counts, before)
        for row, (slot, token) in enumerate(zip(step.slots, sampled.tolist(), strict=False)):
            prompt, output, new, parameters = ASKED[row]
            output = [token for token in (*output, *new, *drafted[row]) if token >= 0]
            draft_temperature = TEMPERATURES[row] * SHARE or 1.0
            q = distribution(
                expected_logits[row], draft_temperature, (prompt, output), parameters, dtype
            )
            cached = speculator.draft_logits[slot, position].float() / draft_temperature
            # A penalized logit in bfloat16 can be rounded the other way.
            rtol = 0 if dtype == torch.float32 else 0.05
            np.testing.assert_allclose(cached.softmax(-1), q, rtol=rtol, atol=1e-6)
            assert q[token] > 0
            if not TEMPERATURES[row]:
                assert token == q.argmax()
            drafted[row].append(token)
    # Other slots are not written.
    others = [slot for slot in range(batch + 2) if slot not in step.slots]
    assert not speculator.draft_logits[others].any()


def test_a_batch_without_parameters_is_drafted_by_vllms_graphs():
    sampling = [params(1.0), params(1.0, top_p=0.8), params(0.0)]
    runner, step, _ = runner_of([Request(params_of_request, [0]) for params_of_request in sampling])
    speculator, states = runner.speculator, runner.sampler.sampling_states

    def propose(*rows, **options):
        batch = SimpleNamespace(idx_mapping_np=step.slots[[*rows]])
        speculator.propose(batch, states.temperature.gpu, states.seeds.gpu, **options)
        return speculator.called.pop()[1:]

    # During memory profiling vLLM has no graphs.
    assert propose(0, is_profile=True) == (True, None)
    for made in (2, 4):
        speculator.init_cudagraph_manager(None)
        speculator.capture()
        assert speculator.called == [("capture", False, made - 1), ("capture", True, made)]
        speculator.called.clear()
        assert propose(0, 2) == (False, made - 1)
        assert propose(0, 1, 2) == (True, made)
        assert propose(2) == (False, made - 1)
        # As vLLM does after profiling.
        graphs = [
            name for name, value in vars(speculator).items() if isinstance(value, CudaGraphManager)
        ]
        assert len(graphs) == 2
        for name in graphs:
            setattr(speculator, name, None)


def test_a_slot_forgets_the_parameters_of_its_last_request():
    runner, step, sampler = runner_of([*requests_under_parameters()])
    table, slot = sampler.requests.draft_parameters, int(step.slots[3])
    others = [other for other in range(table.shape[1]) if other not in step.slots]
    none = table[:, others[0]].tolist()
    assert none[2:] == [1, 1, 0, 0] and none[1] > VOCAB
    assert table[:, slot].tolist() == pytest.approx([0.9 * SHARE, 6, 0.8, 1.2, -0.4, 0.3])
    sampler.requests._req_states.remove_request("3")
    step.requests[3].sampling = params(0.5)
    step.enter(sampler.sampler, ["3"])
    assert table[1:, slot].tolist() == none[1:]
