"""Random verification calls against an oracle in pure Python: `make fuzz MINUTES=10 SEED=1`.

    python tests/fuzz.py --minutes 10 --seed 1          all targets, the minutes shared out
    python tests/fuzz.py --target v1 --seed 1 --only 7  one call again, to look at

Targets: the public function on the backends "torch" (NumPy on a CPU) and "reference", Triton's
interpreter, and the samplers of both model runners. A call draws shapes, dtypes, ties, masks, NaN,
padding ids and thresholds of its own from the seed and its number, so a difference can be run
again. The first difference ends the run with exit status 1.
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

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS / "conformance"))
# Share of the time; the interpreter takes a hundred times as long for a call.
SHARES = {"public": 0.3, "v1": 0.3, "triton": 0.2, "v2": 0.2}
INTERPRETED = ("triton", "v2")
# Of each rule, what all requests of a call may share, and what each may have.
VALUES = {
    "theta": ([1.0, 0.9, 0.5, 0.01], [1.0, 0.9375, 0.5, 0.0625]),
    "gap": ([0.0, 0.5, 3.0], [0.0, 0.25, 4.0]),
    "price": ([0.0, 0.3, 3.0], [0.0, 0.25, 4.0]),
}


@dataclass
class Call:
    """One random call.

    Attributes:
        logits: tensor `[num_rows, vocab]`; each request's draft rows, then its bonus row.
        drafts: draft tokens of each request.
        rule: "theta", "gap" or "price".
        value: of the rule, of each request or one for all.
        protected: token ids.
        allowed: bool `[batch, vocab]` or None; what a processor of the samplers lets through.
    """

    logits: Any
    drafts: list[list[int]]
    rule: str
    value: float | list[float]
    protected: frozenset[int]
    allowed: Any = None

    def value_of(self, request: int) -> float:
        return self.value[request] if isinstance(self.value, list) else self.value

    def describe(self) -> str:
        rows = json.dumps(self.logits.float().tolist())
        return (
            f"dtype {self.logits.dtype}, drafts {self.drafts}, {self.rule} {self.value}, "
            f"protected {sorted(self.protected)}, allowed "
            f"{None if self.allowed is None else self.allowed.tolist()}, logits {rows}"
        )


def expected(call: Call) -> list[Any]:
    """What the oracle says of each request."""
    import oracle

    results = []
    row = 0
    for request, drafts in enumerate(call.drafts):
        rows = call.logits[row : row + len(drafts) + 1].float().tolist()
        row += len(drafts) + 1
        if call.allowed is not None:
            allowed = call.allowed[request].tolist()
            rows = [
                [value if ok else -math.inf for value, ok in zip(values, allowed, strict=True)]
                for values in rows
            ]
        value, bonus = call.value_of(request), oracle.argmax(rows[-1])
        theta = value if call.rule == "theta" else 1.0
        gap = value if call.rule == "gap" else 0.0
        price = value if call.rule == "price" else None
        results.append(
            oracle.verify(rows[:-1], drafts, bonus, theta, gap, call.protected, price=price)
        )
    return results


def random_call(rng: Any, *, sampler: bool) -> Call:
    """Draws a call; those of a sampler leave out what an engine never brings."""
    import torch

    vocab = int(rng.choice([2, 5, 17, 33, 70]) if sampler else rng.choice([1, 2, 3, 17, 33, 70]))
    lengths = rng.integers(0, 6, size=rng.integers(1, 5)).tolist()
    if sampler and not any(lengths):
        lengths[0] = 1
    rows = sum(lengths) + len(lengths)
    scale = rng.choice([0.3, 2.0, 30.0])
    logits = torch.from_numpy(rng.normal(rng.choice([0.0, 2.0, 20.0]), scale, (rows, vocab)))
    if rng.random() < 0.5:
        logits = logits.round()
    specials = [-math.inf, -0.0, 0.0, logits.max().item()]
    # vLLM's samplers give NaN a meaning of their own, and never see +inf.
    specials += [] if sampler else [math.nan, math.inf]
    for value in rng.choice(specials, size=rng.integers(0, 3)):
        logits[torch.from_numpy(rng.random((rows, vocab)) < rng.choice([0.1, 0.6]))] = value
    logits = logits.to([torch.float32, torch.bfloat16, torch.float16][rng.integers(0, 3)])

    drafts, row = [], 0
    for length in lengths:
        best = logits[row : row + length].float().nan_to_num(0).topk(min(3, vocab)).indices
        chosen = [ids[rng.integers(0, len(ids))] for ids in best.tolist()]
        # At times a padding id or any token, in a sampler as elsewhere.
        others = rng.integers(-1, vocab, size=length).tolist()
        drafts.append([o if rng.random() < 0.1 else c for c, o in zip(chosen, others, strict=True)])
        row += length + 1
    rule = rng.choice(["theta", "gap", "price"], p=[0.5, 0.2, 0.3])
    # Those of a tensor are floats that float32 holds.
    one, each = VALUES[rule]
    value: float | list[float] = float(rng.choice(one))
    if rng.random() < 0.5:
        value = rng.choice(each, size=len(lengths)).tolist()
    protected = frozenset(rng.integers(0, vocab, size=rng.integers(0, 3)).tolist())
    return Call(logits, drafts, rule, value, protected)


def padded(results: list[Any], width: int) -> list[list[int]]:
    """Token lists filled with -1."""
    return [result.tokens + [-1] * (width - len(result.tokens)) for result in results]


def layout(call: Call) -> tuple[Any, ...]:
    """Draft ids, prefix sum, draft rows and bonus rows, as tensors."""
    import torch

    is_bonus = torch.cat([torch.arange(len(d) + 1) == len(d) for d in call.drafts])
    ids = torch.tensor([token for drafts in call.drafts for token in drafts], dtype=torch.int32)
    ends = torch.tensor([len(drafts) for drafts in call.drafts]).cumsum(0).int()
    return (
        ids,
        ends,
        (~is_bonus).nonzero().squeeze(1).int(),
        is_bonus.nonzero().squeeze(1).int(),
    )


def per_request(value: float | list[float]) -> Any:
    """A float as it is, a list as float32 tensor."""
    import torch

    return value if isinstance(value, float) else torch.tensor(value)


def mask(call: Call) -> Any:
    """The protected tokens as bool `[vocab]`, or None."""
    import torch

    if not call.protected:
        return None
    protected = torch.zeros(call.logits.shape[1], dtype=torch.bool)
    protected[list(call.protected)] = True
    return protected


def reference_of(call: Call, drafts: Any, value: Any) -> Any:
    """What the reference makes of a call."""
    import torch

    from vllm_mars.kernels import reference
    from vllm_mars.kernels.terms import NO_BOUND, Records, Requests, Rule, price_units

    values = value.tolist() if isinstance(value, torch.Tensor) else [value] * len(call.drafts)
    zeros = torch.zeros(len(values), dtype=torch.int64)
    price = torch.tensor([price_units(one) for one in values])
    records = Records(torch.tensor(values), price, zeros, zeros + NO_BOUND, zeros)
    slots = torch.arange(len(values))
    rule = Rule(call.rule, 0, mask(call))
    return reference.accept(drafts, Requests(records, slots, slots.int()), rule)


def check_public(rng: Any, backends: tuple[str, ...] = ("torch", "reference")) -> str | None:
    """`verify_greedy`; returns what differs, or None."""
    from vllm_mars import verify_greedy
    from vllm_mars.kernels.terms import Drafts

    call = random_call(rng, sampler=False)
    ids, ends, rows, bonus_rows = layout(call)
    width = max(map(len, call.drafts)) + 1
    results = expected(call)
    for backend in backends:
        value = per_request(call.value)
        if backend == "reference":
            drafts = Drafts(call.logits, ids, ends, rows, None, bonus_rows, width - 1)
            output = reference_of(call, drafts, value)
        else:
            output = verify_greedy(
                *(call.logits, ids, ends, None),
                **{call.rule: value},
                protected=mask(call),
                target_rows=rows,
                bonus_rows=bonus_rows,
                max_draft_len=width - 1,
                backend=backend,
            )
        found = (
            output.output_token_ids.tolist(),
            output.num_accepted.tolist(),
            output.num_relaxed.tolist(),
        )
        wanted = (
            padded(results, width),
            [result.accepted for result in results],
            [result.relaxed for result in results],
        )
        if found != wanted:
            return f"backend {backend} gives {found}, the oracle {wanted}, for {call.describe()}"
    return None


def check_triton(rng: Any) -> str | None:
    """`verify_greedy` with backend "triton"."""
    return check_public(rng, ("triton",))


def sampler_call(rng: Any) -> tuple[Call, Any, list[dict[str, float]]]:
    """A call for a sampler, its config, and what each request asks for."""
    from vllm_mars import MarsConfig
    from vllm_mars.config import OPTION, STRICT_VALUE
    from vllm_mars.local.drafts import LOOSEST_LIMIT

    call = random_call(rng, sampler=True)
    guard = {"repeat_guard": 0} if call.rule == "price" else {}
    value = call.value
    if isinstance(value, float):
        own: list[dict[str, float]] = [{} for _ in call.drafts]
    else:
        own, value = [{OPTION[call.rule]: one} for one in value], STRICT_VALUE[call.rule]
    config = MarsConfig(**{call.rule: value}, limit=LOOSEST_LIMIT[call.rule], **guard)
    return call, config, own


def differences(found: list[list[int]], call: Call, compared: int) -> str | None:
    """Compares the tokens that the first requests emit with the oracle's."""
    wanted = [result.tokens for result in expected(call)][:compared]
    if found[:compared] == wanted:
        return None
    return f"the sampler gives {found}, the oracle {wanted}, for {call.describe()}"


def num_greedy(rng: Any, call: Call) -> int:
    """How many requests are greedy: all, or all but a last one that is sampled.

    A batch with a sampled request takes vLLM's own path.
    """
    return len(call.drafts) - int(len(call.drafts) > 1 and rng.random() < 0.4)


def check_v1(rng: Any) -> str | None:
    """The V1 sampler on all of its paths, with masks and own thresholds; greedy requests count."""
    import torch
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from vllm_mars import MarsRejectionSampler
    from vllm_mars.runner.counters import CounterLayout, Counters
    from vllm_mars.runner.requests_v1 import RequestsV1
    from vllm_mars.runner.verification import Verification

    call, config, own = sampler_call(rng)
    cpu, batch, vocab = torch.device("cpu"), len(call.drafts), call.logits.shape[1]
    if rng.random() < 0.4:
        call.allowed = torch.from_numpy(rng.random((batch, vocab)) < 0.7)
        call.allowed[:, 0] = True
    requests = RequestsV1(config, batch, cpu)
    added = [
        (index, SamplingParams(temperature=0, extra_args=extra_args or None), None, [])
        for index, extra_args in enumerate(own)
    ]
    requests.update_state(BatchUpdate(batch, removed=[], added=added, moved=[]))
    ids, _, rows, bonus_rows = layout(call)
    metadata = SpecDecodeMetadata.make_dummy(call.drafts, cpu)
    metadata.draft_token_ids = ids
    metadata.target_logits_indices, metadata.bonus_logits_indices = rows, bonus_rows
    neutral = torch.zeros(batch)
    greedy = num_greedy(rng, call)
    temperature = torch.tensor([float(request >= greedy) for request in range(batch)])
    sampling = SamplingMetadata(
        temperature=None if greedy == batch else temperature,
        all_greedy=greedy == batch,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        # Logprobs and masks keep a batch off the raw rows.
        max_num_logprobs=1 if rng.random() < 0.3 else None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=neutral,
        presence_penalties=neutral,
        repetition_penalties=neutral + 1,
        output_token_ids=[[] for _ in range(batch)],
        spec_token_ids=call.drafts,
        allowed_token_ids_mask=None if call.allowed is None else ~call.allowed,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    counters = Counters(CounterLayout(max(map(len, call.drafts)), rule=config.rule), cpu)
    verification = Verification(config, list(call.protected), counters)
    sampler = MarsRejectionSampler(Sampler(), None, cpu, verification, requests)
    output = sampler(metadata, None, call.logits.clone(), sampling).sampled_token_ids
    return differences([[t for t in row if t >= 0] for row in output.tolist()], call, greedy)


def check_v2(rng: Any) -> str | None:
    """The V2 sampler on all of its paths, in the interpreter; greedy requests count."""
    import torch
    from vllm import SamplingParams

    from steps_v2 import Request, Step, emitted

    call, config, own = sampler_call(rng)
    if rng.random() < 0.5:
        # The mask of grammar stands in the logits before verification.
        keep = torch.from_numpy(rng.random(call.logits.shape) < 0.7)
        keep[:, 0] = True
        call.logits = call.logits.masked_fill(~keep, -math.inf)
    # Of a row without any finite logit vLLM's kernels take no token in particular.
    call.logits[~call.logits.isfinite().any(1), 0] = 0.0
    greedy = num_greedy(rng, call)
    requests = [
        Request(
            SamplingParams(temperature=int(index >= greedy), extra_args=extra_args or None),
            drafts,
            [0, 1, 0, 1, 0],
        )
        for index, (extra_args, drafts) in enumerate(zip(own, call.drafts, strict=True))
    ]
    step = Step(requests, call.logits)
    sampler = step.sampler(config, protected=tuple(call.protected))
    if rng.random() < 0.5:
        # A batch that is marked as touched by a processor goes as a float32 copy.
        sampler.sampler.needs_logits_processing[step.states] = True
    return differences(emitted(sampler(call.logits.clone(), step.batch())), call, greedy)


CHECKS: dict[str, Callable[[Any], str | None]] = {
    "public": check_public,
    "v1": check_v1,
    "triton": check_triton,
    "v2": check_v2,
}


def run_target(target: str, seed: int, seconds: float, most: int, only: int | None) -> int:
    """Makes calls to one target in this process; returns the exit status."""
    import numpy as np
    import torch

    torch.set_num_threads(1)
    # vLLM warns once for each config that is made.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if target == "v1":
        from vllm.platforms import current_platform

        from vllm_mars.runner.cpu_kernels import mend

        current_platform.import_kernels()
        current_platform.register_triton_kernel_overrides()
        mend()
    end = time.monotonic() + seconds
    calls = 0
    numbers = [only] if only is not None else range(most)
    with torch.inference_mode():
        for number in numbers:
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
    parser.add_argument("--minutes", type=float, default=1.0, help="for all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=10**9, help="calls of each target at most")
    parser.add_argument("--target", choices=CHECKS, help="this one alone, in this process")
    parser.add_argument("--only", type=int, help="the number of one call, with --target")
    parser.add_argument("--output", type=Path, help="JSON file with the number of calls")
    args = parser.parse_args()
    if args.target:
        return run_target(args.target, args.seed, args.minutes * 60, args.most, args.only)
    calls: dict[str, int] = {}
    for target, share in SHARES.items():
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        environment.pop("TRITON_INTERPRET", None)
        if target in INTERPRETED:
            environment["TRITON_INTERPRET"] = "1"
            environment["PYTHONPATH"] = str(TESTS / "interpreted")
        command = [sys.executable, __file__, "--target", target, "--seed", str(args.seed)]
        command += ["--minutes", str(args.minutes * share), "--most", str(args.most)]
        child = subprocess.run(
            command, env=environment, check=False, stdout=subprocess.PIPE, text=True
        )
        print(child.stdout, end="", flush=True)
        if child.returncode:
            return child.returncode
        calls[target] = int(child.stdout.split(" calls")[0].split()[-1])
    if args.output:
        from vllm_mars.local.provenance import describe_run

        result = {"schema": "vllm-mars/fuzz/1", **describe_run(None), "seed": args.seed}
        args.output.write_text(json.dumps({**result, "calls": calls, "differences": 0}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
