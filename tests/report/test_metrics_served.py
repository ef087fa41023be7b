"""Counts of a real server: /metrics, the log, and vLLM's counters agree."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from counts import ACCEPTED, GAINED, LOST, RELAXABLE, RELAXED, REQUEST_LOST, VERIFIED
from processes import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("lossy_server")]

PROMPTS = [
    "Repeat this sentence three times: The rain in Spain stays mainly in the plain.",
    "Write a Python function that returns the sum of a list of numbers, then call it twice.",
    "List the days of the week, one on each line, with the word 'day' after each of them.",
    "Explain in three sentences why the sky is blue.",
]


def answer_all(server, theta=None, max_tokens=20):
    """Answers all prompts concurrently; returns the increase of each metric."""
    before = server.metrics()
    extra = {"vllm_xargs": {"mars_theta": theta}} if theta else {}
    with (
        openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none") as client,
        ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):

        def ask(prompt):
            client.chat.completions.create(
                model="model",
                messages=[{"role": "user", "content": prompt}],
                temperature=0,
                max_tokens=max_tokens,
                extra_body=extra,
            )

        list(pool.map(ask, PROMPTS))
    # The step that ends the last request follows its answer.
    for _ in range(20):
        time.sleep(0.5)
        after = server.metrics()
        ended = after[ENDED] - before[ENDED]
        verified = after[VERIFIED_FIRST] - before[VERIFIED_FIRST]
        if verified == after[DRAFTS] - before[DRAFTS] and ended == len(PROMPTS):
            break
    return {name: value - before.get(name, 0) for name, value in after.items()}


VERIFIED_FIRST = f'{VERIFIED}_total{{position="0"}}'
ENDED = f"{REQUEST_LOST}_count"
DRAFTS = "vllm:spec_decode_num_drafts_total"


def check_increase(rise, is_strict=False):
    """Checks our counts against vLLM's; returns the number of relaxed tokens."""

    def by_position(name):
        return [rise[f'{name}_total{{position="{position}"}}'] for position in range(4)]

    verified, relaxed = by_position(VERIFIED), by_position(RELAXED)
    accepted = by_position("vllm:spec_decode_num_accepted_tokens_per_pos")
    assert verified[0] == rise[DRAFTS] > 0
    assert rise[f"{RELAXABLE}_total"] == (0 if is_strict else sum(verified))
    # The position after an accepted draft token is verified, except at an answer's end.
    assert all(after <= before for before, after in zip(accepted, verified[1:], strict=False))
    assert all(a <= v for a, v in zip(accepted, verified, strict=True))
    # vLLM also counts tokens after an answer's end.
    in_answers = by_position(ACCEPTED)
    assert all(ours <= vllms for ours, vllms in zip(in_answers, accepted, strict=True))
    assert sum(in_answers) <= rise["vllm:generation_tokens_total"]
    assert all(r <= a for r, a in zip(relaxed, in_answers, strict=True))
    # A greedy request gains each relaxed token.
    assert rise[f"{GAINED}_total"] == sum(relaxed)
    assert (rise[f"{LOST}_total"] > 0) == any(relaxed)
    assert rise[ENDED] == len(PROMPTS)
    lost = rise[f"{REQUEST_LOST}_sum"]
    assert lost == pytest.approx(rise[f"{LOST}_total"])
    return sum(relaxed)


def test_metrics_and_log_of_a_server_agree(lossy_server):
    def logged():
        text = lossy_server.log_path.read_text()
        lines = re.findall(r"Engine 000: MARS metrics: .*, Relaxed outright: (\d+) tokens", text)
        return sum(map(int, lines))

    def total():
        names = lossy_server.metrics().items()
        return sum(value for name, value in names if name.startswith(f"{RELAXED}_total"))

    assert check_increase(answer_all(lossy_server)) > 0
    # Most of these accepted tokens are past the answers' end.
    rise = answer_all(lossy_server, max_tokens=3)
    verified = sum(rise[f'{VERIFIED}_total{{position="{i}"}}'] for i in range(4))
    assert rise[f"{RELAXABLE}_total"] == verified > 0
    accepted = sum(rise[f'{ACCEPTED}_total{{position="{i}"}}'] for i in range(4))
    assert 0 < accepted <= rise["vllm:generation_tokens_total"]
    assert accepted < rise["vllm:spec_decode_num_accepted_tokens_total"]
    assert check_increase(answer_all(lossy_server, theta=1), is_strict=True) == 0
    # The server logs once a second.
    wait_until(lambda: logged() == total(), 10, "the log agrees with /metrics")
