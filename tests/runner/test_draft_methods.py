"""Draft methods beside ngram, on tiny random models: verified by MARS, and strict at theta = 1."""

import pytest

import tiny_models
from engines import counters, engine_in_process, greedy_tokens

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [100, 3, 200], [7, 7, 7, 7]]


def generate(target, speculative_config):
    """Greedy tokens of each prompt, and how many draft tokens were verified and accepted."""
    with engine_in_process(target, speculative_config) as llm:
        tokens, found = greedy_tokens(llm, PROMPTS, max_tokens=40), counters(llm)
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
        **draft,
        "num_speculative_tokens": tiny_models.NUM_DRAFT_TOKENS,
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


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_draft_method(target, autoregressive, tmp_path, method):
    directory, model = target
    getattr(tiny_models, method)(tmp_path / method, model)
    draft = {"method": method, "model": str(tmp_path / method)}
    # Medusa's heads without training guess nothing.
    check(directory, autoregressive, draft, guesses=method != "medusa")


def test_suffix(target, autoregressive):
    pytest.importorskip(
        "arctic_inference.suffix_decoding",
        reason="needs arctic-inference 0.1.1 (docs/coupling.md, Draft methods)",
    )
    # It proposes what the texts so far hold: in random ones the runner-up only by luck.
    check(target[0], autoregressive, {"method": "suffix"}, guesses=False)


def test_mtp(tmp_path):
    tiny_models.mimo(tmp_path / "mimo")
    alone, _, _ = generate(tmp_path / "mimo", None)
    check(tmp_path / "mimo", alone, {"method": "mtp"})
