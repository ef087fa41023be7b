"""What block verification would add: expected tokens per step, on the steps of a real engine (V1).

    python -m benchmarks.block PROMPTS.jsonl TEMPERATURE PRICE

Drafts are drawn by the packaged head, K 4. For each draft both expectations follow from its
probabilities and those of what is served, without sampling noise. Prints one line of JSON. The rule
is that of Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from vllm_mars.local.draft_head import PACKAGED_HEAD
from vllm_mars.local.drafts import speculative_config
from vllm_mars.local.packaged_model import ensure_model
from vllm_mars.local.prompts import load_prompts
from vllm_mars.runner import sampler_v1


def accepted_by_token(ratios: list[float]) -> float:
    """Expected accepted drafts of one draft; ratios: m(x) / q(x) of each of its tokens."""
    reached, total = 1.0, 0.0
    for ratio in ratios:
        reached *= min(1.0, ratio)
        total += reached
    return total


def accepted_by_block(ratios: list[float], served: torch.Tensor, drawn: torch.Tensor) -> float:
    """The same by blocks; served, drawn: `[len(ratios), vocab]` float32."""
    joint, chances = 1.0, []
    for i, ratio in enumerate(ratios, start=1):
        joint = min(1.0, joint * ratio)
        chance = joint
        if i < len(ratios):
            left = float((joint * served[i] - drawn[i]).clamp_min(0).sum())
            chance = left / (left + 1 - joint) if joint < 1 else 1.0
        chances.append(chance)
    none, total = 1.0, 0.0
    for i, chance in reversed(list(enumerate(chances, start=1))):
        total += i * none * chance
        none *= 1 - chance
    return total


def main(prompts: Path, temperature: float, price: float) -> None:
    from vllm import LLM, SamplingParams

    found: list[tuple[float, float]] = []
    verify = vars(sampler_v1)["rejection_sample"]

    def count(tokens: Any, counts: Any, longest: int, ends: Any, q: Any, *rest: Any, **given: Any):  # type: ignore[no-untyped-def]
        begin = 0
        for length in counts:
            rows = slice(begin, begin + length)
            begin += length
            if not length:
                continue
            served, drawn = rest[0][rows].float().softmax(-1), q[rows]
            own = tokens[rows, None].long()
            ratios = (served.gather(1, own) / drawn.gather(1, own))[:, 0].tolist()
            by_block = accepted_by_block(ratios, served, drawn)
            found.append((accepted_by_token(ratios), by_block))
        return verify(tokens, counts, longest, ends, q, *rest, **given)

    rule = {"rejection_sample_method": "mars", "mars_price": price}
    rule["draft_sample_method"] = "probabilistic"
    config = speculative_config(str(PACKAGED_HEAD), 4, **rule)
    options = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 24}
    llm = LLM(str(ensure_model()), speculative_config=config, max_model_len=2048, **options)
    asked = [[{"role": "user", "content": prompt.turns[0]}] for prompt in load_prompts(prompts)]
    every = range(len(asked))
    sampling = [SamplingParams(temperature=temperature, max_tokens=64, seed=i) for i in every]
    with mock.patch.object(sampler_v1, "rejection_sample", count):
        llm.chat(asked, sampling, use_tqdm=False)
    by_token, by_block = (1 + sum(own) / len(found) for own in zip(*found, strict=True))
    row = {"temperature": temperature, "price": price, "steps": len(found)}
    row |= {"tokens_per_step": by_token, "by_block": by_block, "ratio": by_block / by_token}
    print(json.dumps(row))


if __name__ == "__main__":
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="2", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    main(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
