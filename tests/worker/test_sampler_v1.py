"""The V1 sampler against vLLM's: the same tokens at theta 1 and price 0, the rule otherwise."""

import itertools

import pytest
import torch
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from steps_v1 import (
    CPU,
    LENGTHS,
    VOCAB,
    drafts_of,
    emitted,
    mars_sampler,
    metadata_of,
    sampling,
    step,
)
from vllm_mars import MarsConfig
from vllm_mars.kernels.accept import naive as accept

pytestmark = pytest.mark.usefixtures("mended_kernels")

GREEDY = [0.0] * 4
SAMPLED = [0.7, 1.0, 1.3, 0.2]
MIXED = [0.0, 1.0, 0.8, 0.0]
SEEDS = [1, 2, None, 4]

SETTINGS = {
    "greedy": (GREEDY, {}),
    "sampled": (SAMPLED, {}),
    "mixed": (MIXED, {}),
    "top-k and top-p": (
        SAMPLED,
        {"top_k": torch.tensor([2, 5, 97, 1]), "top_p": torch.tensor([0.9, 0.5, 1.0, 0.7])},
    ),
    "mixed with top-p": (MIXED, {"top_p": torch.tensor([1.0, 0.5, 0.9, 1.0])}),
    "logprobs": (GREEDY, {"max_num_logprobs": 3}),
    "sampled logprobs": (MIXED, {"max_num_logprobs": 2}),
    "bad words": (GREEDY, {"bad_words_token_ids": {0: [[5], [7, 8]], 2: [[11]]}}),
    "allowed tokens": (
        MIXED,
        {"allowed_token_ids_mask": (torch.arange(4 * VOCAB) % 3 == 0).reshape(4, VOCAB)},
    ),
    "penalties": (
        MIXED,
        {
            "no_penalties": False,
            "prompt_token_ids": torch.arange(8).reshape(4, 2),
            "output": [[1, 2], [3], [4, 4, 4], [9]],
            "frequency_penalties": [0.5, 0.0, 1.0, 0.2],
            "presence_penalties": [0.1, 0.3, 0.0, 0.0],
            "repetition_penalties": [1.2, 1.0, 1.5, 1.1],
        },
    ),
}


@pytest.mark.parametrize("logprobs_mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("config", [MarsConfig(theta=1.0), MarsConfig(price=0)])
def test_theta_1_is_vllm(config, setting, logprobs_mode):
    """Fixed drafts only: vLLM's V1 cannot verify probabilistic drafts by blocks."""
    temperatures, changes = SETTINGS[setting]
    samplers = (
        RejectionSampler(Sampler(logprobs_mode), None, CPU),
        mars_sampler(config, logprobs_mode=logprobs_mode),
    )
    for seed in range(8):
        outputs, states = [], []
        for sampler in samplers:
            metadata, logits = step(seed)
            meta = sampling(temperatures, seeds=SEEDS, drafts=drafts_of(metadata), **changes)
            torch.manual_seed(seed)
            outputs.append(sampler(metadata, None, logits, meta))
            # The samplers consume the same random numbers, shared and per request.
            seeded = (generator.get_state() for generator in meta.generators.values())
            states.append(torch.stack([torch.get_rng_state(), *seeded]))
        assert torch.equal(*states)
        vllm, mars = outputs
        assert torch.equal(vllm.sampled_token_ids, mars.sampled_token_ids)
        assert vllm.sampled_token_ids.dtype == mars.sampled_token_ids.dtype
        if vllm.logprobs_tensors is None:
            assert mars.logprobs_tensors is None
            continue
        for field in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
            assert torch.equal(
                getattr(vllm.logprobs_tensors, field), getattr(mars.logprobs_tensors, field)
            ), field


def test_a_seeded_request_is_independent_of_its_batch():
    """A strict request in the batch consumes random numbers for the whole vocabulary."""
    metadata, logits = step(1, [3, 3])
    tokens = []
    for price in (0.0, 1.0):
        sampler = mars_sampler(MarsConfig(price=1.0, strict_opening=0))
        sampler.requests._records.value[:] = torch.tensor([1 << 16])
        slots = torch.tensor([0, 1])
        sampler.requests._slots[:2] = slots
        sampler.requests._records.value[1] = int(price * 2**16)
        meta = sampling([1.0, 1.0], seeds=[1, 2], drafts=drafts_of(metadata))
        tokens.append(emitted(sampler(metadata, None, logits.clone(), meta))[0])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("logprobs_mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("temperatures", [GREEDY, SAMPLED, MIXED])
@pytest.mark.parametrize("lengths", [LENGTHS, [0] * 4])
def test_each_request_gets_its_logprobs(lengths, temperatures, logprobs_mode):
    """The top logprobs, or those of named tokens, for which vLLM fails; the token's is log m."""
    named = {0: [5, 7], 2: [1, 2, 3, 4]}
    is_served = logprobs_mode == "processed_logprobs"
    config = MarsConfig(price=2.0, strict_opening=0, logprobs="sampled" if is_served else "target")
    for most, names in itertools.product((None, 0, 3), (None, named)):
        metadata, logits = step(1, lengths)
        meta = sampling(temperatures, seeds=SEEDS, drafts=drafts_of(metadata))
        meta.max_num_logprobs, meta.logprob_token_ids = most, names
        sampler = mars_sampler(config, logprobs_mode=logprobs_mode)
        output = sampler(metadata, None, logits.clone(), meta)
        if most is names is None:
            assert output.logprobs_tensors is None
            continue
        if is_served:
            logits /= torch.tensor([t or 1.0 for t in temperatures]).repeat_interleave(
                torch.tensor(lengths) + 1
            )[:, None]
        tensors, ratios = output.logprobs_tensors, []
        for index, tokens in enumerate(emitted(output)):
            begin, width = sum(lengths[:index]) + index, output.sampled_token_ids.shape[1]
            for offset, token in enumerate(tokens):
                row, expected = index * width + offset, logits[begin + offset].log_softmax(-1)
                listed = (names or {}).get(index, expected.topk(most or 0).indices.tolist())
                ids = tensors.logprob_token_ids[row, : 1 + len(listed)]
                assert ids.tolist() == [token, *listed]
                rank = (expected > expected[token]).sum() + 1
                assert tensors.selected_token_ranks[row] == rank
                excess = tensors.logprobs[row, : 1 + len(listed)] - expected[ids]
                ratios.append(excess[0])
                torch.testing.assert_close(excess, (ids == token) * excess[0], atol=1e-5, rtol=0)
        if is_served and any(temperatures) and any(lengths):
            assert max(map(abs, ratios)) > 0.1
        else:
            assert max(map(abs, ratios)) < 1e-5


MASKS = (
    {"bad_words_token_ids": {0: [[0]]}},
    {"allowed_token_ids_mask": torch.tensor([[True, False, False, False]])},
)
# vLLM drops both for greedy requests.
CUTS = ({"top_k": torch.tensor([1])}, {"top_p": torch.tensor([0.3])})


@pytest.mark.parametrize(
    ("temperature", "changes"),
    [*((0.0, mask) for mask in MASKS), *((1.0, change) for change in MASKS + CUTS)],
)
def test_a_forbidden_draft_is_never_accepted(temperature, changes):
    logits = torch.tensor([[1.99, 2.0, 1.0, 0.9], [0.0, 3.0, 0.0, 0.0]])
    metadata = metadata_of([[0]])
    sampler = mars_sampler(MarsConfig(theta=0.01))
    for seed in range(50):
        torch.manual_seed(seed)
        meta = sampling([temperature], drafts=[[0]], **changes)
        output = sampler(metadata, None, logits.clone(), meta)
        assert output.sampled_token_ids[0, 0] != 0


@pytest.mark.parametrize("draft_probs", [None, torch.tensor([[0.0, 1.0, 0.0]])])
def test_a_rejected_draft_is_emitted_if_no_other_token_has_mass(monkeypatch, draft_probs):
    """Rounding can reject a draft token with the only finite logit."""
    logits = torch.tensor([[-torch.inf, 9.0, -torch.inf], [0.0, 9.0, 0.0]])
    metadata = metadata_of([[1]])
    monkeypatch.setattr(accept.CpuSamplingInputs, "accepts", lambda *_: False)
    for price in (0.0, 1.0):
        sampler = mars_sampler(MarsConfig(price=price, strict_opening=0))
        output = sampler(metadata, draft_probs, logits.clone(), sampling([1.0], drafts=[[1]]))
        assert output.sampled_token_ids.tolist() == [[1, -1]]


def test_a_token_is_sampled_by_its_weight():
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0])
    sampling_inputs = accept.CpuSamplingInputs(
        torch.ones(1), None, None, {0: torch.Generator().manual_seed(0)}
    )
    tokens = torch.tensor([sampling_inputs.sample_token(0, weights) for _ in range(4_000)])
    assert set(tokens.tolist()) == {1, 3}
    # The standard deviation is 0.007.
    assert abs((tokens == 3).float().mean() - 0.75) < 0.03


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("max_num_logprobs", [None, 2])
def test_a_step_without_any_draft(temperature, max_num_logprobs):
    logits = torch.tensor([[0.0, 9.0, 0.0], [20.0, 9.0, 0.0]])
    metadata = metadata_of([[], []])
    top_k = torch.tensor([1, 2]) if temperature else None
    meta = sampling([temperature] * 2, top_k=top_k, max_num_logprobs=max_num_logprobs)
    sampler = mars_sampler(MarsConfig())
    output = sampler(metadata, None, logits, meta)
    assert sampler.reports.counters.take_delta() is None
    assert output.sampled_token_ids.tolist() == [[1], [0]]
    assert (output.logprobs_tensors is None) == (max_num_logprobs is None)
