"""Tokens of lossy sampled steps equal the golden tokens of the interpreter.

Runs on a GPU, or else in the interpreter. The CPU reference replays the golden tokens.
"""

import json

import pytest
import torch

from calls import Replay
from golden_tokens import GOLDEN, IS_INTERPRETED, KINDS, NUM_STEPS, SMALL, steps, tokens_of
from vllm_mars.kernels import reference
from vllm_mars.kernels.interface import GRAMMAR_REJECTED

# The interpreter takes 0.2 s for a step of the small vocabulary, and 3 s for one of the large.
ALL = max(NUM_STEPS.values())
MOST = [2, pytest.param(ALL, marks=pytest.mark.nightly)] if IS_INTERPRETED else [ALL]

IN_PROCESS = pytest.mark.interpreted if IS_INTERPRETED else pytest.mark.usefixtures()


def written(kind, most=ALL):
    """The first steps of a kind with their tokens."""
    golden = json.loads(GOLDEN.read_text())[kind]
    assert len(golden) == NUM_STEPS[KINDS[kind][2]]
    for (call, step, check), (wanted, tokens) in zip(steps(kind, most), golden, strict=False):
        assert check == wanted, f"{kind}: this NumPy, or this torch, makes other steps"
        yield call, step, tokens


@IN_PROCESS
@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow)")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] if IS_INTERPRETED else [[*KINDS]])
@pytest.mark.parametrize("most", MOST)
def test_tokens_equal_the_golden_tokens(most, kinds):
    """On a GPU rounding may change the tokens of one request per 1,000 tokens."""
    count, differing = 0, []
    for kind in kinds:
        for number, (call, step, expected) in enumerate(written(kind, most)):
            emitted = tokens_of(call, step)
            count += sum(map(len, expected))
            differing += [
                (kind, number, request)
                for request, (tokens, golden) in enumerate(zip(emitted, expected, strict=True))
                if tokens != golden
            ]
    print(f"{len(differing)} requests differ over {count} tokens: {differing}")
    assert len(differing) <= (0 if IS_INTERPRETED else count / 1000), differing


class Possible(Replay):
    """Replays decisions, which must have a positive probability."""

    def accepts(self, position: int, probability: float) -> bool:
        is_accepted = super().accepts(position, probability)
        assert probability > 0 or not is_accepted
        return is_accepted

    def sample_token(self, request: int, weights: torch.Tensor) -> int:
        token = super().sample_token(request, weights)
        assert weights[token] > 0
        return token


@pytest.mark.parametrize("kind", KINDS)
def test_the_cpu_reference_can_emit_the_golden_tokens(kind):
    """It computes greedy tokens itself."""
    for call, (q, step, *_), expected in written(kind):
        width = step.num_speculative_tokens + 1
        tokens = torch.tensor([[*golden, *[-1] * (width - len(golden))] for golden in expected])
        sampling_inputs = Possible(call, tokens, q)
        bonus = torch.tensor(sampling_inputs.next_ids)
        output = reference.verify(
            step, call.engine_params, call.constraints, None, sampling_inputs, bonus
        )
        assert torch.equal(output.output_token_ids.long(), tokens)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][2] == SMALL])
def test_the_golden_steps_cover_every_feature(kind):
    seen = dict.fromkeys(("preserved", "strict", "rejected", "mixed K", "mixed temperatures"), 0)
    for call, _, tokens in written(kind):
        samples = call.temperature > 0
        protected = call.engine_params.protected
        for slot, emitted in zip(call.slots.tolist(), tokens, strict=True):
            ends = {*call.records.stop_ids[slot].tolist()}
            seen["preserved"] += any(
                token in ends or (protected is not None and bool(protected.mask[token]))
                for token in emitted
            )
        seen["strict"] += call.constraints is not None and any(call.constraints.blocked)
        seen["rejected"] += bool((call.ids == GRAMMAR_REJECTED).any())
        seen["mixed K"] += len({*call.lengths}) > 1
        seen["mixed temperatures"] += bool(samples.any() and not samples.all())
    assert all(seen.values()), seen
