"""Acceptance of the packaged model's head by draft position.

    python tests/golden_acceptance.py       # measures and writes golden_acceptance.json

Acceptance shows a wrongly fed draft, or a rule that accepts less, and does not depend on the
machine's load. One greedy engine answers under each rule in turn.
"""

import json
from dataclasses import replace
from pathlib import Path

import conftest  # noqa: F401 - sets the environment in which engines are tested
from engines import engine_in_process
from vllm_mars.lab.prompts import load_prompts
from vllm_mars.models.draft_head import PACKAGED_HEAD
from vllm_mars.models.drafts import speculative_config
from vllm_mars.models.packaged_model import ensure_model
from vllm_mars.servers.provenance import describe_run
from vllm_mars.worker.engine_params import LazyEngineParams

GOLDEN = Path(__file__).with_suffix(".json")
K = 4
MAX_TOKENS = 24
ENGINE = {"skip_tokenizer_init": False, "max_model_len": 256, "max_num_batched_tokens": 256}
# Short prompts of four kinds.
PROMPTS = ("story-bridge", "json-inventory", "explain-yeast", "code-sql")
NO_RULE = {"theta": None, "price": None}
RULES = {
    "strict": {"theta": 1.0},
    "ratio 0.9": {"theta": 0.9},
    "price 0.3": {"price": 0.3},
}


def take_rule(worker, options):
    """Runs in the worker; sets the rule of its sampler."""
    sampler = worker.model_runner.rejection_sampler
    engine_params = sampler.engine_params
    config = replace(engine_params.config, **{**NO_RULE, **options})
    sampler.engine_params = LazyEngineParams(config, engine_params.protected_token_ids)
    sampler.requests._config = config


def measure(model: Path) -> dict[str, dict[str, object]]:
    """Returns, by rule, the number of drafts and of accepted tokens at each position."""
    from vllm import SamplingParams

    texts = {prompt.id: prompt.turns[0] for prompt in load_prompts()}
    chats = [[{"role": "user", "content": texts[name]}] for name in PROMPTS]
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    config = speculative_config(
        str(PACKAGED_HEAD), K, rejection_sample_method="mars", mars_theta=1.0
    )
    measured = {}
    with engine_in_process(model, config, **ENGINE) as llm:

        def counts():
            metrics = {metric.name: metric for metric in llm.get_metrics()}
            by_position = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
            return [metrics["vllm:spec_decode_num_drafts"].value, *by_position]

        for rule, rule_options in RULES.items():
            llm.collective_rpc(take_rule, args=(rule_options,))
            before = counts()
            llm.chat(chats, greedy, use_tqdm=False)
            drafts, *accepted = (now - then for now, then in zip(counts(), before, strict=True))
            measured[rule] = {"drafts": int(drafts), "accepted": [int(count) for count in accepted]}
    return measured


if __name__ == "__main__":
    content = {"schema": 1, **describe_run(None), "rules": measure(ensure_model())}
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n")
