"""Draft methods beside ngram, EAGLE and draft models, on tiny random models.

Verified by MARS, and strict at theta = 1.
"""

import json

import pytest

import tiny_models
from engines import counters, engine_in_process

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [100, 3, 200], [7, 7, 7, 7]]
# So that the batch shrinks.
LENGTHS = (20, 30, 40)


def generate(target, speculative_config):
    """Greedy tokens of each prompt, and how many draft tokens were verified and accepted."""
    from vllm import SamplingParams

    given = {"temperature": 0, "detokenize": False, "ignore_eos": True}
    params = [SamplingParams(max_tokens=length, **given) for length in LENGTHS]
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with engine_in_process(target, speculative_config) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
        tokens, found = [output.outputs[0].token_ids for output in outputs], counters(llm)
    names = ("draft", "accepted")
    return tokens, *(found.get(f"vllm:spec_decode_num_{name}_tokens", 0) for name in names)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    return directory, tiny_models.llama(directory)


@pytest.fixture(scope="module")
def autoregressive(target):
    return generate(target[0], None)[0]


def check(target, autoregressive, draft, *, guesses=True):
    """Strictly verified drafts change nothing; theta accepts more of those of a draft model."""
    given = {
        "num_speculative_tokens": tiny_models.NUM_DRAFT_TOKENS,
        **draft,
        "rejection_sample_method": "mars",
    }
    tokens, drafted, accepted = generate(target, {**given, "mars_theta": 1.0})
    assert tokens == autoregressive
    assert drafted > 0
    if not guesses:
        return
    strict_share = accepted / drafted
    _, drafted, accepted = generate(target, {**given, "mars_theta": 0.01})
    assert accepted / drafted > strict_share


def test_medusa(target, autoregressive, tmp_path):
    directory, model = target
    tiny_models.medusa(tmp_path / "medusa", model)
    # Heads without training guess nothing.
    draft = {"method": "medusa", "model": str(tmp_path / "medusa")}
    check(directory, autoregressive, draft, guesses=False)


def test_mtp(tmp_path):
    tiny_models.mimo(tmp_path / "mimo")
    alone, _, _ = generate(tmp_path / "mimo", None)
    check(tmp_path / "mimo", alone, {"method": "mtp"})


def test_another_k_in_each_step_and_none(target, autoregressive, tmp_path):
    by_batch_size = [[1, 1, 3], [2, 2, 1], [3, 4, 0]]
    tiny_models.eagle(tmp_path / "eagle", target[1])
    draft = {
        "method": "eagle",
        "model": str(tmp_path / "eagle"),
        "num_speculative_tokens_per_batch_size": by_batch_size,
    }
    check(target[0], autoregressive, draft)


def test_all_drafts_at_once(target, autoregressive, tmp_path):
    target[1].save_pretrained(tmp_path / "draft")
    config = tmp_path / "draft/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "pard_token": 3}))
    # All but the first draft are those of a token that it was not trained with.
    given = {"method": "draft_model", "model": str(tmp_path / "draft"), "parallel_drafting": True}
    check(target[0], autoregressive, given, guesses=False)


def test_dflash(target, autoregressive, tmp_path):
    """The plain kind: others vLLM has on V2 alone."""
    tiny_models.dflash(tmp_path / "dflash", target[1], "dflash")
    # Of this target it guesses nothing without training.
    draft = {"method": "dflash", "model": str(tmp_path / "dflash")}
    check(target[0], autoregressive, draft, guesses=False)
