"""With a CUDA graph of the verification the same seeds give the same text."""

import pytest
import torch

from engines import engine_in_process
from vllm_mars.models.draft_head import PACKAGED_HEAD
from vllm_mars.models.drafts import speculative_config
from vllm_mars.options.cuda_graph import GRAPH_VARIABLE
from vllm_mars.worker.graphs import VerificationGraphs

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

PROMPTS = ("Why is the sky blue?", "Write a story of a fox and a hen.", "1, 1, 2, 3, 5, 8,")


def texts(model):
    """One by one: of a batch a head of another size may round otherwise."""
    from vllm import SamplingParams

    mars = {"rejection_sample_method": "mars", "mars_max_loss": 0.05}
    config = speculative_config(str(PACKAGED_HEAD), 3, **mars)
    own = {"dtype": "bfloat16", "enforce_eager": False, "skip_tokenizer_init": False}
    with engine_in_process(model, config, max_model_len=512, **own) as llm:
        for temperature in (0, 0.7, 1):
            for prompt in PROMPTS:
                params = SamplingParams(temperature=temperature, seed=5, max_tokens=200)
                (output,) = llm.generate(prompt, params, use_tqdm=False)
                yield output.outputs[0].text


def test_the_same_seeds_give_the_same_text(monkeypatch, packaged_model):
    replayed, replay = [], VerificationGraphs._replay

    def counted(self, *given):
        replayed.append(given)
        return replay(self, *given)

    monkeypatch.setattr(VerificationGraphs, "_replay", counted)
    without = [*texts(packaged_model)]
    assert not replayed
    monkeypatch.setenv(GRAPH_VARIABLE, "1")
    assert [*texts(packaged_model)] == without
    # Nearly all steps of 1,800 tokens.
    assert len(replayed) > 300
