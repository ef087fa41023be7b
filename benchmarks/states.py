"""Judges rules in the same states: on the same drafts after the same text.

    python -m benchmarks.states states.jsonl --prompts benchmarks/prompts/text.jsonl
    python -m benchmarks.states states.jsonl --report

Two answers to one prompt soon diverge, and then a loop or an early end decides which one took fewer
steps. So one rule answers, and each step computes for every rule the expected number of accepted
draft tokens and their loss. Positions are weighted by the probability that the rule reaches them. A
rule is a price without a cap: `price 0.5`, or `bound 0.02` for the price that this bound sets.

Runs on a CPU, with the reference rules (`vllm_mars.kernels.reference`).
"""

import argparse
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drafts import DrawnUnder, draw_as_vllm
from benchmarks.text import SERVERS, open_engine, prompts_of
from benchmarks.text_report import cell, read_all, show
from vllm_mars.kernels.accept import naive as accept
from vllm_mars.kernels.block_verify.naive import update_joint_ratio
from vllm_mars.kernels.budget import NO_BOUND, UNIT, price_units
from vllm_mars.kernels.interface import Verdict
from vllm_mars.kernels.row_stats.naive import read_probabilities
from vllm_mars.kernels.rules import PRICE
from vllm_mars.kernels.served_dist import naive as served_dist
from vllm_mars.lab.prompts import PACKAGED
from vllm_mars.lab.records import append_line, require_writable
from vllm_mars.lab.rows import compared, estimate, ratio_of_means, temperature_label
from vllm_mars.models.draft_head import PACKAGED_HEAD
from vllm_mars.models.packaged_model import ensure_model
from vllm_mars.options.config import METHOD, price_of_bound
from vllm_mars.servers.provenance import describe_run, vllm_device

# Sums per prompt: tokens, steps, nats lost, drift, reached positions and, at these, the probability
# of tokens outside the draft's support, under the target and as served.
SUMS = ("tokens", "steps", "lost", "drift", "reached", "outside", "outside served")
STRICT = "strict"
COLUMNS: list[list[str | None]] = [
    ["rule", "", "gain spread"],
    ["prompts", "d", "spread"],
    ["tokens per step", ".3f", "spread"],
    ["x strict", ".3f", "gain"],
    # For greedy requests strict; for sampled ones strict with fixed drafts, whose texts differ.
    ["x vLLM's default", ".3f", "spread"],
    ["nats per token", ".4f", "gain"],
    ["of a prompt: median", ".4f", "spread"],
    ["9 in 10 below", ".4f", "gain spread"],
    ["drift", "+.4f", "spread"],
    ["what the draft cannot propose, served / target", ".4f", "gain"],
]


class Judge:
    """Judges the steps that a CPU verifies.

    Args:
        prompt_of: maps a request's batch index to the name of its prompt, or None.
        every: judges a pseudorandom 1 / `every` of the steps.
        drafts: names of the other distributions of `drafts.draw_as_vllm`, with each of which
            each rule is also judged.

    Attributes:
        prices: prices by rule.
        sums: `SUMS` by prompt and rule.
    """

    def __init__(
        self,
        prompt_of: Callable[[int], str | None],
        every: int = 1,
        drafts: Sequence[str] = (),
    ) -> None:
        self.drafts = drafts
        self.prices: dict[str, float] = {STRICT: 0.0}
        self.sums: dict[str, dict[str, np.ndarray]] = {}
        self._prompt_of = prompt_of
        self._every = every
        self._req_idx = 0
        self._seen: dict[str, int] = defaultdict(int)

    def install(self, setattr: Callable[[Any, str, Any], None] = setattr) -> None:
        """Wraps the functions that verify a step; a test passes a `setattr` that is undone."""
        loss_budgets = accept.loss_budgets
        greedy, fixed, probabilistic = accept._greedy, accept._fixed, accept._probabilistic

        def noted(step: Any) -> Iterator[Any]:
            for self._req_idx, budget in enumerate(loss_budgets(step)):
                yield budget

        def on_greedy(rows: Any, begin: int, end: int, budget: Any, which: Any) -> Any:
            self._add(budget, lambda priced, _: of_greedy(rows, begin, end, priced))
            return greedy(rows, begin, end, budget, which)

        def on_fixed(rows: Any, budget: Any, which: Any, request: Any) -> Any:
            request.read(slice(None))
            begin, z, p = request.begin, request.z, request.p
            read = read_probabilities(rows, begin, z, p, request.preserved)
            self._add(budget, lambda priced, _: of_fixed(read, request, priced))
            return fixed(rows, budget, which, request)

        def on_probabilistic(rows: Any, budget: Any, request: Any) -> Any:
            request.read(slice(None))
            # [draft_len, (1 + drafts) * vocab] -> a distribution for each kind of drafts
            q = request.q.chunk(1 + len(self.drafts), dim=1)
            request.q = q[0]
            self._add(budget, lambda priced, kind: of_probabilistic(rows, request, priced, q[kind]))
            return probabilistic(rows, budget, request)

        setattr(accept, "loss_budgets", noted)
        setattr(accept, "_greedy", on_greedy)
        setattr(accept, "_fixed", on_fixed)
        setattr(accept, "_probabilistic", on_probabilistic)

    def _add(self, budget: Any, judged: Callable[[Any, int], np.ndarray]) -> None:
        """Adds a step's sums; `judged` maps a budget and the index of a draft distribution."""
        name = self._prompt_of(self._req_idx)
        if name is None or budget.has_ended:
            return
        self._seen[name] += 1
        if zlib.crc32(f"{name} {self._seen[name]}".encode()) % self._every:
            return
        sums = self.sums.setdefault(name, defaultdict(lambda: np.zeros(len(SUMS))))
        for rule, price in self.prices.items():
            priced = budget._replace(value=price_units(price), rate=NO_BOUND)
            for kind, drafts in enumerate(("", *self.drafts)):
                sums[", ".join(filter(None, (rule, drafts)))] += judged(priced, kind)


def of_greedy(rows: Any, begin: int, end: int, budget: Any) -> np.ndarray:
    accepted, lost = 0, 0.0
    for verdict in PRICE.plain.greedy(rows, begin, end, budget):
        if verdict not in (Verdict.FIRST, Verdict.RELAXED):
            break
        lost += rows.loss[begin + accepted] * UNIT * (verdict == Verdict.RELAXED)
        accepted += 1
    return np.array([accepted + 1, 1, lost, lost, accepted + 1, 0, 0])


def of_fixed(rows: Any, request: Any, budget: Any) -> np.ndarray:
    """Returns `SUMS` of a sampled step with a fixed draft."""
    sums = np.array([1.0, 1, 0, 0, 0, 0, 0])
    joint_ratio = 1.0
    for i, decision in enumerate(PRICE.plain.sampled(rows, request.begin, request.end, budget)):
        sums += joint_ratio * np.array([0, 0, decision.loss * UNIT, decision.drift * UNIT, 1, 0, 0])
        log_m = rows.log_p[request.begin + i] + served_dist.log_ratio(decision, is_draft=True)
        joint_ratio *= math.exp(min(log_m, 0.0))
        sums[0] += joint_ratio
    return sums


def of_probabilistic(rows: Any, request: Any, budget: Any, q: Any) -> np.ndarray:
    """Returns expected `SUMS` of a step with drafts from q, float32 `[draft_len, vocab]`.

    The support of the distribution that the draft was sampled from includes that of q, so the draft
    gets an importance weight.
    """
    sums = np.array([1.0, 1, 0, 0, 0, 0, 0])
    joint_ratio, weight = 1.0, 1.0
    begin, end = request.begin, request.end
    prices = served_dist.clip_prices(rows, begin, end, budget, request.max_draft_len)
    for i, (x, price) in enumerate(zip(rows.draft[begin:end], prices, strict=True)):
        if x < 0:
            break
        served = served_dist.clip_row(
            request.z[i],
            request.p[i],
            q[i],
            price,
            request.preserved[i],
            request.buffers[3 + i],
            request.buffers[:3],
        )
        outside = q[i] == 0
        p_outside, m_outside = float(request.p[i][outside].sum()), float(served.m[outside].sum())
        sums += (
            weight
            * joint_ratio
            * np.array([0, 0, served.loss, served.drift, 1, p_outside, m_outside])
        )
        if not (q_x := float(q[i, x])):
            break
        joint_ratio = update_joint_ratio(joint_ratio, float(served.m[x]), q_x)
        weight *= q_x / float(request.q[i, x])
        sums[0] += weight * joint_ratio
    return sums


def measure(args: argparse.Namespace) -> None:
    """Answers the prompts and appends a line per temperature to the output."""
    device, gpu = vllm_device()
    if device != "cpu":
        raise NotImplementedError(f"the rule's plain form serves a CPU, not {gpu}.")
    from transformers import AutoTokenizer

    path = args.model or str(ensure_model())
    tokenizer = AutoTokenizer.from_pretrained(path)
    drafts = "greedy" if args.fixed_drafts else "probabilistic"
    server = {**SERVERS[METHOD], "draft_sample_method": drafts}
    if args.draft_temperature is not None:
        server["mars_draft_temperature"] = args.draft_temperature
    engine_args = {"dtype": args.dtype} if args.dtype else {}
    llm = open_engine(
        path,
        draft=args.draft,
        k=args.num_speculative_tokens,
        batch=args.batch,
        server=server,
        **engine_args,
    )
    from vllm import SamplingParams

    (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
    prompts: dict[str, list[int]] = {}
    for file in args.prompts:
        prompts |= prompts_of(file, tokenizer)
    names = {tuple(ids): name for name, ids in prompts.items()}

    def prompt_of(req_idx: int) -> str | None:
        request = runner.requests[runner.input_batch.req_ids[req_idx]]
        return names.get(tuple(request.prompt_token_ids))

    judge = Judge(prompt_of, args.every, args.drafts)
    if args.drafts:
        draw_as_vllm(runner, [DrawnUnder(**json.loads(name)) for name in args.drafts])
    judge.install()
    append_line(args.output, {"run": describe_run(gpu)})
    for temperature in args.temperatures:
        prices = {rule: price_of(rule, temperature, not args.fixed_drafts) for rule in args.rules}
        judge.prices = {STRICT: 0.0, **prices}
        judge.sums = {}
        options: dict[str, Any] = {
            "temperature": temperature,
            "max_tokens": args.max_tokens,
            "detokenize": False,
            "extra_args": {"mars_max_loss": 0.02},
            **args.sampling,
        }
        params = [SamplingParams(seed=zlib.crc32(name.encode()), **options) for name in prompts]
        inputs = [{"prompt_token_ids": ids} for ids in prompts.values()]
        llm.generate(inputs, params, use_tqdm=False)
        sums = {
            name: {rule: [float(f"{x:.7g}") for x in sums] for rule, sums in by_rule.items()}
            for name, by_rule in judge.sums.items()
        }
        line = {
            "k": args.num_speculative_tokens,
            "drafts": drafts,
            "temperature": temperature,
            "draft_temperature": args.draft_temperature,
            "max_tokens": args.max_tokens,
            "model": Path(args.model or "").name,
            "sampling": args.sampling,
            "sums": sums,
        }
        append_line(args.output, line)
        print(f"{temperature_label(temperature)}: {len(sums)} prompts", flush=True)


def price_of(name: str, temperature: float, is_probabilistic: bool) -> float:
    kind, value = name.split()
    return (
        float(value)
        if kind == "price"
        else price_of_bound(float(value), temperature, is_probabilistic)
    )


def report(lines: Sequence[dict[str, Any]]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    steps = ["tokens", "steps"]
    for line in sorted(
        lines, key=lambda line: (*setting(line)[:3], is_fixed(line), line["temperature"])
    ):
        drafts = ", fixed drafts" if is_fixed(line) else ", probabilistic drafts"
        drafts = drafts if line["temperature"] else ""
        if line["draft_temperature"] is not None:
            drafts += f" drawn at {line['draft_temperature']:g} x"
        model, sampling, k, temperature = setting(line)
        rows.append(
            [
                ", ".join(
                    filter(
                        None, (model, temperature_label(temperature) + drafts, sampling, f"K {k}")
                    )
                )
            ]
        )
        default = next(
            (
                sums(other)[STRICT]
                for other in lines
                if setting(other) == setting(line) and (is_fixed(other) or not temperature)
            ),
            None,
        )
        by_rule = sums(line)
        for rule, prompts in by_rule.items():
            losses = [values["lost"] / values["tokens"] for values in prompts.values()]
            outside = sum(values["outside"] for values in prompts.values())
            rows.append(
                [
                    title(rule),
                    len(prompts),
                    cell(estimate(ratio_of_means, prompts, steps)),
                    cell(compared(ratio_of_means, prompts, by_rule[STRICT], steps)),
                    cell(compared(ratio_of_means, prompts, default, steps)) if default else None,
                    cell(estimate(ratio_of_means, prompts, ["lost", "tokens"])),
                    round(float(np.quantile(losses, 0.5)), 5),
                    round(float(np.quantile(losses, 0.9)), 5),
                    cell(estimate(ratio_of_means, prompts, ["drift", "reached"])),
                    cell(estimate(ratio_of_means, prompts, ["outside served", "outside"]))
                    if outside
                    else None,
                ]
            )
    return rows


def title(rule: str) -> str:
    """Returns a rule with its draft distribution in words."""
    name, _, fields = rule.partition(", ")
    if not fields:
        return name
    drafts = DrawnUnder(**json.loads(fields))
    changes = [
        *([f"at {drafts.share:g} of the temperature"] if drafts.share != 1 else []),
        *([f"at a top-p larger by {drafts.margin:g}"] if drafts.margin else []),
        *(["without top-k and top-p"] if drafts.margin is None else []),
        *(["without penalties"] if not drafts.penalties else []),
    ]
    return f"{name}, drafts " + (" and ".join(changes) or "under the request's parameters")


def setting(line: dict[str, Any]) -> tuple[str, str, int, float]:
    """Returns model ("" for the packaged one), sampling parameters, K and temperature."""
    sampling = ", ".join(f"{name} {value:g}" for name, value in line.get("sampling", {}).items())
    return line.get("model", ""), sampling, line["k"], line["temperature"]


def is_fixed(line: dict[str, Any]) -> bool:
    return bool(line["drafts"] == "greedy")


def sums(line: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    by_rule: dict[str, dict[str, dict[str, float]]] = {}
    for prompt, values_by_rule in line["sums"].items():
        for rule, values in values_by_rule.items():
            by_rule.setdefault(rule, {})[prompt] = dict(zip(SUMS, values, strict=True))
    return by_rule


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("output", type=Path, help="JSON lines; of a report, maybe compressed")
    add("--model", help="directory; default: the packaged model")
    add("--draft", default=str(PACKAGED_HEAD), help="directory; default: the packaged head")
    add("--dtype", help="default: vLLM's of this device")
    add("--sampling", type=json.loads, default={}, help="further sampling parameters, as JSON")
    add("--rules", nargs="+", default=["bound 0.005", "bound 0.02", "bound 0.05"])
    add("--prompts", nargs="+", type=Path, default=[PACKAGED])
    add("--temperatures", nargs="+", type=float, default=[0.0, 0.4, 0.7, 1.0])
    add("--num-speculative-tokens", type=int, default=4)
    add("--fixed-drafts", action="store_true")
    add("--draft-temperature", type=float, help="as mars_draft_temperature")
    add(
        "--drafts",
        nargs="+",
        default=[],
        help="draws as vLLM does, and judges other draft distributions as well, each in JSON with "
        "the fields of drafts.DrawnUnder; {} is that of a strict request",
    )
    add("--max-tokens", type=int, default=96)
    add("--batch", type=int, default=32)
    add("--every", type=int, default=2, help="one step in so many is judged")
    add("--report", action="store_true")
    add("--figures", type=Path, help="the report: file to write")
    args = parser.parse_args(arguments)
    if not args.report:
        require_writable(args.output)
        measure(args)
        return
    lines, runs = read_all([args.output])
    show(COLUMNS, report(lines), runs, args.figures)


if __name__ == "__main__":
    main()
