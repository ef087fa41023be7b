"""Rules judged in the same states: on the same drafts behind the same text.

    python -m benchmarks.states states.jsonl --prompts benchmarks/prompts/text.jsonl
    python -m benchmarks.states states.jsonl --report

Two answers to one prompt soon differ, and then a loop or an early end decides which of them took
fewer steps. Here one rule answers, and in each step all rules say what they would do with its
draft: how many tokens they would accept, on average over their random numbers, and what these would
lose. Each position counts by the chance that the rule comes to it. A rule is a price that no bound
caps: `price 0.5`, or `bound 0.02` for the price that this bound sets.

It runs on a CPU, by the plain form of the rule (`vllm_mars.kernels.naive`).
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
from vllm_mars.kernels.blocks.naive import reach as reached
from vllm_mars.kernels.law import naive as law
from vllm_mars.kernels.ledger.naive import LOSS_BITS, NO_BOUND, price_units
from vllm_mars.kernels.rows.naive import read_probabilities
from vllm_mars.kernels.rules import PRICE
from vllm_mars.kernels.verdicts import Verdict
from vllm_mars.lab.prompts import PACKAGED
from vllm_mars.lab.records import append_line, require_writable
from vllm_mars.lab.rows import compared, estimate, heat, ratio_of_means
from vllm_mars.models.draft_head import PACKAGED_HEAD
from vllm_mars.models.packaged_model import ensure_model
from vllm_mars.options.config import METHOD, price_of_bound
from vllm_mars.servers.provenance import describe_run, vllm_device

UNIT = 2.0**-LOSS_BITS
# What is summed of each prompt: tokens and steps, nats lost, the drift, positions that were reached
# and there the probability of what the draft cannot propose, under the target and as served.
SUMS = ("tokens", "steps", "lost", "drift", "reached", "outside", "outside served")
STRICT = "strict"
COLUMNS: list[list[str | None]] = [
    ["rule", "", "gain spread"],
    ["prompts", "d", "spread"],
    ["tokens per step", ".3f", "spread"],
    ["x strict", ".3f", "gain"],
    # Of greedy requests the same; else strict with fixed drafts, which answers with other texts.
    ["x vLLM's default", ".3f", "spread"],
    ["nats per token", ".4f", "gain"],
    ["of a prompt: median", ".4f", "spread"],
    ["9 in 10 below", ".4f", "gain spread"],
    ["drift", "+.4f", "spread"],
    ["what the draft cannot propose, served / target", ".4f", "gain"],
]


class Judge:
    """Judges each step that a CPU verifies by some rules.

    Args:
        prompt_of: gives the name of the prompt of the request at a place of the batch, or None.
        every: of the steps of an answer one in so many is judged, in no order.
        drafts: names of further draft distributions, in the order in which `drafts.draw_as_vllm`
            has them; each rule is judged with each of them, too.

    Attributes:
        prices: of the rules, by name.
        sums: by prompt and rule, `SUMS`.
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
        self._place = 0
        self._seen: dict[str, int] = defaultdict(int)

    def install(self, setattr: Callable[[Any, str, Any], None] = setattr) -> None:
        """Wraps how a step is verified; a test has it undone."""
        allowances = accept.allowances
        greedy, fixed, drawn = accept._greedy, accept._fixed, accept._drawn

        def noted(step: Any) -> Iterator[Any]:
            for self._place, allowed in enumerate(allowances(step)):
                yield allowed

        def on_greedy(rows: Any, begin: int, end: int, allowed: Any, which: Any) -> Any:
            self._add(allowed, lambda it, _: of_greedy(rows, begin, end, it))
            return greedy(rows, begin, end, allowed, which)

        def on_fixed(rows: Any, allowed: Any, which: Any, own: Any) -> Any:
            own.read(slice(None))
            read = read_probabilities(rows, own.begin, own.z, own.p, own.kept)
            self._add(allowed, lambda it, _: of_fixed(read, own, it))
            return fixed(rows, allowed, which, own)

        def on_drawn(rows: Any, allowed: Any, own: Any) -> Any:
            own.read(slice(None))
            q = own.q.view(len(own.q), 1 + len(self.drafts), -1).unbind(1)
            own.q = q[0]
            self._add(allowed, lambda it, place: of_drawn(rows, own, it, q[place]))
            return drawn(rows, allowed, own)

        setattr(accept, "allowances", noted)
        for name, wrapped in (("greedy", on_greedy), ("fixed", on_fixed), ("drawn", on_drawn)):
            setattr(accept, f"_{name}", wrapped)

    def _add(self, allowed: Any, judged: Callable[[Any, int], np.ndarray]) -> None:
        name = self._prompt_of(self._place)
        if name is None or allowed.has_ended:
            return
        self._seen[name] += 1
        if zlib.crc32(f"{name} {self._seen[name]}".encode()) % self._every:
            return
        sums = self.sums.setdefault(name, defaultdict(lambda: np.zeros(len(SUMS))))
        for rule, price in self.prices.items():
            own = allowed._replace(value=price_units(price), rate=NO_BOUND)
            for place, drafts in enumerate(("", *self.drafts)):
                sums[", ".join(filter(None, (rule, drafts)))] += judged(own, place)


def of_greedy(rows: Any, begin: int, end: int, allowed: Any) -> np.ndarray:
    """`SUMS` of a greedy step."""
    accepted, lost = 0, 0.0
    for verdict in PRICE.plain.greedy(rows, begin, end, allowed):
        if verdict not in (Verdict.FIRST, Verdict.RELAXED):
            break
        lost += rows.loss[begin + accepted] * UNIT * (verdict == Verdict.RELAXED)
        accepted += 1
    return np.array([accepted + 1, 1, lost, lost, accepted + 1, 0, 0])


def of_fixed(rows: Any, own: Any, allowed: Any) -> np.ndarray:
    """The same of a step that samples with a fixed draft."""
    found, reach = np.array([1.0, 1, 0, 0, 0, 0, 0]), 1.0
    for i, position in enumerate(PRICE.plain.sampled(rows, own.begin, own.end, allowed)):
        found += reach * np.array([0, 0, position.loss * UNIT, position.drift * UNIT, 1, 0, 0])
        log_m = rows.log_p[own.begin + i] + law.log_ratio(position, is_draft=True)
        reach *= math.exp(min(log_m, 0.0))
        found[0] += reach
    return found


def of_drawn(rows: Any, own: Any, allowed: Any, q: Any) -> np.ndarray:
    """The same with a drawn draft, on average over drafts that are drawn from q.

    The draft was drawn from what can propose all that q can, so it counts by its probability under
    q over that under which it was drawn.
    """
    found, reach, weight = np.array([1.0, 1, 0, 0, 0, 0, 0]), 1.0, 1.0
    prices = law.drawn_prices(rows, own.begin, own.end, allowed, own.most_drafts)
    for i, (x, price) in enumerate(zip(rows.draft[own.begin : own.end], prices, strict=True)):
        if x < 0:
            break
        row = own.z[i], own.p[i], q[i], price, own.kept[i]
        served = law.clip_row(*row, own.buffers[3 + i], own.buffers[:3])
        outside = q[i] == 0
        shares = float(own.p[i][outside].sum()), float(served.m[outside].sum())
        found += weight * reach * np.array([0, 0, served.loss, served.drift, 1, *shares])
        if not (of_q := float(q[i, x])):
            break
        reach = reached(reach, float(served.m[x]), of_q)
        weight *= of_q / float(own.q[i, x])
        found[0] += weight * reach
    return found


def measure(args: argparse.Namespace) -> None:
    """Answers the prompts at each temperature; a line of the output for each."""
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
        path, args.draft, args.num_speculative_tokens, args.batch, server, **engine_args
    )
    from vllm import SamplingParams

    (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
    prompts: dict[str, list[int]] = {}
    for file in args.prompts:
        prompts |= prompts_of(file, tokenizer)
    names = {tuple(ids): name for name, ids in prompts.items()}

    def prompt_of(place: int) -> str | None:
        request = runner.requests[runner.input_batch.req_ids[place]]
        return names.get(tuple(request.prompt_token_ids))

    judge = Judge(prompt_of, args.every, args.drafts)
    if args.drafts:
        draw_as_vllm(runner, [DrawnUnder(**json.loads(name)) for name in args.drafts])
    judge.install()
    append_line(args.output, {"run": describe_run(gpu)})
    for temperature in args.temperatures:
        own = {it: price_of(it, temperature, not args.fixed_drafts) for it in args.rules}
        judge.prices, judge.sums = {STRICT: 0.0, **own}, {}
        whole: dict[str, Any] = {"temperature": temperature, "max_tokens": args.max_tokens}
        whole |= {"detokenize": False, "extra_args": {"mars_max_loss": 0.02}, **args.sampling}
        params = [SamplingParams(seed=zlib.crc32(it.encode()), **whole) for it in prompts]
        given = [{"prompt_token_ids": ids} for ids in prompts.values()]
        llm.generate(given, params, use_tqdm=False)
        point = {"k": args.num_speculative_tokens, "drafts": drafts, "temperature": temperature}
        point |= {"draft_temperature": args.draft_temperature, "max_tokens": args.max_tokens}
        point |= {"model": Path(args.model or "").name, "sampling": args.sampling}
        sums = {
            name: {it: [float(f"{x:.7g}") for x in sums] for it, sums in of.items()}
            for name, of in judge.sums.items()
        }
        append_line(args.output, {**point, "sums": sums})
        print(f"{heat(temperature)}: {len(sums)} prompts", flush=True)


def price_of(name: str, temperature: float, is_drawn: bool) -> float:
    """The price in nats that a rule's name stands for."""
    what, value = name.split()
    return float(value) if what == "price" else price_of_bound(float(value), temperature, is_drawn)


def report(lines: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """The rows of `COLUMNS`."""
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
            [", ".join(filter(None, (model, heat(temperature) + drafts, sampling, f"K {k}")))]
        )
        default = next(
            (
                sums(other)[STRICT]
                for other in lines
                if setting(other) == setting(line) and (is_fixed(other) or not temperature)
            ),
            None,
        )
        found = sums(line)
        for it, own in found.items():
            each = [of["lost"] / of["tokens"] for of in own.values()]
            outside = sum(of["outside"] for of in own.values())
            rows.append(
                [
                    it,
                    len(own),
                    cell(estimate(ratio_of_means, own, steps)),
                    cell(compared(ratio_of_means, own, found[STRICT], steps)),
                    cell(compared(ratio_of_means, own, default, steps)) if default else None,
                    cell(estimate(ratio_of_means, own, ["lost", "tokens"])),
                    *(round(float(np.quantile(each, of)), 5) for of in (0.5, 0.9)),
                    cell(estimate(ratio_of_means, own, ["drift", "reached"])),
                    cell(estimate(ratio_of_means, own, ["outside served", "outside"]))
                    if outside
                    else None,
                ]
            )
    return rows


def setting(line: dict[str, Any]) -> tuple[str, str, int, float]:
    """Model ("" is the packaged one), further sampling parameters, K and temperature."""
    sampling = ", ".join(f"{name} {value:g}" for name, value in line.get("sampling", {}).items())
    return line.get("model", ""), sampling, line["k"], line["temperature"]


def is_fixed(line: dict[str, Any]) -> bool:
    """Whether drafts are fixed, which vLLM calls greedy."""
    return bool(line["drafts"] == "greedy")


def sums(line: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """What was summed, by rule, prompt and name."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for prompt, of in line["sums"].items():
        for it, values in of.items():
            found.setdefault(it, {})[prompt] = dict(zip(SUMS, values, strict=True))
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measures, or prints a table and writes its figures."""
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
