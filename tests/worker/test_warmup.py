"""What is compiled before the first request is all that serving reaches."""

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
# The longest draft; 16 lanes hold it and the bonus token, but 8 its beginning.
K = 11
SLOTS = 6


class Engine:
    """An engine without vLLM: what its sampler hands to the kernels, as random as serving is.

    Args:
        config: its options.
        vocab: width of the logits; of an odd one no row but the first starts at 16 bytes.
        is_probabilistic: whether drafts are drawn.
    """

    def __init__(self, config: MarsConfig, vocab: int, is_probabilistic: bool) -> None:
        self.vocab, self.is_probabilistic, self.config = vocab, is_probabilistic, config
        # As a head leaves them.
        self.draft_logits = torch.zeros((SLOTS, K, vocab), dtype=torch.bfloat16)
        self.rng = np.random.default_rng(vocab)
        self.engine_params, self.reports = (
            LazyEngineParams(config, [2]),
            StepReports(Counters(K, CPU)),
        )
        self.records = Records.new(SLOTS, CPU)
        self.tracker = MarkerTracker(config)
        self.ring = new_ring(SLOTS, CPU)
        self.markers = self.tracker.markers(CPU)

    def view(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Zeros that begin anywhere in memory, as vLLM's slices do."""
        start, size = int(self.rng.integers(0, 9)), int(np.prod(shape))
        return torch.zeros(size + start, dtype=dtype)[start:].view(shape)

    def lengths(self) -> list[int]:
        longest = int(self.rng.choice([0, 1, 3, 7, 8, K]))
        return self.rng.integers(0, longest + 1, self.rng.integers(1, SLOTS)).tolist()

    def constraints(self, tokens: torch.Tensor):
        if not (self.tracker or self.config.repeat_ngram):
            return None
        return ConstraintInputs(
            ring=self.ring,
            tokens=tokens,
            temperature=torch.ones(SLOTS),
            markers=self.markers,
            ngram=self.config.repeat_ngram,
        )

    def returns(self) -> dict[int, str]:
        return {0: "a request"} if self.rng.random() < 0.5 else {}

    def step(self) -> None:
        lengths, dtype = self.lengths(), torch.bfloat16
        batch, size = len(lengths), sum(lengths) + len(lengths)
        # A part of a batch over 1 GB begins in the middle of it.
        start = int(self.rng.integers(0, 3))
        rows = torch.zeros((start + size, self.vocab), dtype=dtype)[start:]
        request_tensors = self.view(SLOTS), self.view(SLOTS)
        slots = self.view(batch, dtype=torch.int64)
        if self.rng.random() < 0.5:
            # Something changes the logits.
            rows = rows.float()
        given = rows, self.view(size), self.view(batch), self.records, slots, *request_tensors
        step, sampling_inputs = VerifyInputs(*given, num_speculative_tokens=K), None
        constraints = self.constraints(self.view(SLOTS, 64))
        if self.rng.random() < 0.5:
            sampling = SamplingTensors(torch.ones(SLOTS), torch.zeros(SLOTS, dtype=torch.int64))
            if self.is_probabilistic:
                draft_temperature = torch.ones(SLOTS)
                sampling = sampling._replace(
                    draft_logits=self.draft_logits, draft_temperature=draft_temperature
                )
            by_row = self.view(size, dtype=torch.int64), self.view(size, dtype=torch.int64)
            apply_temperature = rows.dtype == dtype and self.rng.random() < 0.5
            sampling_inputs = SamplingInputs(
                sampling, *by_row, self.view(size), apply_temperature=apply_temperature
            )
        step_counters = self.reports.step_counters(batch, CPU, self.returns())
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
    # Raw and processed rows have kernels of their own; rows that start anywhere have more.
    # What reads rows has a variant for each alignment of theirs, since only then loads are wide.
    # So has what divides them by the temperature.
    most = {32_000: 11, 50_257: 21} if not is_probabilistic else {32_000: 17, 50_257: 35}
    assert warm <= most[vocab]
    assert launched and not {*launched} - {name for name, _ in compiled}
    assert compiled[warm:] == []
