"""Random steps of the V2 sampler against the oracle: `make fuzz MINUTES=60 SEED=1`.

Each step has shapes, dtypes, ties, masks, padding and thresholds of its own, which follow from the
seed and its number, and runs in the interpreter. The first difference ends the run. What the V1
sampler calls is compared by `tests/kernels/test_rule.py`.
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
from vllm_mars.kernels.rules import RULES

VALUES = {"theta": [1.0, 0.9375, 0.5, 0.0625], "price": [0.0, 0.25, 4.0]}


class Greedy:
    """Requests that are greedy, or all but the last, with which a batch takes vLLM's own path.

    Args:
        rng: what all of it is drawn from.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.rule = str(rng.choice(list(VALUES)))
        dtype = [torch.float32, torch.bfloat16, torch.float16][rng.integers(3)]
        # Without +inf and NaN, of which vLLM's samplers see none or make something of their own.
        call = Call(int(rng.integers(2**40)), self.rule, sampled=True, dtype=dtype)
        self.logits, self.lengths = call.logits.clone(), call.lengths
        self.drafts = [own.tolist() for own in call.ids.split(call.lengths)]
        batch, vocab = len(self.drafts), self.logits.shape[1]
        self.values = rng.choice(VALUES[self.rule], batch).tolist()
        # A request may be stricter than its server.
        self.shared = RULES[self.rule].loosest([*self.values, *rng.choice(VALUES[self.rule], 1)])
        self.is_own = rng.random(batch) < rng.choice([0.0, 0.7])
        self.protected = frozenset(rng.integers(0, vocab, rng.integers(0, 3)).tolist())
        self.allowed = torch.from_numpy(rng.random((batch, vocab)) < rng.choice([0.7, 1.0]))
        self.allowed[:, 0] = True
        self.temperatures = [0.0] * batch
        self.temperatures[-1] = float(batch > 1 and rng.random() < 0.4)

    @property
    def config(self) -> MarsConfig:
        return MarsConfig(**{self.rule: self.shared}, strict_opening=0)

    def asked(self) -> list[dict[str, Any]]:
        """What each request asks for."""
        each = zip(self.values, self.is_own, strict=True)
        return [{RULES[self.rule].option: value} if own else {} for value, own in each]

    def difference(self, emitted: list[list[int]]) -> str | None:
        """What there is to say where the greedy requests' tokens are not those of the oracle."""
        rows = self.logits.float().split([len(drafts) + 1 for drafts in self.drafts])
        for place, (own, drafts) in enumerate(zip(rows, self.drafts, strict=True)):
            *before, last = own.masked_fill(~self.allowed[place], -math.inf).tolist()
            value = self.values[place] if self.is_own[place] else self.shared
            given = {self.rule: value, "protected": self.protected}
            wanted = oracle.verify(before, drafts, oracle.argmax(last), **given).tokens
            if not self.temperatures[place] and emitted[place] != wanted:
                return f"request {place} gets {emitted[place]}, not {wanted}: {vars(self)}"
        return None


def check(rng: np.random.Generator) -> str | None:
    """A step of the V2 sampler; what differs from the oracle's, or None."""
    from vllm import SamplingParams

    from benchmarks.step_v2 import Request, Step
    from steps_v2 import emitted

    given = Greedy(rng)
    # The mask of grammar stands in the logits before verification.
    counts = torch.tensor(given.lengths) + 1
    given.logits[~given.allowed.repeat_interleave(counts, 0)] = -math.inf
    # Of a row without any finite logit vLLM's kernels take no token in particular.
    given.logits[~given.logits.isfinite().any(1), 0] = 0.0
    requests = [
        Request(SamplingParams(temperature=temperature, extra_args=own), drafts, [0, 1, 0, 1, 0])
        for temperature, own, drafts in zip(
            given.temperatures, given.asked(), given.drafts, strict=True
        )
    ]
    step = Step(requests, given.logits, steps=LONGEST)
    sampler = step.sampler(given.config, protected=tuple(given.protected))
    if rng.random() < 0.5:
        # A batch that is marked as touched by a processor goes as a float32 copy.
        sampler.sampler.needs_logits_processing[step.slots] = True
    # Drafts that grammar forbids.
    invalid = torch.from_numpy(rng.random(len(given.logits)) < rng.choice([0.0, 0.1]))
    output = sampler(given.logits.clone(), step.batch(), None, invalid)
    given.drafts = [
        [-1 if bad else draft for bad, draft in zip(own[1:].tolist(), drafts, strict=True)]
        for own, drafts in zip(invalid.split(counts.tolist()), given.drafts, strict=True)
    ]
    return given.difference(emitted(output))


def main() -> str | None:
    """Runs until a time has passed; returns the first difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # vLLM warns once for each config that is made.
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
