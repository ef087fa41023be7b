"""Measures each rule's tokens per step and loss, and compares its text with the target's.

    python -m benchmarks.text --output text.jsonl --rules strict mars_max_loss=0.02
    python -m benchmarks.text --output block.jsonl --rules block
    python -m benchmarks.text --report text.jsonl block.jsonl --figures text.json

A rule is `strict`, a request's options, or `standard` or `block` for vLLM without MARS. One engine
serves all rules that requests can choose; `mars_theta`, `standard`, `block` and each K need a
separate call with the same prompts and seeds. All rules answer a block of prompts before the next
one. The output has a line per block and rule, and a call skips the lines that exist.

The target's NLL and entropy of each answer come from a separate forward pass of transformers, at
the request's temperature (1 if greedy): for samples of the target their means are equal. Nats lost
are from the reports if greedy, else from the engine's counter, which on an accelerator lacks the
last second of a call. Requests are first turns of prompts, in the model's chat template if any.
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

# Server options by rule. A request's bound, price or theta works as a server's option, since the
# server's bound is the largest and its theta below all that requests use.
SERVERS: dict[str, dict[str, Any]] = {
    METHOD: {"rejection_sample_method": METHOD, "mars_max_loss": MOST_MAX_LOSS},
    "theta": {"rejection_sample_method": METHOD, "mars_theta": 0.01},
    "standard": {"rejection_sample_method": "standard"},
    "block": {"rejection_sample_method": "block"},
}
RULES = [STRICT, *(f"mars_max_loss={bound}" for bound in (0.005, 0.02, 0.05))]
# The rest of the memory is for the forward pass.
GPU_ENGINE_ARGS: dict[str, Any] = {"gpu_memory_utilization": 0.6, "dtype": "bfloat16"}
# GiB for 32 complete answers; the engine is in this process, so that its counters can be read.
ENV = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# Tokens per forward pass, unless one answer has more.
SCORED = {"cpu": 1024, "cuda": 16384}
# Values recorded of each answer.
RECORDED = (
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
    """Returns the sums of the target's NLL and entropy, in nats, for each answer.

    Args:
        model: causal model of transformers, so that padding has no effect.
        texts: token ids of prompts and answers.
        most: tokens per forward pass.
        further: maps the index and the log-probabilities, float32 `[tokens, vocab]`, of an answer
            to further values.
    """
    import torch

    sums: dict[int, Any] = {}
    lengths = [len(prompt) + len(answer) for prompt, answer in texts]
    left = sorted(range(len(texts)), key=lambda index: lengths[index])
    while left:
        # The longest first.
        width = lengths[left[-1]]
        count = max(1, most // width)
        left, batch = left[:-count], left[-count:]
        padded = [[*texts[i][0], *texts[i][1], *[0] * (width - lengths[i])] for i in batch]
        tokens = torch.tensor(padded, device=model.device)
        with torch.inference_mode():
            logits = model(tokens).logits
            for index, token_ids, rows in zip(batch, tokens, logits, strict=True):
                begin, end = len(texts[index][0]), lengths[index]
                log_p = (rows[begin - 1 : end - 1].float() / (temperature or 1)).log_softmax(-1)
                nll = -log_p.gather(1, token_ids[begin:end, None]).sum()
                sums[index] = torch.stack([nll, -(log_p.exp() * log_p).sum()])
                if further is not None:
                    sums[index] = torch.cat([sums[index], further(index, log_p)])
    # One copy to the host, because each synchronizes.
    return torch.stack([sums[index] for index in range(len(texts))]).tolist()


def told(answer: Any) -> dict[str, float]:
    """Returns an answer's values from vLLM's `CompletionOutput` and the report in it."""
    tokens = list(answer.token_ids)
    metrics = answer.spec_decode_metrics
    grams = [tuple(tokens[begin : begin + 4]) for begin in range(len(tokens) - 3)]
    accepted = sum(number * steps for number, steps in enumerate(metrics.histogram))
    # Engines without MARS have no report.
    report: dict[str, Any] = getattr(metrics, "mars", None) or {}
    ratios: list[float] = report.get("log_ratios") or report.get("loss_nats") or []
    return {
        "tokens": len(tokens),
        # Without the prefill, which emits the first token. vLLM does not count steps without a
        # draft (ngram), but counts accepted tokens after the end.
        "steps": max(sum(metrics.histogram), len(tokens) - 1 - accepted),
        "ended": int(answer.finish_reason == "stop"),
        # p / m, whose mean is 1 at each position if the reports are exact.
        "weights": len(tokens) + sum(math.expm1(-ratio) for ratio in ratios),
        "nats": sum(ratios),
        "drift": report.get("drift_nats", sum(ratios)),
        "repeated": len(grams) - len(set(grams)),
    }


def lost_nats(llm: "LLM") -> float:
    from prometheus_client import REGISTRY

    # vLLM's reader of metrics would round.
    families = [family for family in REGISTRY.collect() if family.name == "vllm:mars_lost_nats"]
    samples = [sample for family in families for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Returns a prompt's tokens, in the chat template or else after the BOS token."""
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        begin = []
    return begin + list(tokenizer(text, add_special_tokens=False).input_ids)


def proposed_tokens(draft: Path) -> set[int] | None:
    """Returns a head's draft vocabulary, or None if it is the target's."""
    from safetensors import safe_open

    if (path := draft / WEIGHTS).is_file():
        with safe_open(path, "pt") as weights:
            if "d2t" in weights.keys():
                offsets = weights.get_tensor("d2t").tolist()
                return {token + offset for token, offset in enumerate(offsets)}
    return None


def prompts_of(file: Path, tokenizer: Any) -> dict[str, list[int]]:
    """Returns the token ids of a file's prompts by names that are unique over files."""
    return {
        f"{file.stem}/{prompt.category}/{prompt.id}": token_ids(tokenizer, prompt.turns[0])
        for prompt in load_prompts(file)
    }


def open_engine(
    path: str, draft: str, k: int, batch: int, server: dict[str, Any], **engine_args: Any
) -> "LLM":
    """Starts an engine in this process, so that its counters can be read."""
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
    return json.dumps([call[name] for name in (*POINT, "name", "seeds", "prompts")])


def measure(args: argparse.Namespace) -> None:
    """Measures the calls that the output lacks, until the time is over."""
    device, gpu = vllm_device()
    on_cpu = device == "cpu"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    begin = time.monotonic()
    path = args.model or str(ensure_model())
    tokenizer = AutoTokenizer.from_pretrained(path)
    named: dict[str, list[int]] = {}
    blocks = []
    for file in args.prompts:
        prompts = prompts_of(file, tokenizer)
        max_len = MAX_MODEL_LEN - args.max_tokens
        names = [name for name, ids in prompts.items() if len(ids) <= max_len][: args.num_prompts]
        blocks += [names[first : first + args.block] for first in range(0, len(names), args.block)]
        named |= prompts
    drafts = "greedy" if args.fixed_drafts else "probabilistic"
    server = {**SERVERS[args.server], "draft_sample_method": drafts}
    k = args.num_speculative_tokens
    llm = open_engine(
        path,
        draft=args.draft,
        k=k,
        batch=args.batch,
        server=server,
        **{"per_request_spec_decode_metrics": "summary", **args.engine_args},
    )
    import torch
    from vllm import SamplingParams

    dtype = torch.float32 if on_cpu else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    proposed = proposed_tokens(Path(args.draft))
    of_tokens = kinds.Kinds(tokenizer, model.config.vocab_size, device, proposed)
    with_mars = server["rejection_sample_method"] == METHOD

    def answer(call: dict[str, Any], request: dict[str, float]) -> dict[str, Any]:
        """Returns the call with its answers; `request` has the rule's options."""
        temperature = call["temperature"]
        samples = list(itertools.product(call["prompts"], call["seeds"]))
        options: dict[str, Any] = {
            # The loss is defined on the whole softmax.
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "detokenize": False,
            "temperature": temperature,
            "max_tokens": args.max_tokens,
        }
        if with_mars:
            options["extra_args"] = {"mars_return": True, **request}
        # The bootstrap over prompts needs independent random numbers.
        seeds = [zlib.crc32(f"{name} {seed}".encode()) for name, seed in samples]
        params = [SamplingParams(seed=seed, **options) for seed in seeds]
        inputs = [{"prompt_token_ids": named[name]} for name, _ in samples]
        before = lost_nats(llm) if with_mars else 0.0
        outputs = llm.generate(inputs, params, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        lost = lost_nats(llm) - before if with_mars else 0.0
        texts = [
            (named[name], list(completion.token_ids))
            for (name, _), completion in zip(samples, answers, strict=True)
        ]
        reports = [kinds.told_of_tokens(completion) for completion in answers]

        def of_kinds(index: int, log_p: torch.Tensor) -> torch.Tensor:
            return of_tokens.sums(texts[index][1], reports[index], log_p, temperature != 0)

        scored = score(model, texts, temperature, SCORED["cpu" if on_cpu else "cuda"], of_kinds)
        names = ("nll", "entropy", *kinds.COLUMNS)
        values = [
            {**told(completion), **dict(zip(names, numbers, strict=True))}
            for completion, numbers in zip(answers, scored, strict=True)
        ]
        columns = {name: [short(row[name]) for row in values] for name in RECORDED}
        return {**call, "lost": short(lost), "answers": columns}

    done = {key(line) for line in read(args.output) if "run" not in line}
    model_name, draft_name = Path(path).name, Path(args.draft).name
    append_line(args.output, {"run": describe_run(gpu)})
    for number, names in enumerate(blocks, start=1):
        if time.monotonic() - begin > 60 * args.minutes:
            break
        for temperature, (name, request) in itertools.product(args.temperatures, args.rules):
            call = {
                "model": model_name,
                "draft": draft_name,
                "max_tokens": args.max_tokens,
                "k": k,
                "temperature": temperature,
                "name": name,
                # A seed has no effect on greedy answers.
                "seeds": list(range(args.answers if temperature else 1)),
                "prompts": names,
            }
            if key(call) not in done:
                append_line(args.output, answer(call, request))
        seconds = time.monotonic() - begin
        print(f"{number} of {len(blocks)} blocks of prompts after {seconds:.0f} s", flush=True)


def short(value: float) -> float:
    rounded = round(value, 4)
    return int(rounded) if rounded == int(rounded) else rounded


def main(arguments: list[str] | None = None) -> int:
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
    servers = {server_of(rule, request) for rule, request in rules.items() if rule != STRICT}
    servers = servers or {METHOD}
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
    args.rules = [(rule.replace("=", " ") + drafts, request) for rule, request in rules.items()]
    require_writable(args.output)
    measure(args)
    return 0


def asked(rule: str) -> dict[str, float]:
    if rule == STRICT:
        return {"mars_max_loss": 0.0}
    pairs = (option.split("=") for option in rule.split(",")) if "=" in rule else ()
    return {name: float(value) for name, value in pairs}


def server_of(rule: str, request: dict[str, float]) -> str:
    """Returns the key of `SERVERS` that a rule needs."""
    return rule if rule in SERVERS else "theta" if "mars_theta" in request else METHOD


if __name__ == "__main__":
    sys.exit(main())
