"""Compares random steps of the V2 sampler with the oracle: `make fuzz MINUTES=60 SEED=1`.

Shapes, dtypes, ties, masks, padding and thresholds follow from the seed and the step's number.
Steps run in the interpreter until the first difference. `tests/kernels/test_rule.py` compares the
functions of the V1 sampler.
"""

import argparse
import logging
import math
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch

import oracle
from calls import LONGEST, Call
from vllm_mars import MarsConfig
from vllm_mars.kernels.interface import Verdict
from vllm_mars.kernels.rules import RULES

VALUES = {"theta": [1.0, 0.9375, 0.5, 0.0625], "price": [0.0, 0.25, 4.0]}


class Greedy:
    """Greedy requests, and possibly a sampled one at the end."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rule = str(rng.choice(list(VALUES)))
        dtype = [torch.float32, torch.bfloat16, torch.float16][rng.integers(3)]
        # No +inf and NaN, which vLLM's samplers do not handle consistently.
        call = Call(int(rng.integers(2**40)), self.rule, sampled=True, dtype=dtype)
        self.logits, self.lengths = call.logits.clone(), call.lengths
        self.drafts = [draft.tolist() for draft in call.ids.split(call.lengths)]
        batch, vocab = len(self.drafts), self.logits.shape[1]
        self.values = rng.choice(VALUES[self.rule], batch).tolist()
        # Requests may be stricter than the server.
        self.server_value = RULES[self.rule].loosest(
            [*self.values, *rng.choice(VALUES[self.rule], 1)]
        )
        self.has_value = rng.random(batch) < rng.choice([0.0, 0.7])
        self.protected = frozenset(rng.integers(0, vocab, rng.integers(0, 3)).tolist())
        self.allowed = torch.from_numpy(rng.random((batch, vocab)) < rng.choice([0.7, 1.0]))
        self.allowed[:, 0] = True
        self.temperatures = [0.0] * batch
        self.temperatures[-1] = float(batch > 1 and rng.random() < 0.4)
        # Tokens of the draft without its padding, so that n-grams repeat.
        tokens = [[0, *(x for x in draft if 0 <= x < vocab)] for draft in self.drafts]
        self.answers = [rng.choice(known, rng.integers(1, 24)).tolist() for known in tokens]

    @property
    def config(self) -> MarsConfig:
        return MarsConfig(**{self.rule: self.server_value}, strict_opening=0)

    def extra_args(self) -> list[dict[str, Any]]:
        option = RULES[self.rule].option
        values = zip(self.values, self.has_value, strict=True)
        return [{option: value} if has_value else {} for value, has_value in values]

    def difference(self, emitted: list[list[int]]) -> str | None:
        """Describes the first greedy request that differs from the oracle, or returns None."""
        rows = self.logits.float().split([len(drafts) + 1 for drafts in self.drafts])
        for index, (logits, drafts) in enumerate(zip(rows, self.drafts, strict=True)):
            *before, last = logits.masked_fill(~self.allowed[index], -math.inf).tolist()
            value = self.values[index] if self.has_value[index] else self.server_value
            options = {self.rule: value, "protected": self.protected}
            if self.config.repeat_ngram:
                options["blocked"] = self.repeats(self.answers[index], drafts, before)
            expected = oracle.verify(before, drafts, oracle.argmax(last), **options).tokens
            if not self.temperatures[index] and emitted[index] != expected:
                return f"request {index} gets {emitted[index]}, not {expected}: {vars(self)}"
        return None

    @staticmethod
    def repeats(answer: list[int], drafts: list[int], rows: list[list[float]]) -> list[int]:
        """Blocks draft tokens that repeat a longer n-gram than the argmax does."""
        blocked = []
        for position, (draft, row) in enumerate(zip(drafts, rows, strict=True)):
            before = [*answer, *drafts[:position]]
            allowed = oracle.repeats(before, oracle.argmax(row))
            blocked.append(Verdict.REPEAT * (oracle.repeats(before, draft) > allowed))
        return blocked


def check(rng: np.random.Generator) -> str | None:
    """Runs a step of the V2 sampler; returns its difference from the oracle, or None."""
    from vllm import SamplingParams

    from benchmarks.step_v2 import Request, Step
    from steps_v2 import emitted

    greedy = Greedy(rng)
    # A grammar's mask is applied to the logits before verification.
    counts = torch.tensor(greedy.lengths) + 1
    greedy.logits[~greedy.allowed.repeat_interleave(counts, 0)] = -math.inf
    # vLLM's kernels return an arbitrary token for a row without finite logits.
    greedy.logits[~greedy.logits.isfinite().any(1), 0] = 0.0
    columns = greedy.temperatures, greedy.extra_args(), greedy.drafts, greedy.answers
    requests = [
        Request(
            SamplingParams(temperature=temperature, max_tokens=50, extra_args=extra_args),
            drafts,
            # The guard does not consider the prompt.
            [0, 1, 0, *answer],
        )
        for temperature, extra_args, drafts, answer in zip(*columns, strict=True)
    ]
    step = Step(requests, greedy.logits, steps=LONGEST)
    sampler = step.sampler(greedy.config, protected=tuple(greedy.protected))
    if rng.random() < 0.5:
        # A batch that needs logits processing becomes a float32 copy.
        sampler.sampler.needs_logits_processing[step.slots] = True
    # Drafts that a grammar forbids.
    invalid = torch.from_numpy(rng.random(len(greedy.logits)) < rng.choice([0.0, 0.1]))
    output = sampler(greedy.logits.clone(), step.batch(), None, invalid)
    greedy.drafts = [
        [-1 if bad else draft for bad, draft in zip(is_invalid[1:].tolist(), drafts, strict=True)]
        for is_invalid, drafts in zip(invalid.split(counts.tolist()), greedy.drafts, strict=True)
    ]
    return greedy.difference(emitted(output))


def main() -> str | None:
    """Runs for the given time; returns the first difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # vLLM warns for each config.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    end, number = time.monotonic() + args.minutes * 60, 0
    with torch.inference_mode():
        while time.monotonic() < end:
            rng = np.random.default_rng([args.seed, number])
            if difference := check(rng):
                return f"seed {args.seed}, step {number}: {difference}"
            number += 1
    print(f"{number} steps, seed {args.seed}, no difference", flush=True)
    return None


if __name__ == "__main__":
    sys.exit(main())
