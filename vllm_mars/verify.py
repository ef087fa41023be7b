"""The public verification functions: argument checks, then a backend."""

import os
from typing import Any, Literal

import torch

from vllm_mars.config import check_value
from vllm_mars.kernels.terms import (
    Drafts,
    Judgement,
    LossBudget,
    Margin,
    RelaxedBudget,
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


def check_step(drafts: Drafts, margin: Margin) -> None:
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
        ("protected", margin.protected, (torch.bool,), (logits.shape[1],)),
        ("blocked", margin.blocked, (torch.int8,), (num_draft,)),
    ]
    thresholds = [("theta", margin.theta), ("gap", margin.gap)]
    if margin.price is not None:
        others = [v for v in (margin.theta, margin.gap) if isinstance(v, float | int)]
        if len(others) == 2 and others != [1, 0]:
            raise ValueError(
                f"price={margin.price} is given beside theta={margin.theta} and gap={margin.gap}; "
                "give theta=1 and gap=0 with a price."
            )
        thresholds.append(("price", margin.price))
    for name, value in thresholds:
        if isinstance(value, float | int):
            check_value(name, value, name)
        else:
            given.append((name, value, (torch.float32,), (batch,)))
    if (budget := margin.budget) is not None:
        if not 0 <= budget.share <= 1:
            raise ValueError(f"budget.share={budget.share} is outside [0, 1]; 1 allows all.")
        for name in ("num_relaxed", "num_output_tokens"):
            given.append((f"budget.{name}", getattr(budget, name), (torch.int32,), (batch,)))
    if (nats := margin.loss_budget) is not None:
        rate = None if isinstance(nats.rate, int) else nats.rate
        given += [
            ("loss_budget.rate", rate, (torch.int64,), (batch,)),
            ("loss_budget.lost", nats.lost, (torch.int64,), (batch,)),
            ("loss_budget.num_output_tokens", nats.num_output_tokens, (torch.int32,), (batch,)),
        ]
    for name, tensor, dtypes, *shapes in given:
        if tensor is not None:
            check_tensor(name, tensor, dtypes, device, *shapes)


def _check_out(out: VerifyOutput, drafts: Drafts, with_verdicts: bool) -> None:
    """Checks the caller's buffers."""
    num_draft, batch = drafts.draft_token_ids.shape[0], drafts.cu_num_draft_tokens.shape[0]
    wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "output_token_ids": (torch.int32, (batch, drafts.max_draft_len + 1)),
        "num_accepted": (torch.int32, (batch,)),
        "num_relaxed": (torch.int32, (batch,)),
        "lost": (torch.int64, (batch,)),
    }
    if with_verdicts:
        wanted["top2_values"] = (torch.float32, (num_draft, 2))
        wanted["verdicts"] = (torch.int8, (num_draft,))
        wanted["losses"] = (torch.int32, (num_draft,))
    for name, (dtype, shape) in wanted.items():
        buffer = getattr(out, name)
        if buffer is None:
            raise ValueError(f"out.{name} is None, but with_verdicts needs a buffer there.")
        check_tensor(f"out.{name}", buffer, (dtype,), drafts.logits.device, shape)


def verify_greedy(
    logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    bonus_token_ids: torch.Tensor | None,
    theta: float | torch.Tensor,
    *,
    gap: float | torch.Tensor = 0.0,
    protected: torch.Tensor | None = None,
    target_rows: torch.Tensor | None = None,
    bonus_rows: torch.Tensor | None = None,
    max_draft_len: int | None = None,
    blocked: torch.Tensor | None = None,
    budget: RelaxedBudget | None = None,
    loss_budget: LossBudget | None = None,
    price: float | torch.Tensor = 0.0,
    with_verdicts: bool = False,
    dry_run: bool = False,
    out: VerifyOutput | None = None,
    backend: Backend = "auto",
) -> VerifyOutput:
    """Verifies a batch of greedy drafts by the margin-aware rule.

    A draft token is accepted if it is the row's argmax, or if it is the runner-up and the margin is
    small: `z2 > theta * z1 - gap` (and `z1 > 0` where theta is below 1), neither token protected.
    The first position that is not accepted emits the argmax and ends the request's output; if all
    are accepted the bonus token follows.

    With a price, tokens of any rank may be accepted. They lose `r = z1 - z[x]` nats against the
    first choice; of all places where the step may end, it ends where `price` times the number of
    accepted drafts, less what they lose, is largest (docs/rule.md).

    Args:
        logits: `[num_rows, vocab]` float32, bfloat16 or float16, any row stride. All other tensors
            are contiguous.
        draft_token_ids: `[num_draft]` int32 or int64; an id outside [0, vocab), such as the padding
            -1, is always rejected.
        cu_num_draft_tokens: `[batch]` int32, inclusive prefix sum of the requests' draft lengths
            (the convention of vLLM); a request may have none.
        bonus_token_ids: `[batch]` or `[batch, 1]` int32 or int64, or None to emit no bonus token.
        theta: float in (0, 1] or float32 `[batch]`. 1 with gap 0 is strict; near 0 every runner-up
            with a positive logit is accepted. A tensor's values are not checked.
        gap: float >= 0 in nats or float32 `[batch]`; with theta 1 this is the metric "gap".
        protected: bool `[vocab]`; tokens at which the rule stays strict.
        target_rows: `[num_draft]` int32 or int64, the row of `logits` of each draft position;
            default 0..num_draft-1.
        bonus_rows: `[batch]` int32 or int64, rows of `logits` whose argmax is the bonus token,
            found in the same pass; only one of `bonus_token_ids` and `bonus_rows` may be given.
        max_draft_len: longest draft of a request, which sets the output's width. Default: read from
            `cu_num_draft_tokens`, which waits for the device; give it in a serving loop.
        blocked: `[num_draft]` int8 or None; not 0 where the rule stays strict. The value, a
            `Verdict`, is the verdict there if the margin would have accepted.
        budget: how many output tokens of each request may be relaxed, or None for no limit.
        loss_budget: how many nats these may lose, or None for no limit.
        price: nats per token gained, float >= 0 or float32 `[batch]`, with theta 1 and gap 0; 0 is
            strict, and a larger price never accepts fewer drafts.
        with_verdicts: also return the verdicts, the losses, and the values of the top 2. On a CPU
            the last are NaN behind a request's first rejected position, except in a dry run.
        dry_run: verify strictly; the verdicts say what the margin would have done.
        out: contiguous buffers to write, in the shapes and dtypes of the result; with them, and
            `max_draft_len` given, the Triton backend allocates nothing once it has seen a batch of
            this size. Calls on one device must be on one stream, since they share a workspace.
        backend: "torch", "triton", or "auto": Triton on an accelerator, torch on a CPU.

    Returns:
        A `VerifyOutput`, `out` if it is given; `output_token_ids` is -1 after the last emitted
        token.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; the message names it.
        NotImplementedError: the backend is "triton" on a CPU.

    Source: arXiv 2601.15498. Deviation: outside the top 2 its research code rejects, here the token
    still gets the strict test, so acceptance is never below strict.
    """
    return verify_drafts(
        Drafts(
            logits,
            draft_token_ids,
            cu_num_draft_tokens,
            target_rows,
            bonus_token_ids,
            bonus_rows,
            max_draft_len,
        ),
        Margin(theta, gap, protected, blocked, budget, loss_budget, price_or_none(price)),
        with_verdicts=with_verdicts,
        dry_run=dry_run,
        out=out,
        backend=backend,
    )


def price_or_none(price: float | torch.Tensor) -> float | torch.Tensor | None:
    """A price, or None for 0, which leaves the rule to theta and gap."""
    return None if isinstance(price, float | int) and price == 0 else price


def verify_drafts(
    drafts: Drafts,
    margin: Margin,
    *,
    with_verdicts: bool = False,
    dry_run: bool = False,
    out: VerifyOutput | None = None,
    backend: Backend = "auto",
) -> VerifyOutput:
    """`verify_greedy` of a step, also in the layout of Model Runner V2.

    Args:
        drafts: the step's draft tokens and logits.
        margin: what may be relaxed.
        with_verdicts: also return the verdicts, the losses and the values of the top 2.
        dry_run: verify strictly; the verdicts say what the margin would have done.
        out: contiguous buffers to write, in the shapes and dtypes of the result; None where the
            bonus row is last.
        backend: "triton", "torch", or "auto": Triton on an accelerator, torch on a CPU.

    Returns:
        A `VerifyOutput`. Where the bonus row is last its `output_token_ids` is int64, as that
        runner wants it, and what is by position is by row; a bonus row's verdict is NONE.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; the message names it.
        NotImplementedError: the backend is "triton" on a CPU.
    """
    resolved = resolve_backend(backend, drafts.logits.device.type)
    check_step(drafts, margin)
    drafts = _sized(drafts)
    if out is not None:
        _check_out(out, drafts, with_verdicts)
    kernels = kernels_of(resolved, drafts.logits.device.type)
    if resolved == "triton":
        return kernels.verify_greedy(drafts, margin, with_verdicts, dry_run, out)
    output = kernels.verify_greedy(drafts.by_position(), margin, with_verdicts, dry_run)
    if drafts.bonus_row_is_last:
        return output._replace(output_token_ids=output.output_token_ids.long())
    if out is None:
        return output
    for buffer, result in zip(out, output, strict=True):
        if buffer is not None and result is not None:
            buffer.copy_(result)
    return out


def kernels_of(resolved: str, device_type: str) -> Any:
    """The module that holds a backend's functions; on Triton those of trees are in `tree`."""
    if resolved == "triton":
        from vllm_mars.kernels import greedy

        return greedy
    from vllm_mars.kernels import cpu, reference

    return cpu if device_type == "cpu" else reference


def judge_drafts(
    drafts: Drafts,
    margin: Margin,
    *,
    with_top2_values: bool = False,
    backend: Backend = "auto",
) -> Judgement:
    """Says at which draft positions the margin accepts outright, for the sampling branch.

    Args:
        drafts: the step's draft tokens and processed logits (temperature, top-k, top-p applied);
            what follows a draft is not read.
        margin: what may be relaxed; its budgets are spent on each position that it accepts.
        with_top2_values: also return z1 and z2 at each draft position.
        backend: "triton", "torch", or "auto": Triton on an accelerator, torch on a CPU.

    Returns:
        A `Judgement`. RELAXED is where the draft token is one of the two largest, the margin is
        small and nothing forbids it; by a price, where a token of any rank loses less. The argmax
        counts: sampling accepts it there without a draw.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; the message names it.
        NotImplementedError: the backend is "triton" on a CPU.
    """
    resolved = resolve_backend(backend, drafts.logits.device.type)
    check_step(drafts, margin)
    kernels = kernels_of(resolved, drafts.logits.device.type)
    return kernels.judge_positions(_sized(drafts), margin, with_top2_values)


def _sized(drafts: Drafts) -> Drafts:
    """The drafts with their longest length, which is read from the device where it is not known."""
    if drafts.max_draft_len is not None:
        return drafts
    ends = drafts.cu_num_draft_tokens
    lengths = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return drafts._replace(max_draft_len=max(lengths, default=0))
