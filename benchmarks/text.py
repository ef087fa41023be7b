"""Tokens per step of each rule, at what loss, and whether its text is like the target's own.

    python -m benchmarks.text --rules mars_max_loss=0.02 mars_max_loss=0.1 --output text.jsonl
    python -m benchmarks.text --report --output text.jsonl --figures text.json

A rule is what a request asks for, so one engine answers by all of them and strictly, with the same
prompts and seeds; `mars_theta` needs a call of its own, and so does each K. A block of prompts is
asked by all rules before the next one. The output has a line for each request of a block by a rule;
a call goes on behind those that are there, and the report is of all.

Of each answer transformers computes the NLL and the entropy of the target, in a forward pass that
knows nothing of vLLM, at the request's temperature (greedily at 1): text drawn from the target has
on average the NLL of its entropy. Nats lost are the engine's counter. Asked is the first turn of a
prompt, in the model's chat template if it has one.

Figures that stand in docs need `raw_files_at` beside them, the commit that holds the output.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.figures import SCHEMA, table_of
from vllm_mars.config import METHOD, MOST_MAX_LOSS
from vllm_mars.experiments.rows import (
    Interval,
    Samples,
    compared,
    estimate,
    means_of,
    ratio_of_means,
)
from vllm_mars.local.draft_head import PACKAGED_HEAD
from vllm_mars.local.drafts import CHOSEN_BY_REQUESTS, speculative_config
from vllm_mars.local.packaged_model import ensure_model
from vllm_mars.local.prompts import PACKAGED, load_prompts
from vllm_mars.local.provenance import describe_run, vllm_device
from vllm_mars.local.result_file import append_line, require_writable, write_json
from vllm_mars.local.vllm_args import CPU_ENGINE_ARGS, CPU_ENV, MAX_MODEL_LEN

if TYPE_CHECKING:
    from vllm import LLM

Calls = Sequence[dict[str, Any]]

# With the servers' rule. Under such a bound a request is as on a server with its own bound, or with
# its own price and no bound.
SERVERS: dict[bool, dict[str, Any]] = {
    False: {"rejection_sample_method": METHOD, "mars_max_loss": MOST_MAX_LOSS},
    True: CHOSEN_BY_REQUESTS["theta"],
}
STRICT = {"strict": {"mars_max_loss": 0.0}}
BOUNDS = [f"mars_max_loss={bound}" for bound in (0.005, 0.01, 0.02, 0.05, 0.1)]
# The forward pass needs memory beside vLLM.
GPU_ENGINE_ARGS: dict[str, Any] = {"gpu_memory_utilization": 0.6, "dtype": "bfloat16"}
# GiB for 32 answers to their end; and the engine in this process, which reads its counts.
ENV = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# The paper's.
THETA = 0.9
# Rows of logits in float32 at once.
CHUNK = 256
# What the calls of one table have in common.
POINT = ("model", "draft", "k", "max_tokens", "temperature")
# With the formats of their numbers.
COLUMNS = [
    ["rule", ""],
    ["tokens per step", ".2f"],
    ["tokens per step x strict", ".2f"],
    ["nats lost per token", ".4f"],
    ["mean weight of a token", ".4f"],
    ["drift", "+.4f"],
    ["NLL less strict's", "+.2f"],
    ["NLL less entropy", "+.3f"],
    ["length x strict", ".2f"],
    ["ended less strict's, points", "+.1f"],
    ["repeated 4-grams", ".3f"],
]


def score(model: Any, prompt: list[int], answer: list[int], temperature: float) -> dict[str, float]:
    """What the target, a model of transformers, says of an answer, summed over its tokens.

    Returns:
        `nll` and `entropy` in nats; `close`, how many positions have a runner-up that the paper's
        theta accepts, and `odds`, the sum of p2 / p1 there.
    """
    import torch

    tokens = torch.tensor(prompt + answer, device=model.device)
    sums = torch.zeros(4, dtype=torch.float64)
    with torch.inference_mode():
        logits = model(tokens[None], logits_to_keep=len(answer) + 1).logits[0, :-1]
        for at in range(0, len(answer), CHUNK):
            rows = logits[at : at + CHUNK].float() / (temperature or 1)
            log_p, own = rows.log_softmax(-1), tokens[len(prompt) + at :][:CHUNK, None]
            first, second = rows.topk(2).values.unbind(-1)
            close = (first > 0) & (second > THETA * first)
            nll, entropy = -log_p.gather(1, own).sum(), -(log_p.exp() * log_p).sum()
            odds = (second - first).exp()[close].sum()
            sums += torch.stack([nll, entropy, close.sum(), odds]).cpu()
    return dict(zip(("nll", "entropy", "close", "odds"), sums.tolist(), strict=True))


def told(answer: Any) -> dict[str, float]:
    """What vLLM's `CompletionOutput` and the report in it say of an answer."""
    tokens, metrics = list(answer.token_ids), answer.spec_decode_metrics
    grams = [tuple(tokens[at : at + 4]) for at in range(len(tokens) - 3)]
    accepted = sum(number * steps for number, steps in enumerate(metrics.histogram))
    ratios = metrics.mars.get("log_ratios", metrics.mars.get("loss_nats"))
    return {
        "tokens": len(tokens),
        # After the prompt's, which gives the first token. vLLM counts no step without a draft, as
        # ngram has them, and what was accepted behind the answer's end.
        "steps": max(sum(metrics.histogram), len(tokens) - 1 - accepted),
        "ended": int(answer.finish_reason == "stop"),
        "log_ratio": sum(ratios),
        # Of p / m, whose mean is 1 at each position if the reports are exact.
        "weights": sum(math.exp(-it) for it in ratios),
        "drift": metrics.mars.get("drift_nats", sum(ratios)),
        "grams": len(grams),
        "repeated": len(grams) - len(set(grams)),
    }


def lost_nats(llm: "LLM") -> float:
    """What an engine's answers have lost so far."""
    from prometheus_client import REGISTRY

    # An accelerator's counts leave with the step without tokens behind the last request.
    llm.llm_engine.step()
    # vLLM's own reader rounds.
    families = [it for it in REGISTRY.collect() if it.name == "vllm:mars_lost_nats"]
    samples = [sample for family in families for sample in family.samples]
    return sum(it.value for it in samples if it.name.endswith("_total"))


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """A prompt as the model expects it: a chat, or a text behind the token that begins one."""
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        begin = []
    return begin + list(tokenizer(text, add_special_tokens=False).input_ids)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of an output; a last one that was not written to its end is left out."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    return [json.loads(line) for line in lines[:-1]]


def key(call: dict[str, Any]) -> str:
    """What a call asks."""
    return json.dumps([call[name] for name in (*POINT, "name", "seeds", "prompts")])


def measure(args: argparse.Namespace) -> None:
    """Asks what the output does not have yet, until the time is over."""
    device, gpu = vllm_device()
    on_cpu = device == "cpu"
    for name, value in ({**CPU_ENV, **ENV} if on_cpu else ENV).items():
        os.environ.setdefault(name, value)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams

    begin, path = time.monotonic(), args.model or str(ensure_model())
    tokenizer = AutoTokenizer.from_pretrained(path)
    named = {
        f"{file.stem}/{it.id}": token_ids(tokenizer, it.turns[0])
        for file in args.prompts
        for it in load_prompts(file)
    }
    fitting = [it for it, ids in named.items() if len(ids) + args.max_tokens <= MAX_MODEL_LEN]
    names = fitting[: args.num_prompts]
    drawn = {} if args.fixed_drafts else {"draft_sample_method": "probabilistic"}
    server = SERVERS[args.theta] | drawn
    llm = LLM(
        path,
        speculative_config=speculative_config(args.draft, args.num_speculative_tokens, **server),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=args.batch,
        disable_log_stats=False,
        **(CPU_ENGINE_ARGS if on_cpu else GPU_ENGINE_ARGS),
    )
    dtype = torch.float32 if on_cpu else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()

    def ask(call: dict[str, Any], own: dict[str, float]) -> dict[str, Any]:
        """The call with its answers."""
        temperature = call["temperature"]
        each = list(itertools.product(call["prompts"], call["seeds"]))
        # The loss is about the whole softmax.
        whole: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "detokenize": False}
        whole |= {"temperature": temperature, "max_tokens": args.max_tokens}
        whole["extra_args"] = {"mars_return": True, **own}
        # Else all prompts would share their random numbers, and could not be the sample.
        seeds = [zlib.crc32(f"{name} {seed}".encode()) for name, seed in each]
        params = [SamplingParams(seed=seed, **whole) for seed in seeds]
        prompts = [{"prompt_token_ids": named[name]} for name, _ in each]
        before, answers = lost_nats(llm), []
        outputs = llm.generate(prompts, params, use_tqdm=False)
        lost = lost_nats(llm) - before
        for (name, seed), (answer,) in zip(each, (it.outputs for it in outputs), strict=True):
            scored = score(model, named[name], list(answer.token_ids), temperature)
            rounded = {key: round(value, 5) for key, value in (told(answer) | scored).items()}
            answers.append({"prompt": name, "seed": seed, **rounded})
        return {**call, "lost": lost, "answers": answers}

    done = {key(line) for line in read(args.output) if "run" not in line}
    point = (Path(path).name, args.drafts, args.num_speculative_tokens, args.max_tokens)
    append_line(args.output, {"run": describe_run(gpu)})
    for at in range(0, len(names), args.block):
        if time.monotonic() - begin > 60 * args.minutes:
            break
        for temperature, (name, own) in itertools.product(args.temperatures, args.rules):
            # Greedily a seed changes nothing.
            seeds = list(range(args.answers if temperature else 1))
            call = {**dict(zip(POINT, (*point, temperature), strict=True)), "name": name}
            call |= {"seeds": seeds, "prompts": names[at : at + args.block]}
            if key(call) not in done:
                append_line(args.output, ask(call, own))
        reached, seconds = min(at + args.block, len(names)), time.monotonic() - begin
        print(f"{reached} of {len(names)} prompts after {seconds:.0f} s", flush=True)


def samples(calls: Calls) -> Samples:
    """The means of each prompt's answers."""
    found: dict[str, list[dict[str, float]]] = {}
    for answer in answers_of(calls):
        known = {name: value for name, value in answer.items() if name != "prompt"}
        known |= {"one": 1.0, "further": answer["tokens"] - 1.0, "points": 100 * answer["ended"]}
        known["excess"] = answer["nll"] - answer["entropy"]
        found.setdefault(answer["prompt"], []).append(known)
    return {prompt: means_of(of) for prompt, of in found.items()}


def answers_of(calls: Calls) -> Iterable[dict[str, Any]]:
    """The answers of all calls."""
    return itertools.chain.from_iterable(call["answers"] for call in calls)


def row(calls: Calls, base: Calls) -> list[Any]:
    """The numbers of a rule, beside those of strict verification, of which it has the prompts."""
    own, strict = samples(calls), samples(base)
    lost = sum(call["lost"] for call in calls) / sum(it["tokens"] for it in answers_of(calls))
    found = [
        estimate(ratio_of_means, own, ["further", "steps"]),
        compared(ratio_of_means, own, strict, ["further", "steps"]),
        Interval(lost, lost, lost),
        # Greedily the target says one thing alone.
        estimate(ratio_of_means, own, ["weights", "tokens"]) if calls[0]["temperature"] else None,
        estimate(ratio_of_means, own, ["drift", "tokens"]),
        compared(ratio_of_means, own, strict, ["nll", "tokens"], np.subtract),
        estimate(ratio_of_means, own, ["excess", "tokens"]),
        compared(ratio_of_means, own, strict, ["tokens", "one"]),
        compared(ratio_of_means, own, strict, ["points", "one"], np.subtract),
        estimate(ratio_of_means, own, ["repeated", "grams"]),
    ]
    # One prompt has no interval.
    ends = [it and [round(end, 5) for end in it if np.isfinite(end)] for it in found]
    return [it and (it if len(set(it)) > 1 else it[0]) for it in ends]


def report(calls: Calls) -> tuple[list[list[Any]], list[str]]:
    """The rows of all rules, and in words what theta means on the model."""
    rows, words = [], []
    all_points = dict.fromkeys(tuple(call[name] for name in POINT) for call in calls)
    for point in all_points:
        model, draft, k, most, temperature = point
        heat = f"temperature {temperature:g}" if temperature else "greedy"
        parts = model, draft, f"K {k}", f"{most} tokens", heat
        # What all have in common needs no words.
        differs = [len(set(of)) > 1 for of in zip(*all_points, strict=True)]
        title = ", ".join(itertools.compress(parts, differs))
        own = [call for call in calls if tuple(call[name] for name in POINT) == point]
        strict = [call for call in own if call["name"] in STRICT]
        for place, name in enumerate(dict.fromkeys(call["name"] for call in own)):
            base = [] if name in STRICT else strict
            of = [call for call in own if call["name"] == name]
            rows.append([f"{title}: {name}" if title and not place else name, *row(of, base)])
        tokens, close, odds = (
            sum(it[name] for it in answers_of(strict)) for name in ("tokens", "close", "odds")
        )
        if temperature == 0 and close:
            words.append(
                f"{title}: theta {THETA} would accept the runner-up at {100 * close / tokens:.1f} "
                f"% of strict positions, where p2 / p1 is {odds / close:.3f} on average."
            )
    return rows, words


def main(arguments: list[str] | None = None) -> int:
    """Measures, then prints the table and writes the figures; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSON lines; goes on where it was")
    add("--report", action="store_true", help="of the output as it is")
    add("--figures", type=Path, help="file of figures to write")
    add("--model", help="directory; default: the packaged model")
    add("--draft", default=str(PACKAGED_HEAD), help="directory, or ngram; default: the packaged")
    add("--fixed-drafts", action="store_true", help="as for theta; ngram's always are")
    add("--rules", nargs="*", default=BOUNDS, help="as mars_price=0.3,mars_max_loss=0.05")
    add("--num-speculative-tokens", type=int, default=4)
    add("--temperatures", nargs="+", type=float, default=[0.0, 0.4, 0.7, 1.0])
    add("--max-tokens", type=int, default=1024)
    add("--prompts", nargs="+", type=Path, default=[PACKAGED])
    add("--num-prompts", type=int, help="the first ones; default: all")
    add("--answers", type=int, default=1, help="to each prompt; greedily one")
    add("--block", type=int, default=16, help="prompts")
    add("--batch", type=int, default=32, help="requests at a time")
    add("--minutes", type=float, default=math.inf, help="no block begins later")
    args = parser.parse_args(arguments)
    args.fixed_drafts |= not Path(args.draft).is_dir()
    args.drafts = Path(args.draft).name + (", fixed" if args.fixed_drafts else ", probabilistic")
    rules = {
        rule.replace("=", " "): dict(it.split("=") for it in rule.split(",")) for rule in args.rules
    }
    args.rules = [*STRICT.items()]
    args.rules += [(rule, {k: float(v) for k, v in own.items()}) for rule, own in rules.items()]
    with_theta = {"mars_theta" in own for own in rules.values()}
    args.theta = True in with_theta
    if len(with_theta) > 1 or (args.theta and not args.fixed_drafts):
        parser.error("--rules: mars_theta needs a call without other rules, and --fixed-drafts.")
    require_writable(args.output)
    if not args.report:
        measure(args)
    lines = read(args.output)
    rows, words = report([line for line in lines if "run" not in line])
    print("\n".join([*table_of(COLUMNS, rows), "", *words]))
    if args.figures:
        runs = [{**line["run"], "raw": args.output.name} for line in lines if "run" in line]
        content = {"schema": SCHEMA, "columns": COLUMNS, "rows": rows, "runs": runs}
        write_json(args.figures, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
