"""What a setting does to sampled text: tokens per step, drift, NLL, length, per answer.

    python -m benchmarks.text --prompts question.jsonl --skip 10 --each 10 --temperature 1
        --setting strict='{"mars_price": 0}' --setting 'bound 0.02={}' --output text.jsonl

The packaged model with its head in one engine with `mars_max_loss`; each setting is what a request
asks for. NLL and the rank of tokens come from the answers' own logprobs, which are the target's.
Each line is an answer; a setting's own line has the engine's counts.
"""

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any


def control(worker: Any, base: float, gain: float) -> None:
    """Lets the drift of a request so far set what its drafts are drawn at, on V1.

    The share of its temperature is base exp(-gain drift): colder while text grows hotter.
    """
    import torch

    from vllm_mars.kernels import cpu

    runner = worker.model_runner
    requests, drafter, settle = runner.rejection_sampler.requests, runner.drafter, cpu.settle
    drift = torch.zeros(runner.max_num_reqs + 1)

    def settle_and_note(
        plan: Any, drafts: Any, step: Any, tokens: Any, account: Any = None
    ) -> None:
        settle(plan, drafts, step, tokens, account)
        slots = step.slots.long()
        before = torch.where(step.produced <= 1, 0, drift[slots])
        drift[slots] = before + account.table[:, 1].sum(1)

    sample_from_logits = drafter._sample_from_logits

    def sample(logits: torch.Tensor, sampling_metadata: Any) -> Any:
        if (temperature := sampling_metadata.temperature) is not None:
            share = base * torch.exp(-gain * drift[requests._slots[: len(temperature)]])
            share = share.clamp(0.4, 1.3)
            sampling_metadata = replace(sampling_metadata, temperature=temperature * share)
        return sample_from_logits(logits, sampling_metadata)

    cpu.settle, drafter._sample_from_logits = settle_and_note, sample


def main() -> None:
    """Measures, a line for each answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--without", nargs="*", default=["summarization", "rag"])
    parser.add_argument("--skip", type=int, default=0, help="prompts of each kind")
    parser.add_argument("--each", type=int, default=10)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--drafts", default="probabilistic")
    parser.add_argument("--server", type=json.loads, default={"mars_max_loss": 0.02})
    parser.add_argument("--control", type=float, nargs=2, help="base and gain: see `control`")
    parser.add_argument("--setting", action="append", required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    from vllm_mars.local.draft_head import PACKAGED_HEAD
    from vllm_mars.local.drafts import speculative_config
    from vllm_mars.local.packaged_model import ensure_model
    from vllm_mars.local.prompts import load_prompts
    from vllm_mars.local.provenance import describe_run

    kinds: dict[str, list[Any]] = {}
    for prompt in load_prompts(args.prompts):
        if prompt.category not in args.without:
            kinds.setdefault(prompt.category, []).append(prompt)
    prompts = [it for kind in kinds.values() for it in kind[args.skip : args.skip + args.each]]
    chats = [[{"role": "user", "content": prompt.turns[0]}] for prompt in prompts]
    speculation = speculative_config(
        str(PACKAGED_HEAD),
        args.k,
        draft_sample_method=args.drafts,
        rejection_sample_method="mars",
        **args.server,
    )
    llm = LLM(
        str(ensure_model()),
        speculative_config=speculation,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=args.batch,
        disable_log_stats=False,
        generation_config="vllm",
        enable_prefix_caching=True,
    )

    if args.control:
        llm.collective_rpc(control, args=tuple(args.control))

    def counters() -> dict[str, float]:
        from prometheus_client import REGISTRY

        found: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if sample.name.startswith("vllm:") and sample.name.endswith("_total"):
                    found[sample.name] = found.get(sample.name, 0) + sample.value
        return found

    settings = {name: json.loads(own) for name, own in (it.split("=", 1) for it in args.setting)}
    common = {"run": describe_run(None), **{k: str(v) for k, v in vars(args).items()}}
    with args.output.open("a") as file:
        file.write(json.dumps({"common": common, "prompts": [it.id for it in prompts]}) + "\n")
        for seed in args.seeds:
            for name, own in settings.items():
                extra = {"mars_return": True, **own}
                temperature = extra.pop("temperature", args.temperature)
                params = SamplingParams(
                    temperature=temperature,
                    max_tokens=args.max_tokens,
                    seed=seed,
                    logprobs=1,
                    extra_args=extra,
                )
                before, begin = counters(), time.monotonic()
                outputs = llm.chat(chats, params, use_tqdm=False)
                seconds, after = time.monotonic() - begin, counters()
                for prompt, request in zip(prompts, outputs, strict=True):
                    answer = request.outputs[0]
                    chosen, unlikely = [], 0
                    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
                        first = max(it.logprob for it in entry.values())
                        chosen.append(entry[token].logprob)
                        unlikely += entry[token].logprob < first - 1.6094
                    grams = [tuple(answer.token_ids[i : i + 4]) for i in range(len(chosen) - 3)]
                    metrics = answer.spec_decode_metrics
                    told = metrics.mars
                    row = {
                        "setting": name,
                        "seed": seed,
                        "prompt": prompt.id,
                        "tokens": len(chosen),
                        "steps": sum(metrics.histogram),
                        "nll": -sum(chosen),
                        "unlikely": unlikely,
                        "ended": answer.finish_reason == "stop",
                        "repeated": len(grams) - len(set(grams)),
                        "drift": told.get("drift_nats", sum(told.get("loss_nats", []))),
                        "log_ratio": sum(told.get("log_ratios", [])),
                    }
                    file.write(json.dumps(row) + "\n")
                rise = {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k, 0)}
                file.write(json.dumps({"of": name, "seed": seed, "s": seconds, **rise}) + "\n")
                file.flush()
                print(name, seed, f"{seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
