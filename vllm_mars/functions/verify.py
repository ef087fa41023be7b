"""`verify_greedy`: argument checks, then the CPU's form of the rule or Triton's."""

from typing import Any

import torch

from vllm_mars.kernels.budget import NO_BOUND
from vllm_mars.kernels.interface import EngineParams, Protected, Records, VerifyInputs, VerifyOutput
from vllm_mars.kernels.rules import RULES, Rule
from vllm_mars.options.config import check_value

_LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ID_DTYPES = (torch.int32, torch.int64)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    *shapes: tuple[int, ...],
) -> None:
    """Raises ValueError unless a tensor is contiguous, on the device, and of a given kind.

    Args:
        name: how the error names it.
        tensor: to check; its values are not read.
        dtypes: one of which it must have.
        device: of the logits.
        shapes: one of which it must have; any if none is given.
    """
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
    if shapes and tuple(tensor.shape) not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} has shape {list(tensor.shape)}, but must have shape {allowed}.")


def _check_rows(logits: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor) -> None:
    """Checks all but a tensor's values, since to read them would wait for the device."""
    if logits.ndim != 2:
        raise ValueError(f"logits has {logits.ndim} dimensions, but must be [num_rows, vocab].")
    check_tensor("logits", logits[:0], _LOGIT_DTYPES, logits.device)
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
            "requests; give one row for each draft token, and one behind each request's draft."
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

    A draft token is accepted if it is the row's argmax, or if it is the runner-up and the margin is
    small: `z2 > theta * z1` and `z1 > 0`, neither token protected. The first
    position that is not accepted emits the argmax and ends the request's output; if all are
    accepted the argmax behind them, the bonus token, follows.

    With a price, tokens of any rank may be accepted. They lose `r = z1 - z[x]` nats against the
    first choice; of all places where the step may end, it ends where `price` times the number of
    accepted drafts, less what they lose, is largest (docs/rule.md).

    On an accelerator it is the fused Triton kernel, which has one workspace for each device, so
    calls on different streams of a device must not overlap.

    Args:
        logits: `[num_draft + batch, vocab]` float32, bfloat16 or float16, any row stride: of each
            request the rows of its draft tokens, then the row behind them. All other tensors are
            contiguous.
        draft_token_ids: `[num_draft]` int32 or int64; an id outside [0, vocab), such as the padding
            -1, is always rejected.
        cu_num_draft_tokens: `[batch]` int32, inclusive prefix sum of the requests' draft lengths
            (the convention of vLLM); a request may have none.
        theta: float in (0, 1] or float32 `[batch]`; exactly one of theta and price is given.
            1 is strict; near 0 every runner-up with a positive logit is accepted. A tensor's values
            are not checked.
        price: nats per token gained, float >= 0 or float32 `[batch]`; 0 is strict, and a larger
            price never accepts fewer drafts.
        protected: bool `[vocab]`; tokens at which the rule stays strict.
        max_draft_len: longest draft of a request, which sets the output's width. Default: read from
            `cu_num_draft_tokens`, which waits for the device; give it in a serving loop.

    Returns:
        A `VerifyOutput`; `output_token_ids` is -1 after the last emitted token.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; the message names it.

    Source: arXiv 2601.15498. Deviation: outside the top 2 its research code rejects, here the token
    still gets the strict test, so acceptance is never below strict.
    """
    device, ids, ends = logits.device, draft_token_ids, cu_num_draft_tokens
    _check_rows(logits, ids, ends)
    batch = ends.shape[0]
    rule, value = _only_one(theta=theta, price=price)
    if isinstance(value, torch.Tensor):
        check_tensor(rule.name, value, (torch.float32,), device, (batch,))
    else:
        check_value(rule, value, rule.name)
        value = torch.full((batch,), value, device=device)
    if protected is not None:
        check_tensor("protected", protected, (torch.bool,), device, (logits.shape[1],))
    if max_draft_len is None:
        lengths = ends.diff(prepend=ends.new_zeros(1)).tolist()
        max_draft_len = max(lengths, default=0)
    records = Records.new(batch, device)
    records.write_values(rule, value)
    records.rate.fill_(NO_BOUND)
    records.max_tokens.fill_(2**31 - 1)
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    # Greedy requests look at the mask alone.
    preserved = None if protected is None else Protected(protected, slots[:0], 0)
    engine_params = EngineParams(rule, preserved)
    # A request's rows follow those of the requests before it, each with one behind its draft.
    positions = torch.arange(ids.shape[0], dtype=torch.int32, device=device)
    rows = positions + torch.searchsorted(ends, positions, right=True)
    none = torch.zeros_like(slots)
    # The input of a request's first row is no draft token.
    inputs = ids.new_full((logits.shape[0],), -1)
    inputs[rows + 1] = ids
    step = VerifyInputs(logits, inputs, ends + slots + 1, records, slots, none, none, max_draft_len)
    if device.type == "cpu":
        from vllm_mars.kernels import reference

        return reference.verify(step, engine_params)
    from vllm_mars.kernels import fused

    output = fused.verify(step, engine_params)
    return output._replace(output_token_ids=output.output_token_ids.int())


def _only_one(**given: Any) -> tuple[Rule, Any]:
    named = [(RULES[name], value) for name, value in given.items() if value is not None]
    if len(named) != 1:
        what = " and ".join(f"{rule.name}={value}" for rule, value in named) or "none of them"
        raise ValueError(f"Exactly one of {' and '.join(given)} names the rule; {what} is given.")
    return named[0]
