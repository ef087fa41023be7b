"""Reports of `mars_return` over real HTTP."""

import functools

import openai
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("lossy_server")]


@pytest.fixture(scope="module")
def client(lossy_server):
    with openai.OpenAI(
        base_url=f"{lossy_server.base_url}/v1", api_key="none", max_retries=0
    ) as opened:
        yield opened


def test_reports(client):
    def ask(**extra):
        request = {
            "model": "model",
            "messages": [{"role": "user", "content": "Say it twice: one two three four five."}],
            "temperature": 0,
            "max_tokens": 40,
            **extra,
        }
        return client.chat.completions.create(**request)

    def reports(answer):
        return answer.metrics["mars"]

    report = {"extra_body": {"vllm_xargs": {"mars_return": True}, "return_token_ids": True}}
    (whole,) = reports(ask(**report))
    assert whole["theta"] == 0.3
    assert whole["num_relaxed_tokens"] == len(whole["relaxed_positions"])
    assert len(whole["loss_nats"]) == len(whole["relaxed_positions"])
    chunks = list(ask(**report, stream=True, stream_options={"include_usage": True}))
    assert reports(chunks[-1]) == [whole]
    (strict,) = reports(ask(extra_body={"vllm_xargs": {"mars_return": True, "mars_max_loss": 0}}))
    nothing = {"num_relaxed_tokens": 0, "relaxed_positions": [], "loss_nats": []}
    assert strict == {"theta": 1.0, **nothing}
    assert ask().model_extra.get("metrics") is None

    def check(answer):
        lengths = [len(choice.token_ids) for choice in answer.choices]
        assert [len(report["log_ratios"]) for report in reports(answer)] == lengths
        return lengths

    def ratios(answer):
        return [ratio for report in reports(answer) for ratio in report["log_ratios"]]

    # Rounding depends on the other requests of a step.
    close = functools.partial(pytest.approx, abs=1e-4)
    sampling = {"temperature": 1.0, "seed": 3, "n": 3}
    whole = ask(**report, **sampling)
    assert len(check(whole)) == 3
    # A stop string from the middle of the first answer, which the front end finds.
    text = whole.choices[0].message.content
    cut = ask(**report, **sampling, stop=text[len(text) // 2 :][:3])
    assert check(cut)[0] < len(whole.choices[0].token_ids)
    assert cut.choices[0].finish_reason == "stop"
    cut_ratios = reports(cut)[0]["log_ratios"]
    assert cut_ratios == close(reports(whole)[0]["log_ratios"][: len(cut_ratios)])
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = list(ask(**report, **sampling, **usage))[-1]
    assert ratios(streamed) == close(ratios(whole))

    prompts = {"model": "model", "prompt": ["one two three one two", "a b c a b"], "max_tokens": 24}
    completion = client.completions.create(**prompts, **report, **sampling)
    assert len(check(completion)) == 6
    streamed = list(client.completions.create(**prompts, **report, **sampling, **usage))[-1]
    assert ratios(streamed) == close(ratios(completion))
