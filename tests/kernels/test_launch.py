"""The launch cache returns the compiled kernels that Triton would choose."""

import itertools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from benchmarks import launcher
from vllm_mars.kernels import fused, launch
from vllm_mars.kernels.constraints.fused import new_ring
from vllm_mars.kernels.counters.table import CounterLayout
from vllm_mars.kernels.interface import (
    ConstraintInputs,
    EngineParams,
    Markers,
    Protected,
    Records,
    SamplingInputs,
    SamplingTensors,
    StepCounters,
    VerifyInputs,
)
from vllm_mars.kernels.rules import RULES

CPU = torch.device("cpu")
SLOTS = 5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Steps:
    """Random steps of one random engine after the other."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.records = Records.new(SLOTS, CPU)

    def choice(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def ids(self, *shape: int) -> torch.Tensor:
        """Integers of 32 or 64 bits."""
        return self.view(*shape, dtype=self.choice(torch.int32, torch.int64))

    def view(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Zeros at any alignment, as in vLLM's slices."""
        start, size = int(self.rng.integers(0, 9)), int(np.prod(shape))
        return torch.zeros(size + start, dtype=dtype)[start:].view(shape)

    def begin(self) -> None:
        self.vocab = self.choice(1_000, 4_096, 32_000, 32_001, 50_256)
        self.k = self.choice(1, 2, 5, 8, 11)
        protected = None
        if self.rng.random() < 0.8:
            mask = torch.zeros(self.vocab, dtype=torch.bool)
            mask[: self.choice(0, 40)] = True
            protected = Protected.of(mask, CPU)
        self.engine_params = EngineParams(self.choice(*RULES.values()), protected)
        self.markers = self.choice(None, Markers(torch.zeros(9, dtype=torch.int64), opening=8))
        self.ngram, self.pads_with_last_token = self.choice(0, 4), self.choice(False, True)
        self.use_fp64 = self.choice(False, True)
        self.drafts = None
        if not self.engine_params.rule.outright and self.rng.random() < 0.7:
            wide = self.vocab + self.choice(0, 0, 3, 16)
            dtype = self.choice(*DTYPES)
            self.drafts = torch.zeros((SLOTS, self.k, wide), dtype=dtype)[..., : self.vocab]

    def rows(self, size: int) -> torch.Tensor:
        """Logits of any dtype, stride and alignment."""
        wide, first = self.vocab + self.choice(0, 0, 1, 8, 16), self.choice(0, 0, 1, 2, 3)
        rows = torch.zeros((first + size, wide), dtype=self.choice(*DTYPES))
        return rows[first:, : self.vocab]

    def step(self) -> None:
        batch = int(self.rng.integers(1, SLOTS + 1))
        size = batch + int(self.rng.integers(0, batch * self.k + 1))
        step = VerifyInputs(
            logits=self.rows(size),
            input_ids=self.ids(size),
            cu_num_logits=self.view(batch),
            records=self.records,
            slots=self.ids(batch),
            total_len=self.view(SLOTS),
            prompt_len=self.view(SLOTS),
            num_speculative_tokens=self.k,
        )
        constraints, sampling_inputs = None, None
        if self.markers is not None or self.ngram or self.pads_with_last_token:
            constraints = ConstraintInputs(
                ring=new_ring(SLOTS, CPU),
                tokens=self.view(SLOTS, 64),
                temperature=torch.ones(SLOTS),
                markers=self.markers,
                ngram=self.ngram,
                pads_with_last_token=self.pads_with_last_token,
            )
        if self.rng.random() < 0.7:
            sampling = SamplingTensors(torch.ones(SLOTS), torch.zeros(SLOTS, dtype=torch.int64))
            if self.drafts is not None:
                sampling = sampling._replace(
                    draft_logits=self.drafts,
                    draft_temperature=torch.ones(SLOTS),
                    next_seeds=self.choice(None, torch.zeros(SLOTS, dtype=torch.int64)),
                )
            sampling_inputs = SamplingInputs(
                sampling,
                self.ids(size),
                self.ids(size),
                self.ids(size),
                self.use_fp64,
                self.choice(False, True),
            )
        table = self.choice(None, torch.zeros(batch, 2, self.k + 1))
        step_counters = StepCounters(
            torch.zeros(CounterLayout(self.k).size, dtype=torch.int64), table
        )
        fused.verify(step, self.engine_params, constraints, step_counters, sampling_inputs)


def test_random_steps_launch_the_kernels_that_triton_would_choose():
    steps, launched = Steps(0), []
    with launcher.without_compiling(lambda name, _: launched.append(name)) as compiled:
        for number in range(4_000):
            if number % 40 == 0:
                steps.begin()
            steps.step()
    assert len(launched) > 12_000
    assert len({*launched}) == 6
    # Most launches hit the cache.
    assert len(compiled) < len(launched) / 2


@triton.jit
def added_kernel(out_ptr, value, number, size: tl.constexpr):
    offset = tl.arange(0, size)
    tl.store(out_ptr + offset, value + number)


def test_a_cached_kernel_of_other_arguments_is_an_error():
    """The cache key must name the properties of tensors, but not those of numbers."""
    cache = launch.launch_cache_for(CPU, torch.float32)
    out, ids = torch.zeros(32), torch.zeros(32, dtype=torch.int32)
    with launcher.without_compiling(lambda *_: None) as compiled:
        for number, block in itertools.product((1, 2, 16, 2**40), (16, 32)):
            cache.launch(added_kernel, (1, 1, 1), out, 0.5, number, block)
        assert len(compiled) == 8
        cache.launch(added_kernel, (1, 1, 1), out, 0.5, 16, 16)
        for other in (ids, out[1:]):
            with pytest.raises(AssertionError, match="added_kernel was compiled for other argum"):
                cache.launch(added_kernel, (1, 1, 1), other, 0.5, 16, 16)


@pytest.mark.skipif(not launcher.has_compiler(), reason="needs a C compiler")
def test_a_cached_launch_calls_the_hooks_of_profilers(monkeypatch):
    calls = []
    cache, out = launch.launch_cache_for("a profile"), torch.zeros(16)
    with launcher.without_a_driver():
        cache.launch(added_kernel, (1, 1, 1), out, 0.5, 1, 16, num_warps=1)
        for hook in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
            monkeypatch.setattr(hook, "calls", [lambda metadata: calls.append(metadata.get())])
        cache.launch(added_kernel, (1, 1, 1), out, 0.5, 1, 16, num_warps=1)
    assert [metadata["name"] for metadata in calls] == ["added_kernel"] * 2
