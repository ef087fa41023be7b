"""Draft methods beside ngram, and what else of vLLM changes a step, on tiny random models.

Verified by MARS, and strict at theta = 1.
"""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from engines import counters, engine_in_process

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [100, 3, 200], [7, 7, 7, 7]]
# So that the batch shrinks.
LENGTHS = (20, 30, 40)


def generate(target, speculative_config, lora=None, **options):
    """Greedy tokens of each prompt, and how many draft tokens were verified and accepted."""
    from vllm import SamplingParams

    given = {"temperature": 0, "detokenize": False, "ignore_eos": True}
    params = [SamplingParams(max_tokens=length, **given) for length in LENGTHS]
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with engine_in_process(target, speculative_config, **options) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False, lora_request=lora)
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


def check(target, autoregressive, draft, *, guesses=True, generate=generate):
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


@pytest.fixture
def eagle(target, tmp_path):
    tiny_models.eagle(tmp_path / "eagle", target[1])
    return {"method": "eagle", "model": str(tmp_path / "eagle")}


def test_another_k_in_each_step_and_none(target, autoregressive, eagle):
    by_batch_size = [[1, 1, 3], [2, 2, 1], [3, 4, 0]]
    draft = {**eagle, "num_speculative_tokens_per_batch_size": by_batch_size}
    check(target[0], autoregressive, draft)


@pytest.fixture
def draft_model(target, tmp_path):
    target[1].save_pretrained(tmp_path / "draft")
    return {"method": "draft_model", "model": str(tmp_path / "draft")}


def test_all_drafts_at_once(target, autoregressive, draft_model, tmp_path):
    config = tmp_path / "draft/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "pard_token": 3}))
    # All but the first draft are those of a token that it was not trained with.
    given = {**draft_model, "parallel_drafting": True}
    check(target[0], autoregressive, given, guesses=False)


def test_lora(target, autoregressive, draft_model, tmp_path):
    """On a CPU vLLM itself fails at a head that shares the adapted target's embedding."""
    from vllm.lora.request import LoRARequest

    torch.manual_seed(1)
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        tensors[f"{name}A.weight"] = torch.randn(8, tiny_models.HIDDEN)
        tensors[f"{name}B.weight"] = torch.randn(tiny_models.HIDDEN, 8)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    lora = LoRARequest("adapter", 1, str(tmp_path))
    adapted = functools.partial(generate, lora=lora, enable_lora=True, max_lora_rank=8)
    alone, _, _ = adapted(target[0], None)
    assert alone != autoregressive
    check(target[0], alone, draft_model, generate=adapted)


def test_a_quantised_target(target, eagle, tmp_path):
    """Weights and activations in 8 bits, as compressed-tensors has them."""
    quantised = tmp_path / "quantised"
    target[1].save_pretrained(quantised)
    config = json.loads((quantised / "config.json").read_text())
    weights = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "all": {
                "targets": ["Linear"],
                "weights": {**weights, "strategy": "channel", "dynamic": False},
                "input_activations": {**weights, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    }
    (quantised / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(quantised / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = tensor.abs().amax(1, keepdim=True) / 127
            tensors[f"{name}_scale"] = scale
            tensor = (tensor / scale).round().to(torch.int8)
        tensors[name] = tensor
    save_file(tensors, quantised / "model.safetensors")
    alone, _, _ = generate(quantised, None)
    check(quantised, alone, eagle)
