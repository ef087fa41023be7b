"""Compiles the Triton kernels before the first request, in every variant that serving reaches.

Triton compiles a kernel for the dtypes, the constants and the divisibility by 16 of its arguments,
in about a second each. The samplers call this on their first call, which is vLLM's dummy run at
start; what varies from step to step afterwards is no part of a variant, or is met here.
"""

import itertools

import torch

from vllm_mars.margin import MarginRule, Thresholds
from vllm_mars.verify import (
    relaxed_positions,
    resolve_backend,
    verify_greedy,
    verify_input_tokens,
)


def warm_up_v1(rule: MarginRule, logits: torch.Tensor, num_speculative_tokens: int) -> None:
    """Compiles what the V1 sampler reaches.

    Args:
        rule: the engine's rule.
        logits: `[num_rows, vocab]` of a step; only its dtype, width and stride count.
        num_speculative_tokens: the longest draft.
    """
    if resolve_backend(rule.backend, logits.device.type) != "triton":
        return
    from vllm_mars.kernels.greedy import num_positions

    first_row, second_row, end = (_ids(row, logits.device) for row in (0, 1, 1))
    # The last length of each width that `accept_kernel` is compiled for.
    longest = {num_positions(length): length for length in range(num_speculative_tokens + 1)}
    processed = torch.zeros((2, logits.shape[1]), device=logits.device)
    for rows in (*_row_layouts(logits), processed):
        # Raw rows are found by their indices; processed ones lie in order, their bonus is sampled.
        is_raw = rows is not processed
        for (theta, gap), max_draft_len in itertools.product(
            _thresholds(rule, logits.device), longest.values()
        ):
            verify_greedy(
                rows,
                first_row,
                end,
                None if is_raw else first_row,
                theta,
                gap=gap,
                protected=rule.protected_mask(rows),
                target_rows=first_row if is_raw else None,
                bonus_rows=second_row if is_raw else None,
                max_draft_len=max_draft_len,
                backend=rule.backend,
            )
    _mark(rule, processed)


def warm_up_v2(rule: MarginRule, logits: torch.Tensor, num_speculative_tokens: int) -> None:
    """Compiles what the V2 sampler reaches; arguments as in `warm_up_v1`."""
    if resolve_backend(rule.backend, logits.device.type) != "triton":
        return
    inputs = torch.zeros(2, dtype=torch.int32, device=logits.device)
    # Where sampling changes no logit, vLLM hands the raw ones on.
    for rows in (*_row_layouts(logits), torch.zeros((2, logits.shape[1]), device=logits.device)):
        for theta, gap in _thresholds(rule, logits.device):
            verify_input_tokens(
                rows,
                inputs,
                _ids(2, logits.device),
                theta,
                num_speculative_tokens,
                gap=gap,
                protected=rule.protected_mask(rows),
                backend=rule.backend,
            )
        _mark(rule, rows)


def _mark(rule: MarginRule, rows: torch.Tensor) -> None:
    for theta, gap in _thresholds(rule, rows.device):
        relaxed_positions(
            rows,
            _ids(0, rows.device),
            _ids(1, rows.device),
            theta,
            gap=gap,
            protected=rule.protected_mask(rows),
            backend=rule.backend,
        )


def _thresholds(rule: MarginRule, device: torch.device) -> list[Thresholds]:
    """Thresholds as a batch brings them: the server's alone, or each request's own."""
    theta, gap = rule.thresholds
    own = (torch.full((1,), theta, device=device), torch.full((1,), gap, device=device))
    return [rule.thresholds, own]


def _row_layouts(logits: torch.Tensor) -> list[torch.Tensor]:
    """Two rows of zeros in each layout that the model's logits may have.

    Most models cut their padded output to the vocabulary, so the stride of a real step can be
    divisible by 16 where that of the dummy run is not.
    """
    vocab = logits.shape[1]
    strides = {vocab, logits.stride(0)}
    if vocab % 16:
        strides.add((vocab // 16 + 1) * 16)
    return [
        torch.zeros((2, stride), dtype=logits.dtype, device=logits.device)[:, :vocab]
        for stride in sorted(strides)
        if stride >= vocab
    ]


def _ids(value: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)
