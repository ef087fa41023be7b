"""Counts of a real server: /metrics and the log beside vLLM's own counters."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from counts import ACCEPTED, GAINED, LOST, RELAXABLE, RELAXED, REQUEST_LOST, VERIFIED
from processes import wait_until
from vllm_mars.cli.__main__ import main

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("lossy_server")]

PROMPTS = [
    "Repeat this sentence three times: The rain in Spain stays mainly in the plain.",
    "Write a Python function that returns the sum of a list of numbers, then call it twice.",
    "List the days of the week, one on each line, with the word 'day' after each of them.",
    "Explain in three sentences why the sky is blue.",
]


def ask_all(server, theta=None, max_tokens=20):
    """Answers all prompts at once and returns by how much the metrics rose."""
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
    # The step that ends the last request comes after its answer.
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
    """Whether the counts of this project and of vLLM tell the same story."""

    def of_positions(name):
        return [rise[f'{name}_total{{position="{position}"}}'] for position in range(4)]

    verified, relaxed = of_positions(VERIFIED), of_positions(RELAXED)
    accepted = of_positions("vllm:spec_decode_num_accepted_tokens_per_pos")
    assert verified[0] == rise[DRAFTS] > 0
    assert rise[f"{RELAXABLE}_total"] == (0 if is_strict else sum(verified))
    # Every accepted draft token but a request's last has the next position verified.
    assert all(after <= before for before, after in zip(accepted, verified[1:], strict=False))
    assert all(a <= v for a, v in zip(accepted, verified, strict=True))
    # vLLM also counts tokens after an answer's end.
    belonging = of_positions(ACCEPTED)
    assert all(ours <= vllms for ours, vllms in zip(belonging, accepted, strict=True))
    assert sum(belonging) <= rise["vllm:generation_tokens_total"]
    assert all(r <= a for r, a in zip(relaxed, belonging, strict=True))
    # All of these requests are greedy.
    assert rise[f"{GAINED}_total"] == sum(relaxed)
    assert (rise[f"{LOST}_total"] > 0) == any(relaxed)
    assert rise[ENDED] == len(PROMPTS)
    lost = rise[f"{REQUEST_LOST}_sum"]
    assert lost == pytest.approx(rise[f"{LOST}_total"])
    return sum(relaxed)


def test_a_real_server_counts_exports_and_logs(lossy_server):
    def logged():
        text = lossy_server.log_path.read_text()
        lines = re.findall(r"Engine 000: MARS metrics: .*, Relaxed outright: (\d+) tokens", text)
        return sum(map(int, lines))

    def total():
        names = lossy_server.metrics().items()
        return sum(value for name, value in names if name.startswith(f"{RELAXED}_total"))

    assert check_increase(ask_all(lossy_server)) > 0
    # Most of what is drafted and accepted here lies behind the answers' end.
    rise = ask_all(lossy_server, max_tokens=3)
    verified = sum(rise[f'{VERIFIED}_total{{position="{i}"}}'] for i in range(4))
    assert rise[f"{RELAXABLE}_total"] == verified > 0
    accepted = sum(rise[f'{ACCEPTED}_total{{position="{i}"}}'] for i in range(4))
    assert 0 < accepted <= rise["vllm:generation_tokens_total"]
    assert accepted < rise["vllm:spec_decode_num_accepted_tokens_total"]
    assert check_increase(ask_all(lossy_server, theta=1), is_strict=True) == 0
    # A line each second.
    wait_until(lambda: logged() == total(), 10, "the log tells what /metrics tells")


def test_the_doctor_sees_it_gain(lossy_server, capsys):
    assert main(["doctor", lossy_server.base_url]) == 0
    found = " ".join(capsys.readouterr().out.split())
    assert "in force: theta 0.3, lossy" in found
    assert re.search(r"gained [1-9][\d.]* draft tokens at [1-9]\d* verified positions", found)
    assert found.endswith("all is well")
