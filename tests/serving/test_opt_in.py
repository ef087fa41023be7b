"""A server that is strict unless a request asks, over HTTP and beside the target itself."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from transformers import AutoModelForCausalLM

from counts import GAINED, LOST, RELAXABLE, RELAXED, VERIFIED
from promise import ROUNDING, log_probs
from vllm_mars.cli.__main__ import main
from vllm_mars.lab.prompts import load_prompts
from vllm_mars.report import metrics

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("opt_in_server")]

PROMPTS = [prompt.turns[0] for prompt in load_prompts()[:8]]
NOTHING = {"num_relaxed_tokens": 0, "relaxed_positions": [], "loss_nats": []}


def ask(server, prompt, **own):
    """A greedy answer with its prompt, as tokens, and its report; or the text of a refusal."""
    xargs = {"mars_return": True, **own}
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as client:
        try:
            answer = client.chat.completions.create(
                model="model",
                messages=[{"role": "user", "content": prompt}],
                temperature=0,
                max_tokens=48,
                extra_body={"vllm_xargs": xargs, "return_token_ids": True},
            )
        except openai.BadRequestError as error:
            return str(error), None, None
    (told,) = (answer.model_extra.get("metrics") or {}).get("mars") or [None]
    return answer.choices[0].token_ids, answer.prompt_token_ids, told


def test_strict_for_all_but_who_asks(packaged_model, opt_in_server, capsys):
    asked = [{}, {"mars_max_loss": 0.02}, {"mars_max_loss": 0}, {"mars_max_loss": 0.03}]
    requests = [(prompt, own) for prompt in PROMPTS for own in asked]
    before = opt_in_server.metrics()
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = [*pool.map(lambda it: ask(opt_in_server, it[0], **it[1]), requests)]
    strict, lossy, declined, refused = (answers[place :: len(asked)] for place in range(4))
    assert strict == declined
    target = AutoModelForCausalLM.from_pretrained(packaged_model, dtype="float32").eval()
    for tokens, prompt, told in strict:
        assert told == {"price": 0.0, **NOTHING}
        for own, first in zip(*log_probs(target, prompt, tokens), strict=True):
            assert own >= first - ROUNDING
    for text, *_ in refused:
        assert "mars_max_loss=0.03 is above this server's limit of 0.02; choose a" in text
    lost = relaxed = 0
    for tokens, _, told in lossy:
        assert told["max_loss"] == 0.02
        assert sum(told["loss_nats"]) <= 0.02 * (len(tokens) + 100)
        lost += sum(told["loss_nats"])
        relaxed += told["num_relaxed_tokens"]
    assert relaxed > 0
    assert [tokens for tokens, *_ in lossy] != [tokens for tokens, *_ in strict]

    found = opt_in_server.metrics()

    def total(name):
        keys = [key for key in found if key.startswith(f"{name}_total")]
        return sum(found[key] - before.get(key, 0) for key in keys)

    assert total(LOST) == pytest.approx(lost, rel=1e-6)
    assert total(GAINED) == total(RELAXED) == relaxed
    assert 0 < total(RELAXABLE) < total(VERIFIED) / 2
    (info,) = (key for key in found if key.startswith(metrics.INFO))
    assert 'limit="0.02",lossy="false",rule="mars_max_loss",value="0"' in info
    assert found[metrics.ALLOWED] == 0.02
    assert main(["doctor", opt_in_server.base_url]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "ok a request may ask for mars_max_loss 0.02, lossy ok gained " in told
    assert "sample here, and drafts are probabilistic" in told
    log = opt_in_server.log_path.read_text()
    assert "mars_max_loss=0 nats per token, mars_limit=0.02, mars_strict_opening=8" in log
    assert "the output is lossless (strict) unless a request chooses otherwise." in log
    assert "Drafts are probabilistic where requests sample" in log
