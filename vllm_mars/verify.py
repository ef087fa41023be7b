"""The public verification functions: argument checks, then a backend."""

import math
import os
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from vllm_mars.kernels.reference import Judgement, RelaxedBudget, VerifyOutput

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


def _check(name: str, tensor: "torch.Tensor", dtypes: tuple[str, ...], device: object) -> None:
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


def _check_shape(name: str, tensor: "torch.Tensor", shapes: tuple[tuple[int, ...], ...]) -> None:
    if tuple(tensor.shape) not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} has shape {list(tensor.shape)}, but must have shape {allowed}.")


def _check_threshold(
    name: str,
    value: "float | torch.Tensor",
    shape: tuple[int, ...],
    device: object,
    upper: float,
) -> None:
    """Checks theta or gap; a tensor's values are not read, since that would wait for the device."""
    if isinstance(value, float | int):
        low_ok = value > 0 if name == "theta" else value >= 0
        if not (low_ok and value <= upper and math.isfinite(value)):
            rule = "(0, 1]; 1 is strict" if name == "theta" else "[0, inf); 0 adds no tolerance"
            raise ValueError(f"{name}={value} is outside {rule}.")
        return
    _check(name, value, ("torch.float32",), device)
    _check_shape(name, value, (shape,))


def _check_common(
    logits: "torch.Tensor",
    draft_token_ids: "torch.Tensor",
    cu_num_draft_tokens: "torch.Tensor",
    theta: "float | torch.Tensor",
    gap: "float | torch.Tensor",
    protected: "torch.Tensor | None",
    target_rows: "torch.Tensor | None",
    blocked: "torch.Tensor | None" = None,
    budget: "RelaxedBudget | None" = None,
) -> None:
    device = logits.device
    if logits.ndim != 2:
        raise ValueError(f"logits has {logits.ndim} dimensions, but must be [num_rows, vocab].")
    _check_dtype("logits", logits, _LOGIT_DTYPES)
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(
            f"logits has strides {list(logits.stride())}, but a row's elements must be adjacent; "
            "pass a contiguous copy."
        )
    _check("draft_token_ids", draft_token_ids, _ID_DTYPES, device)
    _check("cu_num_draft_tokens", cu_num_draft_tokens, ("torch.int32",), device)
    if draft_token_ids.ndim != 1 or cu_num_draft_tokens.ndim != 1:
        raise ValueError(
            f"draft_token_ids has shape {list(draft_token_ids.shape)} and cu_num_draft_tokens "
            f"{list(cu_num_draft_tokens.shape)}, but both must have one dimension."
        )
    num_draft, batch = draft_token_ids.shape[0], cu_num_draft_tokens.shape[0]
    _check_threshold("theta", theta, (batch,), device, upper=1.0)
    _check_threshold("gap", gap, (batch,), device, upper=math.inf)
    if protected is not None:
        _check("protected", protected, ("torch.bool",), device)
        _check_shape("protected", protected, ((logits.shape[1],),))
    if blocked is not None:
        _check("blocked", blocked, ("torch.int8",), device)
        _check_shape("blocked", blocked, ((num_draft,),))
    if budget is not None:
        if not 0 <= budget.share <= 1:
            raise ValueError(f"budget.share={budget.share} is outside [0, 1]; 1 allows all.")
        for name in ("num_relaxed", "num_output_tokens"):
            _check(f"budget.{name}", getattr(budget, name), ("torch.int32",), device)
            _check_shape(f"budget.{name}", getattr(budget, name), ((batch,),))
    if target_rows is not None:
        _check("target_rows", target_rows, _ID_DTYPES, device)
        _check_shape("target_rows", target_rows, ((num_draft,),))
    elif logits.shape[0] < num_draft:
        raise ValueError(
            f"logits has {logits.shape[0]} rows for {num_draft} draft tokens; "
            "give one row for each, or target_rows."
        )


def _check_out(
    out: "VerifyOutput",
    batch: int,
    max_draft_len: int,
    num_draft: int,
    device: object,
    with_top2: bool,
    with_verdicts: bool,
) -> None:
    """Checks the caller's buffers."""
    ids = ("torch.int32",)
    wanted = {
        "output_token_ids": ((batch, max_draft_len + 1), ids),
        "num_accepted": ((batch,), ids),
        "num_relaxed": ((batch,), ids),
    }
    if with_top2 or with_verdicts:
        wanted["top2_values"] = ((num_draft, 2), ("torch.float32",))
    if with_top2:
        wanted["top2_ids"] = ((num_draft, 2), ids)
    if with_verdicts:
        wanted["verdicts"] = ((num_draft,), ("torch.int8",))
    for name, (shape, dtypes) in wanted.items():
        buffer = getattr(out, name)
        if buffer is None:
            asked = "with_verdicts" if with_verdicts and name != "top2_ids" else "with_top2"
            raise ValueError(f"out.{name} is None, but {asked} needs a buffer there.")
        _check(f"out.{name}", buffer, dtypes, device)
        _check_shape(f"out.{name}", buffer, (shape,))


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
    with_top2: bool = False,
    blocked: "torch.Tensor | None" = None,
    budget: "RelaxedBudget | None" = None,
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

    Args:
        logits: `[num_rows, vocab]` float32, bfloat16 or float16, any row stride. All other tensors
            are contiguous.
        draft_token_ids: `[num_draft]` int32 or int64; an id outside [0, vocab), such as the padding
            -1, is always rejected.
        cu_num_draft_tokens: `[batch]` int32, inclusive prefix sum of the requests' draft lengths
            (the convention of vLLM); a request may have none.
        bonus_token_ids: `[batch]` or `[batch, 1]` int32 or int64, or None to emit no bonus token.
        theta: float in (0, 1] or float32 `[batch]`. 1 with gap 0 is strict; near 0 every runner-up
            with a positive logit is accepted. A tensor's values are taken as they are.
        gap: float >= 0 in nats or float32 `[batch]`; with theta 1 this is the metric "gap".
        protected: bool `[vocab]`; tokens at which the rule stays strict.
        target_rows: `[num_draft]` int32 or int64, the row of `logits` of each draft position;
            default 0..num_draft-1.
        bonus_rows: `[batch]` int32 or int64, rows of `logits` whose argmax is the bonus token,
            found in the same pass; only one of `bonus_token_ids` and `bonus_rows` may be given.
        max_draft_len: longest draft of a request, which sets the output's width. Default: read from
            `cu_num_draft_tokens`, which waits for the device; give it in a serving loop.
        with_top2: also return the two largest logits and their ids at each draft position.
        blocked: `[num_draft]` int8 or None; not 0 where the rule stays strict. The value, a
            `Verdict`, is the verdict there if the margin would have accepted.
        budget: how many output tokens of each request may be relaxed, or None for no limit.
        with_verdicts: also return the verdicts, and the values of the top 2. On a CPU the latter
            are NaN behind a request's first rejected position, but in a dry run.
        dry_run: verify strictly; the verdicts tell what the margin would have done.
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
    resolved = resolve_backend(backend, logits.device.type)
    _check_common(
        logits,
        draft_token_ids,
        cu_num_draft_tokens,
        theta,
        gap,
        protected,
        target_rows,
        blocked,
        budget,
    )
    device, batch = logits.device, cu_num_draft_tokens.shape[0]
    if bonus_token_ids is not None:
        if bonus_rows is not None:
            raise ValueError("bonus_token_ids and bonus_rows are both given; give one of them.")
        _check("bonus_token_ids", bonus_token_ids, _ID_DTYPES, device)
        _check_shape("bonus_token_ids", bonus_token_ids, ((batch,), (batch, 1)))
    if bonus_rows is not None:
        _check("bonus_rows", bonus_rows, _ID_DTYPES, device)
        _check_shape("bonus_rows", bonus_rows, ((batch,),))
    if max_draft_len is None:
        max_draft_len = _longest_draft(cu_num_draft_tokens)

    num_draft = draft_token_ids.shape[0]
    if out is not None:
        _check_out(out, batch, max_draft_len, num_draft, device, with_top2, with_verdicts)

    arguments = (
        logits,
        draft_token_ids,
        cu_num_draft_tokens,
        bonus_token_ids,
        theta,
        gap,
        protected,
        target_rows,
        bonus_rows,
        max_draft_len,
        with_top2,
        blocked,
        budget,
        with_verdicts,
        dry_run,
    )
    if resolved == "triton":
        from vllm_mars.kernels.greedy import verify_greedy as verify_in_triton

        return verify_in_triton(*arguments, out)
    if device.type == "cpu":
        from vllm_mars.kernels.cpu import verify_greedy as verify
    else:
        from vllm_mars.kernels.reference import verify_greedy as verify
    output: VerifyOutput = verify(*arguments)
    if out is None:
        return output
    for buffer, result in zip(out, output, strict=True):
        if buffer is not None and result is not None:
            buffer.copy_(result)
    return out


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
        protected: bool `[vocab]` or None.
        blocked: `[num_logits]` int8 or None; as the next three, as in `verify_greedy`.
        budget: or None.
        with_verdicts: of all rows; a bonus row's verdict is NONE.
        dry_run: verify strictly.
        backend: as in `verify_greedy`.

    Returns:
        A `VerifyOutput` whose `output_token_ids` is int64, as that runner wants it.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; the message names it.
        NotImplementedError: the backend is "triton" on a CPU.
    """
    import torch

    resolved = resolve_backend(backend, logits.device.type)
    if resolved != "triton":
        drafts = next_input_tokens(input_token_ids, cu_num_logits)
        # A bonus row is a position whose draft is always rejected: it emits its argmax.
        output = verify_greedy(
            logits,
            drafts,
            cu_num_logits,
            None,
            theta,
            gap=gap,
            protected=protected,
            max_draft_len=max_draft_len + 1,
            blocked=blocked,
            budget=budget,
            with_verdicts=with_verdicts,
            dry_run=dry_run,
            backend=backend,
        )
        tokens = output.output_token_ids[:, : max_draft_len + 1].to(torch.int64)
        return output._replace(output_token_ids=tokens)

    from vllm_mars.kernels.greedy import verify_greedy as verify_in_triton
    from vllm_mars.kernels.reference import new_output

    _check_common(
        logits, input_token_ids, cu_num_logits, theta, gap, protected, None, blocked, budget
    )
    return verify_in_triton(
        logits,
        input_token_ids,
        cu_num_logits,
        None,
        theta,
        gap,
        protected,
        None,
        None,
        max_draft_len,
        blocked=blocked,
        budget=budget,
        with_verdicts=with_verdicts,
        dry_run=dry_run,
        out=new_output(
            cu_num_logits.shape[0],
            max_draft_len,
            logits.shape[0],
            logits.device,
            with_verdicts=with_verdicts,
            token_dtype=torch.int64,
        ),
        bonus_row_is_last=True,
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
        protected: bool `[vocab]` or None.
        target_rows: `[num_draft]` row of each draft position; default 0..num_draft-1.
        blocked: as in `verify_greedy`.
        budget: as in `verify_greedy`; it is spent on each position that the margin accepts.
        with_top2_values: also return z1 and z2 at each draft position.
        backend: as in `verify_greedy`.

    Returns:
        A `Judgement`. RELAXED is where the draft token is one of the two largest, the margin is
        small and nothing forbids it. The argmax counts: sampling accepts it there without a draw.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; the message names it.
        NotImplementedError: the backend is "triton" on a CPU.
    """
    resolved = resolve_backend(backend, logits.device.type)
    _check_common(
        logits,
        draft_token_ids,
        cu_num_draft_tokens,
        theta,
        gap,
        protected,
        target_rows,
        blocked,
        budget,
    )
    if resolved == "triton":
        from vllm_mars.kernels.greedy import judge_positions as judge
    elif logits.device.type == "cpu":
        from vllm_mars.kernels.cpu import judge_positions as judge
    else:
        from vllm_mars.kernels.reference import judge_positions as judge
    judgement: Judgement = judge(
        logits,
        draft_token_ids,
        cu_num_draft_tokens,
        theta,
        gap,
        protected,
        target_rows,
        blocked,
        budget,
        with_top2_values,
    )
    return judgement


def _longest_draft(cu_num_draft_tokens: "torch.Tensor") -> int:
    if not cu_num_draft_tokens.shape[0]:
        return 0
    lengths = cu_num_draft_tokens.diff(prepend=cu_num_draft_tokens.new_zeros(1))
    return int(lengths.max())
