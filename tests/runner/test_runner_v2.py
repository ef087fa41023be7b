"""Model Runner V2 on a CPU, its Triton kernels run by the interpreter: identity, then the rule.

In one batch requests differ in their gap. Every other kind of request is in tests/conformance.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_models

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

INTERPRETED = Path(__file__).parents[1] / "interpreted"
PROMPTS = [[5, 6, 7, 8], [100, 3, 200], [7, 7, 7, 7], [31, 32, 33]]
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    model = tiny_models.llama(target)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    model.save_pretrained(draft)
    return target, draft


def generate(
    models,
    sampling=(GREEDY, GREEDY, GREEDY, GREEDY),
    *,
    prompts=PROMPTS,
    engine=None,
    timeout=500,
    **options,
):
    target, draft = models
    job = {
        "model": str(target),
        "speculative_config": {
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": 3,
            **options,
        },
        "prompts": prompts,
        "sampling": list(sampling),
        "engine": engine or {},
    }
    environment = {
        **os.environ,
        "PYTHONPATH": str(INTERPRETED),
        "TRITON_INTERPRET": "1",
    }
    child = subprocess.run(
        [sys.executable, str(INTERPRETED / "generate.py"), json.dumps(job)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, child.stdout[-3000:] + child.stderr[-3000:]
    result = json.loads(lines[-1].removeprefix("RESULT "))
    result["log"] = child.stdout + child.stderr
    assert "vllm.v1.worker.gpu.model_runner" in result["runner"], "this was not Runner V2"
    return result


def test_theta_1_is_vllm_and_a_gap_accepts_more(models):
    own = generate(models)
    assert own["sampler"] == "RejectionSampler"
    strict = generate(models, rejection_sample_method="mars", mars_theta=1.0)
    assert strict["sampler"] == "MarsRejectionSamplerV2"
    assert strict["tokens"] == own["tokens"]
    assert (
        "Margin-aware verification (MARS) is on: mars_theta=1, no mars_max_loss, 1 protected "
        "tokens, model runner V2, torch backend; the output is lossless (strict)." in strict["log"]
    )
    assert "Margin-aware" not in own["log"]
    # In one batch: the first request stays strict, the second's prompt opens a span that never
    # ends, the third takes what the server gives, within its budget, the last wants no drafts.
    chosen = [{"mars_gap": 0}, {}, {}, {"mars_speculate": False}]
    relaxed = generate(
        models,
        [{**GREEDY, "extra_args": {"mars_return": True, **extra}} for extra in chosen],
        rejection_sample_method="mars",
        mars_gap=1000.0,
        mars_max_loss=0.5,
        mars_strict_spans=[[3, None]],
    )
    assert relaxed["tokens"][:2] == own["tokens"][:2]
    assert relaxed["tokens"][2] != own["tokens"][2]
    assert relaxed["tokens"][3] == own["tokens"][3]
    positions = [told["relaxed_positions"] for told in relaxed["returned"]]
    assert positions[:2] == [[], []]
    assert positions[3] == []
    assert positions[2]
    for count, position in enumerate(positions[2], start=1):
        assert count <= 0.5 * (position + 1)
    assert "mars_gap=1000 nats, mars_max_loss=0.5 nats per token" in relaxed["log"]
    assert "the output is LOSSY: it can differ from the target's own." in relaxed["log"]
    assert relaxed["accepted"] / relaxed["drafted"] > own["accepted"] / own["drafted"]
