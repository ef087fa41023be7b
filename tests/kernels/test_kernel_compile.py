"""The Triton kernels compile for each GPU target without a GPU, and to lean code."""

import functools
import sys
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
from vllm_mars.kernels.counters import fused as beside
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

# The others are compiled at night.
BY_DAY = "sm_90"
# The launch settings and the width of the partial results are those of this vocabulary.
VOCAB = 128_256
# Its rows start at addresses that 16 bytes do not divide.
ODD_STRIDE = VOCAB + 1

ids = functools.partial(torch.zeros, dtype=torch.int32)
# A request with two draft tokens, and the row of its bonus token.
ROWS, ONE = ids(3), ids(1)
RECORDS = Records.new(1, ONE.device)
PROTECTED = Protected.of(torch.zeros(VOCAB, dtype=torch.bool), ONE.device)
GUARD = tensors_of(CpuConstraints.of([(0, False, ())] * 3))
SAMPLING = SamplingTensors(torch.ones(1), ONE.long())
DRAWN = SamplingTensors(*SAMPLING[:2], torch.empty(1, 2, VOCAB).half(), torch.ones(1), ONE.long())


def rows(dtype=torch.bfloat16, stride=VOCAB):
    return torch.empty((3, stride), dtype=dtype)[:, :VOCAB]


def step(logits=None, most=5):
    return VerifyInputs(
        rows() if logits is None else logits, ROWS, ONE, RECORDS, ONE, ONE, ONE, most
    )


def read(name, logits):
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
        GUARD,
        sampling_inputs=sampling_inputs,
    )


def look():
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
    beside.count_ended(ids(99).long(), CounterLayout(5), ids(10).long(), RECORDS, ONE)


def add_log_ratios():
    logprobs = torch.zeros(3, 2), ids(3, 2).long()
    beside.add_log_ratios(*logprobs, torch.zeros(1, 2, 6), torch.ones(1), ONE, ids(2))


def count():
    count_drafted(ids(1, VOCAB), ONE.long(), ids(1, 5).long(), ids(()).long(), 1)


def call(function, *arguments, **options):
    return functools.partial(function, *arguments, **options)


# What the samplers and the public functions call, by the kernel and what is peculiar; what else a
# call launches is another variant.
VARIANTS = {
    **{
        f"rows_kernel, {dtype}": call(read, "theta", rows(dtype))
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    },
    "rows_kernel, z1 alone": call(read, "price", rows()),
    "rows_kernel, sums": call(verify, "price", SAMPLING),
    "rows_kernel, sums, divided": call(verify, "price", SAMPLING, apply_temperature=True),
    "rows_kernel, odd stride": call(read, "theta", rows(stride=ODD_STRIDE)),
    "accept_kernel, theta": call(verify, "theta"),
    "accept_kernel, price": call(verify, "price"),
    "accept_kernel, sampled theta": call(verify, "theta", SAMPLING),
    "accept_kernel, sampled price": call(verify, "price", SAMPLING),
    "accept_kernel, sampled, drawn": call(verify, "price", DRAWN),
    "accept_kernel, theta, 16 drafts": call(verify, "theta", most=16),
    "accept_kernel, price, 16 drafts": call(verify, "price", most=16),
    "accept_kernel, sampled theta, 16 drafts": call(verify, "theta", SAMPLING, most=16),
    "accept_kernel, sampled price, 16 drafts": call(verify, "price", SAMPLING, most=16),
    "accept_kernel, sampled, drawn, 16 drafts": call(verify, "price", DRAWN, most=16),
    "clip_kernel": call(verify, "price", DRAWN),
    "clip_kernel, 16 drafts": call(verify, "price", DRAWN, most=16),
    "clip_kernel, divided": call(verify, "price", DRAWN, apply_temperature=True),
    "mass_kernel": call(verify, "price", DRAWN),
    "mass_kernel, divided": call(verify, "price", DRAWN, apply_temperature=True),
    "resample_kernel": call(verify, "price", SAMPLING),
    "resample_kernel, divided": call(verify, "price", SAMPLING, apply_temperature=True),
    "resample_kernel, drawn": call(verify, "price", DRAWN),
    "resample_kernel, drawn, divided": call(verify, "price", DRAWN, apply_temperature=True),
    "constraints_kernel": call(look),
    "ended_kernel": call(count_ended),
    "ratios_kernel": call(add_log_ratios),
    "count_kernel": call(count),
}
# How many times a kernel goes through a row, by the beginning of a variant's name, the longest one.
PASSES = {
    "rows_kernel": 1,
    "clip_kernel": 2,
    "mass_kernel": 2,
    "resample_kernel": 1,
    "resample_kernel, drawn": 2,
}

# Bytes that a variant may spill. Smaller blocks of the draw would spill none; on an H200 these take
# half the time of small ones where 16 requests sample.
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
    """vLLM's noise as Triton's functions, which vLLM has only where it finds a GPU."""
    modules = {"vllm.triton_utils": SimpleNamespace(tl=tl, triton=triton)}
    with mock.patch.dict(sys.modules, modules):
        # All else that it imports stays.
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
    found = compile_for(launch, target)
    assert found.spills <= SPILLS.get((variant, target), 0)
    # Where a request samples, exponentials and logarithms are made of such.
    if name == "accept_kernel" and "sampled" not in variant:
        assert found.fused == 0, "what is compared must be rounded"
    passes = [PASSES[begin] for begin in PASSES if variant.startswith(begin)]
    if passes and "odd stride" not in variant:
        block = launch["BLOCK"] * (4 if "float32" in variant else 2)
        threads = launch["num_warps"] * TARGETS[target].warp_size
        least = passes[-1] * (block // threads // 16)
        assert found.wide_loads >= least, "a row must be read in 16-byte loads"
    if name == "rows_kernel" and "odd stride" not in variant:
        # 8 warps of 40 registers leave room for six programs on a multiprocessor, of 64, which the
        # sums of exponentials take, for four; on a CDNA 3 unit 64 are the most with which it holds
        # as many waves as it can.
        most = 64 if "sums" in variant or target.startswith("gfx") else 40
        assert found.registers <= most


@triton.jit
def spilling_kernel(out_ptr):
    place = tl.arange(0, 2048)
    value = tl.load(out_ptr + place)
    tl.store(out_ptr + place, tl.cumsum(value, axis=0) / value)


def test_a_spilled_register_is_seen():
    (launch,) = launches(lambda: spilling_kernel[(1,)](torch.ones(2048), num_warps=1, maxnreg=32))
    assert compile_for(launch, BY_DAY).spills > 0


@triton.jit
def fused_kernel(out_ptr, a, b):
    tl.store(out_ptr, tl.load(out_ptr) * a + b)


def test_a_fused_multiplication_is_seen():
    (launch,) = launches(lambda: fused_kernel[(1,)](torch.zeros(1), 2.5, 3.5))
    assert compile_for(launch, BY_DAY).fused == 1
