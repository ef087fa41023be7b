"""The public verification functions: argument checks, then a backend."""

import importlib
import os
from types import ModuleType
from typing import Any, Literal

import torch

from vllm_mars.config import check_value
from vllm_mars.kernels.terms import (
    LOSS_BITS,
    MOST_PRICE,
    NO_BOUND,
    Drafts,
    Records,
    Requests,
    Rule,
    RuleName,
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
        NotImplementedError: "triton" on a CPU, outside Triton's interpreter.
        ValueError: any other name.
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(
            f"backend={backend!r} is not one of 'auto', 'torch', 'triton'; "
            "'auto' takes Triton on an accelerator and torch on a CPU."
        )
    if backend == "auto":
        return "torch" if device_type == "cpu" else "triton"
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


def check_drafts(drafts: Drafts) -> None:
    """Checks all but a tensor's values, since to read them would wait for the device."""
    logits, device = drafts.logits, drafts.logits.device
    if logits.ndim != 2:
        raise ValueError(f"logits has {logits.ndim} dimensions, but must be [num_rows, vocab].")
    _check_dtype("logits", logits, _LOGIT_DTYPES)
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(
            f"logits has strides {list(logits.stride())}, but a row's elements must be adjacent; "
            "pass a contiguous copy."
        )
    ids, ends = drafts.draft_token_ids, drafts.cu_num_draft_tokens
    check_tensor("draft_token_ids", ids, ID_DTYPES, device)
    check_tensor("cu_num_draft_tokens", ends, (torch.int32,), device)
    if ids.ndim != 1 or ends.ndim != 1:
        raise ValueError(
            f"draft_token_ids has shape {list(ids.shape)} and cu_num_draft_tokens "
            f"{list(ends.shape)}, but both must have one dimension."
        )
    num_draft, batch = ids.shape[0], ends.shape[0]
    if drafts.target_rows is None and logits.shape[0] < num_draft:
        raise ValueError(
            f"logits has {logits.shape[0]} rows for {num_draft} draft tokens; "
            "give one row for each, or target_rows."
        )
    if drafts.bonus_token_ids is not None and drafts.bonus_rows is not None:
        raise ValueError("bonus_token_ids and bonus_rows are both given; give one of them.")
    # Name, tensor or None, dtypes, shapes.
    given: list[tuple[Any, ...]] = [
        ("target_rows", drafts.target_rows, ID_DTYPES, (num_draft,)),
        ("bonus_token_ids", drafts.bonus_token_ids, ID_DTYPES, (batch,), (batch, 1)),
        ("bonus_rows", drafts.bonus_rows, ID_DTYPES, (batch,)),
    ]
    for name, tensor, dtypes, *shapes in given:
        if tensor is not None:
            check_tensor(name, tensor, dtypes, device, *shapes)


def verify_greedy(
    logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    bonus_token_ids: torch.Tensor | None,
    theta: float | torch.Tensor | None = None,
    *,
    price: float | torch.Tensor | None = None,
    protected: torch.Tensor | None = None,
    blocked: torch.Tensor | None = None,
    target_rows: torch.Tensor | None = None,
    bonus_rows: torch.Tensor | None = None,
    max_draft_len: int | None = None,
    backend: Backend = "auto",
) -> VerifyOutput:
    """Verifies a batch of greedy drafts by the margin-aware rule.

    A draft token is accepted if it is the row's argmax, or if it is the runner-up and the margin is
    small: `z2 > theta * z1` and `z1 > 0`, neither token protected. The first
    position that is not accepted emits the argmax and ends the request's output; if all are
    accepted the bonus token follows.

    With a price, tokens of any rank may be accepted. They lose `r = z1 - z[x]` nats against the
    first choice; of all places where the step may end, it ends where `price` times the number of
    accepted drafts, less what they lose, is largest (docs/rule.md).

    The Triton form has one workspace for each device, so calls on different streams of a device
    must not overlap.

    Args:
        logits: `[num_rows, vocab]` float32, bfloat16 or float16, any row stride. All other tensors
            are contiguous.
        draft_token_ids: `[num_draft]` int32 or int64; an id outside [0, vocab), such as the padding
            -1, is always rejected.
        cu_num_draft_tokens: `[batch]` int32, inclusive prefix sum of the requests' draft lengths
            (the convention of vLLM); a request may have none.
        bonus_token_ids: `[batch]` or `[batch, 1]` int32 or int64, or None to emit no bonus token.
        theta: float in (0, 1] or float32 `[batch]`; exactly one of theta and price is given.
            1 is strict; near 0 every runner-up with a positive logit is accepted. A tensor's values
            are not checked.
        price: nats per token gained, float >= 0 or float32 `[batch]`; 0 is strict, and a larger
            price never accepts fewer drafts.
        protected: bool `[vocab]`; tokens at which the rule stays strict.
        blocked: `[num_draft]` int8 or None; not 0 where the rule stays strict, a `Verdict` that
            says why.
        target_rows: `[num_draft]` int32 or int64, the row of `logits` of each draft position;
            default 0..num_draft-1.
        bonus_rows: `[batch]` int32 or int64, rows of `logits` whose argmax is the bonus token,
            found in the same pass; only one of `bonus_token_ids` and `bonus_rows` may be given.
        max_draft_len: longest draft of a request, which sets the output's width. Default: read from
            `cu_num_draft_tokens`, which waits for the device; give it in a serving loop.
        backend: "torch", "triton", or "auto": Triton on an accelerator, torch on a CPU.

    Returns:
        A `VerifyOutput`; `output_token_ids` is -1 after the last emitted token.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; the message names it.
        NotImplementedError: the backend is "triton" on a CPU.

    Source: arXiv 2601.15498. Deviation: outside the top 2 its research code rejects, here the token
    still gets the strict test, so acceptance is never below strict.
    """
    device = logits.device
    resolved = resolve_backend(backend, device.type)
    drafts = Drafts(
        logits,
        draft_token_ids,
        cu_num_draft_tokens,
        target_rows,
        bonus_token_ids,
        bonus_rows,
        max_draft_len or 0,
    )
    check_drafts(drafts)
    batch = cu_num_draft_tokens.shape[0]
    name, value = _only_one(theta, price)
    if isinstance(value, torch.Tensor):
        check_tensor(name, value, (torch.float32,), device, (batch,))
    else:
        check_value(name, value, name)
        value = torch.full((batch,), value, device=device)
    if protected is not None:
        check_tensor("protected", protected, (torch.bool,), device, (logits.shape[1],))
    if blocked is not None:
        check_tensor("blocked", blocked, (torch.int8,), device, draft_token_ids.shape)
    if max_draft_len is None:
        lengths = cu_num_draft_tokens.diff(prepend=cu_num_draft_tokens.new_zeros(1)).tolist()
        drafts = drafts._replace(max_draft_len=max(lengths, default=0))
    zeros = torch.zeros(batch, dtype=torch.int64, device=device)
    units = (value * 2**LOSS_BITS).floor().clamp(max=MOST_PRICE).long()
    no_bound, no_cap = torch.full_like(zeros, NO_BOUND), torch.full_like(zeros, 2**31 - 1).int()
    no_ends = torch.full((batch, 1), -1, dtype=torch.int32, device=device)
    records = Records(value, units, zeros, no_bound, zeros.clone(), no_cap, no_ends)
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    requests = Requests(records, slots, torch.zeros_like(slots))
    where: Any = blocked.tolist() if blocked is not None and resolved == "torch" else blocked
    output: VerifyOutput = kernels_of(resolved, device.type).accept(
        drafts, requests, Rule(name, 0, protected), where
    )
    return output


def _only_one(theta: Any, price: Any) -> tuple[RuleName, Any]:
    given = {"theta": theta, "price": price}
    named = [(name, value) for name, value in given.items() if value is not None]
    if len(named) != 1:
        what = " and ".join(f"{name}={value}" for name, value in named) or "none of them"
        raise ValueError(f"Exactly one of theta and price names the rule; {what} is given.")
    name, value = named[0]
    return name, value


def kernels_of(resolved: str, device_type: str) -> ModuleType:
    """The module that holds a backend's `accept`."""
    if resolved == "triton":
        name = "accept"
    else:
        name = "cpu" if device_type == "cpu" else "reference"
    return importlib.import_module(f"vllm_mars.kernels.{name}")
