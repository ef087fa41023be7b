"""Per-request theta and reports over real HTTP, with the official client; overrides."""

import functools
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from counts import RELAXED
from engines import PET_FORMAT
from vllm_mars.options.overrides import PERIOD
from vllm_mars.report.metrics import OVERRIDE

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("lossy_server")]

SUBJECTS = ("a fox and a dog", "the days of the week", "a red boat", "three cats on a mat")


@pytest.fixture(scope="module")
def client(lossy_server):
    url = f"{lossy_server.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as opened:
        yield opened


def body(theta):
    return {} if theta is None else {"extra_body": {"vllm_xargs": {"mars_theta": theta}}}


def ask(client, subject, theta, **options):
    prompt = f"Repeat twice, word for word: {subject}. Then explain it in two sentences."
    stream = client.chat.completions.create(
        model="model",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=16,
        stream=True,
        **body(theta),
        **options,
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


@pytest.mark.parametrize(
    "subjects", [SUBJECTS[:2], pytest.param(SUBJECTS, marks=pytest.mark.nightly)], ids=len
)
def test_streams_of_mixed_theta_do_not_affect_each_other(client, subjects):
    thetas = (1, 0.3, None, 0.7)[: len(subjects) + 1]
    requests = [(subject, theta) for subject in subjects for theta in thetas]
    sequential = [ask(client, *request) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        concurrent = list(pool.map(lambda request: ask(client, *request), requests))
    assert concurrent == sequential
    texts = {1: [], 0.3: [], None: [], 0.7: []}
    for text, (_, theta) in zip(sequential, requests, strict=True):
        texts[theta].append(text)
    assert texts[1] != texts[0.3], "theta of a request has no effect"


def ask_all_endpoints(client, theta):
    """Returns the texts of a completion, a response and a chat."""
    prompt = "one two three four, one two three"
    completion = client.completions.create(
        model="model", prompt=prompt, temperature=0, max_tokens=10, **body(theta)
    )
    response = client.responses.create(
        model="model", input=prompt, temperature=0, max_output_tokens=10, **body(theta)
    )
    chat = client.chat.completions.create(
        model="model",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=10,
        **body(theta),
    )
    return completion.choices[0].text, response.output_text, chat.choices[0].message.content


def test_a_running_server_is_made_stricter(lossy_server, client):
    """By a file, for every route; an invalid file changes nothing."""
    file = lossy_server.log_path.with_name("overrides.json")

    def thetas(text):
        """Returns the thetas in force with this file, for requests of no theta, 0.3 and 0.95."""
        if text is None:
            file.unlink()
        else:
            file.write_text(text)
        time.sleep(PERIOD)
        answers = [
            client.completions.create(
                model="model",
                prompt="one, two",
                max_tokens=2,
                extra_body={"vllm_xargs": {"mars_return": True, **options}},
            )
            for options in ({}, {"mars_theta": 0.3}, {"mars_theta": 0.95})
        ]
        return [answer.metrics["mars"][0]["theta"] for answer in answers]

    def gauges():
        metrics = lossy_server.metrics().items()
        named = {key.partition("{")[2]: value for key, value in metrics if OVERRIDE in key}
        return {
            option: value
            for option in ("mars_theta", "mars_max_loss")
            for labels, value in named.items()
            if option in labels and not math.isnan(value)
        }

    def relaxed():
        return sum(v for k, v in lossy_server.metrics().items() if k.startswith(RELAXED + "_total"))

    strict = ask_all_endpoints(client, 1), ask(client, SUBJECTS[0], 1)
    try:
        assert thetas('{"mars_theta": 0.9}') == [0.9, 0.9, 0.95]
        assert gauges() == {"mars_theta": 0.9}
        assert thetas('{"mars_max_loss": 0}') == [1, 1, 1]
        assert gauges() == {"mars_max_loss": 0}
        before = relaxed()
        assert (ask_all_endpoints(client, 0.3), ask(client, SUBJECTS[0], None)) == strict
        client.completions.create(model="model", prompt="one, two", n=2, seed=1, max_tokens=16)
        assert relaxed() == before
        for broken in ("{", '{"mars_theta": 0.2}', '{"mars_gain": 0}', None):
            assert thetas(broken) == [1, 1, 1]
            assert gauges() == {"mars_max_loss": 0}
    finally:
        assert thetas("{}") == [0.3, 0.3, 0.95]
    assert gauges() == {}
    assert ask_all_endpoints(client, 0.3) != strict[0]
    assert lossy_server.log_path.read_text().count("Until then this stays") == 4


def refusals():
    """Pairs of `vllm_xargs` that are refused and a part of the message."""
    return [
        ({"mars_theta": 2}, "mars_theta=2 is outside (0, 1]"),
        ({"mars_theta": math.nan}, "mars_theta=nan is outside (0, 1]"),
        ({"mars_theta": 10**30}, "extra_args integers must be between"),
        ({"mars_theta": 2**63}, "mars_theta=9223372036854775808 is outside (0, 1]"),
        ({"mars_theta": 0.2}, "below this server's own 0.3, but a request may only be stricter"),
        ({"mars_return": "no"}, "mars_return='no' is not true or false"),
        # A key that only the front end may set.
        ({"mars_overrides": 0}, "mars_overrides is not an option of a request"),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_values_are_refused_and_affect_nobody_else(lossy_server, client, stream):
    """HTTP 400 with the field and the range, while another request runs."""
    expected = ask(client, SUBJECTS[0], 0.7)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, client, SUBJECTS[0], 0.7)
        for xargs, message in refusals():
            # The official client cannot send NaN.
            response = httpx.post(
                f"{lossy_server.base_url}/v1/chat/completions",
                content=json.dumps(
                    {
                        "model": "model",
                        "messages": [{"role": "user", "content": "Hi"}],
                        "max_tokens": 4,
                        "stream": stream,
                        "vllm_xargs": xargs,
                    }
                ),
                headers={"content-type": "application/json"},
                timeout=120,
                trust_env=False,
            )
            assert response.status_code == 400, (xargs, response.text)
            assert message in response.json()["error"]["message"], (xargs, response.text)
        assert running.result() == expected
    assert ask(client, SUBJECTS[0], 0.7) == expected


@pytest.mark.parametrize("mode", ["chat", ("stream",), ("background",), ("background", "stream")])
def test_a_stream_is_refused_before_it_begins(client, mode):
    with pytest.raises(openai.BadRequestError, match=r"own 0.3") as refused:
        if mode == "chat":
            ask(client, SUBJECTS[0], 0.1)
        else:
            modes = dict.fromkeys(mode, True)
            client.responses.create(model="model", input="Hi", **modes, **body(0.1))
    assert refused.value.param == "vllm_xargs"


def test_structured_output_is_that_of_strict_verification(client):
    texts = [ask(client, "a pet as JSON", theta, response_format=PET_FORMAT) for theta in (0.3, 1)]
    assert texts[0] == texts[1]


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
