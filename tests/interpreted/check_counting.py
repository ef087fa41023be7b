"""The kernels of counts and of sections, run by the interpreter, against their definitions.

Run by `tests/kernels/test_kernel_interpreted.py`, with TRITON_INTERPRET=1 set before triton loads.
"""

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from test_counters import LONGEST, random_case, step
from vllm_mars import MarsConfig
from vllm_mars.kernels import counting, sections
from vllm_mars.kernels.terms import Drafts, Slots
from vllm_mars.runner.counters import CounterLayout, Counters, count_positions
from vllm_mars.runner.sections import Sections

CPU = torch.device("cpu")


def test_the_kernels_are_interpreted():
    for kernel in (counting.count_kernel, sections.block_kernel):
        assert isinstance(kernel, InterpretedFunction)


@pytest.mark.parametrize("dry_run", [False, True])
def test_counts_equal_those_of_torch(dry_run):
    generator = torch.Generator().manual_seed(3)
    layout = CounterLayout(LONGEST)
    expected, found = Counters(layout, CPU), Counters(layout, CPU)
    for number in range(30):
        case = random_case(generator, 1 + number % 7)
        if number % 2:
            case |= {"theta": 0.9, "gap": 0.25}
        count_positions(expected, *step(case), dry_run=dry_run, backend="torch")
        count_positions(found, *step(case), dry_run=dry_run, backend="triton")
    assert found.device_counts.tolist() == expected.device_counts.tolist()
    assert expected.device_counts.any()


@pytest.mark.parametrize("scope", ["all", "reasoning"])
def test_blocked_rows_equal_the_walk(scope):
    """Tokens 0 to 9, of which most mark something; each step commits some of its drafts."""
    config = MarsConfig(strict_spans=((1, 2), (3, 4), (5, 5), (6, None)), scope=scope)
    walk = Sections(config if scope == "all" else config_with_thinking(config))
    rng = np.random.default_rng(0)
    slots, batch, capacity = 6, 4, 200
    states = torch.zeros(slots, dtype=torch.int32)
    scanned = torch.zeros(slots, dtype=torch.int32)
    structured = torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.int32)
    tokens = torch.zeros((slots, capacity), dtype=torch.int32)
    total = torch.tensor(rng.integers(1, 12, slots), dtype=torch.int32)
    for slot in range(slots):
        tokens[slot, : total[slot]] = torch.from_numpy(rng.integers(0, 10, int(total[slot])))
    for _ in range(12):
        mapping = torch.from_numpy(rng.permutation(slots)[:batch].astype(np.int32))
        drafts = [rng.integers(0, 10, rng.integers(0, 5)).tolist() for _ in range(batch)]
        rows, expected = [], []
        for slot, draft in zip(mapping.tolist(), drafts, strict=True):
            history = tokens[slot, : total[slot]].tolist()
            rows += [history[-1], *draft]
            state = walk.advance(0, history)
            # The bonus row, whose draft token there is none of, is as strict as a draft would be.
            expected += walk.blocked([state], [structured[slot]], [*draft, 0], [len(draft) + 1])
        ends = torch.tensor([len(draft) + 1 for draft in drafts]).cumsum(0).int()
        given = Drafts(torch.empty(0, 0), torch.tensor(rows, dtype=torch.int32), ends)
        where = Slots(mapping, tokens, torch.zeros_like(total), total)
        blocked = sections.blocked_rows(
            states, scanned, structured, where, given, walk.markers(CPU)
        )
        assert blocked.tolist() == list(map(int, expected))
        for slot in mapping.tolist():
            new = rng.integers(0, 10, rng.integers(0, 6))
            tokens[slot, total[slot] : total[slot] + len(new)] = torch.from_numpy(new).int()
            total[slot] += len(new)


def config_with_thinking(config):
    return MarsConfig(strict_spans=config.strict_spans, scope="reasoning", thinking=(7, 8))
