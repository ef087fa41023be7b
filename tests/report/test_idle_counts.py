"""An engine that goes idle sends all counts, however long the interval between copies."""

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

import counts
import tiny_models
from engines import engine_in_process, greedy_tokens
from processes import wait_until
from vllm_mars.servers.server import VllmServer
from workload import draft_model

pytestmark = pytest.mark.engine

PROMPTS = [[5, 6, 7] * 4, [9, 8] * 6, [30, 31, 32] * 3]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A target and its speculative config."""
    directory, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    tiny_models.first_layer(draft, tiny_models.llama(directory))
    tiny_models.tokenizer(directory)
    return directory, draft_model(draft, rejection_sample_method="mars")


VERIFIED, ENDED = f"{counts.VERIFIED}_total", f"{counts.REQUEST_LOST}_count"


def counted():
    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    return {
        name: sum(sample.value for sample in samples if sample.name == name)
        for name in (VERIFIED, ENDED)
    }


def test_an_idle_engine_in_this_process_has_sent_all_counts(model, monkeypatch):
    from vllm_mars.worker import sampler_v1

    hourly = functools.partial(sampler_v1.Counters, interval=3600.0)
    monkeypatch.setattr(sampler_v1, "Counters", hourly)
    with engine_in_process(*model) as llm:
        # The first copy is due at once.
        greedy_tokens(llm, PROMPTS[:1], max_tokens=4)
        for num_requests in (1, 3, 2):
            before = counted()
            greedy_tokens(llm, PROMPTS[:num_requests], max_tokens=20)
            after = counted()
            assert after[ENDED] - before[ENDED] == num_requests
            assert after[VERIFIED] > before[VERIFIED]
            assert not llm.llm_engine.has_unfinished_requests()


def test_an_idle_server_has_sent_all_counts(model, tmp_path):
    import openai

    with VllmServer(
        model[0],
        [
            "--enforce-eager",
            "--dtype=float32",
            "--max-model-len=128",
            "--max-num-seqs=4",
            "--served-model-name=model",
            "--worker-extension-cls=slow_counts.Engine",
            f"--speculative-config={json.dumps(model[1])}",
        ],
        log_path=tmp_path / "server.log",
        env={"PYTHONPATH": str(Path(__file__).parents[1])},
    ) as server:
        client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none")

        def ask(prompt):
            client.completions.create(
                model="model",
                prompt=prompt,
                temperature=0,
                max_tokens=20,
                extra_body={"ignore_eos": True},
            )

        def total(name):
            return sum(value for key, value in server.metrics().items() if key.startswith(name))

        for ended in (3, 6):
            before = total(VERIFIED)
            with ThreadPoolExecutor(3) as pool:
                list(pool.map(ask, PROMPTS))
            wait_until(lambda ended=ended: total(ENDED) == ended, 10, "all counts are there")
            assert total(VERIFIED) > before
