"""`clip.clip_rows` as one Triton kernel; `clip` has the rule and the meaning of each step.

    clip_kernel   grid (rows)   streams target and draft once for their log-sum-exps, once for each
                                step of Newton's method, and once for what it writes

Not materialised: p, q, m, gathered rows, float32 copies. Bytes read: vocab * (4 + itemsize of the
draft) for each of typically 4 to 6 passes. Only the rows of a small batch stay in the L2 cache from
pass to pass: all rows of a step are under way at once. A row without a price is read twice, its
draft not at all.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _logsumexp(row_ptr, scale, vocab, BLOCK: tl.constexpr):
    """Log-sum-exp of a row divided by scale; NaN where a NaN or +inf is in it."""
    # A finite start, so that a lane that meets nothing above -inf subtracts no infinities.
    largest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
        value = value.to(tl.float32) / scale
        larger = tl.maximum(largest, value)
        total = total * tl.exp(largest - larger) + tl.exp(value - larger)
        largest = larger
    row_largest = tl.max(largest, axis=0)
    return row_largest + tl.log(tl.sum(total * tl.exp(largest - row_largest), axis=0))


@triton.jit
def _load(
    target_ptr,
    target_lse,
    draft_ptr,
    draft_lse,
    temperature,
    token,
    vocab,
    DRAFT_IS_LOGITS: tl.constexpr,
):
    """Logits of tokens, their p, and r = q / p; p = 0 and r = 1 behind the vocabulary."""
    mask = token < vocab
    target = tl.load(target_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)
    p = tl.exp(target - target_lse)
    if DRAFT_IS_LOGITS:
        draft = tl.load(draft_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)
        q = tl.exp(draft / temperature - draft_lse)
    else:
        q = tl.load(draft_ptr + token, mask=mask, other=0.0)
    ratio = q / p
    return target, p, tl.where(ratio == ratio, ratio, 1.0)


@triton.jit(
    do_not_specialize_on_alignment=[
        "losses_ptr",
        "gained_ptr",
        "drift_ptr",
        "target_lse_ptr",
        "prices_ptr",
        "slots_ptr",
        "steps_ptr",
        "temperature_ptr",
    ],
)
def clip_kernel(
    # [num_rows, target_vocab]
    logits_ptr,
    # [num_rows]
    losses_ptr,
    # [num_rows]
    gained_ptr,
    # [num_rows]
    drift_ptr,
    # [num_rows]
    target_lse_ptr,
    # [num_rows, target_vocab]
    target_ptr,
    target_stride,
    # [num_rows, vocab], or [max_num_reqs, num_speculative_steps, draft_vocab] of logits
    draft_ptr,
    # Of a row, or of a slot and of a step.
    draft_stride,
    draft_step_stride,
    # [num_rows]
    prices_ptr,
    # [num_rows] or None
    slots_ptr,
    # [num_rows] or None
    steps_ptr,
    # [max_num_reqs] or None
    temperature_ptr,
    target_vocab,
    # The smaller of the target's and the draft's.
    vocab,
    DRAFT_IS_LOGITS: tl.constexpr,
    # Of `clip`, which says what they are.
    TOLERANCE: tl.constexpr,
    STEPS: tl.constexpr,
    MOST_PRICE: tl.constexpr,
    EIGHTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    # int64 before the multiply: a row can start past 2**31 elements.
    target_ptr += row.to(tl.int64) * target_stride
    logits_ptr += row.to(tl.int64) * target_vocab
    price = tl.load(prices_ptr + row)
    target_lse = _logsumexp(target_ptr, 1.0, vocab, BLOCK)
    tl.store(target_lse_ptr + row, target_lse)
    is_finite = (target_lse > float("-inf")) & (target_lse < float("inf"))
    if (price > 0) & is_finite:
        price = tl.minimum(price, MOST_PRICE)
        temperature = 1.0
        draft_lse = 0.0
        if DRAFT_IS_LOGITS:
            slot = tl.load(slots_ptr + row).to(tl.int64)
            step = tl.load(steps_ptr + row).to(tl.int64)
            draft_ptr += slot * draft_stride + step * draft_step_stride
            temperature = tl.load(temperature_ptr + slot)
            draft_lse = _logsumexp(draft_ptr, temperature, vocab, BLOCK)
        else:
            draft_ptr += row.to(tl.int64) * draft_stride

        spread = tl.exp(price)
        low = tl.exp(-price)
        high = 1.0
        w = 1.0
        following = 1.0
        total = 0.0
        taken = 0
        while (taken < STEPS) & (tl.abs(total - 1.0) > TOLERANCE):
            w = following
            sums = tl.zeros([BLOCK], tl.float32)
            flats = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocab, BLOCK):
                token = start + tl.arange(0, BLOCK)
                _, p, ratio = _load(
                    target_ptr,
                    target_lse,
                    draft_ptr,
                    draft_lse,
                    temperature,
                    token,
                    vocab,
                    DRAFT_IS_LOGITS,
                )
                clipped = tl.maximum(tl.minimum(ratio, w * spread), w)
                sums += p * clipped
                flats += tl.where(clipped == ratio, p * clipped, 0.0)
            total = tl.sum(sums, axis=0)
            flat = tl.sum(flats, axis=0)
            low = tl.where(total < 1.0, w, low)
            high = tl.where(total > 1.0, w, high)
            newton = w * (1.0 - flat) / (total - flat)
            is_inside = (newton > low) & (newton < high)
            following = tl.where(is_inside, newton, tl.sqrt(low * high))
            taken += 1

        log_total = tl.log(total)
        losses = tl.zeros([BLOCK], tl.float32)
        gains = tl.zeros([BLOCK], tl.float32)
        drifts = tl.zeros([BLOCK], tl.float32)
        for start in range(0, target_vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            target, p, ratio = _load(
                target_ptr,
                target_lse,
                draft_ptr,
                draft_lse,
                temperature,
                token,
                vocab,
                DRAFT_IS_LOGITS,
            )
            clipped = tl.maximum(tl.minimum(ratio, w * spread), w)
            log_ratio = tl.log(clipped)
            losses += p * clipped * log_ratio
            gains += p * (tl.minimum(clipped, ratio) - tl.minimum(ratio, 1.0))
            surprise = tl.where(p > 0.0, target_lse - target, 0.0)
            drifts += p * (clipped / total - 1.0) * surprise
            served = log_ratio - (target_lse + log_total) + target
            tl.store(logits_ptr + token, served, mask=token < target_vocab)
        loss = tl.maximum(tl.sum(losses, axis=0) / total - log_total, 0.0)
        tl.store(losses_ptr + row, tl.minimum(loss, EIGHTH * price * price))
        tl.store(gained_ptr + row, tl.maximum(tl.sum(gains, axis=0), 0.0))
        tl.store(drift_ptr + row, tl.sum(drifts, axis=0))
    else:
        for start in range(0, target_vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            target = tl.load(target_ptr + token, mask=token < target_vocab, other=0.0)
            tl.store(logits_ptr + token, target.to(tl.float32), mask=token < target_vocab)
        tl.store(losses_ptr + row, 0.0)
        tl.store(gained_ptr + row, 0.0)
        tl.store(drift_ptr + row, 0.0)


def launch_clip(
    clipped: tuple[torch.Tensor, ...],
    target_logits: torch.Tensor,
    draft: torch.Tensor,
    prices: torch.Tensor,
    draft_rows: tuple[torch.Tensor, torch.Tensor] | None,
    temperature: torch.Tensor | None,
    **constants: float,
) -> None:
    """Launches `clip_kernel`: one variant for each kind of draft and dtype of target.

    Args:
        clipped: the fields of `clip.Clipped`, written; contiguous.
        constants: those of `clip`; the other arguments are those of `clip.clip_rows`.
    """
    num_rows, target_vocab = target_logits.shape
    slots, steps = draft_rows or (None, None)
    # Few rows leave most of the chip idle, so each has many threads in flight: half of what a
    # multiprocessor takes at 64 registers. Not tuned on hardware.
    block = min(4096, max(256, triton.next_power_of_2(target_vocab)))
    if num_rows:
        clip_kernel[(num_rows,)](
            *clipped,
            target_logits,
            target_logits.stride(0),
            draft,
            draft.stride(0),
            0 if draft_rows is None else draft.stride(1),
            prices,
            slots,
            steps,
            temperature,
            target_vocab,
            min(target_vocab, draft.shape[-1]),
            DRAFT_IS_LOGITS=draft_rows is not None,
            **constants,
            BLOCK=block,
            enable_fp_fusion=False,
            num_warps=16 if block == 4096 else 4,
        )
