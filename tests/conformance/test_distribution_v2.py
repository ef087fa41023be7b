"""Enumerates what Model Runner V2 emits and reports for sampled requests.

Triton's interpreter takes 50 ms per request, so cases are small; `test_step_v2.py` compares tokens.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle
from vllm import SamplingParams
from vllm.v1.worker.gpu.structured_outputs import grammar_invalid_drafts

from benchmarks.step_v2 import Request, Step
from enumerated import FEATURES, PARAMETERS, Batch, case_of
from scheduled import CASES, MARS, Engine, logits_of, write_model
from steps_v2 import emitted
from vllm_mars import MarsConfig
from vllm_mars.kernels.accept import fused as accept_kernel
from vllm_mars.kernels.accept import resample as draw_kernel
from vllm_mars.kernels.served_dist import fused as clip_kernel
from vllm_mars.worker.draft_sampling_v2 import DraftSampler

pytestmark = pytest.mark.interpreted

# Draft temperature, as a fraction of the request's.
SHARE = 0.5
DAILY = "cut", "forbidden", "only a bound", "followers", "ends", "later end", "protected", "all"
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in FEATURES if name not in DAILY]
# Daily runs use all parameters together.
PARAMETER_SETS = [
    pytest.param(name, marks=[pytest.mark.nightly] if name != "all parameters" else [])
    for name in PARAMETERS
]


def filled(like, by_request, seed, rest):
    """A request's row as a float32 tensor of the interpreter; the seed is the request's index."""
    like, row = like.to(tl.float32), by_request[int(seed.handle.data.item())]
    data = np.full(like.handle.data.shape, rest, dtype=np.float32)
    data[: len(row)] = row
    return tl.tensor(TensorHandle(data, tl.float32), like.type)


def check(monkeypatch, batch, logits, acceptable=None):
    """Verifies all probes in one step; `acceptable` limits the draft tokens of each request."""
    case = batch.case
    monkeypatch.setattr(clip_kernel, "TOLERANCE", 1e-6)
    uniform, log_noise = batch.uniform, batch.noise.log()

    def uniform_of(seeds_ptr, slot, row, **_):
        return filled(row, uniform, tl.load(seeds_ptr + slot), 1.0)

    def noised_argmax(logits, keys, mask, seed, *_, **__):
        noised = logits - filled(logits, log_noise, seed, np.inf)
        return tl.max(noised, axis=0, return_indices=True)

    monkeypatch.setattr(accept_kernel, "_uniform", uniform_of)
    monkeypatch.setattr(draw_kernel, "gumbel_noised_argmax", noised_argmax)
    tokens = [3, 1, 4, *case.answer]
    requests = [Request(case.params(i), path, tokens, 3, 3) for i, path in enumerate(batch.paths)]
    draft_logits = SHARE * batch.q.log() if case.is_probabilistic else None
    step = Step(requests, logits, draft_logits, case.steps)
    sampler = step.sampler(case.config, protected=case.protected)
    # The warm-up would be counted.
    sampler._is_warm = True
    if case.is_probabilistic:
        sampler.requests.draft_sampling[0].fill_(SHARE)
    lost = sampler.requests.records.lost
    lost[step.slots] = case.lost
    monkeypatch.setattr(sampler.requests, "returns", lambda _: {0: "a request"})
    input_batch, invalid = step.batch(), None
    if acceptable is not None:
        invalid = grammar_invalid_drafts(input_batch, input_batch.req_ids, acceptable)
    output = sampler(step.logits.clone(), input_batch, step.draft_logits, invalid)
    batch.check(sampler.reports, emitted(output), lost[step.slots] - case.lost)


@pytest.mark.parametrize("is_probabilistic", [False, True])
@pytest.mark.parametrize("name", [*DAILY, *NIGHTLY])
def test_v2(monkeypatch, is_probabilistic, name):
    batch = Batch(case_of(2, name, is_probabilistic=is_probabilistic, every=8))
    check(monkeypatch, batch, batch.logits)


@pytest.mark.parametrize("name", PARAMETER_SETS)
def test_v2_with_drafts_under_parameters(monkeypatch, name):
    """MARS' sampler in vLLM's speculator samples the drafts and stores their logits."""
    case = case_of(1, is_probabilistic=True, steps=2, price=1.0, max_loss=None, answer=(1, 2, 0, 2))
    repetition, frequency, presence, top_k, top_p = PARAMETERS[name]
    sampling = SamplingParams(
        temperature=1 / SHARE,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        top_k=top_k,
        top_p=top_p,
    )
    logits = torch.zeros(2, case.vocab)
    step = Step([Request(sampling, [0], [3, 1, 4, *case.answer], 3, 3)], logits, logits[None, :1])
    config = MarsConfig(price=1.0, draft_temperature=SHARE)
    requests = (sampler := step.sampler(config)).requests
    tokens = torch.zeros(1, case.steps, dtype=torch.int64)
    draft_logits = torch.zeros(3, case.steps + 1, case.vocab)
    speculator = SimpleNamespace(
        draft_tokens=tokens, init_cudagraph_manager=None, capture=None, draft_watermarker=None
    )
    runner = SimpleNamespace(speculator=speculator, sampler=sampler.sampler)
    sample = DraftSampler(runner, requests).sample

    def draft_dist(logits, before):
        tokens[0, : len(before)] = torch.tensor(before)
        sample(
            torch.tensor(logits)[None],
            torch.tensor(step.slots),
            *requests.draft_sampling,
            torch.zeros(1, dtype=torch.int64),
            apply_temperature=True,
            is_drafting=True,
            logits_cache=draft_logits,
            logits_cache_col=torch.tensor(len(before)),
        )
        return draft_logits[step.slots[0], len(before)].softmax(-1).numpy()

    case = replace(case, draft_dist=draft_dist)
    batch = Batch(case)
    assert not np.allclose(case.row(()).q, replace(case, draft_dist=None).row(()).q)
    check(monkeypatch, batch, batch.logits)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.regex)
def test_drafts_that_a_grammar_forbids(monkeypatch, tmp_path, is_async, case):
    """vLLM's scheduler cuts the drafts; see `test_grammar.py`."""
    batch = Batch(case)
    engine = Engine(write_model(tmp_path), case.steps, is_async, **MARS)
    step = engine.draft(batch.paths, case.regex, *case.answer)
    # The tokens are on the device.
    assert list(map(len, step.drafts)) == list(map(len, batch.paths))
    logits = step.mask(logits_of(case, batch.paths))
    check(monkeypatch, batch, logits, step.grammar.num_acceptable_drafts)
