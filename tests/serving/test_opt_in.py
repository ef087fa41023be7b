"""A server that is strict unless a request asks, over HTTP and beside vLLM's own."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import openai
import pytest

from engines import packaged_server
from vllm_mars.cli import main
from vllm_mars.engine import metrics
from vllm_mars.local.draft_head import PACKAGED_HEAD
from vllm_mars.local.drafts import speculative_config
from vllm_mars.local.prompts import load_prompts

pytestmark = pytest.mark.engine

OPT_IN = {"rejection_sample_method": "mars", "mars_max_loss": 0, "mars_limit": 0.02}
PROMPTS = [prompt.turns[0] for prompt in load_prompts()[:8]]
NOTHING = {"num_relaxed_tokens": 0, "relaxed_positions": [], "loss_nats": []}


def ask(server, prompt, **own):
    """A greedy answer: its tokens and its report, or the text of a refusal."""
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
            return str(error), None
    (told,) = (answer.model_extra.get("metrics") or {}).get("mars") or [None]
    return answer.choices[0].token_ids, told


def test_strict_for_all_but_who_asks(packaged_model, tmp_path, capsys):
    whole = "--no-enable-prefix-caching"
    with ExitStack() as stack:
        of = {}
        for name, own in (("vllm", {}), ("mars", OPT_IN)):
            config = speculative_config(str(PACKAGED_HEAD), 3, **own)
            running = packaged_server(packaged_model, config, tmp_path / name, whole)
            of[name] = stack.enter_context(running)
        asked = [{}, {"mars_max_loss": 0.02}, {"mars_max_loss": 0}, {"mars_max_loss": 0.03}]
        requests = [(prompt, own) for prompt in PROMPTS for own in asked]
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = [*pool.map(lambda it: ask(of["mars"], it[0], **it[1]), requests)]
            expected = [*pool.map(lambda prompt: ask(of["vllm"], prompt)[0], PROMPTS)]
        strict, lossy, declined, refused = (answers[place :: len(asked)] for place in range(4))
        assert [tokens for tokens, _ in strict] == expected
        assert strict == declined
        assert all(told == {"price": 0.0, **NOTHING} for _, told in strict)
        for text, _ in refused:
            assert "mars_max_loss=0.03 is above this server's limit of 0.02; choose a" in text
        lost = relaxed = 0
        for tokens, told in lossy:
            assert told["max_loss"] == 0.02
            assert sum(told["loss_nats"]) <= 0.02 * (len(tokens) + 100)
            lost += sum(told["loss_nats"])
            relaxed += told["num_relaxed_tokens"]
        assert relaxed > 0 and [tokens for tokens, _ in lossy] != expected

        found = of["mars"].metrics()

        def total(name):
            return sum(value for key, value in found.items() if key.startswith(f"{name}_total"))

        assert total(metrics.LOST) == pytest.approx(lost, rel=1e-6)
        assert total(metrics.GAINED) == total(metrics.RELAXED) == relaxed
        assert 0 < total(metrics.RELAXABLE) < total(metrics.VERIFIED) / 2
        (info,) = (key for key in found if key.startswith(metrics.INFO))
        assert 'limit="0.02",lossy="false",rule="mars_max_loss",value="0"' in info
        assert found[metrics.ALLOWED] == 0.02
        assert main(["doctor", of["mars"].base_url]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert "ok a request may ask for mars_max_loss 0.02, lossy ok gained " in told
        assert "sample here, and drafts are probabilistic" in told
        log = of["mars"].log_path.read_text()
        assert "mars_max_loss=0 nats per token, mars_limit=0.02, mars_strict_opening=8" in log
        assert "the output is lossless (strict) unless a request chooses otherwise." in log
        assert "Drafts are probabilistic where requests sample" in log
