"""The Triton kernels compile for each GPU target: spills, registers and load widths."""

import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
import vllm.v1.worker.gpu.sample.gumbel

from calls import tensors_of
from compiled import TARGETS, compile_for, launches
from vllm_mars.kernels import fused
from vllm_mars.kernels.constraints import fused as constraints_kernel
from vllm_mars.kernels.counters import fused as counters
from vllm_mars.kernels.counters.table import CounterLayout
from vllm_mars.kernels.drafted.fused import count_drafted
from vllm_mars.kernels.interface import (
    ConstraintInputs,
    CpuConstraints,
    EngineParams,
    Markers,
    Protected,
    Records,
    SamplingInputs,
    SamplingTensors,
    VerifyInputs,
)
from vllm_mars.kernels.row_stats.fused import reduce_rows
from vllm_mars.kernels.rules import RULES

# Nightly runs compile for the other targets, too.
BY_DAY = "sm_90"
# Determines the launch settings and the width of the partial results.
VOCAB = 128_256
# Rows are not aligned to 16 bytes.
ODD_STRIDE = VOCAB + 1

ids = partial(torch.zeros, dtype=torch.int32)
# A request with two draft tokens, and the row of its bonus token.
ROWS, ONE = ids(3), ids(1)
RECORDS = Records.new(1, ONE.device)
PROTECTED = Protected.of(torch.zeros(VOCAB, dtype=torch.bool), ONE.device)
CONSTRAINTS = tensors_of(CpuConstraints.of([(0, False, ())] * 3))
SAMPLING = SamplingTensors(torch.ones(1), ONE.long())
PROBABILISTIC = SAMPLING._replace(
    draft_logits=torch.empty(1, 2, VOCAB).half(),
    draft_temperature=torch.ones(1),
    next_seeds=ONE.long(),
)


def rows(dtype=torch.bfloat16, stride=VOCAB):
    return torch.empty((3, stride), dtype=dtype)[:, :VOCAB]


def step(logits=None, most=5):
    return VerifyInputs(
        rows() if logits is None else logits, ROWS, ONE, RECORDS, ONE, ONE, ONE, most
    )


def reduce(name, logits):
    reduce_rows(step(logits), EngineParams(RULES[name], PROTECTED))


def verify(name, sampling=None, most=5, apply_temperature=False):
    sampling_inputs = None
    if sampling is not None:
        sampling_inputs = SamplingInputs(
            sampling, ROWS.long(), ROWS.long(), ROWS, apply_temperature=apply_temperature
        )
    fused.verify(
        step(most=most),
        EngineParams(RULES[name], PROTECTED),
        CONSTRAINTS,
        sampling_inputs=sampling_inputs,
    )


def compute_constraints():
    markers = Markers(ONE.long(), opening=8)
    ring = constraints_kernel.new_ring(1, ONE.device)
    constraint_inputs = ConstraintInputs(
        ring=ring,
        tokens=ids(1, 9),
        temperature=torch.ones(1),
        markers=markers,
        ngram=4,
        pads_with_last_token=True,
    )
    constraints_kernel.compute_constraints(step(), constraint_inputs)


def count_ended():
    counters.count_ended(ids(99).long(), CounterLayout(5), ids(10).long(), RECORDS, ONE)


def add_log_ratios():
    logprobs, token_ids = torch.zeros(3, 2), ids(3, 2).long()
    counters.add_log_ratios(logprobs, token_ids, torch.zeros(1, 2, 6), torch.ones(1), ONE, ids(2))


def count():
    count_drafted(ids(1, VOCAB), ONE.long(), ids(1, 5).long(), ids(()).long(), 1)


ACCEPTED = {
    "theta": ("theta", None),
    "price": ("price", None),
    "sampled theta": ("theta", SAMPLING),
    "sampled price": ("price", SAMPLING),
    "sampled, probabilistic": ("price", PROBABILISTIC),
}
# The temperature may divide the logits in these kernels.
DIVIDED = {
    "rows_kernel, sums": SAMPLING,
    "clip_kernel": PROBABILISTIC,
    "mass_kernel": PROBABILISTIC,
    "resample_kernel": SAMPLING,
    "resample_kernel, probabilistic": PROBABILISTIC,
}
# Calls of the samplers and the public functions, named by the kernel that is checked and its
# options. Other kernels of a call are separate variants.
VARIANTS = {
    **{
        f"rows_kernel, {dtype}": partial(reduce, "theta", rows(dtype))
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    },
    "rows_kernel, z1 only": partial(reduce, "price", rows()),
    "rows_kernel, odd stride": partial(reduce, "theta", rows(stride=ODD_STRIDE)),
    **{
        f"accept_kernel, {name}{', 16 drafts' * (most == 16)}": partial(
            verify, *arguments, most=most
        )
        for name, arguments in ACCEPTED.items()
        for most in (5, 16)
    },
    **{
        f"{name}{', divided' * divided}": partial(
            verify, "price", sampling, apply_temperature=divided
        )
        for name, sampling in DIVIDED.items()
        for divided in (False, True)
    },
    "clip_kernel, 16 drafts": partial(verify, "price", PROBABILISTIC, most=16),
    "constraints_kernel": compute_constraints,
    "ended_kernel": count_ended,
    "ratios_kernel": add_log_ratios,
    "count_kernel": count,
}
# Passes of a kernel over a row; the longest prefix of a variant's name applies.
PASSES = {
    "rows_kernel": 1,
    "clip_kernel": 2,
    "mass_kernel": 2,
    "resample_kernel": 1,
    "resample_kernel, probabilistic": 2,
}

# Bytes that a variant may spill. Smaller resampling blocks would not spill, but take twice the time
# on an H200 with 16 sampled requests.
SPILLS = {
    (name, target): 8
    for name in ("resample_kernel", "resample_kernel, divided")
    for target in TARGETS
} | {
    ("accept_kernel, sampled price", "sm_90"): 8,
    ("constraints_kernel", "sm_90"): 16 if triton.__version__.startswith("3.6.") else 0,
    ("constraints_kernel", "sm_100"): 8,
}


@pytest.fixture(autouse=True)
def vllms_functions():
    """Compiles vLLM's noise functions, which are placeholders without a GPU."""
    modules = {"vllm.triton_utils": SimpleNamespace(tl=tl, triton=triton)}
    with mock.patch.dict(sys.modules, modules):
        del sys.modules[vllm.v1.worker.gpu.sample.gumbel.__name__]
        sys.modules.pop("vllm_mars.kernels.accept.resample", None)
        yield


@pytest.mark.parametrize(
    "target",
    [pytest.param(name, marks=[] if name == BY_DAY else pytest.mark.nightly) for name in TARGETS],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_code(variant, target):
    name = variant.split(",")[0]
    (launch,) = (one for one in launches(VARIANTS[variant]) if one.name == name)
    resources = compile_for(launch, target)
    assert resources.spills <= SPILLS.get((variant, target), 0)
    # Exponentials and logarithms of sampled requests use fused multiply-adds.
    if name == "accept_kernel" and "sampled" not in variant:
        assert resources.fused == 0, "values must be rounded before they are compared"
    passes = [PASSES[begin] for begin in PASSES if variant.startswith(begin)]
    if passes and "odd stride" not in variant:
        block = launch["BLOCK"] * (4 if "float32" in variant else 2)
        threads = launch["num_warps"] * TARGETS[target].warp_size
        least = passes[-1] * (block // threads // 16)
        assert resources.wide_loads >= least, "a row must be read in 16-byte loads"
    if name == "rows_kernel" and "odd stride" not in variant:
        # With 8 warps a multiprocessor holds six programs of 40 registers, or four of 64, which
        # the sums of exponentials need. A CDNA 3 unit has full occupancy up to 64.
        most = 64 if "sums" in variant or target.startswith("gfx") else 40
        assert resources.registers <= most


@triton.jit
def spilling_kernel(out_ptr):
    offset = tl.arange(0, 2048)
    value = tl.load(out_ptr + offset)
    tl.store(out_ptr + offset, tl.cumsum(value, axis=0) / value)


def test_a_spilled_register_is_found():
    (launch,) = launches(lambda: spilling_kernel[(1,)](torch.ones(2048), num_warps=1, maxnreg=32))
    assert compile_for(launch, BY_DAY).spills > 0


@triton.jit
def fused_kernel(out_ptr, a, b):
    tl.store(out_ptr, tl.load(out_ptr) * a + b)


def test_a_fused_multiply_add_is_found():
    (launch,) = launches(lambda: fused_kernel[(1,)](torch.zeros(1), 2.5, 3.5))
    assert compile_for(launch, BY_DAY).fused == 1
