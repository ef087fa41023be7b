"""What drafts are drawn from, on real engines of both model runners."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.spec_decode.eagle import EagleProposer

import steps_v1
import workload
from drafted import ASKED, TEMPERATURES, distribution, logits_of
from engines import engine_in_process
from vllm_mars import MarsConfig
from vllm_mars.worker.draft_sampling_v1 import wrap_drafter


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.parametrize("v2", [False, True])
def test_cold_drafts_are_verified_as_first_choices(models, v2):
    """Token for token as drafts that are not drawn: in drawing and verification alike.

    Seeds leave the draws that verification makes the same. So small a price adds nothing, but does
    not make a request strict, whose drafts would be drawn at its own temperature.
    """
    directory, draft, _ = models
    every = workload.every_kind(12)
    requests = [every[name] for name in ("greedy", "sampled", "sampled, cool", "sampled, hot")]
    given = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    cold = {"draft_sample_method": "probabilistic", "mars_draft_temperature": 0.01}
    own, mars = (
        workload.run({**given, **options}, [requests], v2=v2, model=str(directory))
        for options in ({}, {**cold, "rejection_sample_method": "mars", "mars_price": 1e-9})
    )
    names = list(map(str, range(len(requests))))
    workload.assert_same_batches([dict(zip(names, requests, strict=True))], own, mars)
    assert "Drafts are drawn at 0.01 of each request's temperature" in mars["log"]
    assert 0 < workload.accepted_share(own, 0) < 1


@pytest.fixture
def drafter():
    """One of vLLM's that draws."""
    found = object.__new__(EagleProposer)
    found._enable_probabilistic_draft_probs, found.use_fp64_gumbel = True, False
    return found


def wrap(drafter, config, share=1.0):
    """Wraps a drafter, whose requests all have this share; returns what tells a step's tokens."""
    runner = SimpleNamespace(drafter=drafter, propose_draft_token_ids=lambda *_: None)
    wrap_drafter(runner, config, lambda batch: torch.full((batch,), share))
    return lambda *tokens: runner.propose_draft_token_ids(None, torch.tensor(tokens))


@pytest.mark.parametrize("share", [None, 1.0, 0.5])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_seed_draws_the_same_drafts(drafter, share, rows):
    """Those of its own request, whatever was drawn before; of all rows that it has."""
    wrap(drafter, MarsConfig(draft_temperature=share), 0.8)
    logits = torch.randn(4 * rows, 500, generator=torch.Generator().manual_seed(1))

    def drawn(*seeds):
        metadata = steps_v1.sampling([0.9, 0.0, 0.7, 1.0], seeds=seeds)
        drawn, probs = drafter._sample_from_logits(logits.clone(), metadata)
        assert torch.equal(drawn.view(4, rows)[1], logits.view(4, rows, -1)[1].argmax(-1))
        assert torch.allclose(probs.sum(-1), torch.ones(4 * rows))
        return drawn.view(4, rows).tolist()

    one, other = drawn(7, 8, 7, None), drawn(7, 9, 6, None)
    assert one[0] == other[0] and one[2] != other[2] and one[3] != other[3]
    assert drawn(None, None, 7, None)[2] == one[2]


def test_a_seed_draws_from_what_the_draft_says(drafter):
    wrap(drafter, MarsConfig(), 0.5)
    logits = torch.tensor([[1.0, 0.0, -1.0, -2.0]])
    metadata = steps_v1.sampling([1.0], seeds=[3])
    counts = torch.zeros(4)
    for _ in range(4_000):
        drawn, probs = drafter._sample_from_logits(logits.clone(), metadata)
        counts[drawn] += 1
    assert torch.allclose(probs[0], (2 * logits[0]).softmax(-1))
    # 0.1 % of all seeds come so far.
    assert ((counts - 4_000 * probs[0]) ** 2 / (4_000 * probs[0])).sum() < 16.3


@pytest.mark.engine
@pytest.mark.parametrize("own", [{}, {"mars_draft_temperature": 1}])
def test_a_seed_repeats_an_answer(models, own):
    """Lossy and strict, alone and in a batch."""
    from vllm import SamplingParams

    given = {"method": "draft_model", "model": str(models[1]), "num_speculative_tokens": 3}
    given |= {"rejection_sample_method": "mars", "mars_max_loss": 0.5, "mars_strict_opening": 0}
    prompts = [{"prompt_token_ids": workload.prompt(seed, 6)} for seed in range(4)]
    with engine_in_process(models[0], {**given, **own}) as llm:

        def ask(prompts, **extra_args):
            params = [
                SamplingParams(
                    temperature=0.8,
                    seed=7 + number,
                    max_tokens=40,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args=extra_args,
                )
                for number in range(len(prompts))
            ]
            answers = llm.generate(prompts, params, use_tqdm=False)
            return [tuple(it.outputs[0].token_ids) for it in answers]

        for extra_args in ({}, {"mars_max_loss": 0}):
            assert len({ask(prompts[:1], **extra_args)[0] for _ in range(3)}) == 1
            assert ask(prompts, **extra_args) == ask(prompts, **extra_args)
            # Beside requests that have none.
            assert len({*ask(prompts, **extra_args)}) == 4


def test_a_drafter_that_draws_nothing():
    wrap(object(), MarsConfig())
    with pytest.raises(RuntimeError, match="mars_draft_temperature=0.5 .* object draws no drafts"):
        wrap(object(), MarsConfig(draft_temperature=0.5))


def test_a_drafter_that_no_longer_says_whether_it_draws():
    drafter = object.__new__(EagleProposer)
    with pytest.raises(RuntimeError, match="EagleProposer has no _enable_probabilistic_draft_prob"):
        wrap(drafter, MarsConfig())


def parameters(temperatures, **changes):
    """The metadata of `ASKED`."""
    prompts, outputs, _, own = zip(*ASKED, strict=True)
    repetition, frequency, presence, k, p = zip(*own, strict=True)
    given = {
        "no_penalties": False,
        "prompt_token_ids": torch.tensor(prompts),
        "repetition_penalties": list(repetition),
        "frequency_penalties": list(frequency),
        "presence_penalties": list(presence),
        "top_k": torch.tensor(k, dtype=torch.int32),
        "top_p": torch.tensor(p),
    }
    output = [list(tokens) for tokens in outputs]
    return steps_v1.sampling(temperatures, output=output, **{**given, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_drafts_are_drawn_under_the_parameters_of_their_requests(drafter, rows, share, dtype):
    """Which the tokens of the step and of the draft count for, where they are drawn in turn."""
    begin = wrap(drafter, MarsConfig(draft_temperature=share), share)
    batch = len(ASKED)
    generator = torch.Generator().manual_seed(3)
    begin(*(tokens for *_, tokens, _ in ASKED))
    so_far = [[] for _ in ASKED]
    for _ in range(1 if rows > 1 else 4):
        logits = logits_of(batch * rows, generator).to(dtype)
        drawn, probs = drafter._sample_from_logits(logits.clone(), parameters(TEMPERATURES))
        for row, token in enumerate(drawn.tolist()):
            prompt, output, new, own = ASKED[row // rows]
            output = [token for token in (*output, *new, *so_far[row // rows]) if token >= 0]
            temperature = TEMPERATURES[row // rows] * share or 1.0
            q = distribution(logits[row].tolist(), temperature, (prompt, output), own)
            np.testing.assert_allclose(probs[row], q, rtol=0, atol=1e-6)
            assert q[token] > 0
            if not TEMPERATURES[row // rows]:
                assert token == q.argmax()
        for own, token in zip(so_far, drawn.tolist(), strict=False):
            own.append(token)


def test_other_drafts_are_drawn_as_vllm_draws_them(drafter, monkeypatch):
    """A batch without any parameter but temperatures pays nothing."""
    seen = []
    monkeypatch.setattr(drafter, "_sample_from_logits", lambda *args: seen.append(args) or args)
    with pytest.raises(AttributeError):
        # What it gives back here is no probabilities.
        wrap(drafter, MarsConfig(draft_temperature=1.0))
        drafter._sample_from_logits(logits := torch.randn(2, 9), asked := steps_v1.sampling([1, 1]))
    assert seen == [(logits, asked)]


PARAMETERS = {
    "top-p": {"top_p": 0.7},
    "top-k": {"top_k": 7, "top_p": 0.999},
    "repetition penalty": {"repetition_penalty": 1.4},
    "other penalties": {"frequency_penalty": 0.8, "presence_penalty": 0.8},
    "all": {"top_p": 0.8, "top_k": 20, "repetition_penalty": 1.2, "presence_penalty": 0.5},
}


@pytest.mark.engine
@pytest.mark.parametrize("v2", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_draft_model_that_is_the_target_loses_no_token(models, v2):
    """Strict verification accepts all where drafts are drawn from what is served."""
    draft = {"method": "draft_model", "model": str(models[0]), "num_speculative_tokens": 3}
    given = {**draft, "rejection_sample_method": "mars", "mars_price": 0}
    asked = [
        (workload.prompt(seed), workload.sampled(seed, max_tokens=12, temperature=0.8, **own))
        for seed, own in enumerate(PARAMETERS.values())
    ]
    found = workload.run(given, [asked], v2=v2, model=str(models[0]))
    assert workload.accepted_share(found, 0) > 0.99
