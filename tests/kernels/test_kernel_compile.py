"""The Triton kernels compile for each GPU target without a GPU, and to lean code."""

import functools

import pytest
import torch
import triton
import triton.language as tl

from compiled import TARGETS, compile_for, launches
from vllm_mars.kernels import accept, context, top2
from vllm_mars.kernels.clip import clip_rows
from vllm_mars.kernels.terms import Drafts, Markers, Records, Requests, Rule

# The others are compiled at night.
BY_DAY = "sm_90"
# The launch settings and the width of the partial results are those of this vocabulary.
VOCAB = 128_256
# Its rows start at addresses that 16 bytes do not divide.
ODD_STRIDE = VOCAB + 1

ids = functools.partial(torch.zeros, dtype=torch.int32)
# A request with two draft tokens, and the row of its bonus token.
IDS, ONE = ids(2), ids(1)
RECORDS = Records(torch.zeros(1), *(ONE.long() for _ in range(4)), ONE, ids(1, 32))
V1, V2 = Requests(RECORDS, ONE, ONE), Requests(RECORDS, ONE, None, ONE, ONE)
BY_INDEX = {"target_rows": IDS, "bonus_rows": ONE}
LAST = {"bonus_row_is_last": True}
PROTECTED = torch.zeros(VOCAB, dtype=torch.bool)
BLOCKED = torch.zeros(2, dtype=torch.int8)


def drafts(dtype=torch.bfloat16, stride=VOCAB, **layout):
    logits = torch.empty((3, stride), dtype=dtype)[:, :VOCAB]
    return Drafts(logits, IDS, ONE, **{"max_draft_len": 5, **layout})


def rule(name, longest=5):
    return Rule(name, 1, PROTECTED, longest)


def sample(name, requests, **layout):
    """Around vLLM's sampler."""
    step = drafts(torch.float32, **layout)
    plan = accept.plan(step, requests, rule(name), torch.ones(1), BLOCKED)
    num_sampled = ONE if layout else None
    accept.settle(plan, step, requests, ids(1, 6), None, num_sampled)


def look():
    markers = Markers(IDS, IDS, (3, 4), only_thinking=True, opening=8)
    state = context.new_state(1, True, IDS.device)
    context.blocked_positions(state, ids(1, 9), V2, drafts(**LAST), markers, 4)


def clip(draft, **options):
    clip_rows(torch.empty(2, VOCAB), draft, torch.ones(2), backend="triton", **options)


def call(function, *arguments, **options):
    return functools.partial(function, *arguments, **options)


# What the samplers and the public functions call, by the kernel and what is peculiar; what else a
# call launches is another variant.
VARIANTS = {
    **{
        f"top2_kernel, {dtype}": call(top2.reduce_rows, drafts(dtype, **BY_INDEX), True)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    },
    "top2_kernel, z1 alone": call(top2.reduce_rows, drafts(**BY_INDEX), False),
    "top2_kernel, sums": call(top2.reduce_rows, drafts(torch.float32), False, True),
    "top2_kernel, odd stride": call(top2.reduce_rows, drafts(stride=ODD_STRIDE, **BY_INDEX), True),
    "accept_kernel, theta": call(accept.accept, drafts(**BY_INDEX), V1, rule("theta"), BLOCKED),
    "accept_kernel, price": call(accept.accept, drafts(**BY_INDEX), V1, rule("price"), BLOCKED),
    "accept_kernel, V2": call(accept.accept, drafts(**LAST), V2, rule("price"), BLOCKED),
    "accept_kernel, sampled theta": call(sample, "theta", V1),
    "accept_kernel, sampled price": call(sample, "price", V1),
    "accept_kernel, sampled V2": call(sample, "price", V2, **LAST),
    "settle_kernel": call(sample, "price", V1),
    "settle_kernel, V2": call(sample, "price", V2, **LAST),
    "context_kernel": call(look),
    "clip_kernel, V1": call(clip, torch.empty(2, VOCAB)),
    "clip_kernel, V2": call(
        clip, torch.empty(1, 2, VOCAB).half(), draft_rows=(IDS, IDS), temperature=torch.ones(1)
    ),
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
    # Where a request samples, exponentials and logarithms are made of such.
    if name == "accept_kernel" and "sampled" not in variant:
        assert found.fused == 0, "what is compared must be rounded"
    if name == "top2_kernel" and "odd stride" not in variant:
        assert found.wide_loads > 0, "a row must be read in 16-byte loads"
        # 8 warps of 40 registers leave room for six programs on a multiprocessor, of 64, which the
        # sums of exponentials take, for four; on a CDNA 3 unit 64 are the most with which it holds
        # as many waves as it can.
        most = 64 if "sums" in variant or target.startswith("gfx") else 40
        assert found.registers <= most


@triton.jit
def fused_kernel(out_ptr, a, b):
    tl.store(out_ptr, tl.load(out_ptr) * a + b)


def test_a_fused_multiplication_is_seen():
    (launch,) = launches(lambda: fused_kernel[(1,)](torch.zeros(1), 2.5, 3.5))
    assert compile_for(launch, BY_DAY).fused == 1
