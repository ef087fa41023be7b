"""The Triton walk down trees, run by the interpreter, against the torch form: exact.

Run by `tests/kernels/test_kernel_interpreted.py`, with TRITON_INTERPRET=1 set before triton loads.
"""

import pytest
import torch

from tree_calls import as_call, random_call
from vllm_mars import verify_tree


def check(call):
    """The Triton form against the torch form; returns its output."""
    output, expected = (verify_tree(**call, backend=name) for name in ("triton", "torch"))
    assert all(map(torch.equal, output, expected))
    assert [found.dtype for found in output] == [wanted.dtype for wanted in expected]
    return output


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.nightly)])
def test_equals_the_torch_form(count):
    for seed in range(count):
        check(random_call(seed))


OVER_THE_LIMIT = pytest.param(130, "target", marks=pytest.mark.nightly)


@pytest.mark.parametrize(("size", "prefer"), [(60, "longest"), OVER_THE_LIMIT])
def test_large_trees(size, prefer):
    taken = 0
    for rule in ("gap", "price"):
        call = random_call(size, [size, 7], 37, prefer=prefer, rule=rule)
        call[rule] = torch.tensor([1.5, 0.75])
        taken += int(check(call).num_accepted.sum())
    assert taken > 4


@pytest.mark.parametrize("rule", [{"gap": 0.0}, {"price": 0.5}])
def test_a_long_path_of_first_choices(rule):
    """As deep as a tree can be: the longest sums, and every round of doubling."""
    rows = torch.tensor([[0.0, 1.0]] * 129)
    call = as_call(rows, [1] * 128, list(range(-1, 127)), [128], [0], list(range(1, 129)), **rule)
    assert check(call).num_accepted.tolist() == [128]


@pytest.mark.parametrize("vocab", [32_000, pytest.param(151_936, marks=pytest.mark.nightly)])
def test_several_splits_of_each_row(vocab):
    for rule in ("theta", "price"):
        check(random_call(vocab, [4, 2], vocab, rule))


def test_rows_past_2_to_the_31_elements():
    """The node's row starts past 2**31 elements; only the pages that are touched take memory."""
    stride = 2**31 + 64
    storage = torch.empty(stride + 128, dtype=torch.bfloat16)
    logits = storage.as_strided((2, 100), (stride, 1))
    logits[:] = torch.linspace(1, 8, 100).to(torch.bfloat16)
    logits[1, 40] = 9.0
    call = as_call(logits, [99, 40], [-1, 0], [2], [0], [1, 1], theta=1.0, max_depth=2)
    assert check(call).output_token_ids.tolist() == [[99, 40, 40]]
