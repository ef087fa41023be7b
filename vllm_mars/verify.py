"""The public verification functions: argument checks, then a backend."""

import importlib
import os
from typing import Any, Literal

import torch

from vllm_mars.config import check_value
from vllm_mars.kernels.terms import (
    LOSS_BITS,
    MOST_PRICE,
    NO_BOUND,
    Drafts,
    Protected,
    Records,
    Requests,
    Rule,
    RuleName,
    Step,
    VerifyOutput,
)

Backend = Literal["auto", "torch", "triton"]

_LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ID_DTYPES = (torch.int32, torch.int64)


def resolve_backend(backend: str, device_type: str) -> str:
    """The backend that a name stands for on a device.

    Args:
        backend: "auto", "torch" or "triton"; auto is Triton on an accelerator and torch on a CPU.
        device_type: type of the torch device, such as "cpu" or "cuda".

    Raises:
        NotImplementedError: "triton" on a CPU, outside Triton's interpreter, or "torch" elsewhere.
        ValueError: any other name.
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(
            f"backend={backend!r} is not one of 'auto', 'torch', 'triton'; "
            "'auto' takes Triton on an accelerator and torch on a CPU."
        )
    if backend == "auto":
        return "torch" if device_type == "cpu" else "triton"
    if backend == "torch" and device_type != "cpu":
        raise NotImplementedError(
            f"backend='torch' needs logits on the CPU, but they are on {device_type}; take 'auto', "
            "or move them."
        )
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "triton" and device_type == "cpu" and not is_interpreted:
        raise NotImplementedError(
            "backend='triton' needs logits on an accelerator, but they are on the CPU; take "
            "'auto', or set TRITON_INTERPRET=1 before triton is imported to interpret it."
        )
    return backend


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
    _check_dtype(name, tensor, dtypes)
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


def _check_dtype(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(
            f"{name} has dtype {tensor.dtype}, but must have one of {', '.join(map(str, dtypes))}."
        )


def _check_rows(logits: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor) -> None:
    """Checks all but a tensor's values, since to read them would wait for the device."""
    if logits.ndim != 2:
        raise ValueError(f"logits has {logits.ndim} dimensions, but must be [num_rows, vocab].")
    _check_dtype("logits", logits, _LOGIT_DTYPES)
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
    backend: Backend = "auto",
) -> VerifyOutput:
    """Verifies a batch of greedy drafts by the margin-aware rule.

    A draft token is accepted if it is the row's argmax, or if it is the runner-up and the margin is
    small: `z2 > theta * z1` and `z1 > 0`, neither token protected. The first
    position that is not accepted emits the argmax and ends the request's output; if all are
    accepted the argmax behind them, the bonus token, follows.

    With a price, tokens of any rank may be accepted. They lose `r = z1 - z[x]` nats against the
    first choice; of all places where the step may end, it ends where `price` times the number of
    accepted drafts, less what they lose, is largest (docs/rule.md).

    The Triton form has one workspace for each device, so calls on different streams of a device
    must not overlap.

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
        backend: "torch", on a CPU alone, "triton", or "auto": Triton on an accelerator, torch on a
            CPU.

    Returns:
        A `VerifyOutput`; `output_token_ids` is -1 after the last emitted token.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; the message names it.
        NotImplementedError: the backend does not serve the logits' device.

    Source: arXiv 2601.15498. Deviation: outside the top 2 its research code rejects, here the token
    still gets the strict test, so acceptance is never below strict.
    """
    device = logits.device
    resolved = resolve_backend(backend, device.type)
    ids, ends = draft_token_ids, cu_num_draft_tokens
    _check_rows(logits, ids, ends)
    batch = ends.shape[0]
    name, value = _only_one(theta, price)
    if isinstance(value, torch.Tensor):
        check_tensor(name, value, (torch.float32,), device, (batch,))
    else:
        check_value(name, value, name)
        value = torch.full((batch,), value, device=device)
    if protected is not None:
        check_tensor("protected", protected, (torch.bool,), device, (logits.shape[1],))
    if max_draft_len is None:
        lengths = ends.diff(prepend=ends.new_zeros(1)).tolist()
        max_draft_len = max(lengths, default=0)
    records = Records.new(batch, device)
    records.threshold.copy_(value)
    records.price.copy_((value * 2**LOSS_BITS).floor().clamp(max=MOST_PRICE))
    records.rate.fill_(NO_BOUND)
    records.most_tokens.fill_(2**31 - 1)
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    # Greedy requests look at the mask alone.
    kept = None if protected is None else Protected(protected, slots[:0], 0)
    rule = Rule(name, kept)
    # A request's rows follow those of the requests before it, each with one behind its draft.
    places = torch.arange(ids.shape[0], dtype=torch.int32, device=device)
    rows = places + torch.searchsorted(ends, places, right=True)
    kernels = importlib.import_module(
        "vllm_mars.kernels." + ("accept" if resolved == "triton" else "cpu")
    )
    if resolved == "torch":
        drafts = Drafts(logits, ids, ends, rows, None, ends + slots, max_draft_len)
        none = torch.zeros_like(slots)
        requests = Requests(records, slots, none, none - 1)
        output: VerifyOutput = kernels.accept(drafts, requests, rule)
        return output
    # The input of a request's first row is no draft token.
    inputs = ids.new_full((logits.shape[0],), -1)
    inputs[rows + 1] = ids
    none = torch.zeros_like(slots)
    step = Step(logits, inputs, ends + slots + 1, records, slots, none, none, max_draft_len)
    output = kernels.accept(step, rule)
    return output._replace(output_token_ids=output.output_token_ids.int())


def _only_one(theta: Any, price: Any) -> tuple[RuleName, Any]:
    given = {"theta": theta, "price": price}
    named = [(name, value) for name, value in given.items() if value is not None]
    if len(named) != 1:
        what = " and ".join(f"{name}={value}" for name, value in named) or "none of them"
        raise ValueError(f"Exactly one of theta and price names the rule; {what} is given.")
    name, value = named[0]
    return name, value
