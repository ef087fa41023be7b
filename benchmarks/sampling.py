"""Studies of requests that sample under a price, on real engines (V1) of the packaged model.

    python -m benchmarks.sampling weights --draft ngram --length 8 --price 0.6 PROMPTS.jsonl
    python -m benchmarks.sampling look-ahead --prices 0.6 1 --seeds 0 1 2 PROMPTS.jsonl
    python -m benchmarks.sampling nll --temperature 1 PROMPTS.jsonl SWEEP.jsonl

`weights`: the mean of p / m, which is 1 where `log_ratios` are right, by kind of request, all kinds
in one batch. `look-ahead`: the server's own account of extra acceptance and of loss, with what the
rest of a draft is worth and without it. `nll`: of a sweep's answers under the target, which
transformers computes, in nats per token. Each prints one line of JSON per row.
"""

import argparse
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from vllm_mars.kernels import rule as definition
from vllm_mars.kernels.rule import Allowance, Position, Rows
from vllm_mars.kernels.terms import RuleName
from vllm_mars.local.draft_head import PACKAGED_HEAD
from vllm_mars.local.drafts import speculative_config
from vllm_mars.local.packaged_model import ensure_model
from vllm_mars.local.prompts import load_prompts

KINDS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.6, top-p 0.9": {"temperature": 0.6, "top_p": 0.9},
    "temperature 1, top-k 50": {"temperature": 1.0, "top_k": 50},
    "temperature 0.6": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
}


def without_look_ahead(
    rows: Rows, begin: int, end: int, name: RuleName, allowed: Allowance
) -> list[Position]:
    """`definition.sampled` of a price, without a bound, where a bias is the price alone."""
    # A draft of one token has nothing behind it.
    return [
        position for i in range(begin, end) for position in SAMPLED(rows, i, i + 1, name, allowed)
    ]


SAMPLED = definition.sampled


def engine(draft: str, length: int, price: float) -> Any:
    from vllm import LLM

    config = speculative_config(draft, length, rejection_sample_method="mars", mars_price=price)
    return LLM(
        str(ensure_model()),
        speculative_config=config,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=24,
        max_model_len=2048,
        disable_log_stats=False,
    )


def answers(
    llm: Any, prompts: list[Any], sampling: list[Any]
) -> tuple[list[Any], dict[str, float]]:
    before = counters(llm)
    outputs = llm.chat(
        [[{"role": "user", "content": prompt.turns[0]}] for prompt in prompts],
        sampling,
        use_tqdm=False,
    )
    after = counters(llm)
    return outputs, {name: after[name] - before.get(name, 0.0) for name in after}


def counters(llm: Any) -> dict[str, float]:
    return {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}


def params(seed: int, args: argparse.Namespace, **kind: Any) -> Any:
    from vllm import SamplingParams

    own = {"mars_return": True}
    return SamplingParams(
        max_tokens=args.max_tokens, ignore_eos=True, seed=seed, extra_args=own, **kind
    )


def weights(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    prompts = load_prompts(args.prompts) * args.repeats
    llm = engine(args.draft, args.length, args.price)
    names = list(KINDS)
    once = len(prompts) // args.repeats
    # A prompt has another kind each time.
    kinds = [names[(i + i // once) % len(names)] for i in range(len(prompts))]
    sampling = [params(i, args, **KINDS[kind]) for i, kind in enumerate(kinds)]
    outputs, counted = answers(llm, prompts, sampling)
    found: dict[str, list[float]] = defaultdict(list)
    for kind, output in zip(kinds, outputs, strict=True):
        told = output.outputs[0].spec_decode_metrics.to_dict()["mars"]
        found[kind] += told.get("log_ratios", [])
    for kind, ratios in found.items():
        if ratios:
            ratio = np.exp(-np.array(ratios))
            error = ratio.std() / math.sqrt(len(ratio))
            yield {
                "kind": kind,
                "tokens": len(ratio),
                "mean": round(ratio.mean(), 5),
                "standard_error": round(error, 5),
                "deviation": round((ratio.mean() - 1) / error, 2),
            }
    drafts = counted["vllm:spec_decode_num_drafts"]
    yield {
        "tokens_per_step": round(1 + counted["vllm:spec_decode_num_accepted_tokens"] / drafts, 3)
    }


def look_ahead(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    prompts = load_prompts(args.prompts)
    llm = engine(args.draft, args.length, max(args.prices))
    for seed in args.seeds:
        for price in args.prices:
            for form, function in (("with", SAMPLED), ("without", without_look_ahead)):
                sampling = [
                    params(seed * 10_000 + i, args, temperature=1.0) for i in range(len(prompts))
                ]
                for one in sampling:
                    one.extra_args["mars_price"] = price
                with mock.patch.object(definition, "sampled", function):
                    outputs, counted = answers(llm, prompts, sampling)
                tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                drafts = counted["vllm:spec_decode_num_drafts"]
                accepted = counted["vllm:spec_decode_num_accepted_tokens"]
                yield {
                    "look_ahead": form,
                    "price": price,
                    "seed": seed,
                    "tokens": tokens,
                    "tokens_per_step": round(1 + accepted / drafts, 4),
                    "gained_per_step": round(counted["vllm:mars_gained_acceptance"] / drafts, 5),
                    "nats_per_token": round(counted["vllm:mars_lost_nats"] / tokens, 6),
                }


def nll(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = str(ensure_model())
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = {prompt.id: prompt.turns[0] for prompt in load_prompts(args.prompts)}
    found: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for line in args.sweep.read_text(encoding="utf-8").splitlines():
        turn = json.loads(line)
        if turn["kind"] != "turn":
            continue
        for answer in turn["measured"]["answers"]:
            messages = [{"role": "user", "content": asked[answer["prompt"]]}]
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )["input_ids"]
            # Its last token may be cut: the text holds whole characters.
            own = tokenizer(answer["text"], add_special_tokens=False)["input_ids"]
            if not own:
                continue
            with torch.inference_mode():
                logits = target(torch.tensor([prompt + own])).logits[0, len(prompt) - 1 : -1]
            logprobs = (logits / args.temperature).log_softmax(-1)
            nats = -logprobs.gather(-1, torch.tensor(own)[:, None])[:, 0]
            found[turn["name"]].append((float(nats.sum()), len(own)))
    for name, pairs in found.items():
        sums, lengths = np.array(pairs).T
        mean = sums.sum() / lengths.sum()
        error = math.sqrt(((sums - mean * lengths) ** 2).sum()) / lengths.sum()
        yield {"rule": name, "nll": round(mean, 4), "standard_error": round(error, 4)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling")
    commands = parser.add_subparsers(required=True)
    for name, function in (("weights", weights), ("look-ahead", look_ahead), ("nll", nll)):
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        command.add_argument("prompts", type=Path)
        if function is nll:
            command.add_argument("sweep", type=Path)
            command.add_argument("--temperature", type=float, default=1.0)
            continue
        command.add_argument("--draft", default=str(PACKAGED_HEAD))
        command.add_argument("--length", type=int, default=4)
        command.add_argument("--max-tokens", type=int, default=64)
        if function is weights:
            command.add_argument("--price", type=float, default=0.6)
            command.add_argument("--repeats", type=int, default=4)
        else:
            command.add_argument("--prices", type=float, nargs="+", default=[0.6, 1.0])
            command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="WARNING",
    )
    for row in args.function(args):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
