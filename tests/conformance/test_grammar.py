"""Drafts that a grammar partly forbids, through vLLM's scheduler and V1."""

import re

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

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
