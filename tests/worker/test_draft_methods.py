"""Draft methods other than ngram, EAGLE and draft models, on tiny random models."""

import json

import pytest

import tiny_models
from engines import counters, engine_in_process

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [100, 3, 200], [7, 7, 7, 7]]
# The batch shrinks as answers end.
LENGTHS = (20, 30, 40)


def generate(target, speculative_config):
    """Greedy tokens of each prompt, and the numbers of drafted and accepted tokens."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0, max_tokens=length, detokenize=False, ignore_eos=True)
        for length in LENGTHS
    ]
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with engine_in_process(target, speculative_config) as llm:
        outputs = llm.generate(inputs, params, use_tqdm=False)
        counts = counters(llm)
    return (
        [output.outputs[0].token_ids for output in outputs],
        counts.get("vllm:spec_decode_num_draft_tokens", 0),
        counts.get("vllm:spec_decode_num_accepted_tokens", 0),
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    return directory, tiny_models.llama(directory)


@pytest.fixture(scope="module")
def autoregressive(target):
    return generate(target[0], None)[0]


def check(target, autoregressive, draft, *, guesses=True):
    """Theta 1 answers as without drafts; a lower theta accepts more drafts that `guesses` well."""
    speculation = {
        "num_speculative_tokens": tiny_models.NUM_DRAFT_TOKENS,
        **draft,
        "rejection_sample_method": "mars",
    }
    tokens, drafted, accepted = generate(target, {**speculation, "mars_theta": 1.0})
    assert tokens == autoregressive
    assert drafted > 0
    if not guesses:
        return
    strict_share = accepted / drafted
    _, drafted, accepted = generate(target, {**speculation, "mars_theta": 0.01})
    assert accepted / drafted > strict_share


def test_medusa(target, autoregressive, tmp_path):
    directory, model = target
    tiny_models.medusa(tmp_path / "medusa", model)
    # Untrained heads guess nothing.
    draft = {"method": "medusa", "model": str(tmp_path / "medusa")}
    check(directory, autoregressive, draft, guesses=False)


def test_mtp(tmp_path):
    tiny_models.mimo(tmp_path / "mimo")
    without_drafts, _, _ = generate(tmp_path / "mimo", None)
    check(tmp_path / "mimo", without_drafts, {"method": "mtp"})


def test_k_by_batch_size(target, autoregressive, tmp_path):
    """The largest batch gets no drafts."""
    tiny_models.eagle(tmp_path / "eagle", target[1])
    draft = {
        "method": "eagle",
        "model": str(tmp_path / "eagle"),
        "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 2, 1], [3, 4, 0]],
    }
    check(target[0], autoregressive, draft)


def test_parallel_drafting(target, autoregressive, tmp_path):
    target[1].save_pretrained(tmp_path / "draft")
    config = tmp_path / "draft/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "pard_token": 3}))
    # All drafts but the first follow a token that the model was not trained with.
    draft = {"method": "draft_model", "model": str(tmp_path / "draft"), "parallel_drafting": True}
    check(target[0], autoregressive, draft, guesses=False)


def test_dflash(target, autoregressive, tmp_path):
    """vLLM supports other kinds of DFlash only on V2."""
    tiny_models.dflash(tmp_path / "dflash", target[1], "dflash")
    # An untrained draft guesses nothing.
    draft = {"method": "dflash", "model": str(tmp_path / "dflash")}
    check(target[0], autoregressive, draft, guesses=False)
