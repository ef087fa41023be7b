"""What comes of drafts that a grammar forbids a part of, by vLLM's scheduler and V1."""

import re

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.rejection_sampler import rejection_sample

import steps_v1
from engines import counters, engine_in_process
from enumerated import Batch
from scheduled import CASES, MARS, Engine, logits_of, write_model
from vllm_mars.kernels.accept import naive as accept
from vllm_mars.worker import sampler_v1

FIXED = {"draft_sample_method": "greedy"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("letters"))


@pytest.mark.usefixtures("mended_kernels")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.regex)
def test_the_law_is_the_targets_own(monkeypatch, model, case):
    """All that can come of a drawn draft, by its probes, in one step."""
    batch = Batch(case)
    step = Engine(model, case.steps, **MARS).draft(batch.paths, case.regex, *case.answer)
    lengths = torch.tensor([len(draft) for draft in step.drafts])
    is_there = torch.arange(case.steps) < lengths[:, None]
    monkeypatch.setattr(sampler_v1, "generate_uniform_probs", lambda *_: batch.uniform[is_there])
    draws = lambda _, place, weights: int((weights / batch.noise[place]).argmax())  # noqa: E731
    monkeypatch.setattr(accept.CpuSamplingInputs, "sample_token", draws)
    # For the bonus token.
    draw = lambda logits, _: (logits.softmax(-1) / batch.noise).argmax(-1)  # noqa: E731
    monkeypatch.setattr(torch.ops._C, "fused_gumbel_argmax", draw)
    sampler = steps_v1.mars_sampler(case.config)
    requests = sampler.requests
    answers = [[*case.answer] for _ in batch.probes]
    added = [(place, case.params(), [0, 1], answer) for place, answer in enumerate(answers)]
    requests.update_state(BatchUpdate(len(answers), removed=[], added=added, moved=[]))
    lost = requests._records.lost
    lost.zero_()
    monkeypatch.setattr(requests, "returns", lambda _: {0: "asks"})
    output = sampler(
        steps_v1.metadata_of(step.drafts),
        batch.q[is_there],
        step.mask(logits_of(case, step.drafts)),
        steps_v1.sampling([1.0] * len(answers), output=answers, drafts=step.drafts),
    )
    slots = requests._slots[: len(answers)]
    batch.check(sampler.reports, steps_v1.emitted(output), lost[slots])


@pytest.mark.usefixtures("mended_kernels")
def test_vllms_own_is_biased(model):
    """Once this fails, `hooks.grammar` can go. With p (.5, .5, 0) and q (.4, .1, .5)."""
    number, q = 1 << 16, torch.tensor([0.4, 0.1, 0.5])
    generator = torch.Generator().manual_seed(0)
    drawn = q.multinomial(number, replacement=True, generator=generator)
    served = {}
    for options in {}, MARS:
        step = Engine(model, 1, **options).draft([[0], [1], [2]], "a[ab]{9}", 0)
        drafts = [step.drafts[x] for x in drawn.tolist()]
        metadata = steps_v1.metadata_of(drafts)
        p = step.mask(torch.zeros(sum(len(it) + 1 for it in step.drafts), 3))[:1].softmax(-1)
        bonus = p[0].multinomial(number, replacement=True, generator=generator)
        tokens = rejection_sample(
            metadata.draft_token_ids,
            metadata.num_draft_tokens,
            metadata.max_spec_len,
            metadata.cu_num_draft_tokens,
            q.expand(sum(map(len, drafts)), -1).contiguous(),
            p.log().expand(sum(map(len, drafts)), -1).contiguous(),
            bonus[:, None].int(),
            steps_v1.sampling([1.0] * number),
        )
        served[not options] = tokens[:, 0].long().bincount(minlength=3) / number
    tolerance = {"atol": 0.01, "rtol": 0}
    torch.testing.assert_close(served[True], torch.tensor([0.65, 0.35, 0]), **tolerance)
    torch.testing.assert_close(served[False], torch.tensor([0.5, 0.5, 0]), **tolerance)


def test_fixed_and_greedy_drafts_are_as_vllm_has_them(model):
    paths, regex = [[0, 1], [1, 4], [4, 4]], "a[ab]{9}"
    for sampling, options in (({"temperature": 0}, MARS), ({}, MARS | FIXED)):
        own = Engine(model, 2).draft(paths, regex, 0, **sampling)
        mars = Engine(model, 2, **options).draft(paths, regex, 0, **sampling)
        assert own.drafts == mars.drafts == [[0, 1], [1], []]
        assert own.grammar.num_acceptable_drafts == mars.grammar.num_acceptable_drafts
        assert (own.grammar.grammar_bitmask == mars.grammar.grammar_bitmask).all()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_draft_is_verified_up_to_its_first_forbidden_token(model, is_async):
    paths = [[0, 1], [1, 4], [4, 4]]
    step = Engine(model, 2, is_async, **MARS).draft(paths, "a[ab]{9}", 0)
    # Where a worker has tokens of its own, the scheduler's do not count.
    assert step.drafts == ([[0, 1], [1, -1], [-1, -1]] if is_async else paths)
    assert step.grammar.num_acceptable_drafts == [2, 2, 1]
    # vLLM's metrics leave these out.
    assert step.output.num_invalid_spec_tokens == {"1": 1, "2": 2}


def test_of_a_draft_that_the_scheduler_has_not_seen_nothing_is_verified(model):
    """Where a step is scheduled ahead of which the last one has ended: its tokens do not matter."""
    engine = Engine(model, 2, is_async=True, **MARS)
    prompts = engine.enter(1, "a[ab]{9}")
    engine.end(prompts, 0)
    output = engine.scheduler.schedule()
    assert output.scheduled_spec_decode_tokens == {"0": [-1, -1]}
    assert engine.scheduler.get_grammar_bitmask(output).num_acceptable_drafts == [0]


@pytest.mark.engine
def test_an_engine_keeps_to_a_grammar(bytes_model, capfd):
    drafts = {"method": "draft_model", "model": str(bytes_model), "num_speculative_tokens": 3}
    params = SamplingParams(
        max_tokens=9, structured_outputs=StructuredOutputsParams(regex="[!-~]{8,32}")
    )
    with engine_in_process(bytes_model, drafts | MARS, skip_tokenizer_init=False) as llm:
        outputs = llm.generate([{"prompt_token_ids": [5, 6]}] * 16, params, use_tqdm=False)
        counted = counters(llm)
    for output in outputs:
        assert re.fullmatch("[!-~]{8,}", output.outputs[0].text)
    # vLLM counts no draft token from the first forbidden one on, of which there are many.
    drawn = 3 * counted["vllm:spec_decode_num_drafts"]
    assert 0 < counted["vllm:spec_decode_num_draft_tokens"] < 0.7 * drawn
    assert 0 < counted["vllm:spec_decode_num_accepted_tokens"]
    assert "Unexpected: grammar" not in "".join(capfd.readouterr())
