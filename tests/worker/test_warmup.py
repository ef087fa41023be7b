"""Warm-up compiles every kernel variant that serving reaches."""

import numpy as np
import pytest
import torch

from benchmarks.launcher import without_compiling
from vllm_mars import MarsConfig
from vllm_mars.kernels import fused
from vllm_mars.kernels.constraints.fused import new_ring
from vllm_mars.kernels.constraints.markers import MarkerTracker
from vllm_mars.kernels.interface import (
    ConstraintInputs,
    Records,
    SamplingInputs,
    SamplingTensors,
    VerifyInputs,
)
from vllm_mars.report.counters import Counters
from vllm_mars.report.worker import StepReports
from vllm_mars.worker.engine_params import LazyEngineParams
from vllm_mars.worker.warmup import warm_up

CPU = torch.device("cpu")
# Drafts and bonus token take 16 lanes at the longest, and 8 for short drafts.
K = 11
SLOTS = 6


class Engine:
    """The inputs of an engine's kernels, without vLLM, at random as in serving.

    Rows of an odd vocabulary are not aligned to 16 bytes.
    """

    def __init__(self, config: MarsConfig, vocab: int, is_probabilistic: bool) -> None:
        self.vocab, self.is_probabilistic, self.config = vocab, is_probabilistic, config
        self.draft_logits = torch.zeros((SLOTS, K, vocab), dtype=torch.bfloat16)
        self.rng = np.random.default_rng(vocab)
        self.engine_params = LazyEngineParams(config, [2])
        self.reports = StepReports(Counters(K, CPU))
        self.records = Records.new(SLOTS, CPU)
        self.tracker = MarkerTracker(config)

    def view(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Zeros at any alignment, as in vLLM's slices."""
        start, size = int(self.rng.integers(0, 9)), int(np.prod(shape))
        return torch.zeros(size + start, dtype=dtype)[start:].view(shape)

    def step(self) -> None:
        longest = int(self.rng.choice([0, 1, 3, 7, 8, K]))
        batch = int(self.rng.integers(1, SLOTS))
        size = batch + int(self.rng.integers(0, longest + 1, batch).sum())
        # vLLM slices batches over 1 GB.
        start = int(self.rng.integers(0, 3))
        rows = torch.zeros((start + size, self.vocab), dtype=torch.bfloat16)[start:]
        if self.rng.random() < 0.5:
            # Logits processors return float32.
            rows = rows.float()
        step = VerifyInputs(
            logits=rows,
            input_ids=self.view(size),
            cu_num_logits=self.view(batch),
            records=self.records,
            slots=self.view(batch, dtype=torch.int64),
            total_len=self.view(SLOTS),
            prompt_len=self.view(SLOTS),
            num_speculative_tokens=K,
        )
        constraints, sampling_inputs = None, None
        if self.tracker or self.config.repeat_ngram:
            constraints = ConstraintInputs(
                ring=new_ring(SLOTS, CPU),
                tokens=self.view(SLOTS, 64),
                temperature=torch.ones(SLOTS),
                markers=self.tracker.markers(CPU),
                ngram=self.config.repeat_ngram,
            )
        if self.rng.random() < 0.5:
            sampling = SamplingTensors(torch.ones(SLOTS), torch.zeros(SLOTS, dtype=torch.int64))
            if self.is_probabilistic:
                sampling = sampling._replace(
                    draft_logits=self.draft_logits, draft_temperature=torch.ones(SLOTS)
                )
            sampling_inputs = SamplingInputs(
                sampling,
                self.view(size, dtype=torch.int64),
                self.view(size, dtype=torch.int64),
                self.view(size),
                apply_temperature=rows.dtype == torch.bfloat16 and self.rng.random() < 0.5,
            )
        returns = {0: "a request"} if self.rng.random() < 0.5 else {}
        step_counters = self.reports.step_counters(batch, CPU, returns)
        fused.verify(step, self.engine_params.on(rows), constraints, step_counters, sampling_inputs)


@pytest.mark.parametrize("vocab", [32_000, 50_257])
@pytest.mark.parametrize(
    ("options", "is_probabilistic"),
    [
        ({"theta": 0.9}, False),
        ({"max_loss": 0.02}, False),
        ({"max_loss": 0.02, "strict_spans": ((5, 6),)}, True),
    ],
)
def test_nothing_compiles_while_serving(options, is_probabilistic, vocab):
    engine = Engine(MarsConfig(**options), vocab, is_probabilistic)
    logits = torch.zeros((2, vocab), dtype=torch.bfloat16)
    launched = []
    with without_compiling(lambda name, _: launched.append(name)) as compiled:
        drafts = engine.draft_logits if is_probabilistic else None
        warm_up(engine.engine_params, engine.reports, logits, drafts)
        warm = len(compiled)
        launched.clear()
        for _ in range(60):
            engine.step()
    # Kernels that read rows have a variant for each dtype and alignment, without which loads would
    # not be wide, and one that divides by the temperature.
    most = {32_000: 11, 50_257: 21} if not is_probabilistic else {32_000: 17, 50_257: 35}
    assert warm <= most[vocab]
    assert launched and not {*launched} - {name for name, _ in compiled}
    assert compiled[warm:] == []
