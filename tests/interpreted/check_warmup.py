"""Warm-up meets every variant of the kernels that a sampler's steps reach, so none compiles later.

Run by `tests/test_kernel_interpreted.py`, which sets TRITON_INTERPRET=1 before triton loads.
"""

import itertools

import pytest
import torch
from vllm_mars.kernels import greedy, top2

from vllm_mars import MarsConfig
from vllm_mars.margin import MarginRule
from vllm_mars.verify import relaxed_positions, verify_greedy, verify_input_tokens
from vllm_mars.warmup import warm_up_v1, warm_up_v2

SPECIALIZED = {"logits_stride", "vocab", "logits_ptr", "best_ptr", "second_ptr"}


class Recorder:
    """Stands before a kernel and notes what Triton's cache would look a launch up by."""

    def __init__(self, kernel, seen):
        self.kernel = kernel
        self.seen = seen

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.seen.add(self.key(args, kwargs))
            return self.kernel[grid](*args, **kwargs)

        return launch

    def key(self, args, kwargs):
        names = self.kernel.arg_names
        key = [self.kernel.fn.__name__, *sorted(kwargs.items())]
        for name, value in zip(names, args, strict=False):
            if isinstance(value, torch.Tensor):
                key.append((name, value.dtype))
                if name in SPECIALIZED:
                    key.append(value.data_ptr() % 16 == 0)
            elif name in SPECIALIZED:
                key.append((name, value == 1, value % 16 == 0))
            else:
                key.append((name, type(value)))
        return tuple(key)


@pytest.fixture
def seen(monkeypatch):
    keys = set()
    for module, name in (
        (top2, "top2_kernel"),
        (greedy, "accept_kernel"),
        (greedy, "mark_kernel"),
    ):
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), keys))
    return keys


def steps(vocab, stride, dtype):
    """Ragged batches of up to 5 drafts, as vLLM's steps bring them."""
    torch.manual_seed(0)
    for lengths in ([1], [5], [0, 3], [5, 0, 2, 4], [1] * 9, [9, 7]):
        rows = sum(lengths) + len(lengths)
        logits = torch.randn(rows, stride).to(dtype)[:, :vocab]
        yield lengths, logits


@pytest.fixture(params=[(512, 512), (8_209, 8_256), (512, 768)], ids=str)
def shape(request):
    return request.param


def test_v1(seen, shape):
    vocab, stride = shape
    rule = MarginRule(MarsConfig(theta=0.9), [2], backend="triton")
    # The dummy run's logits are contiguous, whatever the model's are.
    warm_up_v1(rule, torch.zeros(3, vocab, dtype=torch.bfloat16), 9)
    warm = set(seen)
    for lengths, logits in steps(vocab, stride, torch.bfloat16):
        drafts = torch.zeros(sum(lengths), dtype=torch.int32)
        cu = torch.tensor(lengths).cumsum(0).int()
        verify_greedy(
            logits,
            drafts,
            cu,
            None,
            0.9,
            protected=rule.protected_mask(logits),
            target_rows=torch.arange(len(drafts), dtype=torch.int32),
            bonus_rows=torch.arange(len(lengths), dtype=torch.int32),
            max_draft_len=max(lengths),
            backend="triton",
        )
        # What a processor has touched is float32, in order, and its bonus tokens are sampled.
        options = {"protected": rule.protected_mask(logits), "backend": "triton"}
        processed = logits.float().contiguous()[: len(drafts)]
        bonus = torch.zeros(len(lengths), 1, dtype=torch.int32)
        batch = len(lengths)
        for theta, gap in ((0.9, 0.0), (torch.full((batch,), 0.9), torch.zeros(batch))):
            verify_greedy(
                processed,
                drafts,
                cu,
                bonus,
                theta,
                gap=gap,
                max_draft_len=max(lengths),
                **options,
            )
            relaxed_positions(processed, drafts, cu, theta, gap=gap, **options)
    assert seen == warm


def test_v2(seen, shape):
    vocab, stride = shape
    rule = MarginRule(MarsConfig(theta=0.9), [2], backend="triton")
    warm_up_v2(rule, torch.zeros(3, vocab, dtype=torch.bfloat16), 9)
    warm = set(seen)
    for lengths, logits in steps(vocab, stride, torch.bfloat16):
        inputs = torch.zeros(len(logits), dtype=torch.int32)
        # The runner's prefix sum starts with a 0 that is cut off: a view that is not aligned.
        ends = torch.tensor([0, *itertools.accumulate(length + 1 for length in lengths)]).int()[1:]
        options = {"protected": rule.protected_mask(logits), "backend": "triton"}
        verify_input_tokens(logits, inputs, ends, 0.9, 9, **options)
        for processed in (logits, logits.float().contiguous()):
            relaxed_positions(processed, inputs, ends, 0.9, **options)
    assert seen == warm


def test_nothing_is_compiled_for_the_torch_backend(seen):
    rule = MarginRule(MarsConfig(theta=0.9), [])
    warm_up_v1(rule, torch.zeros(2, 512), 5)
    warm_up_v2(rule, torch.zeros(2, 512), 5)
    assert not seen
