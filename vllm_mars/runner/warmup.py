"""Compiles the Triton kernels before the first request, in every variant that serving reaches.

Triton compiles a kernel for the dtypes, the constants and the divisibility by 16 of its arguments,
in about a second each. The samplers call this on their first call, which is vLLM's dummy run at
start; what varies from step to step afterwards is no part of a variant, or is met here.
"""

import itertools

import torch

from vllm_mars.kernels.reference import RelaxedBudget
from vllm_mars.runner.margin import Limits, MarginRule
from vllm_mars.runner.sections import Sections
from vllm_mars.verify import resolve_backend, verify_greedy, verify_input_tokens


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
    all_limits = _all_limits(rule, logits.device, num_draft=1)
    for rows in (*_row_layouts(logits), processed):
        # Raw rows are found by their indices; processed ones lie in order, their bonus is sampled.
        is_raw = rows is not processed
        for limits, max_draft_len in itertools.product(all_limits, longest.values()):
            verify_greedy(
                rows,
                first_row,
                end,
                None if is_raw else first_row,
                target_rows=first_row if is_raw else None,
                bonus_rows=second_row if is_raw else None,
                max_draft_len=max_draft_len,
                **rule.greedy_arguments(rows, limits),
            )
    for limits in all_limits:
        _judge(rule, limits, processed, first_row, end)
    _block(rule, logits.device)


def warm_up_v2(rule: MarginRule, logits: torch.Tensor, num_speculative_tokens: int) -> None:
    """Compiles what the V2 sampler reaches; arguments as in `warm_up_v1`."""
    if resolve_backend(rule.backend, logits.device.type) != "triton":
        return
    inputs = torch.zeros(2, dtype=torch.int32, device=logits.device)
    ends = _ids(2, logits.device)
    # Where sampling changes no logit, vLLM hands the raw ones on.
    for rows in (*_row_layouts(logits), torch.zeros((2, logits.shape[1]), device=logits.device)):
        for limits in _all_limits(rule, logits.device, num_draft=2):
            arguments = rule.greedy_arguments(rows, limits)
            verify_input_tokens(
                rows, inputs, ends, max_draft_len=num_speculative_tokens, **arguments
            )
            _judge(rule, limits, rows, inputs, ends)
    _block(rule, logits.device)


def _judge(
    rule: MarginRule,
    limits: Limits,
    rows: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
) -> None:
    """The sampled path: judging and counting. What is counted at start is dropped."""
    with rule.relaxed_made_certain(rows, draft_token_ids, cu_num_draft_tokens, limits) as judgement:
        pass
    if judgement is not None:
        none = torch.zeros_like(cu_num_draft_tokens)
        rule.record(limits, judgement, none, draft_token_ids, cu_num_draft_tokens, {})


def _block(rule: MarginRule, device: torch.device) -> None:
    """The kernel that says which positions are strict."""
    if not _may_block(rule):
        return
    from vllm_mars.kernels.sections import blocked_rows

    sections = Sections(rule.config)
    slots = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(7)]
    states, scanned, is_structured, idx_mapping, tokens, total_len, inputs = slots
    blocked_rows(
        *(states, scanned, is_structured, idx_mapping, tokens[None], total_len, inputs),
        _ids(1, device),
        sections.tables(device),
        sections.thinking,
        sections.only_thinking,
    )


def _all_limits(rule: MarginRule, device: torch.device, num_draft: int) -> list[Limits]:
    """What the requests of a step can bring: a threshold for all or one each, strict positions."""
    theta, gap = rule.thresholds
    own = (torch.full((1,), theta, device=device), torch.full((1,), gap, device=device))
    blocked: list[torch.Tensor | None] = []
    if not Sections(rule.config):
        blocked.append(None)
    if _may_block(rule):
        blocked.append(torch.zeros(num_draft, dtype=torch.int8, device=device))
    budget = None
    if rule.config.max_relaxed_share < 1:
        none = torch.zeros(1, dtype=torch.int32, device=device)
        budget = RelaxedBudget(rule.config.max_relaxed_share, none, none)
    return [
        Limits(thresholds[0], thresholds[1], positions, budget)
        for thresholds in ((theta, gap), own)
        for positions in blocked
    ]


def _may_block(rule: MarginRule) -> bool:
    return bool(Sections(rule.config)) or rule.config.structured == "strict"


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
