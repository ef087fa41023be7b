"""What `mars_draft_temperature` does to drawn drafts, on real engines of both model runners."""

import pytest
import torch
from vllm.v1.spec_decode.eagle import EagleProposer

import steps_v1
import workload
from engines import engine_in_process
from vllm_mars import MarsConfig
from vllm_mars.worker.draft_temperature import scale_v1


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


@pytest.mark.parametrize("share", [None, 1.0, 0.5])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_seed_draws_the_same_drafts(drafter, share, rows):
    """Those of its own request, whatever was drawn before; of all rows that it has."""
    scale_v1(drafter, MarsConfig(draft_temperature=share), lambda batch: torch.full((batch,), 0.8))
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
    scale_v1(drafter, MarsConfig(), lambda batch: torch.full((batch,), 0.5))
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
    scale_v1(object(), MarsConfig(), torch.ones)
    with pytest.raises(RuntimeError, match="mars_draft_temperature=0.5 .* object draws no drafts"):
        scale_v1(object(), MarsConfig(draft_temperature=0.5), torch.ones)


def test_a_drafter_that_no_longer_says_whether_it_draws():
    drafter = object.__new__(EagleProposer)
    with pytest.raises(RuntimeError, match="EagleProposer has no _enable_probabilistic_draft_prob"):
        scale_v1(drafter, MarsConfig(), torch.ones)
