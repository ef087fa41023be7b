"""The Triton walk down trees, run by the interpreter, against the reference: exact.

Run by `tests/kernels/test_kernel_interpreted.py`, with TRITON_INTERPRET=1 set before triton loads.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from triton.runtime.interpreter import InterpretedFunction

from tree_calls import TreeCall, tree_calls
from vllm_mars.kernels import reference, tree
from vllm_mars.kernels.terms import MOST_NODES

PREFERENCES = ("draft", "target", "longest")


def test_the_kernel_is_interpreted():
    assert isinstance(tree.walk_kernel, InterpretedFunction)


def check(call):
    """The Triton form against the reference; returns its output."""
    output = call.run("triton")
    expected = call.run_on(reference, output.path.shape[1])
    for name in expected._fields:
        assert torch.equal(getattr(output, name), getattr(expected, name)), name
        assert getattr(output, name).dtype == getattr(expected, name).dtype, name
    return output


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.nightly)])
def test_equals_reference(count):
    def equals(call):
        check(call)

    settings(max_examples=count, deadline=None)(given(tree_calls())(equals))()


def grown(rng, vocab, sizes, dtype, **options):
    """Trees that are grown at random, with tokens that are mostly among the three largest."""
    rows = sum(sizes) + len(sizes)
    logits = torch.from_numpy(rng.normal(3, 2, (rows, vocab))).to(dtype)
    order = rng.permutation(rows).tolist()
    root_rows, node_rows = order[: len(sizes)], order[len(sizes) :]
    drafts, parents = [], []
    for request, size in enumerate(sizes):
        start = len(drafts)
        for node in range(size):
            # Mostly a recent node, so that trees get deep.
            parent = max(-1, node - 1 - int(rng.geometric(0.5)) + 1)
            row = root_rows[request] if parent < 0 else node_rows[start + parent]
            best = logits[row].float().topk(min(3, vocab)).indices
            drafts.append(int(best[min(int(rng.geometric(0.6)) - 1, len(best) - 1)]))
            parents.append(parent)
    count = len(sizes)
    given = {"theta": [1.0] * count, "gap": [0.0] * count, "price": None, "prefer": "longest"}
    given |= {"draws": None, "protected": frozenset(), **options}
    return TreeCall(logits, drafts, parents, list(sizes), root_rows, node_rows, **given)


# Each way of walking once.
BY_DAY = {(60, "longest"), (MOST_NODES + 2, "draft")}


@pytest.mark.parametrize(
    ("size", "prefer"),
    [
        pytest.param(*case, marks=[] if case in BY_DAY else pytest.mark.nightly)
        for case in itertools.product([60, MOST_NODES, MOST_NODES + 2], PREFERENCES)
    ],
)
def test_large_trees(size, prefer):
    rng = np.random.default_rng(size)
    taken = 0
    for options in ({"gap": [1.0, 0.5]}, {"price": [0.75, 1.5]}):
        call = grown(rng, 37, (size, 7), torch.float32, prefer=prefer, **options)
        taken += int(check(call).num_accepted.sum())
    assert taken > 4


def test_a_long_path_of_first_choices():
    """As deep as a tree can be: the longest sums, and every round of doubling."""
    rows = [[0.0, 1.0]] * (MOST_NODES + 1)
    for options in ({}, {"price": [0.5]}):
        given = {"theta": [1.0], "gap": [0.0], "price": None, "prefer": "longest"}
        given |= {"draws": None, "protected": frozenset(), **options}
        parents = list(range(-1, MOST_NODES - 1))
        nodes = list(range(1, MOST_NODES + 1))
        call = TreeCall(
            *(torch.tensor(rows), [1] * MOST_NODES, parents, [MOST_NODES], [0], nodes), **given
        )
        assert check(call).num_accepted.tolist() == [MOST_NODES]


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        (32_000, torch.bfloat16),
        pytest.param(49_152, torch.float16, marks=pytest.mark.nightly),
        pytest.param(151_936, torch.float32, marks=pytest.mark.nightly),
    ],
)
def test_large_vocabulary(vocab, dtype):
    """Several splits of each row."""
    rng = np.random.default_rng(vocab)
    draws = rng.integers(0, vocab, 8).tolist()
    for options in ({"theta": [0.9, 0.8]}, {"draws": draws, "gap": [0.5, 0.5]}):
        check(grown(rng, vocab, (4, 2), dtype, **options))


def test_rows_past_2_to_the_31_elements():
    """The node's row starts past 2**31 elements; only the pages that are touched take memory."""
    stride = 2**31 + 64
    storage = torch.empty(stride + 128, dtype=torch.bfloat16)
    logits = storage.as_strided((2, 100), (stride, 1))
    logits[:] = torch.linspace(1, 8, 100).to(torch.bfloat16)
    logits[1, 40] = 9.0
    given = {"theta": [1.0], "gap": [0.0], "price": None, "protected": frozenset()}
    call = TreeCall(
        logits, [99, 40], [-1, 0], [2], [0], [1, 1], **given, prefer="draft", draws=None
    )
    assert check(call).output_token_ids.tolist() == [[99, 40, 40]]
