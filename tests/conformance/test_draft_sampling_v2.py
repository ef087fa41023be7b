"""What Model Runner V2 draws drafts from, on vLLM's real state and kernels."""

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
    """As much of vLLM's as draws; with stand-ins for its graphs.

    Attributes:
        called: whether what was called drew under parameters, and by which graphs.
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
    # At the share of the temperature.
    own = [request.sampling.temperature * SHARE for request in requests]
    sampler.requests.drawn_with[0][step.slots] = torch.tensor(own)
    return runner, step, sampler


def asked():
    """The requests of `ASKED`."""
    for temperature, (prompt, output, new, own) in zip(TEMPERATURES, ASKED, strict=True):
        given = dict(zip(NAMES, own, strict=True))
        given["top_k"] = 0 if given["top_k"] == VOCAB else given["top_k"]
        tokens = [*prompt, *output, *(token for token in new if token >= 0)]
        yield Request(params(temperature, 1, **given), [0], tokens, len(prompt), len(prompt))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [0, 3])
def test_drafts_are_drawn_under_the_parameters_of_their_requests(dtype, more):
    """Which the tokens of the draft so far count for; a draft's vocabulary may be larger.

    The last row fills the batch up.
    """
    runner, step, sampler = runner_of([*asked()], dtype, VOCAB + more)
    speculator, requests = runner.speculator, sampler.requests
    counts = runner.sampler.penalties_state.output_bin_counts
    before, generator = counts.clone(), torch.Generator().manual_seed(3)
    slots = torch.tensor([*step.slots, -1])
    temperature, batch, so_far = requests.drawn_with[0], len(ASKED), [[] for _ in ASKED]
    speculator.propose(None, temperature, None, is_profile=True)
    draw = speculator.draw
    for place in range(K):
        logits = torch.full((batch + 1, VOCAB + more), -9.0)
        logits[:, :VOCAB] = logits_of(batch + 1, generator)
        given = logits.double().numpy()
        drawn = draw(
            logits.to(dtype),
            slots,
            temperature,
            requests.drawn_with[1],
            torch.full((batch + 1,), 9),
            apply_temperature=True,
            is_drafting=True,
            logits_cache=speculator.draft_logits,
            logits_cache_col=torch.tensor(place),
            use_fp64=False,
        )
        speculator.draft_tokens[:, place] = drawn
        assert torch.equal(counts, before)
        for row, (slot, token) in enumerate(zip(step.slots, drawn.tolist(), strict=False)):
            prompt, output, new, own = ASKED[row]
            output = [token for token in (*output, *new, *so_far[row]) if token >= 0]
            drawn_at = TEMPERATURES[row] * SHARE or 1.0
            q = distribution(given[row], drawn_at, (prompt, output), own, dtype)
            kept = (speculator.draft_logits[slot, place].float() / drawn_at).softmax(-1)
            # A penalized logit in bfloat16 can be rounded the other way.
            rtol = 0 if dtype == torch.float32 else 0.05
            np.testing.assert_allclose(kept, q, rtol=rtol, atol=1e-6)
            assert q[token] > 0
            if not TEMPERATURES[row]:
                assert token == q.argmax()
            so_far[row].append(token)
    # Nobody's, and of no request of this batch.
    others = [slot for slot in range(batch + 2) if slot not in step.slots]
    assert not speculator.draft_logits[others].any()


def test_a_batch_without_parameters_is_drafted_by_vllms_own_graphs():
    sampling = [params(1.0), params(1.0, top_p=0.8), params(0.0)]
    runner, step, _ = runner_of([Request(own, [0]) for own in sampling])
    speculator, states = runner.speculator, runner.sampler.sampling_states

    def propose(*places, **options):
        batch = SimpleNamespace(idx_mapping_np=step.slots[[*places]])
        speculator.propose(batch, states.temperature.gpu, states.seeds.gpu, **options)
        return speculator.called.pop()[1:]

    # Where vLLM measures its memory, before it has any graph.
    assert propose(0, is_profile=True) == (True, None)
    for made in (2, 4):
        speculator.init_cudagraph_manager(None)
        speculator.capture()
        assert speculator.called == [("capture", False, made - 1), ("capture", True, made)]
        speculator.called.clear()
        assert propose(0, 2) == (False, made - 1)
        assert propose(0, 1, 2) == (True, made)
        assert propose(2) == (False, made - 1)
        # As after that measurement.
        graphs = [name for name, it in vars(speculator).items() if isinstance(it, CudaGraphManager)]
        assert len(graphs) == 2
        for name in graphs:
            setattr(speculator, name, None)


def test_a_slot_forgets_the_parameters_of_its_last_request():
    runner, step, sampler = runner_of([*asked()])
    table, slot = sampler.requests.draft_parameters.table, int(step.slots[3])
    others = [other for other in range(table.shape[1]) if other not in step.slots]
    none = table[:, others[0]].tolist()
    assert none[2:] == [1, 1, 0, 0] and none[1] > VOCAB
    assert table[:, slot].tolist() == pytest.approx([0.9 * SHARE, 6, 0.8, 1.2, -0.4, 0.3])
    sampler.requests._req_states.remove_request("3")
    step.requests[3].sampling = params(0.5)
    step.enter(sampler.sampler, ["3"])
    assert table[1:, slot].tolist() == none[1:]
