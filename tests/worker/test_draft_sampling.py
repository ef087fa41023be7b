"""Sampling of drafts, on real engines of both model runners."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.spec_decode.eagle import EagleProposer

import steps_v1
import workload
from drafted import ASKED, TEMPERATURES, distribution, logits_of
from engines import engine_in_process, greedy_tokens
from vllm_mars import MarsConfig
from vllm_mars.worker.draft_sampling_v1 import wrap_drafter

MARS = {"rejection_sample_method": "mars"}


@pytest.fixture
def drafter():
    """A probabilistic drafter of vLLM."""
    drafter = object.__new__(EagleProposer)
    drafter._enable_probabilistic_draft_probs, drafter.use_fp64_gumbel = True, False
    return drafter


def wrap(drafter, config, share=1.0):
    """Wraps a drafter whose requests all have this share; returns a function that starts a step."""
    runner = SimpleNamespace(drafter=drafter, propose_draft_token_ids=lambda *_: None)
    wrap_drafter(runner, config, lambda batch: torch.full((batch,), share))
    return lambda *tokens: runner.propose_draft_token_ids(None, torch.tensor(tokens))


@pytest.mark.parametrize("share", [None, 1.0, 0.5])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_seed_repeats_its_requests_drafts(drafter, share, rows):
    """Whatever other requests sample."""
    wrap(drafter, MarsConfig(draft_temperature=share), 0.8)
    logits = torch.randn(4 * rows, 500, generator=torch.Generator().manual_seed(1))

    def drafts(*seeds):
        metadata = steps_v1.sampling([0.9, 0.0, 0.7, 1.0], seeds=seeds)
        tokens, probs = drafter._sample_from_logits(logits.clone(), metadata)
        assert torch.equal(tokens.view(4, rows)[1], logits.view(4, rows, -1)[1].argmax(-1))
        assert torch.allclose(probs.sum(-1), torch.ones(4 * rows))
        return tokens.view(4, rows).tolist()

    one, other = drafts(7, 8, 7, None), drafts(7, 9, 6, None)
    assert one[0] == other[0] and one[2] != other[2] and one[3] != other[3]
    assert drafts(None, None, 7, None)[2] == one[2]


def test_seeded_drafts_follow_the_draft_distribution(drafter):
    wrap(drafter, MarsConfig(), 0.5)
    logits = torch.tensor([[1.0, 0.0, -1.0, -2.0]])
    metadata = steps_v1.sampling([1.0], seeds=[3])
    counts = torch.zeros(4)
    for _ in range(4_000):
        tokens, probs = drafter._sample_from_logits(logits.clone(), metadata)
        counts[tokens] += 1
    assert torch.allclose(probs[0], (2 * logits[0]).softmax(-1))
    # Chi-square exceeds 16.3 with a probability of 0.1%.
    assert ((counts - 4_000 * probs[0]) ** 2 / (4_000 * probs[0])).sum() < 16.3


@pytest.mark.engine
@pytest.mark.parametrize("options", [{}, {"mars_draft_temperature": 1}])
def test_a_seed_repeats_an_answer(models, options):
    """Lossy and strict, with and without a batch."""
    lossy = {**MARS, "mars_max_loss": 0.5, "mars_strict_opening": 0, **options}
    prompts = [workload.prompt(seed) for seed in range(4)]
    with engine_in_process(models[0], workload.draft_model(models[1], **lossy)) as llm:

        def ask(prompts, **extra_args):
            sampling = {"temperature": 0.8, "seed": 7, "max_tokens": 40}
            return greedy_tokens(llm, prompts, **sampling, extra_args=extra_args)

        for extra_args in ({}, {"mars_max_loss": 0}):
            assert ask(prompts[:1], **extra_args) == ask(prompts[:1], **extra_args)
            answers = ask(prompts, **extra_args)
            assert ask(prompts, **extra_args) == answers
            assert len({*map(tuple, answers)}) == 4


def test_a_draft_temperature_without_probabilistic_drafts_is_an_error():
    wrap(object(), MarsConfig())
    with pytest.raises(RuntimeError, match="mars_draft_temperature=0.5 .*object samples no drafts"):
        wrap(object(), MarsConfig(draft_temperature=0.5))


def test_a_drafter_without_the_flag_of_probabilistic_drafts_is_an_error():
    drafter = object.__new__(EagleProposer)
    with pytest.raises(RuntimeError, match="EagleProposer has no _enable_probabilistic_draft_prob"):
        wrap(drafter, MarsConfig())


def metadata_of_asked(temperatures):
    prompts, outputs, _, parameters = zip(*ASKED, strict=True)
    repetition, frequency, presence, k, p = zip(*parameters, strict=True)
    return steps_v1.sampling(
        temperatures,
        output=[list(tokens) for tokens in outputs],
        no_penalties=False,
        prompt_token_ids=torch.tensor(prompts),
        repetition_penalties=list(repetition),
        frequency_penalties=list(frequency),
        presence_penalties=list(presence),
        top_k=torch.tensor(k, dtype=torch.int32),
        top_p=torch.tensor(p),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_drafts_are_sampled_with_their_requests_parameters(drafter, rows, share, dtype):
    """Penalties count tokens of the step and of the draft so far."""
    begin = wrap(drafter, MarsConfig(draft_temperature=share), share)
    batch = len(ASKED)
    generator = torch.Generator().manual_seed(3)
    begin(*(tokens for *_, tokens, _ in ASKED))
    so_far = [[] for _ in ASKED]
    for _ in range(1 if rows > 1 else 4):
        logits = logits_of(batch * rows, generator).to(dtype)
        tokens, probs = drafter._sample_from_logits(logits.clone(), metadata_of_asked(TEMPERATURES))
        for row, token in enumerate(tokens.tolist()):
            prompt, output, new, parameters = ASKED[row // rows]
            output = [token for token in (*output, *new, *so_far[row // rows]) if token >= 0]
            temperature = TEMPERATURES[row // rows] * share or 1.0
            q = distribution(logits[row].tolist(), temperature, (prompt, output), parameters)
            np.testing.assert_allclose(probs[row], q, rtol=0, atol=1e-6)
            assert q[token] > 0
            if not TEMPERATURES[row // rows]:
                assert token == q.argmax()
        for drafted, token in zip(so_far, tokens.tolist(), strict=False):
            drafted.append(token)


PARAMETERS = {
    "top-p": {"top_p": 0.7},
    "top-k": {"top_k": 7, "top_p": 0.999},
    "repetition penalty": {"repetition_penalty": 1.4},
    "other penalties": {"frequency_penalty": 0.8, "presence_penalty": 0.8},
    "all": {"top_p": 0.8, "top_k": 20, "repetition_penalty": 1.2, "presence_penalty": 0.5},
}


@pytest.mark.engine
@pytest.mark.parametrize("v2", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_drafts_of_the_target_itself_are_all_accepted(models, v2):
    """Since they are sampled from the served distribution, also under other parameters."""
    speculation = workload.draft_model(models[0], **workload.STRICT_PRICE)
    requests = [
        (workload.prompt(seed), workload.sampled(seed, max_tokens=12, temperature=0.8, **options))
        for seed, options in enumerate(PARAMETERS.values())
    ]
    result = workload.run(speculation, [requests], v2=v2, model=str(models[0]))
    assert workload.accepted_share(result, 0) > 0.99
