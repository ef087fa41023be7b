"""Relaxed acceptance: the definition against an oracle, and the kernels against the definition."""

import os

import pytest
import torch

import oracle
from calls import LONGEST, Call, on_cpu, sampled_step, written_down
from vllm_mars.kernels.rules import DELTA

TOP = 10
DELTAS = [0.0, 0.013, 0.11, 1.0]


def a_call(number, sampled=False):
    call = Call(number, "delta", sampled)
    values = torch.from_numpy(call.rng.choice(DELTAS, len(call.records.value))).float()
    call.records.write_values(DELTA, values)
    return call, values


def is_accepted(row, token, delta):
    """By sorting the probabilities of a row."""
    p = row.double().softmax(-1)
    rank = int((row > row[token]).sum())
    return delta > 0 and rank < TOP and bool(p.max() - p[token] <= delta)


def test_a_token_is_accepted_by_rank_and_probability():
    """A greedy request whose bound, ends and guard forbid nothing."""
    outcomes = set()
    for number in range(300):
        call, values = a_call(number, sampled=True)
        call.terms, call.guard = call.terms._replace(protected=None), None
        call.records.rate.fill_(1 << 40)
        call.records.ends.fill_(-1)
        output, _ = on_cpu(call, call.account())
        rows = call.logits.float().split([length + 1 for length in call.lengths])
        for place, drafts in enumerate(call.ids.split(call.lengths)):
            delta, expected = float(values[call.slots[place]]), []
            for row, token in zip(rows[place], drafts.tolist(), strict=False):
                first = oracle.argmax(row.tolist())
                accepts = token == first or (token >= 0 and is_accepted(row, token, delta))
                outcomes.add((token == first, accepts))
                expected.append(token if accepts else first)
                if not accepts:
                    break
            else:
                expected.append(oracle.argmax(rows[place][-1].tolist()))
            found = output.output_token_ids[place].tolist()
            assert [token for token in found if token >= 0] == expected, number
    assert len(outcomes) == 3


@pytest.mark.interpreted
@pytest.mark.parametrize("count", [15, pytest.param(400, marks=pytest.mark.nightly)])
def test_the_kernels_equal_the_definition(count):
    from vllm_mars.kernels import fused

    assert os.environ["TRITON_INTERPRET"] == "1"
    relaxed = 0
    for number in range(count):
        call, _ = a_call(number)
        expected, mine = on_cpu(call, wanted := call.account())
        found, (step, guard) = call.account(), call.step()
        output = fused.verify(step, call.terms, guard, found)
        assert torch.equal(output.output_token_ids, expected.output_token_ids.long()), number
        assert torch.equal(step.records.lost, mine.lost)
        assert found.counts.tolist() == wanted.counts.tolist()
        relaxed += int(output.num_relaxed.sum())
        call, _ = a_call(number, sampled=True)
        q, step, guard, draws = sampled_step(call, False)
        output = fused.verify(step, call.terms, guard, call.account(), draws)
        _, lost = written_down(call, q, output.output_token_ids)
        assert (step.records.lost - lost).abs().max() <= 3 * LONGEST
    assert relaxed > 0
