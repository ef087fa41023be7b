"""`mars_max_loss` over whole answers on real engines: each of 200 keeps its bound at each prefix.

Of greedy answers, and of sampled ones by theta, the target itself says what was lost; of those by a
price the record, after each step. Bounds differ within a batch, and memory is so short that some
requests are preempted.
"""

import math

import numpy as np
import pytest

import tiny_models
import workload
from engines import counters, engine_in_process
from promise import check_promise
from vllm_mars.kernels import cpu
from vllm_mars.kernels.terms import most_lost

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


NUM_ANSWERS = 200
# In nats per token; the server's own stands where a request has none.
BOUNDS = (None, 0.03, 0.01, 0.0)
SERVER = {"mars_max_loss": 0.05}
METRICS = {
    "theta": {"mars_theta": 0.01},
    "price": {"mars_price": 1000.0},
}
# Two requests fill these blocks before they end.
MEMORY = {"max_num_seqs": 4, "block_size": 32, "num_gpu_blocks_override": 7}


def requests(max_tokens):
    """Prompts and the parameters of each; the second half is greedy and sampled in turn."""
    rng = np.random.default_rng(0)
    prompts, sampling = [], []
    for number in range(NUM_ANSWERS):
        prompts.append(rng.integers(3, tiny_models.VOCAB, rng.integers(2, 30)).tolist())
        bound = BOUNDS[number // 2 % len(BOUNDS)]
        own = {} if bound is None else {"mars_max_loss": bound}
        is_sampled = number >= NUM_ANSWERS // 2 and number % 2
        sampling.append(
            {
                "temperature": float(is_sampled),
                "seed": number,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "extra_args": {"mars_return": True, **own},
            }
        )
    return prompts, sampling


def check(target, prompts, sampling, answers, told):
    """Whether all answers keep their bounds, and whether these bind."""
    lost = dict.fromkeys(BOUNDS, 0.0)
    for prompt, params, tokens, returned in zip(prompts, sampling, answers, told, strict=True):
        if "log_ratios" in returned and "price" in returned:
            assert len(returned["log_ratios"]) == len(tokens)
            continue
        own = params["extra_args"].get("mars_max_loss")
        bound = SERVER["mars_max_loss"] if own is None else own
        lost[own] += check_promise(target, prompt, tokens, returned, bound)
    assert lost[None] > lost[0.03] > lost[0.01] > lost[0.0] == 0


@pytest.fixture
def watched(monkeypatch):
    """Sampled steps, in each of which every request's record is within what its tokens allow."""
    steps, accept = [], cpu.accept

    def accept_and_check(drafts, requests, rule, blocked, account, sampled):
        output = accept(drafts, requests, rule, blocked, account, sampled)
        records, produced = requests.records, requests.produced.tolist()
        for place, slot in enumerate(requests.slots.tolist()):
            tokens = produced[place] + int((output.output_token_ids[place] >= 0).sum())
            assert records.lost[slot] <= most_lost(int(records.rate[slot]), tokens)
        if sampled is not None:
            steps.append(int(output.lost.sum()))
        return output

    monkeypatch.setattr(cpu, "accept", accept_and_check)
    return steps


def speculation(models, metric):
    return {
        "method": "draft_model",
        "model": str(models[1]),
        "num_speculative_tokens": 3,
        "rejection_sample_method": "mars",
        **METRICS[metric],
        **SERVER,
    }


@pytest.mark.parametrize("metric", METRICS)
def test_each_answer_of_v1_keeps_its_bound(models, metric, watched):
    from vllm import SamplingParams

    prompts, sampling = requests(max_tokens=64)
    with engine_in_process(models[0], speculation(models, metric), **MEMORY) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [SamplingParams(detokenize=False, **params) for params in sampling],
            use_tqdm=False,
        )
        metrics = counters(llm)
    answers = [output.outputs[0] for output in outputs]
    told = [answer.spec_decode_metrics.mars for answer in answers]
    check(models[2], prompts, sampling, [list(answer.token_ids) for answer in answers], told)
    assert metrics["vllm:num_preemptions"] > 0
    nats = math.fsum(nats for answer in told for nats in answer.get("loss_nats", []))
    assert any(watched)
    assert metrics["vllm:mars_lost_nats"] >= nats > 0


@pytest.mark.timeout(1600)
def test_each_answer_of_v2_keeps_its_bound(models):
    prompts, sampling = requests(max_tokens=24)
    result = workload.run(
        speculation(models, "price"),
        [list(zip(prompts, sampling, strict=True))],
        v2=True,
        timeout=1500,
        model=str(models[0]),
        **{**MEMORY, "max_model_len": 64},
    )
    answers = [answer for (answer,) in result["batches"][0]]
    tokens, told = ([answer[name] for answer in answers] for name in ("tokens", "returned"))
    check(models[2], prompts, sampling, tokens, told)
    assert result["metrics"][-1]["vllm:num_preemptions"] > 0
