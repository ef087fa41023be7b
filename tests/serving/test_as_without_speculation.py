"""Answers at price 0 over HTTP equal those of a server without speculation.

Greedy answers have the same tokens, logprobs, usage and finish reasons. Sampled answers use other
random numbers under speculation, so only the first token and the rest of the answer are compared.
"""

import json
import math

import httpx
import pytest

from engines import PET_FORMAT, open_server

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("bounded_server")]

TEXT = "one two three, one two"
GREEDY = {"model": "model", "temperature": 0, "max_tokens": 32, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": TEXT}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
NEEDED = {
    CHAT: {"messages": MESSAGES, "return_token_ids": True},
    COMPLETION: {"prompt": TEXT, "return_token_ids": True},
    "/v1/chat/completions/batch": {"messages": [MESSAGES, MESSAGES]},
    "/v1/messages": {"messages": MESSAGES},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 32},
    "/generative_scoring": {"query": TEXT, "items": [" x", "y"], "label_token_ids": [5, 6, 7]},
}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
STOPS = list(range(0, 512, 7))
SAMPLED = {"temperature": 1, "seed": 5}
TABLE = [
    *((route, {}) for route in NEEDED if route != "/generative_scoring"),
    *((COMPLETION, {"max_tokens": tokens}) for tokens in range(1, 6)),
    *((COMPLETION, {"logprobs": number}) for number in (0, 1, 5)),
    *((CHAT, {"logprobs": True, "top_logprobs": number}) for number in (0, 1, 5)),
    *((COMPLETION, {"prompt_logprobs": number, "logprobs": 2}) for number in (0, 3)),
    *((COMPLETION, {"echo": True, "logprobs": 2, "max_tokens": tokens}) for tokens in (0, 3)),
    *((route, {**STREAM, "logprobs": 1}) for route in (CHAT, COMPLETION)),
    (COMPLETION, {"prompt": [TEXT, "x"]}),
    (COMPLETION, {"stop": ["w3", "w4"]}),
    (COMPLETION, {"stop": ["w3", "w4"], "include_stop_str_in_output": True, **STREAM}),
    (COMPLETION, {"stop_token_ids": STOPS}),
    (COMPLETION, {"stop_token_ids": STOPS, "min_tokens": 20, "logprobs": 1}),
    (COMPLETION, {"ignore_eos": False, "max_tokens": 200}),
    (COMPLETION, {"frequency_penalty": 1.5, "presence_penalty": 1.5}),
    (COMPLETION, {"repetition_penalty": 1.4}),
    (COMPLETION, {"bad_words": ["w3", "a"]}),
    (COMPLETION, {"allowed_token_ids": STOPS}),
    (CHAT, {"response_format": PET_FORMAT}),
    (COMPLETION, {"structured_outputs": {"regex": "(a|b)+c"}, "logprobs": 1}),
    (COMPLETION, {"structured_outputs": {"choice": ["red", "blue"]}}),
    (COMPLETION, {"structured_outputs": {"grammar": 'root ::= "ab" root | "c"'}}),
    (COMPLETION, {"repetition_detection": {"max_pattern_size": 8, "min_count": 3}}),
    (COMPLETION, {**SAMPLED, "max_tokens": 1, "logprobs": 3}),
    (COMPLETION, {**SAMPLED, "n": 3}),
    (COMPLETION, {"use_beam_search": True, "n": 2, "max_tokens": 8}),
    (COMPLETION, {"logprobs": 2, "logprob_token_ids": [5, 6]}),
    (CHAT, {"logprobs": True, "logprob_token_ids": [5, 6]}),
    (CHAT, {"logprobs": True, "logprob_token_ids": [5, 6], **STREAM}),
    *(("/generative_scoring", {"apply_softmax": softmax}) for softmax in (True, False)),
]
# Keys that differ between any two answers, or with speculation.
IGNORED = {"id", "created", "created_at", "metrics", "system_fingerprint"}


@pytest.fixture(scope="module")
def plain_server(bytes_model, tmp_path_factory):
    with open_server(bytes_model, None, tmp_path_factory.mktemp("plain")) as running:
        yield running


def answer(server, route, body, **extra):
    """Returns the status and the content of an answer, with the parts of a stream merged."""
    content = {**GREEDY, **NEEDED[route], **body, **extra}
    response = httpx.post(server.base_url + route, json=content, timeout=60, trust_env=False)
    if "stream" not in body:
        return response.status_code, response.json()
    parts = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    whole = {}
    for part in map(json.loads, parts):
        merge(whole, part)
    return response.status_code, whole


def merge(whole, part):
    """Merges a part of a stream: strings and lists grow, other values are replaced."""
    for key, value in part.items():
        if isinstance(value, dict):
            merge(whole.setdefault(key, {}), value)
        elif key == "choices":
            for choice in value:
                merge(whole.setdefault(choice["index"], {}), choice)
        elif key in ("content", "text") or isinstance(value, list):
            whole[key] = whole[key] + value if key in whole else value
        elif value is not None:
            whole[key] = value


def differences(one, other, path=""):
    """Lists the differences of two answers; numbers may differ by rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = (one.keys() | other.keys()) - IGNORED
        pairs = [(f"{path}.{key}", one.get(key), other.get(key)) for key in sorted(keys, key=str)]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(f"{path}[{i}]", *both) for i, both in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, float) and isinstance(other, float):
        return [] if math.isclose(one, other, abs_tol=1e-3) else [f"{path}: {one} {other}"]
    else:
        return [] if one == other else [f"{path}: {one!r} {other!r}"]
    return [line for path, one, other in pairs for line in differences(one, other, path)]


@pytest.mark.parametrize(("route", "body"), TABLE, ids=str)
def test_an_answer(bounded_server, plain_server, route, body):
    expected = answer(plain_server, route, body)
    assert expected[0] == 200, expected
    extra = {} if route == "/generative_scoring" else {"vllm_xargs": {"mars_price": 0}}
    actual = answer(bounded_server, route, body, **extra)
    differing = differences(list(expected), list(actual))
    if "seed" in body and "max_tokens" not in body:
        words = ("text", "token_ids")
        differing = [line for line in differing if not any(word in line for word in words)]
    assert not differing, differing


def test_drafts_are_accepted(bounded_server):
    """Without accepted drafts the comparison would prove nothing."""

    def accepted():
        return bounded_server.metrics()["vllm:spec_decode_num_accepted_tokens_total"]

    before = accepted()
    for route in (CHAT, COMPLETION):
        answer(bounded_server, route, {"max_tokens": 200}, vllm_xargs={"mars_price": 0})
    assert accepted() > before + 50
