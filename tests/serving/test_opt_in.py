"""A server that is lossy on request, over HTTP and against the target."""

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


def ask(server, prompt, **options):
    """Returns answer and prompt as token ids, and the report; or the text of a refusal."""
    xargs = {"mars_return": True, **options}
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
    (report,) = (answer.model_extra.get("metrics") or {}).get("mars") or [None]
    return answer.choices[0].token_ids, answer.prompt_token_ids, report


def test_strict_by_default_and_lossy_on_request(packaged_model, opt_in_server, capsys):
    variants = [{}, {"mars_max_loss": 0.02}, {"mars_max_loss": 0}, {"mars_max_loss": 0.03}]
    requests = [(prompt, options) for prompt in PROMPTS for options in variants]
    before = opt_in_server.metrics()
    with ThreadPoolExecutor(len(requests)) as pool:
        jobs = [pool.submit(ask, opt_in_server, prompt, **own) for prompt, own in requests]
    answers = [job.result() for job in jobs]
    strict, lossy, declined, refused = (answers[i::4] for i in range(4))
    assert strict == declined
    target = AutoModelForCausalLM.from_pretrained(packaged_model, dtype="float32").eval()
    for tokens, prompt, report in strict:
        assert report == {"price": 0.0, **NOTHING}
        for log_prob, highest in zip(*log_probs(target, prompt, tokens), strict=True):
            assert log_prob >= highest - ROUNDING
    for text, *_ in refused:
        assert "mars_max_loss=0.03 is above this server's limit of 0.02; choose a" in text
    lost = relaxed = 0
    for tokens, _, report in lossy:
        assert report["max_loss"] == 0.02
        assert sum(report["loss_nats"]) <= 0.02 * (len(tokens) + 100)
        lost += sum(report["loss_nats"])
        relaxed += report["num_relaxed_tokens"]
    assert relaxed > 0
    assert [tokens for tokens, *_ in lossy] != [tokens for tokens, *_ in strict]

    after = opt_in_server.metrics()

    def total(name):
        keys = [key for key in after if key.startswith(f"{name}_total")]
        return sum(after[key] - before.get(key, 0) for key in keys)

    assert total(LOST) == pytest.approx(lost, rel=1e-6)
    assert total(GAINED) == total(RELAXED) == relaxed
    assert 0 < total(RELAXABLE) < total(VERIFIED) / 2
    (info,) = (key for key in after if key.startswith(metrics.INFO))
    assert 'limit="0.02",lossy="false",rule="mars_max_loss",value="0"' in info
    assert after[metrics.ALLOWED] == 0.02
    assert main(["doctor", opt_in_server.base_url]) == 0
    findings = " ".join(capsys.readouterr().out.split())
    assert "ok a request may ask for mars_max_loss 0.02, lossy ok gained " in findings
    assert "sample here, and drafts are probabilistic" in findings
    log = opt_in_server.log_path.read_text()
    assert "mars_max_loss=0 nats per token, mars_limit=0.02, mars_strict_opening=8" in log
    assert "the output is lossless (strict) unless a request chooses otherwise." in log
    assert "Drafts are probabilistic where requests sample" in log
