"""The public verification functions: argument checks, then a backend."""

import os
from typing import TYPE_CHECKING, Any, Literal

from vllm_mars.config import check_nats, check_theta

if TYPE_CHECKING:
    import torch

    from vllm_mars.kernels.terms import (
        Drafts,
        Judgement,
        LossBudget,
        Margin,
        RelaxedBudget,
        VerifyOutput,
    )

Backend = Literal["auto", "torch", "triton"]

_LOGIT_DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")
_ID_DTYPES = ("torch.int32", "torch.int64")


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
    if backend == "triton" and device_type == "cpu" and not _is_interpreted():
        raise NotImplementedError(
            "backend='triton' needs logits on an accelerator, but they are on the CPU; take "
            "'auto', or set TRITON_INTERPRET=1 before triton is imported to interpret it."
        )
    return backend


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def check_given(name: str, tensor: "torch.Tensor", dtypes: tuple[str, ...], device: object) -> None:
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


def _check_dtype(name: str, tensor: "torch.Tensor", dtypes: tuple[str, ...]) -> None:
    if str(tensor.dtype) not in dtypes:
        raise ValueError(
            f"{name} has dtype {tensor.dtype}, but must have one of {', '.join(dtypes)}."
        )


def check_shape(name: str, tensor: "torch.Tensor", shapes: tuple[tuple[int, ...], ...]) -> None:
    if tuple(tensor.shape) not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} has shape {list(tensor.shape)}, but must have shape {allowed}.")


def check_step(drafts: "Drafts", margin: "Margin") -> None:
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
    check_given("draft_token_ids", ids, _ID_DTYPES, device)
    check_given("cu_num_draft_tokens", ends, ("torch.int32",), device)
    if ids.ndim != 1 or ends.ndim != 1:
        raise ValueError(
            f"draft_token_ids has shape {list(ids.shape)} and cu_num_draft_tokens "
            f"{list(ends.shape)}, but both must have one dimension."
        )
    num_draft, batch = ids.shape[0], ends.shape[0]
    if drafts.target_rows is not None:
        check_given("target_rows", drafts.target_rows, _ID_DTYPES, device)
        check_shape("target_rows", drafts.target_rows, ((num_draft,),))
    elif logits.shape[0] < num_draft:
        raise ValueError(
            f"logits has {logits.shape[0]} rows for {num_draft} draft tokens; "
            "give one row for each, or target_rows."
        )
    if drafts.bonus_token_ids is not None:
        if drafts.bonus_rows is not None:
            raise ValueError("bonus_token_ids and bonus_rows are both given; give one of them.")
        check_given("bonus_token_ids", drafts.bonus_token_ids, _ID_DTYPES, device)
        check_shape("bonus_token_ids", drafts.bonus_token_ids, ((batch,), (batch, 1)))
    if drafts.bonus_rows is not None:
        check_given("bonus_rows", drafts.bonus_rows, _ID_DTYPES, device)
        check_shape("bonus_rows", drafts.bonus_rows, ((batch,),))
    thresholds = [("theta", margin.theta, check_theta), ("gap", margin.gap, check_nats)]
    if margin.price is not None:
        given = [v for v in (margin.theta, margin.gap) if isinstance(v, float | int)]
        if len(given) == 2 and given != [1, 0]:
            raise ValueError(
                f"price={margin.price} is given beside theta={margin.theta} and gap={margin.gap}; "
                "give theta=1 and gap=0 with a price."
            )
        thresholds.append(("price", margin.price, check_nats))
    for name, value, check in thresholds:
        if isinstance(value, float | int):
            check(value, name)
        else:
            check_given(name, value, ("torch.float32",), device)
            check_shape(name, value, ((batch,),))
    if margin.protected is not None:
        check_given("protected", margin.protected, ("torch.bool",), device)
        check_shape("protected", margin.protected, ((logits.shape[1],),))
    if margin.blocked is not None:
        check_given("blocked", margin.blocked, ("torch.int8",), device)
        check_shape("blocked", margin.blocked, ((num_draft,),))
    if margin.budget is not None and not 0 <= margin.budget.share <= 1:
        raise ValueError(f"budget.share={margin.budget.share} is outside [0, 1]; 1 allows all.")
    for whose, budget, dtypes in (
        ("budget", margin.budget, {"num_relaxed": "int32", "num_output_tokens": "int32"}),
        ("loss_budget", margin.loss_budget, {"lost": "int64", "num_output_tokens": "int32"}),
    ):
        for name, dtype in dtypes.items() if budget is not None else ():
            check_given(f"{whose}.{name}", getattr(budget, name), (f"torch.{dtype}",), device)
            check_shape(f"{whose}.{name}", getattr(budget, name), ((batch,),))
    if margin.loss_budget is not None and not isinstance(margin.loss_budget.rate, int):
        check_given("loss_budget.rate", margin.loss_budget.rate, ("torch.int64",), device)
        check_shape("loss_budget.rate", margin.loss_budget.rate, ((batch,),))


def _check_out(out: "VerifyOutput", drafts: "Drafts", with_verdicts: bool) -> None:
    """Checks the caller's buffers."""
    num_draft, batch = drafts.draft_token_ids.shape[0], drafts.cu_num_draft_tokens.shape[0]
    wanted = {
        "output_token_ids": ((batch, drafts.max_draft_len + 1), "torch.int32"),
        "num_accepted": ((batch,), "torch.int32"),
        "num_relaxed": ((batch,), "torch.int32"),
        "lost": ((batch,), "torch.int64"),
    }
    if with_verdicts:
        wanted["top2_values"] = ((num_draft, 2), "torch.float32")
        wanted["verdicts"] = ((num_draft,), "torch.int8")
        wanted["losses"] = ((num_draft,), "torch.int32")
    for name, (shape, dtype) in wanted.items():
        buffer = getattr(out, name)
        if buffer is None:
            raise ValueError(f"out.{name} is None, but with_verdicts needs a buffer there.")
        check_given(f"out.{name}", buffer, (dtype,), drafts.logits.device)
        check_shape(f"out.{name}", buffer, (shape,))


def verify_greedy(
    logits: "torch.Tensor",
    draft_token_ids: "torch.Tensor",
    cu_num_draft_tokens: "torch.Tensor",
    bonus_token_ids: "torch.Tensor | None",
    theta: "float | torch.Tensor",
    *,
    gap: "float | torch.Tensor" = 0.0,
    protected: "torch.Tensor | None" = None,
    target_rows: "torch.Tensor | None" = None,
    bonus_rows: "torch.Tensor | None" = None,
    max_draft_len: int | None = None,
    blocked: "torch.Tensor | None" = None,
    budget: "RelaxedBudget | None" = None,
    loss_budget: "LossBudget | None" = None,
    price: "float | torch.Tensor" = 0.0,
    with_verdicts: bool = False,
    dry_run: bool = False,
    out: "VerifyOutput | None" = None,
    backend: Backend = "auto",
) -> "VerifyOutput":
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
    from vllm_mars.kernels.terms import Drafts, Margin

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


def price_or_none(price: "float | torch.Tensor") -> "float | torch.Tensor | None":
    """A price, or None for 0, which leaves the rule to theta and gap."""
    return None if isinstance(price, float | int) and price == 0 else price


def verify_drafts(
    drafts: "Drafts",
    margin: "Margin",
    *,
    with_verdicts: bool = False,
    dry_run: bool = False,
    out: "VerifyOutput | None" = None,
    backend: Backend = "auto",
) -> "VerifyOutput":
    """`verify_greedy`, or `verify_input_tokens` where the bonus row is a request's last.

    Args:
        drafts: the step's draft tokens and logits.
        margin: what may be relaxed.
        with_verdicts: also return the verdicts and the values of the top 2.
        dry_run: verify strictly.
        out: contiguous buffers to write, in the shapes and dtypes of the result; None where the
            bonus row is last.
        backend: "triton", "torch", or "auto": Triton on an accelerator, torch on a CPU.

    Returns:
        A `VerifyOutput`; where the bonus row is last its `output_token_ids` is int64.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; the message names it.
        NotImplementedError: the backend is "triton" on a CPU.
    """
    resolved = resolve_backend(backend, drafts.logits.device.type)
    check_step(drafts, margin)
    if drafts.max_draft_len is None:
        drafts = drafts._replace(max_draft_len=_longest_draft(drafts.cu_num_draft_tokens))
    if out is not None:
        _check_out(out, drafts, with_verdicts)
    kernels = kernels_of(resolved, drafts.logits.device.type)
    output: VerifyOutput
    if resolved == "triton":
        output = kernels.verify_greedy(drafts, margin, with_verdicts, dry_run, out)
        return output
    if drafts.bonus_row_is_last:
        # A bonus row is a position whose draft is always rejected: it emits its argmax.
        rows = drafts._replace(
            draft_token_ids=next_input_tokens(drafts.draft_token_ids, drafts.cu_num_draft_tokens),
            bonus_row_is_last=False,
        )
        output = kernels.verify_greedy(rows, margin, with_verdicts, dry_run)
        return output._replace(output_token_ids=output.output_token_ids.long())
    output = kernels.verify_greedy(drafts, margin, with_verdicts, dry_run)
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


def verify_input_tokens(
    logits: "torch.Tensor",
    input_token_ids: "torch.Tensor",
    cu_num_logits: "torch.Tensor",
    theta: "float | torch.Tensor",
    max_draft_len: int,
    *,
    gap: "float | torch.Tensor" = 0.0,
    protected: "torch.Tensor | None" = None,
    blocked: "torch.Tensor | None" = None,
    budget: "RelaxedBudget | None" = None,
    loss_budget: "LossBudget | None" = None,
    price: "float | torch.Tensor" = 0.0,
    with_verdicts: bool = False,
    dry_run: bool = False,
    backend: Backend = "auto",
) -> "VerifyOutput":
    """`verify_greedy` in the layout of vLLM's Model Runner V2.

    Args:
        logits: `[num_logits, vocab]`; each request's draft rows, then its bonus row.
        input_token_ids: `[num_logits]` int32 or int64, the model's input token at each row, so that
            a row's draft token stands one entry behind it; -1 is always rejected.
        cu_num_logits: `[batch]` int32, inclusive prefix sum of the requests' rows, each at least 1.
        theta: float in (0, 1] or float32 `[batch]`.
        max_draft_len: longest draft of a request; one less than the longest run of rows.
        gap: float >= 0 or float32 `[batch]`.
        protected: bool `[vocab]` or None; tokens at which the rule stays strict.
        blocked: `[num_logits]` int8 or None; not 0, a `Verdict`, where the rule stays strict.
        budget: how many output tokens of each request may be relaxed, or None for no limit.
        loss_budget: how many nats these may lose, or None for no limit.
        price: float >= 0 in nats or float32 `[batch]`, with theta 1 and gap 0.
        with_verdicts: also return the verdicts, the losses and the values of the top 2 of all rows;
            a bonus row's verdict is NONE.
        dry_run: verify strictly; the verdicts tell what the margin would have done.
        backend: "triton", "torch", or "auto": Triton on an accelerator, torch on a CPU.

    Returns:
        A `VerifyOutput` whose `output_token_ids` is int64, as that runner wants it.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; the message names it.
        NotImplementedError: the backend is "triton" on a CPU.
    """
    from vllm_mars.kernels.terms import Drafts, Margin

    return verify_drafts(
        Drafts(
            logits,
            input_token_ids,
            cu_num_logits,
            max_draft_len=max_draft_len,
            bonus_row_is_last=True,
        ),
        Margin(theta, gap, protected, blocked, budget, loss_budget, price_or_none(price)),
        with_verdicts=with_verdicts,
        dry_run=dry_run,
        backend=backend,
    )


def next_input_tokens(
    input_token_ids: "torch.Tensor", cu_num_logits: "torch.Tensor"
) -> "torch.Tensor":
    """The draft token of each row, and -1 for each request's last row; all `[num_logits]`.

    Args:
        input_token_ids: `[num_logits]`, the model's input token at each row.
        cu_num_logits: `[batch]` int32, inclusive prefix sum of the requests' rows.
    """
    return input_token_ids.roll(-1).index_fill(0, cu_num_logits.long() - 1, -1)


def judge_positions(
    logits: "torch.Tensor",
    draft_token_ids: "torch.Tensor",
    cu_num_draft_tokens: "torch.Tensor",
    theta: "float | torch.Tensor",
    *,
    gap: "float | torch.Tensor" = 0.0,
    protected: "torch.Tensor | None" = None,
    target_rows: "torch.Tensor | None" = None,
    blocked: "torch.Tensor | None" = None,
    budget: "RelaxedBudget | None" = None,
    loss_budget: "LossBudget | None" = None,
    price: "float | torch.Tensor" = 0.0,
    with_top2_values: bool = False,
    backend: Backend = "auto",
) -> "Judgement":
    """Says at which draft positions the margin accepts outright, for the sampling branch.

    Args:
        logits: `[num_rows, vocab]`, processed logits (temperature, top-k, top-p applied).
        draft_token_ids: `[num_draft]` int32 or int64.
        cu_num_draft_tokens: `[batch]` int32, inclusive prefix sum.
        theta: float in (0, 1] or float32 `[batch]`.
        gap: float >= 0 or float32 `[batch]`.
        protected: bool `[vocab]` or None; tokens at which the rule stays strict.
        target_rows: `[num_draft]` int32 or int64, row of each draft position; default
            0..num_draft-1.
        blocked: `[num_draft]` int8 or None; not 0, a `Verdict`, where the rule stays strict.
        budget: how many output tokens of each request may be relaxed, or None for no limit; it is
            spent on each position that the margin accepts.
        loss_budget: how many nats these may lose, or None for no limit.
        price: float >= 0 in nats or float32 `[batch]`, with theta 1 and gap 0: RELAXED is where the
            draft token, of any rank, loses less.
        with_top2_values: also return z1 and z2 at each draft position.
        backend: "triton", "torch", or "auto": Triton on an accelerator, torch on a CPU.

    Returns:
        A `Judgement`. RELAXED is where the draft token is one of the two largest, the margin is
        small and nothing forbids it. The argmax counts: sampling accepts it there without a draw.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; the message names it.
        NotImplementedError: the backend is "triton" on a CPU.
    """
    from vllm_mars.kernels.terms import Drafts, Margin

    return judge_drafts(
        Drafts(logits, draft_token_ids, cu_num_draft_tokens, target_rows),
        Margin(theta, gap, protected, blocked, budget, loss_budget, price_or_none(price)),
        with_top2_values=with_top2_values,
        backend=backend,
    )


def judge_drafts(
    drafts: "Drafts",
    margin: "Margin",
    *,
    with_top2_values: bool = False,
    backend: Backend = "auto",
) -> "Judgement":
    """`judge_positions` of a step.

    Args:
        drafts: the step's draft tokens and processed logits; what follows a draft is not read.
        margin: what may be relaxed.
        with_top2_values: also return z1 and z2 at each draft position.
        backend: "triton", "torch", or "auto": Triton on an accelerator, torch on a CPU.

    Returns:
        A `Judgement`.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; the message names it.
        NotImplementedError: the backend is "triton" on a CPU.
    """
    resolved = resolve_backend(backend, drafts.logits.device.type)
    check_step(drafts, margin)
    kernels = kernels_of(resolved, drafts.logits.device.type)
    judgement: Judgement = kernels.judge_positions(drafts, margin, with_top2_values)
    return judgement


def _longest_draft(cu_num_draft_tokens: "torch.Tensor") -> int:
    if not cu_num_draft_tokens.shape[0]:
        return 0
    lengths = cu_num_draft_tokens.diff(prepend=cu_num_draft_tokens.new_zeros(1))
    return int(lengths.max())
