"""Tokens per step of each rule, at what loss, and whether its text is like the target's own.

    python -m benchmarks.text --output text.jsonl --rules strict mars_max_loss=0.02
    python -m benchmarks.text --output block.jsonl --rules block
    python -m benchmarks.text --report text.jsonl block.jsonl --of reading --figures text.json

A rule is `strict`, what a request asks for, or `standard` or `block`, vLLM's own engine without
MARS. One engine answers by all rules that requests ask for; `mars_theta`, `standard` and `block`
need a call of their own, and so does each K, with the same prompts and seeds. A block of prompts is
asked by all rules before the next one. The output has a line for each block by a rule; a call goes
on behind those that are there. A report is of one file of prompts or of all.

Of each answer transformers computes the NLL and the entropy of the target, in a forward pass that
knows nothing of vLLM, at the request's temperature (greedily at 1): text drawn from the target has
on average the NLL of its entropy. Nats lost are greedily those of the reports, else the engine's
counter, of which an accelerator's last second before the end of a call is missing. Asked is the
first turn of a prompt, in the model's chat template if it has one.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import kinds
from benchmarks.text_report import POINT, STRICT, read, tell
from vllm_mars.lab.prompts import PACKAGED, load_prompts
from vllm_mars.lab.records import append_line, require_writable
from vllm_mars.models.draft_head import PACKAGED_HEAD, WEIGHTS
from vllm_mars.models.drafts import speculative_config
from vllm_mars.models.packaged_model import ensure_model
from vllm_mars.options.config import METHOD, MOST_MAX_LOSS
from vllm_mars.servers.provenance import describe_run, vllm_device
from vllm_mars.servers.vllm_args import CPU_ENGINE_ARGS, CPU_ENV, MAX_MODEL_LEN

if TYPE_CHECKING:
    from vllm import LLM

# By what rules need. Under such a bound a request is as on a server with its own bound, or with its
# own price and no bound; so is one by theta, from this one on. The last two are vLLM's own.
SERVERS: dict[str, dict[str, Any]] = {
    METHOD: {"rejection_sample_method": METHOD, "mars_max_loss": MOST_MAX_LOSS},
    "theta": {"rejection_sample_method": METHOD, "mars_theta": 0.01},
    "standard": {"rejection_sample_method": "standard"},
    "block": {"rejection_sample_method": "block"},
}
RULES = [STRICT, *(f"mars_max_loss={bound}" for bound in (0.005, 0.02, 0.05))]
# The forward pass needs memory beside vLLM.
GPU_ENGINE_ARGS: dict[str, Any] = {"gpu_memory_utilization": 0.6, "dtype": "bfloat16"}
# GiB for 32 answers to their end; and the engine in this process, which reads its counts.
ENV = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# Tokens whose logits transformers computes at once, unless one answer has more.
SCORED = {"cpu": 1024, "cuda": 16384}
# What is kept of each answer.
KEPT = (
    "tokens",
    "steps",
    "ended",
    "weights",
    "drift",
    "repeated",
    "nll",
    "entropy",
    *kinds.COLUMNS,
)


def score(
    model: Any,
    texts: Sequence[tuple[list[int], list[int]]],
    temperature: float,
    most: int,
    further: Callable[[int, Any], Any] | None = None,
) -> list[list[float]]:
    """What the target, a model of transformers, says of answers: sums of NLL and entropy, in nats.

    Args:
        model: causal, so what pads a text to the length of others changes nothing of it.
        texts: prompts with their answers.
        temperature: of the requests.
        most: tokens at once.
        further: of a text and its log-probabilities, float32 `[tokens, vocab]`, further numbers.
    """
    import torch

    found: dict[int, Any] = {}
    left = sorted(range(len(texts)), key=lambda at: sum(map(len, texts[at])))
    while left:
        width = sum(map(len, texts[left[-1]]))
        count = max(1, most // width)
        left, batch = left[:-count], left[-count:]
        padded = [(it := texts[at][0] + texts[at][1]) + [0] * (width - len(it)) for at in batch]
        tokens = torch.tensor(padded, device=model.device)
        with torch.inference_mode():
            logits = model(tokens).logits
            for at, own, rows in zip(batch, tokens, logits, strict=True):
                begin, end = len(texts[at][0]), sum(map(len, texts[at]))
                log_p = (rows[begin - 1 : end - 1].float() / (temperature or 1)).log_softmax(-1)
                nll = -log_p.gather(1, own[begin:end, None]).sum()
                found[at] = torch.stack([nll, -(log_p.exp() * log_p).sum()])
                if further is not None:
                    found[at] = torch.cat([found[at], further(at, log_p)])
    # Read once, since each waits for the device.
    return torch.stack([found[at] for at in range(len(texts))]).tolist()


def told(answer: Any) -> dict[str, float]:
    """What vLLM's `CompletionOutput` and the report in it say of an answer."""
    tokens, metrics = list(answer.token_ids), answer.spec_decode_metrics
    grams = [tuple(tokens[at : at + 4]) for at in range(len(tokens) - 3)]
    accepted = sum(number * steps for number, steps in enumerate(metrics.histogram))
    # vLLM's own engines have none.
    report: dict[str, Any] = getattr(metrics, "mars", None) or {}
    ratios: list[float] = report.get("log_ratios") or report.get("loss_nats") or []
    return {
        "tokens": len(tokens),
        # After the prompt's, which gives the first token. vLLM counts no step without a draft, as
        # ngram has them, and what was accepted behind the answer's end.
        "steps": max(sum(metrics.histogram), len(tokens) - 1 - accepted),
        "ended": int(answer.finish_reason == "stop"),
        # Of p / m, whose mean is 1 at each position if the reports are exact.
        "weights": len(tokens) + sum(math.expm1(-it) for it in ratios),
        "nats": sum(ratios),
        "drift": report.get("drift_nats", sum(ratios)),
        "repeated": len(grams) - len(set(grams)),
    }


def lost_nats(llm: "LLM") -> float:
    """What an engine's answers have lost so far."""
    from prometheus_client import REGISTRY

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


def proposed_tokens(draft: Path) -> set[int] | None:
    """The tokens that a head can propose, if it has a vocabulary of its own; else None."""
    from safetensors import safe_open

    if (path := draft / WEIGHTS).is_file():
        with safe_open(path, "pt") as weights:
            if "d2t" in weights.keys():
                offsets = weights.get_tensor("d2t").tolist()
                return {token + offset for token, offset in enumerate(offsets)}
    return None


def prompts_of(file: Path, tokenizer: Any) -> dict[str, list[int]]:
    """The tokens of each prompt of a file, by a name that no other file's has."""
    return {
        f"{file.stem}/{it.category}/{it.id}": token_ids(tokenizer, it.turns[0])
        for it in load_prompts(file)
    }


def open_engine(
    path: str, draft: str, k: int, batch: int, server: dict[str, Any], **engine_args: Any
) -> "LLM":
    """An engine in this process, so that its counts can be read."""
    on_cpu = vllm_device()[0] == "cpu"
    for name, value in ({**CPU_ENV, **ENV} if on_cpu else ENV).items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    defaults = {"max_model_len": MAX_MODEL_LEN, **(CPU_ENGINE_ARGS if on_cpu else GPU_ENGINE_ARGS)}
    return LLM(
        path,
        speculative_config=speculative_config(draft, k, **server),
        max_num_seqs=batch,
        disable_log_stats=False,
        **defaults | engine_args,
    )


def key(call: dict[str, Any]) -> str:
    """What a call asks."""
    return json.dumps([call[name] for name in (*POINT, "name", "seeds", "prompts")])


def measure(args: argparse.Namespace) -> None:
    """Asks what the output does not have yet, until the time is over."""
    device, gpu = vllm_device()
    on_cpu = device == "cpu"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    begin, path = time.monotonic(), args.model or str(ensure_model())
    tokenizer = AutoTokenizer.from_pretrained(path)
    named: dict[str, list[int]] = {}
    blocks = []
    for file in args.prompts:
        given = prompts_of(file, tokenizer)
        fitting = [it for it, ids in given.items() if len(ids) + args.max_tokens <= MAX_MODEL_LEN]
        names = fitting[: args.num_prompts]
        blocks += [names[at : at + args.block] for at in range(0, len(names), args.block)]
        named |= given
    drafts = "greedy" if args.fixed_drafts else "probabilistic"
    server = {**SERVERS[args.server], "draft_sample_method": drafts}
    own_args = {"per_request_spec_decode_metrics": "summary", **args.engine_args}
    k = args.num_speculative_tokens
    llm = open_engine(path, args.draft, k, args.batch, server, **own_args)
    import torch
    from vllm import SamplingParams

    dtype = torch.float32 if on_cpu else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    proposed = proposed_tokens(Path(args.draft))
    of_tokens = kinds.Kinds(tokenizer, model.config.vocab_size, device, proposed)
    with_mars = server["rejection_sample_method"] == METHOD

    def ask(call: dict[str, Any], own: dict[str, float]) -> dict[str, Any]:
        """The call with its answers."""
        temperature = call["temperature"]
        each = list(itertools.product(call["prompts"], call["seeds"]))
        # The loss is about the whole softmax.
        whole: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "detokenize": False}
        whole |= {"temperature": temperature, "max_tokens": args.max_tokens}
        if with_mars:
            whole["extra_args"] = {"mars_return": True, **own}
        # Else all prompts would share their random numbers, and could not be the sample.
        seeds = [zlib.crc32(f"{name} {seed}".encode()) for name, seed in each]
        params = [SamplingParams(seed=seed, **whole) for seed in seeds]
        prompts = [{"prompt_token_ids": named[name]} for name, _ in each]
        before = lost_nats(llm) if with_mars else 0.0
        answers = [it.outputs[0] for it in llm.generate(prompts, params, use_tqdm=False)]
        lost = lost_nats(llm) - before if with_mars else 0.0
        texts = [
            (named[name], list(it.token_ids)) for (name, _), it in zip(each, answers, strict=True)
        ]
        reports = [kinds.told_of_tokens(it) for it in answers]

        def of_kinds(at: int, log_p: torch.Tensor) -> torch.Tensor:
            return of_tokens.sums(texts[at][1], reports[at], log_p, temperature != 0)

        scored = score(model, texts, temperature, SCORED["cpu" if on_cpu else "cuda"], of_kinds)
        names = ("nll", "entropy", *kinds.COLUMNS)
        found = [
            {**told(it), **dict(zip(names, numbers, strict=True))}
            for it, numbers in zip(answers, scored, strict=True)
        ]
        columns = {name: [short(it[name]) for it in found] for name in KEPT}
        return {**call, "lost": short(lost), "answers": columns}

    done = {key(line) for line in read(args.output) if "run" not in line}
    point = (Path(path).name, Path(args.draft).name, args.max_tokens, k)
    append_line(args.output, {"run": describe_run(gpu)})
    for at, names in enumerate(blocks, start=1):
        if time.monotonic() - begin > 60 * args.minutes:
            break
        for temperature, (name, own) in itertools.product(args.temperatures, args.rules):
            # Greedily a seed changes nothing.
            seeds = list(range(args.answers if temperature else 1))
            call = {**dict(zip(POINT, (*point, temperature), strict=True)), "name": name}
            call |= {"seeds": seeds, "prompts": names}
            if key(call) not in done:
                append_line(args.output, ask(call, own))
        seconds = time.monotonic() - begin
        print(f"{at} of {len(blocks)} blocks of prompts after {seconds:.0f} s", flush=True)


def short(value: float) -> float:
    """A number as it is kept."""
    rounded = round(value, 4)
    return int(rounded) if rounded == int(rounded) else rounded


def main(arguments: list[str] | None = None) -> int:
    """Measures, or prints a table and writes its figures; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--output", type=Path, help="JSON lines; goes on where it was")
    add("--model", help="directory; default: the packaged model")
    add("--draft", default=str(PACKAGED_HEAD), help="directory, or ngram; default: the packaged")
    add("--fixed-drafts", action="store_true", help="as for theta; ngram's always are")
    add("--rules", nargs="+", default=RULES, help="as mars_price=0.3,mars_max_loss=0.05, or block")
    add("--num-speculative-tokens", type=int, default=4)
    add("--temperatures", nargs="+", type=float, default=[0.0, 0.4, 0.7, 1.0])
    add("--max-tokens", type=int, default=256, help="of each answer, which may end before")
    add("--prompts", nargs="+", type=Path, default=[PACKAGED])
    add("--num-prompts", type=int, help="the first ones of each file; default: all")
    add("--answers", type=int, default=1, help="to each prompt; greedily one")
    add("--block", type=int, default=16, help="prompts")
    add("--batch", type=int, default=32, help="requests at a time")
    add("--engine-args", type=json.loads, default={}, help="JSON, further ones of vLLM's")
    add("--minutes", type=float, default=math.inf, help="no block begins later")
    add("--report", nargs="+", type=Path, metavar="OUTPUT", help="of outputs as they are, or .gz")
    add("--of", help="the report: of this file of prompts")
    add("--by-kind", metavar="RULE", help="the report: of a rule by kind of prompts")
    add(
        "--of-tokens", metavar="RULE", help="the report: a rule's kinds of tokens over the target's"
    )
    add("--figures", type=Path, help="the report: file to write")
    args = parser.parse_args(arguments)
    if args.report:
        tell(args)
        return 0
    if args.output is None:
        parser.error("--output or --report is needed.")
    rules = {rule: asked(rule) for rule in args.rules}
    servers = {server_of(rule, own) for rule, own in rules.items() if rule != STRICT} or {METHOD}
    (args.server, *others) = servers
    args.fixed_drafts |= not Path(args.draft).is_dir()
    if (
        others
        or (args.server in ("standard", "block") and STRICT in rules)
        or (args.server == "theta" and not args.fixed_drafts)
    ):
        parser.error(
            "--rules: mars_theta, standard and block each need a call without other rules; "
            "mars_theta also --fixed-drafts."
        )
    drafts = ", fixed drafts" if args.fixed_drafts and Path(args.draft).is_dir() else ""
    args.rules = [(rule.replace("=", " ") + drafts, own) for rule, own in rules.items()]
    require_writable(args.output)
    measure(args)
    return 0


def asked(rule: str) -> dict[str, float]:
    """What requests by a rule ask for."""
    if rule == STRICT:
        return {"mars_max_loss": 0.0}
    pairs = (it.split("=") for it in rule.split(",")) if "=" in rule else ()
    return {name: float(value) for name, value in pairs}


def server_of(rule: str, own: dict[str, float]) -> str:
    """Which of `SERVERS` a rule needs."""
    return rule if rule in SERVERS else "theta" if "mars_theta" in own else METHOD


if __name__ == "__main__":
    sys.exit(main())
