"""Constrained answers, and what an answer tells, over real HTTP."""

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
TOOL = {
    "type": "function",
    "function": {"name": "add_pet", "parameters": PET, "strict": True},
}
SUBJECTS = ("a cat called Tom", "a dog called Rex", "a bird", "the cat of a friend", "my own pet")


@pytest.fixture(scope="module")
def client(lossy_server):
    with openai.OpenAI(
        base_url=f"{lossy_server.base_url}/v1", api_key="none", max_retries=0
    ) as opened:
        yield opened


def create(client, number, **options):
    """One answer about a subject; every other request is sampled."""
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


def test_an_answer_tells_what_verification_did(client):
    def ask(**extra):
        request = {
            "model": "model",
            "messages": [{"role": "user", "content": "Say it twice: one two three four five."}],
            "temperature": 0,
            "max_tokens": 40,
            **extra,
        }
        return client.chat.completions.create(**request)

    def told(answer):
        return answer.metrics["mars"]

    wanted = {"extra_body": {"vllm_xargs": {"mars_return": True}, "return_token_ids": True}}
    (whole,) = told(ask(**wanted))
    assert whole["theta"] == 0.3
    assert whole["num_relaxed_tokens"] == len(whole["relaxed_positions"])
    assert len(whole["loss_nats"]) == len(whole["relaxed_positions"])
    chunks = list(ask(**wanted, stream=True, stream_options={"include_usage": True}))
    assert told(chunks[-1]) == [whole]
    (strict,) = told(ask(extra_body={"vllm_xargs": {"mars_return": True, "mars_max_loss": 0}}))
    nothing = {"num_relaxed_tokens": 0, "relaxed_positions": [], "loss_nats": []}
    assert strict == {"theta": 1.0, **nothing}
    assert ask().model_extra.get("metrics") is None

    def check(answer):
        lengths = [len(choice.token_ids) for choice in answer.choices]
        assert [len(each["log_ratios"]) for each in told(answer)] == lengths
        return lengths

    def ratios(answer):
        return [ratio for each in told(answer) for ratio in each["log_ratios"]]

    # What else a step computes rounds them otherwise.
    close = functools.partial(pytest.approx, abs=1e-4)

    sampling = {"temperature": 1.0, "seed": 3, "n": 3}
    whole = ask(**wanted, **sampling)
    assert len(check(whole)) == 3
    # A string that stands in the middle of the first answer, and ends it in the front end.
    text = whole.choices[0].message.content
    cut = ask(**wanted, **sampling, stop=text[len(text) // 2 :][:3])
    assert check(cut)[0] < len(whole.choices[0].token_ids)
    assert cut.choices[0].finish_reason == "stop"
    of_cut = told(cut)[0]["log_ratios"]
    assert of_cut == close(told(whole)[0]["log_ratios"][: len(of_cut)])
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = list(ask(**wanted, **sampling, **usage))[-1]
    assert ratios(streamed) == close(ratios(whole))

    prompts = {"model": "model", "prompt": ["one two three one two", "a b c a b"], "max_tokens": 24}
    completion = client.completions.create(**prompts, **wanted, **sampling)
    assert len(check(completion)) == 6
    streamed = list(client.completions.create(**prompts, **wanted, **sampling, **usage))[-1]
    assert ratios(streamed) == close(ratios(completion))
