"""Constrained answers and reports of `mars_return` over real HTTP."""

import functools
import json
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pytest

from engines import PET, PET_FORMAT

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("lossy_server")]

REGEX = r"[A-Z][a-z]{2,5}-[0-9]{3}"
CHOICES = ["Paris", "Rome", "Madrid"]
TOOL = {"type": "function", "function": {"name": "add_pet", "parameters": PET, "strict": True}}
SUBJECTS = ("a cat called Tom", "a dog called Rex", "a bird", "the cat of a friend", "my pet")


@pytest.fixture(scope="module")
def client(lossy_server):
    with openai.OpenAI(
        base_url=f"{lossy_server.base_url}/v1", api_key="none", max_retries=0
    ) as opened:
        yield opened


def create(client, number, **options):
    """Returns an answer about a subject; half of the numbers are sampled requests."""
    return client.chat.completions.create(
        model="model",
        messages=[{"role": "user", "content": f"Describe {SUBJECTS[number % len(SUBJECTS)]}."}],
        temperature=0.8 * (number // len(SUBJECTS) % 2),
        seed=number,
        max_tokens=80,
        **options,
    ).choices[0]


def schema(client, number):
    choice = create(client, number, response_format=PET_FORMAT)
    jsonschema.validate(json.loads(choice.message.content), PET)


def regex(client, number):
    choice = create(client, number, extra_body={"structured_outputs": {"regex": REGEX}})
    assert re.fullmatch(REGEX, choice.message.content), choice.message.content


def choice(client, number):
    answer = create(client, number, extra_body={"structured_outputs": {"choice": CHOICES}})
    assert answer.message.content in CHOICES


def tool_call(client, number):
    named = {"type": "function", "function": {"name": "add_pet"}}
    answer = create(client, number, tools=[TOOL], tool_choice=named)
    assert answer.message.tool_calls, answer
    (call,) = answer.message.tool_calls
    assert call.function.name == "add_pet"
    jsonschema.validate(json.loads(call.function.arguments), PET)


@pytest.mark.parametrize("times", [8, pytest.param(200, marks=pytest.mark.nightly)])
def test_constrained_answers_are_valid(client, times):
    kinds = (schema, regex, choice, tool_call)
    with ThreadPoolExecutor(16) as pool:
        jobs = [pool.submit(kinds[n % len(kinds)], client, n // len(kinds)) for n in range(times)]
        for job in jobs:
            job.result()


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
