"""Draft methods beside ngram, on tiny random models: verified by MARS, and strict at theta = 1."""

import pytest

import tiny_models
from engines import engine_in_process

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [100, 3, 200], [7, 7, 7, 7]]


def generate(target, speculative_config):
    """Greedy tokens of each prompt, and how many draft tokens were verified and accepted."""
    from vllm import SamplingParams

    with engine_in_process(target, speculative_config) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=40, detokenize=False, ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return (
        [list(output.outputs[0].token_ids) for output in outputs],
        metrics.get("vllm:spec_decode_num_draft_tokens", 0),
        metrics.get("vllm:spec_decode_num_accepted_tokens", 0),
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    return directory, tiny_models.llama(directory)


@pytest.fixture(scope="module")
def autoregressive(target):
    return generate(target[0], None)[0]


def check(target, autoregressive, draft, *, guesses=True):
    """Strictly verified drafts change nothing; the gap accepts more of those of a draft model."""
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
    _, drafted, accepted = generate(target, {**given, "mars_gap": 1000.0})
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
