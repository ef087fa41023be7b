"""`verify_greedy`: checks arguments, then runs the CPU version or the Triton kernels."""

import torch

from vllm_mars.kernels.budget import NO_BOUND
from vllm_mars.kernels.interface import EngineParams, Protected, Records, VerifyInputs, VerifyOutput
from vllm_mars.kernels.rules import RULES, Rule
from vllm_mars.options.config import check_value

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ID_DTYPES = (torch.int32, torch.int64)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    shape: tuple[int, ...] | None = None,
) -> None:
    """Raises ValueError if a tensor is not contiguous or has the wrong dtype, device or shape."""
    if tensor.dtype not in dtypes:
        raise ValueError(
            f"{name} has dtype {tensor.dtype}, but must have one of {', '.join(map(str, dtypes))}."
        )
    if tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device}, but logits are on {device}; move it there."
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} has strides {list(tensor.stride())}, but must be contiguous; "
            "pass a contiguous copy."
        )
    if shape is not None and tensor.shape != shape:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}, but must have shape {list(shape)}."
        )


def _check_rows(logits: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor) -> None:
    """Checks everything except values, which would wait for the device."""
    if logits.ndim != 2:
        raise ValueError(f"logits has {logits.ndim} dimensions, but must be [num_rows, vocab].")
    check_tensor("logits", logits[:0], LOGIT_DTYPES, logits.device)
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(
            f"logits has strides {list(logits.stride())}, but a row's elements must be adjacent; "
            "pass a contiguous copy."
        )
    check_tensor("draft_token_ids", ids, ID_DTYPES, logits.device)
    check_tensor("cu_num_draft_tokens", ends, (torch.int32,), logits.device)
    if ids.ndim != 1 or ends.ndim != 1:
        raise ValueError(
            f"draft_token_ids has shape {list(ids.shape)} and cu_num_draft_tokens "
            f"{list(ends.shape)}, but both must have one dimension."
        )
    if logits.shape[0] != ids.shape[0] + ends.shape[0]:
        raise ValueError(
            f"logits has {logits.shape[0]} rows for {ids.shape[0]} draft tokens of {ends.shape[0]} "
            "requests; give one row for each draft token, and one after each request's draft."
        )


def verify_greedy(
    logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    theta: float | torch.Tensor | None = None,
    *,
    price: float | torch.Tensor | None = None,
    protected: torch.Tensor | None = None,
    max_draft_len: int | None = None,
) -> VerifyOutput:
    """Verifies a batch of greedy drafts by the margin-aware rule.

    With theta, a draft token is accepted if it is the row's argmax, or if it is the runner-up,
    `z2 > theta * z1` and `z1 > 0`, and neither token is protected. The first rejected position
    emits the argmax; if no token is rejected, the argmax of the last row is the bonus token.

    With a price, tokens of any rank may be accepted, at a loss of `z1 - z[x]` nats. The accepted
    prefix is the one with the largest price * length - loss (docs/rule.md).

    On a GPU, each device has one workspace, so calls on different streams must not overlap.

    Args:
        logits: `[num_draft + batch, vocab]` float32, bfloat16 or float16, any row stride: for each
            request the rows of its draft tokens, then its bonus row. All other tensors must be
            contiguous.
        draft_token_ids: `[num_draft]` int32 or int64; ids outside [0, vocab), such as the padding
            -1, are always rejected.
        cu_num_draft_tokens: `[batch]` int32, inclusive prefix sum of draft lengths, as in vLLM; a
            length may be 0.
        theta: float in (0, 1] or float32 `[batch]`; give either theta or price. 1 is strict; near
            0 every runner-up with a positive logit is accepted. Values of a tensor are not checked.
        price: nats per token gained, float >= 0 or float32 `[batch]`. 0 is strict; a larger price
            never accepts fewer tokens.
        protected: bool `[vocab]`; the rule is strict at these tokens.
        max_draft_len: upper bound on draft length, which sets the output's width. By default it is
            read from `cu_num_draft_tokens`, which waits for the device: pass it in a serving loop.

    Returns:
        A `VerifyOutput`; `output_token_ids` is -1 after the last emitted token.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; the message names it.

    Source: arXiv 2601.15498. Unlike its code, a token outside the top 2 still gets the strict test,
    so that acceptance is never below strict.
    """
    ids = draft_token_ids
    ends = cu_num_draft_tokens
    device = logits.device
    _check_rows(logits, ids, ends)
    batch = ends.shape[0]
    rule, values = rule_values(batch, device, theta=theta, price=price)
    if protected is not None:
        check_tensor("protected", protected, (torch.bool,), device, (logits.shape[1],))
    if max_draft_len is None:
        lengths = ends.diff(prepend=ends.new_zeros(1)).tolist()
        max_draft_len = max(lengths, default=0)
    records = Records.new(batch, device)
    records.write_values(rule, values)
    records.rate.fill_(NO_BOUND)
    records.max_tokens.fill_(2**31 - 1)
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    # Greedy requests read only the mask.
    preserved = None if protected is None else Protected(mask=protected, ids=slots[:0], num_ids=0)
    engine_params = EngineParams(rule, preserved)
    # Row of each draft token: its index plus one bonus row per earlier request.
    positions = torch.arange(ids.shape[0], dtype=torch.int32, device=device)
    rows = positions + torch.searchsorted(ends, positions, right=True)
    zeros = torch.zeros_like(slots)
    # Entry i + 1 is row i's draft token; a request's first entry is -1, no last token.
    input_ids = ids.new_full((logits.shape[0],), -1)
    input_ids[rows + 1] = ids
    step = VerifyInputs(
        logits=logits,
        input_ids=input_ids,
        cu_num_logits=ends + slots + 1,
        records=records,
        slots=slots,
        total_len=zeros,
        prompt_len=zeros,
        num_speculative_tokens=max_draft_len,
    )
    if device.type == "cpu":
        from vllm_mars.kernels import reference

        return reference.verify(step, engine_params)
    from vllm_mars.kernels import fused

    output = fused.verify(step, engine_params)
    return output._replace(output_token_ids=output.output_token_ids.int())


def rule_values(
    batch: int, device: torch.device, **options: float | torch.Tensor | None
) -> tuple[Rule, torch.Tensor]:
    """Returns the rule whose option is not None, and its checked values, float32 `[batch]`."""
    chosen = [(RULES[name], value) for name, value in options.items() if value is not None]
    if len(chosen) != 1:
        listed = " and ".join(f"{rule.name}={value}" for rule, value in chosen) or "none of them"
        names = " and ".join(options)
        raise ValueError(f"Exactly one of {names} names the rule; {listed} is given.")
    ((rule, value),) = chosen
    if isinstance(value, torch.Tensor):
        check_tensor(rule.name, value, (torch.float32,), device, (batch,))
        return rule, value
    check_value(rule, value, rule.name)
    return rule, torch.full((batch,), value, dtype=torch.float32, device=device)
