"""Drafts that a grammar partly forbids, through vLLM's scheduler and V1."""

import re

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.rejection_sampler import rejection_sample

import steps_v1
from engines import counters, engine_in_process
from enumerated import Batch
from scheduled import CASES, MARS, Engine, logits_of, write_model

FIXED = {"draft_sample_method": "greedy"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("letters"))


@pytest.mark.usefixtures("mended_kernels")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.regex)
def test_the_output_follows_the_masked_target(monkeypatch, model, case):
    """Enumerates the outcomes of probabilistic drafts."""
    batch = Batch(case)
    step = Engine(model, case.steps, **MARS).draft(batch.paths, case.regex, *case.answer)
    logits = step.mask(logits_of(case, step.drafts))
    steps_v1.check_probes(monkeypatch, batch, step.drafts, logits)


@pytest.mark.usefixtures("mended_kernels")
def test_vllm_without_mars_is_biased(model):
    """If this fails, `hooks.grammar` can go. p is (.5, .5, 0), q is (.4, .1, .5)."""
    num_draws, q = 1 << 16, torch.tensor([0.4, 0.1, 0.5])
    generator = torch.Generator().manual_seed(0)
    sampled = q.multinomial(num_draws, replacement=True, generator=generator)
    served = {}
    for options in {}, MARS:
        step = Engine(model, 1, **options).draft([[0], [1], [2]], "a[ab]{9}", 0)
        drafts = [step.drafts[x] for x in sampled.tolist()]
        metadata = steps_v1.metadata_of(drafts)
        p = step.mask(torch.zeros(sum(len(draft) + 1 for draft in step.drafts), 3))[:1].softmax(-1)
        bonus = p[0].multinomial(num_draws, replacement=True, generator=generator)
        tokens = rejection_sample(
            metadata.draft_token_ids,
            metadata.num_draft_tokens,
            metadata.max_spec_len,
            metadata.cu_num_draft_tokens,
            q.expand(sum(map(len, drafts)), -1).contiguous(),
            p.log().expand(sum(map(len, drafts)), -1).contiguous(),
            bonus[:, None].int(),
            steps_v1.sampling([1.0] * num_draws),
        )
        served[not options] = tokens[:, 0].long().bincount(minlength=3) / num_draws
    tolerance = {"atol": 0.01, "rtol": 0}
    torch.testing.assert_close(served[True], torch.tensor([0.65, 0.35, 0]), **tolerance)
    torch.testing.assert_close(served[False], torch.tensor([0.5, 0.5, 0]), **tolerance)


def test_fixed_and_greedy_drafts_are_cut_as_in_vllm(model):
    paths, regex = [[0, 1], [1, 4], [4, 4]], "a[ab]{9}"
    for sampling, options in (({"temperature": 0}, MARS), ({}, MARS | FIXED)):
        vllms = Engine(model, 2).draft(paths, regex, 0, **sampling)
        mars = Engine(model, 2, **options).draft(paths, regex, 0, **sampling)
        assert vllms.drafts == mars.drafts == [[0, 1], [1], []]
        assert vllms.grammar.num_acceptable_drafts == mars.grammar.num_acceptable_drafts
        assert (vllms.grammar.grammar_bitmask == mars.grammar.grammar_bitmask).all()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_draft_is_verified_up_to_its_first_forbidden_token(model, is_async):
    paths = [[0, 1], [1, 4], [4, 4]]
    step = Engine(model, 2, is_async, **MARS).draft(paths, "a[ab]{9}", 0)
    # With asynchronous scheduling, the worker has the tokens, and the scheduler only placeholders.
    assert step.drafts == ([[0, 1], [1, -1], [-1, -1]] if is_async else paths)
    assert step.grammar.num_acceptable_drafts == [2, 2, 1]
    # vLLM's metrics do not count these.
    assert step.output.num_invalid_spec_tokens == {"1": 1, "2": 2}


def test_a_draft_that_the_scheduler_has_not_seen_is_not_verified(model):
    """A step is scheduled before the tokens of the last one are known."""
    engine = Engine(model, 2, is_async=True, **MARS)
    prompts = engine.enter(1, "a[ab]{9}")
    engine.end(prompts, 0)
    output = engine.scheduler.schedule()
    assert output.scheduled_spec_decode_tokens == {"0": [-1, -1]}
    assert engine.scheduler.get_grammar_bitmask(output).num_acceptable_drafts == [0]


@pytest.mark.engine
def test_answers_of_an_engine_match_the_grammar(bytes_model, capfd):
    drafts = {"method": "draft_model", "model": str(bytes_model), "num_speculative_tokens": 3}
    params = SamplingParams(
        max_tokens=9, structured_outputs=StructuredOutputsParams(regex="[!-~]{8,32}")
    )
    with engine_in_process(bytes_model, drafts | MARS, skip_tokenizer_init=False) as llm:
        outputs = llm.generate([{"prompt_token_ids": [5, 6]}] * 16, params, use_tqdm=False)
        counted = counters(llm)
    for output in outputs:
        assert re.fullmatch("[!-~]{8,}", output.outputs[0].text)
    # vLLM does not count draft tokens from the first forbidden one on.
    sampled = 3 * counted["vllm:spec_decode_num_drafts"]
    assert 0 < counted["vllm:spec_decode_num_draft_tokens"] < 0.7 * sampled
    assert 0 < counted["vllm:spec_decode_num_accepted_tokens"]
    assert "Unexpected: grammar" not in "".join(capfd.readouterr())
