"""Rules judged in the same states: the expectation for a step is its mean result."""

import math

import numpy as np
import pytest
import torch

from benchmarks import states
from calls import LONGEST, Call, on_cpu, sampled_step
from vllm_mars.kernels import reference
from vllm_mars.kernels.accept import naive as accept
from vllm_mars.options.config import DRAWN_PRICE, FIXED_PRICE

RULES = {"strict": 0.0, "price 0.5": 0.5, "price 2": 2.0}


@pytest.fixture
def judge(monkeypatch):
    judge = states.Judge(str)
    judge.prices = RULES
    judge.install(monkeypatch.setattr)
    return judge


def judged(judge, name):
    """Returns the sums of a rule by request; requests that had ended have none."""
    return {
        int(request): dict(zip(states.SUMS, by_rule[name], strict=True))
        for request, by_rule in judge.sums.items()
    }


def a_call(number, price, sampled=False):
    """A step whose requests all have the price and no bound."""
    call = Call(number, "price", sampled)
    call.records.value.fill_(round(price * 2**16))
    call.records.rate.fill_(states.NO_BOUND)
    call.records.max_tokens.fill_(99)
    return call


@pytest.mark.parametrize("rule", RULES)
def test_a_greedy_step(judge, rule):
    for number in range(20):
        judge.sums = {}
        call = a_call(number, RULES[rule])
        output, _ = on_cpu(call, call.step_counters())
        for request, sums in judged(judge, rule).items():
            ends = set(call.records.stop_ids[int(call.slots[request])].tolist())
            emitted = [token for token in output.output_token_ids[request].tolist() if token >= 0]
            assert sums["steps"] == 1 and sums["tokens"] == len(emitted)
            if not ends & set(emitted):
                assert sums["lost"] == float(output.lost[request]) / 2**16


@pytest.mark.parametrize("is_probabilistic", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_sampled_step(judge, rule, is_probabilistic):
    """Compares with the mean of 400 samples."""
    call = a_call(4, RULES[rule], sampled=True)
    call.temperature = torch.ones(call.batch)
    assert min(call.lengths) < max(call.lengths)
    q, step, _, _ = sampled_step(call, is_probabilistic)
    rng, counts, lost = np.random.default_rng(0), [], []
    for _ in range(400):
        sampling_inputs = accept.CpuSamplingInputs(
            call.temperature, rng.random(sum(call.lengths)), q
        )
        records = step.records._replace(table=step.records.table.clone())
        output = reference.verify(
            step._replace(records=records),
            call.engine_params,
            call.constraints,
            None,
            sampling_inputs,
            torch.zeros(call.batch),
        )
        counts.append(output.num_emitted.tolist())
        lost.append((output.lost / 2**16).tolist())
    for request, sums in judged(judge, rule).items():
        assert sums["steps"] == 400
        for name, all_samples in (("tokens", counts), ("lost", lost)):
            values = np.array(all_samples)[:, request]
            error = 4 * values.std() / math.sqrt(400) + LONGEST * 2**-15
            assert sums[name] / 400 == pytest.approx(values.mean(), abs=error), (request, name)


def test_the_table():
    sums = {
        f"text/chat/{prompt}": {
            "strict": [20.0, 10.0, 0.0, 0.0, 20.0, 2.0, 2.0],
            "bound 0.02": [22.0 + prompt, 10.0, 0.44, 0.1, 20.0, 2.0, 1.9],
        }
        for prompt in range(3)
    }
    point = {"k": 4, "drafts": "probabilistic", "temperature": 1.0, "draft_temperature": None}
    (title, strict, bounded) = states.report([{**point, "sums": sums}])
    assert title == ["temperature 1, probabilistic drafts, K 4"]
    assert strict[:5] == ["strict", 3, 2.0, 1.0, None] and strict[-1] == 1.0
    assert bounded[2][0] == 2.3 and bounded[3][0] == 1.15 and bounded[-1] == 0.95
    assert bounded[5][0] == pytest.approx(1.32 / 69, abs=1e-5)
    # vLLM's default, strict with fixed drafts, comes last.
    fixed = {prompt: {"strict": [16.0, 10.0, 0.0, 0.0, 16.0, 0.0, 0.0]} for prompt in sums}
    lines = [{**point, "drafts": "greedy", "sums": fixed}, {**point, "sums": sums}]
    rows = states.report(lines)
    assert [row[0] for row in rows[:3]] == [title[0], "strict", "bound 0.02"]
    assert rows[1][4] == 1.25 and rows[2][4][0] == pytest.approx(2.3 / 1.6, abs=1e-5)
    assert rows[3] == ["temperature 1, fixed drafts, K 4"] and rows[4][4] == 1.0


def test_a_rule_is_a_price():
    assert states.price_of("price 0.3", 0.5, True) == 0.3
    assert states.price_of("bound 0.04", 0.0, True) == pytest.approx(FIXED_PRICE * 0.2)
    assert states.price_of("bound 0.04", 0.25, True) == pytest.approx(DRAWN_PRICE * 0.4)
