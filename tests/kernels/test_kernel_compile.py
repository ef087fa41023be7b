"""The Triton kernels compile for each GPU target without a GPU, and to lean code."""

import functools

import pytest
import torch
import triton
import triton.language as tl

from compiled import TARGETS, compile_for, launches
from vllm_mars.kernels import counting, greedy, repeats, sections, top2, tree, tree_reference
from vllm_mars.kernels.terms import (
    Drafts,
    Judgement,
    LossBudget,
    Margin,
    Markers,
    RelaxedBudget,
    Slots,
)
from vllm_mars.runner.counters import RATIO_EDGES, RATIO_UNIT, CounterLayout

# The others are compiled at night.
BY_DAY = "sm_90"
# The launch settings and the width of the partial results are those of this vocabulary.
VOCAB = 128_256
# Its rows start at addresses that 16 bytes do not divide.
ODD_STRIDE = VOCAB + 1

ids = functools.partial(torch.zeros, dtype=torch.int32)
# A request with two draft tokens, and the row of its bonus token.
IDS, ONE = ids(2), ids(1)
SLOTS = Slots(ONE, ids(1, 1), ONE, ONE)
BY_INDEX = {"target_rows": IDS, "bonus_rows": ONE}
LAST = {"bonus_row_is_last": True}
LIMITS = {
    "blocked": torch.zeros(2, dtype=torch.int8),
    "budget": RelaxedBudget(0.5, ONE, ONE),
    "loss_budget": LossBudget(ONE.long(), 0, ONE.long(), ONE),
}


def drafts(dtype=torch.bfloat16, stride=VOCAB, **layout):
    logits = torch.empty((3, stride), dtype=dtype)[:, :VOCAB]
    return Drafts(logits, IDS, ONE, **{"max_draft_len": 5, **layout})


def margin(per_request=False, **limits):
    """One theta, or one for each request; some tokens are protected."""
    theta, gap = (torch.ones(1), torch.ones(1)) if per_request else (0.9, 0.0)
    return Margin(theta, gap, protected=torch.zeros(VOCAB, dtype=torch.bool), **limits)


def trees(num_nodes, **options):
    nodes, one = ids(num_nodes), torch.ones(1)
    return tree_reference.Trees(
        *(drafts().logits, nodes, ONE, nodes, ONE, nodes),
        value=one,
        price=one.long(),
        protected=torch.zeros(VOCAB, dtype=torch.bool),
        max_depth=7,
        **{"rule": "theta", "prefer": "longest", **options},
    )


def count():
    layout = CounterLayout(num_speculative_tokens=5)
    counting.count_positions(
        drafts(),
        Judgement(IDS.to(torch.int8), torch.empty(2, 2), IDS),
        ONE,
        margin(),
        dry_run=False,
        counts=torch.zeros(layout.size, dtype=torch.int64),
        starts=layout.starts,
        ratio_edges=torch.tensor(RATIO_EDGES),
        ratio_unit=RATIO_UNIT,
    )


def block():
    markers = Markers(IDS, IDS, (3, 4), only_thinking=True)
    sections.blocked_rows(ONE, ONE, ONE, SLOTS, drafts(), markers)


def call(function, *arguments):
    return functools.partial(function, *arguments)


price = margin(price=torch.ones(1))
all_limits = margin(True, **LIMITS)
# What the samplers and the public functions call, by the kernel and what is peculiar; what else a
# call launches is another variant.
VARIANTS = {
    **{
        f"top2_kernel, {dtype}": call(top2.reduce_rows, drafts(dtype, **BY_INDEX), True)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    },
    "top2_kernel, rows in order": call(top2.reduce_rows, drafts(bonus_rows=ONE), True),
    "top2_kernel, no bonus rows": call(top2.reduce_rows, drafts(), True),
    "top2_kernel, z1 alone": call(top2.reduce_rows, drafts(**BY_INDEX), False),
    "top2_kernel, odd stride": call(top2.reduce_rows, drafts(stride=ODD_STRIDE, **BY_INDEX), True),
    "accept_kernel, theta": call(greedy.verify_greedy, drafts(**BY_INDEX), margin()),
    "accept_kernel, V2": call(greedy.verify_greedy, drafts(**LAST), margin(True)),
    "accept_kernel, no bonus": call(greedy.verify_greedy, drafts(target_rows=IDS), margin()),
    "accept_kernel, 128 drafts": call(
        greedy.verify_greedy, drafts(max_draft_len=128, **BY_INDEX), margin()
    ),
    "accept_kernel, limits": call(greedy.verify_greedy, drafts(**BY_INDEX), all_limits, True),
    "accept_kernel, V2 limits": call(greedy.verify_greedy, drafts(**LAST), all_limits, True),
    "accept_kernel, price": call(
        greedy.verify_greedy, drafts(**BY_INDEX), price._replace(**LIMITS), True
    ),
    "accept_kernel, verdicts": call(greedy.judge_positions, drafts(torch.float32), all_limits),
    "walk_kernel, theta": call(tree.verify_tree, trees(60)),
    "walk_kernel, the drafter's order": call(tree.verify_tree, trees(60, prefer="draft")),
    "walk_kernel, price, 128 nodes": call(tree.verify_tree, trees(128, rule="price")),
    "count_kernel": count,
    "block_kernel": block,
    "repeat_kernel": call(repeats.block_repeats, IDS.to(torch.int8), SLOTS, drafts(**LAST), 4),
}


@pytest.mark.parametrize(
    "target",
    [pytest.param(name, marks=[] if name == BY_DAY else pytest.mark.nightly) for name in TARGETS],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_code(variant, target):
    name = variant.split(",")[0]
    (launch,) = (one for one in launches(VARIANTS[variant]) if one.name == name)
    found = compile_for(launch, target)
    assert found.spills == 0
    if name != "top2_kernel":
        assert found.fused == 0, "theta * z1 - gap must not fuse"
    elif "odd stride" not in variant:
        assert found.wide_loads > 0, "a row must be read in 16-byte loads"
        # 8 warps of 40 registers leave room for six programs on a multiprocessor; on a CDNA 3 unit
        # 64 are the most with which it holds as many waves as it can.
        assert found.registers <= (64 if target.startswith("gfx") else 40)


@triton.jit
def fused_kernel(out_ptr, a, b):
    tl.store(out_ptr, tl.load(out_ptr) * a + b)


def test_a_fused_multiplication_is_seen():
    (launch,) = launches(lambda: fused_kernel[(1,)](torch.zeros(1), 2.5, 3.5))
    assert compile_for(launch, BY_DAY).fused == 1
