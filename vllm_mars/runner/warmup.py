"""Compiles the Triton kernels before the first request, in every variant that serving reaches.

Triton compiles a kernel for the dtypes, the constants and the divisibility by 16 of its arguments,
in about a second each. The samplers call this on their first call, which is vLLM's dummy run at
start; what varies from step to step afterwards is no part of a variant, or is met here.
"""

import itertools

import torch

from vllm_mars.kernels.terms import Drafts, LossBudget, Margin, Slots, loss_units
from vllm_mars.runner.margin import MarginRule
from vllm_mars.runner.sections import Sections
from vllm_mars.verify import resolve_backend


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
    margins = _margins(rule, logits.device, num_draft=1)
    # Raw rows are found by their indices; processed ones lie in order, their bonus is sampled.
    steps = [
        Drafts(rows, first_row, end, target_rows=first_row, bonus_rows=second_row)
        for rows in _row_layouts(logits)
    ]
    steps.append(Drafts(processed, first_row, end, bonus_token_ids=first_row))
    for drafts, margin, length in itertools.product(steps, margins, longest.values()):
        rule.verify(drafts._replace(max_draft_len=length), margin)
    for margin, length in itertools.product(margins, longest.values()):
        _judge(rule, steps[-1]._replace(max_draft_len=length), margin)
    _block(rule, logits.device, bonus_row_is_last=False)


def warm_up_v2(rule: MarginRule, logits: torch.Tensor, num_speculative_tokens: int) -> None:
    """Compiles what the V2 sampler reaches.

    Args:
        rule: the engine's rule.
        logits: `[num_rows, vocab]` of a step; only its dtype, width and stride count.
        num_speculative_tokens: the longest draft.
    """
    if resolve_backend(rule.backend, logits.device.type) != "triton":
        return
    inputs = torch.zeros(2, dtype=torch.int32, device=logits.device)
    # Where sampling changes no logit, vLLM hands the raw ones on.
    for rows in (*_row_layouts(logits), torch.zeros((2, logits.shape[1]), device=logits.device)):
        drafts = Drafts(rows, inputs, _ids(2, logits.device), max_draft_len=num_speculative_tokens)
        for margin in _margins(rule, logits.device, num_draft=2):
            rule.verify(drafts._replace(bonus_row_is_last=True), margin)
            _judge(rule, drafts._replace(max_draft_len=num_speculative_tokens + 1), margin)
    _block(rule, logits.device, bonus_row_is_last=True)


def _judge(rule: MarginRule, drafts: Drafts, margin: Margin) -> None:
    """The sampled path, beside a greedy request, and counting. What is counted here is dropped."""
    is_greedy = torch.ones_like(drafts.cu_num_draft_tokens, dtype=torch.bool)
    with rule.relaxed_made_certain(drafts, margin, is_greedy) as judgement:
        pass
    if judgement is not None:
        none = torch.zeros_like(drafts.cu_num_draft_tokens)
        rule.record(drafts, margin, judgement, none)


def _block(rule: MarginRule, device: torch.device, *, bonus_row_is_last: bool) -> None:
    """The kernels that say which positions are strict."""
    if not _may_block(rule):
        return
    from vllm_mars.kernels.repeats import block_repeats
    from vllm_mars.kernels.sections import blocked_rows

    zero = _ids(0, device)
    # V2's `idx_mapping` is int64.
    places = zero.long() if bonus_row_is_last else zero
    slots = Slots(places, zero[None], zero, zero)
    drafts = Drafts(torch.empty(0, 0), zero, _ids(1, device), bonus_row_is_last=bonus_row_is_last)
    markers = Sections(rule.config).markers(device)
    blocked = blocked_rows(zero.clone(), zero.clone(), zero, slots, drafts, markers)
    if rule.config.repeat_ngram:
        block_repeats(blocked, slots, drafts, rule.config.repeat_ngram)


def _margins(rule: MarginRule, device: torch.device, num_draft: int) -> list[Margin]:
    """What the requests of a step can bring: a value for all or one each, strict positions."""
    value = rule.config.value
    own = torch.full((1,), value, device=device)
    blocked: list[torch.Tensor | None] = []
    if not Sections(rule.config) and not rule.config.repeat_ngram:
        blocked.append(None)
    if _may_block(rule):
        blocked.append(torch.zeros(num_draft, dtype=torch.int8, device=device))
    return [
        Margin.of(rule.config.rule, values, blocked=positions, loss_budget=loss_budget)
        for values in (value, own)
        for positions in blocked
        for loss_budget in _loss_budgets(rule, device)
    ]


def _loss_budgets(rule: MarginRule, device: torch.device) -> list[LossBudget | None]:
    """All steps have a bound that is the server's, else those of a request that brings its own."""
    config = rule.config
    bound = LossBudget(
        torch.zeros(1, dtype=torch.int64, device=device),
        loss_units(config.loss_burst),
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    if config.is_shadow or (config.max_loss is None and not config.client_control):
        return [None]
    return [None, bound] if config.max_loss is None else [bound]


def _may_block(rule: MarginRule) -> bool:
    config = rule.config
    return bool(Sections(config)) or config.structured == "strict" or config.repeat_ngram > 0


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
