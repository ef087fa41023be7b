"""Random verification calls against an oracle in pure Python: `make fuzz MINUTES=10 SEED=1`.

    python tests/fuzz.py --minutes 10 --seed 1          both samplers, the minutes shared out
    python tests/fuzz.py --target v1 --seed 1 --only 7  one call again, to look at

Of the samplers of both model runners, V2's in the interpreter; `tests/kernels/test_rule.py` and
`tests/interpreted` compare what they call. A call draws shapes, dtypes, ties, masks, padding and
thresholds of its own from the seed and its number, so a difference can be run again. The first
difference ends the run with exit status 1.
"""

import argparse
import json
import logging
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import oracle
from vllm_mars import MarsConfig
from vllm_mars.config import OPTION, STRICT_VALUE
from vllm_mars.local.drafts import LOOSEST_LIMIT
from vllm_mars.local.provenance import describe_run

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS / "conformance"))
# Of each rule, what all requests of a call may share, and what each may have.
VALUES = {
    "theta": ([1.0, 0.9, 0.5, 0.01], [1.0, 0.9375, 0.5, 0.0625]),
    "price": ([0.0, 0.3, 3.0], [0.0, 0.25, 4.0]),
}


@dataclass
class Call:
    """One random call.

    Attributes:
        logits: `[num_rows, vocab]`; each request's draft rows, then its bonus row.
        drafts: draft tokens of each request.
        rule: "theta" or "price".
        value: of the rule, of each request or one for all.
        protected: token ids.
        allowed: bool `[batch, vocab]` or None; what a processor of the samplers lets through.
    """

    logits: torch.Tensor
    drafts: list[list[int]]
    rule: str
    value: float | list[float]
    protected: frozenset[int]
    allowed: torch.Tensor | None = None

    def expected(self) -> list[Any]:
        """What the oracle says of each request."""
        results, row = [], 0
        for request, drafts in enumerate(self.drafts):
            logits = self.logits[row : row + len(drafts) + 1].float()
            row += len(logits)
            if self.allowed is not None:
                logits = logits.masked_fill(~self.allowed[request], -math.inf)
            *rows, last = logits.tolist()
            value = self.value[request] if isinstance(self.value, list) else self.value
            given = {self.rule: value, "protected": self.protected}
            results.append(oracle.verify(rows, drafts, oracle.argmax(last), **given))
        return results

    def differs(self, who: str, found: Any, wanted: Any) -> str | None:
        """What there is to say where this is not the same."""
        if found == wanted:
            return None
        allowed = None if self.allowed is None else self.allowed.tolist()
        return (
            f"{who} gives {found}, the oracle {wanted}, for dtype {self.logits.dtype}, "
            f"drafts {self.drafts}, {self.rule} {self.value}, protected {sorted(self.protected)}, "
            f"allowed {allowed}, logits {json.dumps(self.logits.float().tolist())}"
        )


def random_call(rng: np.random.Generator) -> Call:
    """Draws a call, without what an engine never brings."""
    vocab = int(rng.choice([2, 5, 17, 33, 70]))
    lengths = rng.integers(0, 6, size=rng.integers(1, 5)).tolist()
    if not any(lengths):
        lengths[0] = 1
    rows = sum(lengths) + len(lengths)
    scale = rng.choice([0.3, 2.0, 30.0])
    logits = torch.from_numpy(rng.normal(rng.choice([0.0, 2.0, 20.0]), scale, (rows, vocab)))
    if rng.random() < 0.5:
        logits = logits.round()
    specials = [-math.inf, -0.0, 0.0, logits.max().item()]
    # vLLM's samplers give NaN a meaning of their own, and never see +inf.
    for value in rng.choice(specials, size=rng.integers(0, 3)):
        logits[torch.from_numpy(rng.random((rows, vocab)) < rng.choice([0.1, 0.6]))] = value
    logits = logits.to([torch.float32, torch.bfloat16, torch.float16][rng.integers(0, 3)])

    drafts, row = [], 0
    for length in lengths:
        best = logits[row : row + length].float().topk(min(3, vocab)).indices
        chosen = [ids[rng.integers(0, len(ids))] for ids in best.tolist()]
        # At times a padding id or any token, in a sampler as elsewhere.
        others = rng.integers(-1, vocab, size=length).tolist()
        drafts.append([o if rng.random() < 0.1 else c for c, o in zip(chosen, others, strict=True)])
        row += length + 1
    rule = rng.choice(list(VALUES), p=[0.6, 0.4])
    # Those of a tensor are floats that float32 holds.
    one, each = VALUES[rule]
    value: float | list[float] = float(rng.choice(one))
    if rng.random() < 0.5:
        value = rng.choice(each, size=len(lengths)).tolist()
    protected = frozenset(rng.integers(0, vocab, size=rng.integers(0, 3)).tolist())
    return Call(logits, drafts, rule, value, protected)


def sampler_call(rng: np.random.Generator) -> tuple[Call, MarsConfig, list[Any], list[float]]:
    """A call for a sampler, its config, and what each request asks for, with its temperature.

    All requests are greedy, or all but a last one: a batch with it takes vLLM's own path.
    """
    call = random_call(rng)
    guard = {"strict_opening": 0} if call.rule == "price" else {}
    value, batch = call.value, len(call.drafts)
    own: list[Any] = [None] * batch
    if isinstance(value, list):
        own, value = [{OPTION[call.rule]: one} for one in value], STRICT_VALUE[call.rule]
    config = MarsConfig(**{call.rule: value}, limit=LOOSEST_LIMIT[call.rule], **guard)
    last = float(batch > 1 and rng.random() < 0.4)
    return call, config, own, [0.0] * (batch - 1) + [last]


def differences(found: list[list[int]], call: Call, temperatures: list[float]) -> str | None:
    """Compares the tokens that greedy requests emit with the oracle's."""
    compared = temperatures.count(0.0)
    wanted = [result.tokens for result in call.expected()]
    return call.differs("the sampler", found[:compared], wanted[:compared])


def check_v1(rng: np.random.Generator) -> str | None:
    """The V1 sampler on all of its paths, with masks and own thresholds; greedy requests count."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor.interface import BatchUpdate

    import steps_v1

    call, config, own, temperatures = sampler_call(rng)
    batch, vocab = len(call.drafts), call.logits.shape[1]
    if rng.random() < 0.4:
        call.allowed = torch.from_numpy(rng.random((batch, vocab)) < 0.7)
        call.allowed[:, 0] = True
    sampler = steps_v1.mars_sampler(config, call.protected)
    added = [
        (index, SamplingParams(temperature=0, extra_args=extra_args), None, [])
        for index, extra_args in enumerate(own)
    ]
    sampler.requests.update_state(BatchUpdate(batch, removed=[], added=added, moved=[]))
    sampling = steps_v1.sampling(
        temperatures,
        drafts=call.drafts,
        # Logprobs and masks keep a batch off the raw rows.
        max_num_logprobs=1 if rng.random() < 0.3 else None,
        allowed_token_ids_mask=None if call.allowed is None else ~call.allowed,
    )
    output = sampler(steps_v1.metadata_of(call.drafts), None, call.logits.clone(), sampling)
    return differences(steps_v1.emitted(output), call, temperatures)


def check_v2(rng: np.random.Generator) -> str | None:
    """The V2 sampler on all of its paths, in the interpreter; greedy requests count."""
    from vllm import SamplingParams

    from steps_v2 import Request, Step, emitted

    call, config, own, temperatures = sampler_call(rng)
    if rng.random() < 0.5:
        # The mask of grammar stands in the logits before verification.
        keep = torch.from_numpy(rng.random(call.logits.shape) < 0.7)
        keep[:, 0] = True
        call.logits = call.logits.masked_fill(~keep, -math.inf)
    # Of a row without any finite logit vLLM's kernels take no token in particular.
    call.logits[~call.logits.isfinite().any(1), 0] = 0.0
    requests = [
        Request(
            SamplingParams(temperature=temperature, extra_args=extra_args), drafts, [0, 1, 0, 1, 0]
        )
        for temperature, extra_args, drafts in zip(temperatures, own, call.drafts, strict=True)
    ]
    step = Step(requests, call.logits)
    sampler = step.sampler(config, protected=tuple(call.protected))
    if rng.random() < 0.5:
        # A batch that is marked as touched by a processor goes as a float32 copy.
        sampler.sampler.needs_logits_processing[step.states] = True
    # Drafts that grammar forbids.
    invalid = torch.from_numpy(rng.random(len(call.logits)) < rng.choice([0.0, 0.1]))
    output = sampler(call.logits.clone(), step.batch(), None, invalid)
    counts = [len(drafts) + 1 for drafts in call.drafts]
    call.drafts = [
        [-1 if bad else draft for bad, draft in zip(row[1:], drafts, strict=True)]
        for row, drafts in zip(map(list, invalid.split(counts)), call.drafts, strict=True)
    ]
    return differences(emitted(output), call, temperatures)


CHECKS: dict[str, Callable[[np.random.Generator], str | None]] = {"v1": check_v1, "v2": check_v2}


def run_target(target: str, seed: int, seconds: float, most: int, only: int | None) -> int:
    """Makes calls to one target in this process; returns the exit status."""
    torch.set_num_threads(1)
    # vLLM warns once for each config that is made.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    end = time.monotonic() + seconds
    calls = 0
    with torch.inference_mode():
        for number in range(most) if only is None else [only]:
            if only is None and time.monotonic() > end:
                break
            rng = np.random.default_rng([seed, list(CHECKS).index(target), number])
            difference = CHECKS[target](rng)
            if difference is not None:
                print(f"{target}, seed {seed}, call {number}: {difference}", flush=True)
                return 1
            calls += 1
    print(f"{target}: {calls} calls, seed {seed}, no difference", flush=True)
    return 0


def main() -> int:
    """Runs the targets, each in a process of its own; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=1.0, help="for both targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=10**9, help="calls of each target at most")
    parser.add_argument("--target", choices=CHECKS, help="this one alone, in this process")
    parser.add_argument("--only", type=int, help="the number of one call, with --target")
    parser.add_argument("--output", type=Path, help="JSON file with the number of calls")
    args = parser.parse_args()
    if args.target:
        return run_target(args.target, args.seed, args.minutes * 60, args.most, args.only)
    calls: dict[str, int] = {}
    for target in CHECKS:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        environment.pop("TRITON_INTERPRET", None)
        if target == "v2":
            environment["TRITON_INTERPRET"] = "1"
            environment["PYTHONPATH"] = str(TESTS / "interpreted")
        command = [sys.executable, __file__, "--target", target, "--seed", str(args.seed)]
        command += ["--minutes", str(args.minutes / len(CHECKS)), "--most", str(args.most)]
        child = subprocess.run(
            command, env=environment, check=False, stdout=subprocess.PIPE, text=True
        )
        print(child.stdout, end="", flush=True)
        if child.returncode:
            return child.returncode
        calls[target] = int(child.stdout.split(" calls")[0].split()[-1])
    if args.output:
        result = {"schema": "vllm-mars/fuzz/1", **describe_run(None), "seed": args.seed}
        args.output.write_text(json.dumps({**result, "calls": calls, "differences": 0}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
