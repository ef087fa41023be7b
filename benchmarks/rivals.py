"""Published rules of acceptance on the same recorded rows, and what a price gains at their loss.

    python -m benchmarks.rivals build/rivals.jsonl --k 4 [--fixed-drafts]
    python -m benchmarks.rivals_figures build/rivals.jsonl

`benchmarks.text` asks, and the rows are kept. What a rule makes of a step, in tokens and lost nats,
follows without a draw: greedily from what it accepts; while sampling, given the drafted path, by
the chance that each token stays, and where drafts are drawn by all that could stand in its place.
What a rule changes in the text that follows is not in it. A price, theta and blocks are the
project's own definition, which keeps ends and protected tokens, without guard and opening.
"""

import argparse
import itertools
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from benchmarks import text
from vllm_mars.kernels import clip, cpu, rule, terms
from vllm_mars.local.provenance import describe_run
from vllm_mars.local.result_file import append_line
from vllm_mars.local.vllm_args import CPU_ENV

UNIT, PLAIN = 2.0**-terms.LOSS_BITS, 99
THETAS, WINDOWS = (0.9, 0.96), (1, 2, 3, 6)
GREEDY_PRICES = (0.0, *np.geomspace(0.01, 8, 40).round(4).tolist())
# Of drawn drafts; a price of 0 is strict.
KNOBS: dict[str, tuple[float, ...]] = {
    "price": (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.2, 1.6, 2.2, 3.0, 4.5, 8.0),
    "mentored": (0.01, 0.025, 0.06, 0.15, 0.4),
    "lenience": (0.85, 0.65, 0.45, 0.25, 0.1),
    "Cactus": (0.00001, 0.00005, 0.0002, 0.001, 0.004),
}
TEXTS = Path(__file__).with_name("texts.jsonl")
Told = dict[str, tuple[float, float]]


class Step(NamedTuple):
    """A draft: by theta what the rule reads, the entropy of the three likeliest tokens, and, if it
    was drawn, p and q of each row, the drafted tokens and the kept ones."""

    rows: dict[float, rule.Rows]
    entropy: list[float]
    drawn: tuple[torch.Tensor, torch.Tensor, list[int], torch.Tensor] | None


def step_of(sampler: Any, drafts: Any, sampled: Any, place: int, begin: int, end: int) -> Step:
    """Up to the answer's end. Tokens that are never drafted become one, which changes no rule."""
    ends = np.array(sampler.requests._of_place(place).record[terms.Column.ENDS :])
    ids = drafts.draft_token_ids[begin:end]
    count = next((i for i, x in enumerate(ids.tolist(), 1) if x in ends), len(ids))
    at = torch.arange(begin, begin + count)
    logits = drafts.logits[at if drafts.target_rows is None else drafts.target_rows[at]].float()
    own = terms.Drafts(logits, ids[:count], torch.tensor([count])), ends[None].repeat(count, 0)
    of_theta = terms.Rule("theta", sampler.verification.rule(logits).protected)
    kept, rows = cpu._kept(of_theta, ends, logits.shape[1]), {}
    for theta in THETAS:
        thresholds, samples = np.full(count, theta, np.float32), np.full(count, sampled is not None)
        found, _ = cpu.read_rows(own[0], thresholds, own[1], of_theta, None, samples)
        rows[theta], p = cpu.read_probabilities(found, logits, [0, count], [kept])
    entropy = torch.special.entr(p.topk(3).values).sum(-1).tolist()
    if sampled is None or sampled.draft_probs is None:
        return Step(rows, entropy, None)
    q = sampled.draft_probs[begin : begin + count]
    shown = (q > 0).any(0).index_fill(0, kept, True)
    place_of = shown.cumsum(0) - 1
    rest = (1 - p[:, shown].double().sum(1, keepdim=True)).clamp(min=1e-30).float()
    p, q = torch.cat([p[:, shown], rest], 1), torch.nn.functional.pad(q[:, shown], (0, 1))
    return Step(rows, entropy, (p, q, place_of[ids[:count].long()].tolist(), place_of[kept]))


def allowed(nats: float) -> rule.Allowance:
    return rule.Allowance(terms.price_units(nats), terms.NO_BOUND, 0, 0, room=1 << 20)


def fly(native: Any, entropy: list[float], window: int) -> int:
    """How many stay by vLLM 0.33, v1/spec_decode/fly.py, of what is accepted natively or not."""
    for i, h in enumerate(entropy):
        follows = i + window < len(native) and all(native[i + 1 : i + 1 + window])
        if not (native[i] or (h >= 0.3 and follows)):
            return i
    return len(native)


def greedy(step: Step, spent: list[float]) -> Told:
    """Tokens and nats by rule; `spent` is ASD's of the request."""
    rows, n = step.rows[0.9], len(step.entropy)
    native = [x == first for x, first in zip(rows.draft, rows.argmax, strict=True)]
    losses = [0.0 if n else max(it, 1) * UNIT for n, it in zip(native, rows.loss, strict=True)]
    found = {f"fly {window}": fly(native, step.entropy, window) for window in WINDOWS}
    # 2608.03447 with B 8, g 0.25, m 2.
    fits = (spent[0] + np.cumsum(losses) <= 8) & (losses / np.arange(n, 0, -1) <= 0.25)
    found["ASD"] = [*(fits & (np.cumsum(~np.array(native)) <= 2)), False].index(False)
    spent[0] += sum(losses[: found["ASD"]])
    # 2609.02897: the first mismatch stays where p / p1 is at least k.
    first, second, *_ = [i for i, it in enumerate(native) if not it] + [n, n]
    found["first"] = second if first < n and math.exp(-losses[first]) >= 0.61 else first
    asked: list[Any] = [("price", price, rows, price) for price in GREEDY_PRICES]
    for name, value, own, nats in [*asked, *(("theta", it, step.rows[it], 0) for it in THETAS)]:
        verdicts = rule.greedy(own, 0, n, name, allowed(nats))
        stays = [it in (terms.Verdict.FIRST, terms.Verdict.RELAXED) for it in verdicts]
        found[f"{name} {value}"] = [*stays, False].index(False)
    return {name: (count + 1.0, sum(losses[:count])) for name, count in found.items()}


def counts(chances: list[float], entropy: list[float], window: int) -> np.ndarray:
    """The chance that so many stay by `fly`, by those of native acceptance."""
    found = np.zeros(len(chances) + 1)
    for own in itertools.product((0, 1), repeat=len(chances)):
        chance = math.prod(a if n else 1 - a for n, a in zip(own, chances, strict=True))
        found[fly(own, entropy, window)] += chance
    return found


def fixed(step: Step) -> Told:
    """With a draft that is not drawn; what is lost is KL(served || target)."""
    p, found = np.exp(step.rows[0.9].log_p).tolist(), {}
    plain, length = counts(p, step.entropy, PLAIN), np.arange(1, len(p) + 2)
    for window in (PLAIN, *WINDOWS):
        own = counts(p, step.entropy, window)
        nats = sum(a * math.log(a / b) for a, b in zip(own, plain, strict=True) if a and b)
        found[f"fly {window}"] = float(own @ length), nats
    for theta in THETAS:
        reach, tokens, nats = 1.0, 1.0, 0.0
        positions = rule.sampled(step.rows[theta], 0, len(p), "theta", allowed(0))
        for accepted, position in zip(p, positions, strict=True):
            nats += reach * position.loss * UNIT
            reach *= 1.0 if position.verdict == terms.Verdict.RELAXED else accepted
            tokens += reach
        found[f"theta {theta}"] = tokens, nats
    return found


def kl(m: torch.Tensor, p: torch.Tensor) -> float:
    return float(torch.special.xlogy(m.double(), m.double() / p.double()).sum())


def served(name: str, value: float, p: Any, q: Any, kept: Any) -> tuple[Any, Any]:
    """What a rule accepts of q, and m."""

    def clipped(price: float) -> Any:
        buffers = p.new_empty(4, len(p))
        return clip.clip_row(p.log(), p, q, price, kept, buffers[3], buffers[:3]).m

    if name == "price":
        m = clipped(value)
    elif name == "mentored":  # 2609.30474: the clip of this KL, or of the largest there is.
        low, high = 0.0, 16.0
        for _ in range(14 if kl(clipped(high), p) > value else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if kl(clipped(middle), p) <= value else (low, middle)
        m = clipped(high)
    else:
        p, q = p.double(), q.double()
        if name == "lenience":  # 2211.17192: min(1, p / (l q)), and the strict rest.
            accepted, share = torch.minimum(p / value, q), torch.ones_like(p)
        else:  # 2604.04987: x has h, which others make room for.
            h = (p + (2 * value * p * (1 - p)).sqrt()).clamp(max=1)
            accepted, share = torch.minimum(h, q), (1 - h) / (1 - p).clamp(min=1e-300)
        # A rejected x gives way to max(share[x] p - q, 0): tokens of q / p below share[x].
        gone = q - accepted
        ratio, order = (q / p).sort()
        sums = [torch.nn.functional.pad(it[order].cumsum(0), (1, 0)) for it in (p, q)]
        upto = torch.searchsorted(ratio, share)
        weight = gone / (share * sums[0][upto] - sums[1][upto]).clamp(min=1e-300)
        added = p.new_zeros(2, len(p) + 1).index_add(1, upto, torch.stack([weight * share, weight]))
        above = added.flip(1).cumsum(1).flip(1)[:, 1:]
        m = accepted.index_add(0, order, above[0] * p[order] - above[1] * q[order])
        return accepted, m
    return torch.minimum(m, q), m


def drawn(step: Step, rules: Iterable[str]) -> Told:
    """Each rule position by position, as it is published; a price also by blocks."""
    found: Told = {}
    ps, qs, ids, kept = step.drawn  # type: ignore[misc]
    names = [(name, value) for name in rules for value in KNOBS[name]]
    for name, value in names:
        reach, tokens, nats, block = 1.0, 1.0, 0.0, [1.0, 1.0, 0.0]
        for p, q, x in zip(ps, qs, ids, strict=True):
            accepted, m = served(name, value, p, q, kept)
            lost, before = kl(m, p), block[0]
            tokens, nats = tokens + reach * float(accepted.sum()), nats + reach * lost
            reach *= float(accepted[x] / q[x])
            after = rule.reach(before, float(m[x]), float(q[x]))
            more = float(torch.minimum(before * m, q).sum())
            block = [after, block[1] + more, block[2] + before * lost]
        found[f"{name} {value}"] = tokens, nats
        if name == "price":
            found[f"blocks {value}"] = block[1], block[2]
    # Given the path, less what is so by chance of what is accepted natively.
    native = [min(float(p[x] / q[x]), 1.0) for p, q, x in zip(ps, qs, ids, strict=True)]
    length, plain = np.arange(1, len(ids) + 2), counts(native, step.entropy, PLAIN)
    for window in WINDOWS:
        more = float((counts(native, step.entropy, window) - plain) @ length)
        found[f"fly {window}"] = found["price 0.0"][0] + more, 0.0
    return found


def main() -> None:
    """Asks, and adds the sums of each prompt, by temperature and whether the answers are strict."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--k", type=int, required=True)
    parser.add_argument("--fixed-drafts", action="store_true")
    args = parser.parse_args()
    os.environ.update({**CPU_ENV, **text.ENV})
    from vllm_mars.runner.sampler_v1 import MarsRejectionSampler

    run, verify = describe_run(None), MarsRejectionSampler._verify
    seen: dict[Any, int] = defaultdict(int)
    steps: dict[tuple[float, bool], dict[str, list[Step]]] = defaultdict(lambda: defaultdict(list))

    def keep(sampler: Any, drafts: Any, most: int, sampled: Any = None) -> Any:
        ends = [0, *drafts.cu_num_draft_tokens.tolist()]
        for place, (begin, end) in enumerate(itertools.pairwise(ends)):
            request = sampler.requests._of_place(place)
            heat = 0.0 if sampled is None else round(float(sampled.temperature[place]), 2)
            own = heat, not request.record[terms.Column.PRICE]
            prompt = f"{zlib.crc32(np.array(request.prompt).tobytes()):08x}"
            seen[own, prompt] += 1
            # Steps in a row are alike; ASD's account needs all of them.
            if end > begin and (heat == 0 or seen[own, prompt] % 3 == 0):
                steps[own][prompt].append(step_of(sampler, drafts, sampled, place, begin, end))
        return verify(sampler, drafts, most, sampled)

    asked = ["--prompts", str(TEXTS), "--block", "28", "--max-tokens", "128", "--rules", "strict"]
    asked += ["--fixed-drafts"] if args.fixed_drafts else ["mars_max_loss=0.02"]
    # Greedily the drafts are the same.
    asked += ["--temperatures", *["0"][: args.fixed_drafts], "0.7", "1"]
    asked += ["--output", str(args.output.with_suffix(".text.jsonl"))]
    with mock.patch.object(MarsRejectionSampler, "_verify", keep):
        text.main([*asked, "--num-speculative-tokens", str(args.k)])
    for (heat, is_strict), by_prompt in steps.items():
        sums: dict[str, dict[str, list[float]]] = defaultdict(dict)
        rules = KNOBS if is_strict else ("price",)
        for prompt, own in by_prompt.items():
            spent = [0.0]
            told = [
                drawn(it, rules) if it.drawn else fixed(it) if heat else greedy(it, spent)
                for it in own
            ]
            for name in told[0]:
                tokens, nats = (round(sum(it[name][i] for it in told), 4) for i in range(2))
                sums[name][prompt] = [len(told), tokens, nats]
        point = {"k": args.k, "fixed": args.fixed_drafts, "temperature": heat, "strict": is_strict}
        append_line(args.output, {**point, "sums": sums, "run": run})


if __name__ == "__main__":
    main()
