"""New weights in a running engine: the rule, its reports and the drafts keep working."""

import pytest
import torch

from counts import GAINED, LOST
from engines import counters, engine_in_process
from vllm_mars.models.draft_head import PACKAGED_HEAD
from vllm_mars.models.drafts import speculative_config

pytestmark = pytest.mark.engine

RULE = {"rejection_sample_method": "mars", "mars_max_loss": 0.02, "mars_strict_opening": 0}
PROMPTS = ["Tell me about rain.", "Tell me about a bridge.", "How is bread made?", "What is tea?"]


@pytest.fixture(scope="module")
def moved_model(packaged_model, tmp_path_factory):
    """Directory of the packaged model with weights changed enough to change its answers."""
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("models") / "moved"
    model = AutoModelForCausalLM.from_pretrained(packaged_model, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers[-10:]:
            for weights in layer.mlp.parameters():
                weights += 0.1 * weights.std() * torch.randn_like(weights)
    model.save_pretrained(directory)
    return directory


def test_new_weights_keep_rule_reports_and_drafts(packaged_model, moved_model):
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    config = speculative_config(str(PACKAGED_HEAD), 3, **RULE, mars_logprobs="sampled")
    params = SamplingParams(
        temperature=1, seed=1, max_tokens=32, logprobs=0, extra_args={"mars_return": True}
    )
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]

    def check(llm, directory):
        """Checks log m - log_ratio of each answer against transformers with these weights."""
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        before = counters(llm)
        for request in llm.chat(chats, params, use_tqdm=False):
            (answer,) = request.outputs
            report = answer.spec_decode_metrics.mars
            assert report["max_loss"] == 0.02
            steps = zip(answer.token_ids, answer.logprobs, strict=True)
            served = [step[token].logprob for token, step in steps]
            ids = torch.tensor([[*request.prompt_token_ids, *answer.token_ids]])
            with torch.no_grad():
                rows = model(ids).logits[0, -len(served) - 1 : -1].log_softmax(-1)
            log_p = rows.gather(-1, torch.tensor([answer.token_ids]).T)[:, 0]
            ratios = torch.tensor(report["log_ratios"])
            assert torch.tensor(served) - ratios == pytest.approx(log_p, abs=2e-3)
            assert ratios.abs().max() > 0.05
        after = counters(llm)
        spent = {name: after[name] - before.get(name, 0) for name in after}
        assert spent[LOST] > 0 and spent[GAINED] > 0
        assert spent["vllm:spec_decode_num_accepted_tokens"] > 0

    with engine_in_process(
        packaged_model,
        config,
        skip_tokenizer_init=False,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        enable_prefix_caching=True,
    ) as llm:
        check(llm, packaged_model)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(moved_model)})
        assert llm.reset_prefix_cache()
        check(llm, moved_model)
        # vLLM ignores both on a CPU.
        llm.sleep()
        llm.wake_up()
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(packaged_model)})
        assert llm.reset_prefix_cache()
        check(llm, packaged_model)
