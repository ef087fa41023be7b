"""Row statistics in one Triton kernel that reads each row once.

Symbols: V vocabulary, R rows that are read, S splits of a row.

    rows_kernel    grid (R, S)   streams V / S logits; each lane tracks its two largest values (one
                                 if the rule needs no z2) and the 16-byte chunk of the largest;
                                 reduces the lanes, looks up the id and writes a partial result

`combine` has the device functions with which later kernels combine the splits of a row.

Buffers: see `Partials`. Only the kernels for probabilistic drafts and `resample_kernel` read logits
again. Bonus rows of sampled requests are skipped: only the resampling reads them.

Bytes moved: R * V * itemsize once, plus 20 * R * S twice. Not materialised: gathered rows, float32
copies, softmax, masks of the logits' size.

Packing: a float32 maps to an int32 of the same order, NaN to the largest. This is the high half of
an int64, the complement of the id the low half, so one integer maximum finds the largest value and
the lowest id on ties; NaN wins over everything, as in torch.argmax.
"""

import functools
from collections.abc import Hashable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from vllm_mars.kernels.constants import C
from vllm_mars.kernels.interface import Constraints, EngineParams, SamplingInputs, VerifyInputs
from vllm_mars.kernels.launch import UNALIGNED, UNSPECIALIZED, LaunchCache, launch_cache_for
from vllm_mars.kernels.preserved import num_preserved, preserved_tokens

# Short drafts share variants: fewer than 8 positions cost no less.
_MIN_POSITIONS = 8


@triton.jit
def _pack(value, token_id):
    """Orders (value, lowest id) pairs as int64; -0.0 counts as 0.0 and NaN as the largest."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = tl.where(value != value, 0x7FFFFFFF, ordered)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token_id).to(tl.int64)


@triton.jit
def unpack_value(packed):
    ordered = (packed >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def unpack_id(packed):
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _top2_of_pairs(first, second):
    """Two largest values of neighbouring groups, from the two of each group, [CHUNKS, 2]."""
    first_a, first_b = tl.split(first)
    second_a, second_b = tl.split(second)
    # FMNMX.NAN: a NaN becomes the first; the second is then never read.
    first = tl.maximum(first_a, first_b, propagate_nan=tl.PropagateNan.ALL)
    second = tl.maximum(tl.minimum(first_a, first_b), tl.maximum(second_a, second_b))
    return first, second


@triton.jit
def _top2_of_chunks(value, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Two largest values of each chunk, [CHUNKS] each, by a tree within one thread."""
    # The compiler drops the second values if they are not used.
    a, b = tl.split(tl.reshape(value, [CHUNKS, CHUNK // 2, 2]))
    first = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    second = tl.minimum(a, b)
    if CHUNK == 8:
        first = tl.reshape(first, [CHUNKS, 2, 2])
        first, second = _top2_of_pairs(first, tl.reshape(second, [CHUNKS, 2, 2]))
    return _top2_of_pairs(first, second)


@triton.jit
def divide_logits(logits, divisor, APPLY_TEMPERATURE: tl.constexpr):
    """Target logits as float32, divided by the temperature as in vLLM."""
    logits = logits.to(tl.float32)
    if APPLY_TEMPERATURE:
        logits = logits / divisor
    return logits


@triton.jit
def temperature_divisor(sampling, slot, APPLY_TEMPERATURE: tl.constexpr):
    """Temperature of a sampled request, else 1."""
    divisor = 1.0
    if APPLY_TEMPERATURE:
        temperature = tl.load(sampling.temperature + slot)
        divisor = tl.where(temperature == 0.0, 1.0, temperature)
    return divisor


@triton.jit
def _find(
    row_ptr, chunk, value, vocab, divisor, CHUNK: tl.constexpr, APPLY_TEMPERATURE: tl.constexpr
):
    """Lowest id of a chunk whose logit equals the value; NaN equals NaN."""
    token_id = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(row_ptr + token_id, mask=token_id < vocab, other=float("-inf"))
    logit = divide_logits(logit, divisor, APPLY_TEMPERATURE)
    value = value + tl.zeros([CHUNK], tl.float32)
    is_match = (logit == value) | ((logit != logit) & (value != value))
    return tl.min(tl.where(is_match, token_id, 0x7FFFFFFF), axis=0)


@triton.jit
def _sum_preserved(
    out_ptr,
    row_ptr,
    record_ptr,
    protected,
    constraints,
    row,
    vocab,
    divisor,
    APPLY_TEMPERATURE: tl.constexpr,
):
    """Writes the sums over the preserved tokens of a row: see `Partials`."""
    largest = tl.full([], C.LEAST, tl.float32)
    total = tl.zeros([], tl.float32)
    moment = tl.zeros([], tl.float32)
    for first in range(0, num_preserved(protected, constraints, row), C.PRESERVED_CHUNK):
        token = preserved_tokens(first, record_ptr, protected, constraints, row, vocab)
        value = tl.load(row_ptr + token, mask=token >= 0, other=float("-inf"))
        value = divide_logits(value, divisor, APPLY_TEMPERATURE)
        now = tl.maximum(largest, tl.max(value, axis=0))
        shift = tl.maximum(largest - now, C.NOTHING)
        moment = (moment + total * shift) * tl.exp(shift)
        below = tl.maximum(value - now, C.NOTHING)
        weight = tl.exp(below)
        total = total * tl.exp(shift) + tl.sum(weight, axis=0)
        moment += tl.sum(weight * below, axis=0)
        largest = now
    tl.store(out_ptr, largest)
    tl.store(out_ptr + 1, total)
    tl.store(out_ptr + 2, moment)


@triton.jit
def _draft_sums(row_ptr, start, num_blocks, scale, vocab, BLOCK: tl.constexpr):
    """Largest scaled logit of a part of a draft row, and the sum of powers of 2 relative to it."""
    # Finite, so that a lane without a logit above -inf does not subtract infinities.
    largest = tl.full([BLOCK], C.LEAST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    token = start + tl.arange(0, BLOCK)
    for _ in range(0, num_blocks):
        value = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
        value = value.to(tl.float32) * scale
        larger = tl.maximum(largest, value)
        total = total * libdevice.exp2(largest - larger) + libdevice.exp2(value - larger)
        largest = larger
        token += BLOCK
    row_max = tl.max(largest, axis=0)
    return row_max, tl.sum(total * libdevice.exp2(largest - row_max), axis=0)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def rows_kernel(
    # `Partials`
    partials,
    # [num_rows, vocab]
    logits_ptr,
    logits_stride,
    # [num_rows]; the draft token of a row is the next entry
    input_ids_ptr,
    # From here to `sampling`: None if all requests are greedy
    # [num_slots, RECORD_SIZE]
    records_ptr,
    # `Protected` or None
    protected,
    # `Constraints` or None
    constraints,
    # [num_rows], slot of each row
    expanded_idx_mapping_ptr,
    # [num_rows], position of each row in its request
    expanded_local_pos_ptr,
    # `SamplingTensors`
    sampling,
    # Strides of `sampling.draft_logits`, [num_slots, steps, vocab]
    draft_stride,
    draft_step_stride,
    num_rows,
    vocab,
    blocks_per_split,
    BLOCK: tl.constexpr,
    # Logits of one 16-byte load: 8 of a 16-bit dtype, 4 of float32.
    CHUNK: tl.constexpr,
    WITH_SECOND: tl.constexpr,
    # Whether the step has sampled requests
    SAMPLED: tl.constexpr,
    APPLY_TEMPERATURE: tl.constexpr,
):
    row = tl.program_id(0)
    split = tl.program_id(1)
    slot = tl.zeros([], tl.int64)
    divisor = 1.0
    if SAMPLED:
        # The bonus row is the last row of a request; only the resampling reads it if the request is
        # sampled. Temperatures can be in host memory, so other rows read them only to divide.
        next_local_pos = tl.load(expanded_local_pos_ptr + row + 1, mask=row + 1 < num_rows, other=0)
        slot = tl.load(expanded_idx_mapping_ptr + row).to(tl.int64)
        if next_local_pos == 0:
            if tl.load(sampling.temperature + slot) != 0.0:
                return
        divisor = temperature_divisor(sampling, slot, APPLY_TEMPERATURE)
    # int64 before the multiply: a row can start past 2**31 elements.
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride

    CHUNKS: tl.constexpr = BLOCK // CHUNK
    # Tracking the ids of chunks instead of logits takes two thirds of the instructions.
    chunk = split * blocks_per_split * CHUNKS + tl.arange(0, CHUNKS)
    # A lane without a logit above -inf reports its first chunk.
    best = tl.full([CHUNKS], float("-inf"), tl.float32)
    best_chunk = chunk
    second = tl.full([CHUNKS], float("-inf"), tl.float32)
    # Relative to the largest logit of the lane, or to LEAST if none is above -inf.
    sums = tl.zeros([CHUNKS], tl.float32)
    moments = tl.zeros([CHUNKS], tl.float32)
    base = tl.full([CHUNKS], C.LEAST, tl.float32)
    for _ in range(0, blocks_per_split):
        token_id = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        value = tl.load(row_ptr + token_id, mask=token_id < vocab, other=float("-inf"))
        value = divide_logits(value, divisor, APPLY_TEMPERATURE)
        first, runner_up = _top2_of_chunks(value, CHUNKS, CHUNK)
        # Strictly larger, so the lowest id wins ties. The first NaN wins for good.
        better = (first > best) | ((first != first) & (best == best))
        if WITH_SECOND:
            second = tl.where(better, tl.maximum(best, runner_up), tl.maximum(first, second))
        best = tl.where(better, first, best)
        best_chunk = tl.where(better, chunk, best_chunk)
        if SAMPLED:
            now = tl.maximum(best, C.LEAST)
            shift = base - now
            decay = libdevice.exp2(shift * C.LOG2_E)
            moments = (moments + sums * shift) * decay
            sums = sums * decay
            below = tl.maximum(value - now[:, None], C.NOTHING)
            weight = libdevice.exp2(below * C.LOG2_E)
            sums += tl.sum(weight, axis=1)
            moments += tl.sum(weight * below, axis=1)
            base = now
        chunk += CHUNKS

    packed = _pack(best, best_chunk)
    winner = tl.max(packed, axis=0)
    loses = packed != winner
    first = unpack_value(winner)
    # Reads the winning chunk again, from the cache, to find the id.
    first_id = _find(row_ptr, unpack_id(winner), first, vocab, divisor, CHUNK, APPLY_TEMPERATURE)
    out = row.to(tl.int64) * tl.num_programs(1) + split
    tl.store(partials.best + out, _pack(first, first_id))
    if WITH_SECOND:
        # z2 is the second of the winning lane or the first of another lane.
        tl.store(partials.second + out, tl.max(tl.where(loses, best, second), axis=0))
    if SAMPLED:
        shift = base - tl.maximum(first, C.LEAST)
        tl.store(partials.sums + 2 * out, tl.sum(sums * tl.exp(shift), axis=0))
        moment = tl.sum((moments + sums * shift) * tl.exp(shift), axis=0)
        tl.store(partials.sums + 2 * out + 1, moment)
    if SAMPLED:
        if sampling.draft_logits is not None:
            draft_temperature = tl.load(sampling.draft_temperature + slot)
            if (draft_temperature != 0.0) & (next_local_pos != 0):
                local_pos = tl.load(expanded_local_pos_ptr + row).to(tl.int64)
                draft_ptr = (
                    sampling.draft_logits + slot * draft_stride + local_pos * draft_step_stride
                )
                largest, total = _draft_sums(
                    row_ptr=draft_ptr,
                    start=split * blocks_per_split * BLOCK,
                    num_blocks=blocks_per_split,
                    scale=C.LOG2_E / draft_temperature,
                    vocab=vocab,
                    BLOCK=BLOCK,
                )
                tl.store(partials.draft + 2 * out, largest)
                tl.store(partials.draft + 2 * out + 1, total)
    if split == 0:
        draft = tl.load(input_ids_ptr + row + 1, mask=row + 1 < num_rows, other=-1)
        in_vocab = (draft >= 0) & (draft < vocab)
        logit = tl.load(row_ptr + draft, mask=in_vocab, other=float("-inf"))
        tl.store(partials.logit + row, divide_logits(logit, divisor, APPLY_TEMPERATURE))
        if SAMPLED:
            _sum_preserved(
                out_ptr=partials.preserved + 3 * row,
                row_ptr=row_ptr,
                record_ptr=records_ptr + slot * C.RECORD_SIZE,
                protected=protected,
                constraints=constraints,
                row=row,
                vocab=vocab,
                divisor=divisor,
                APPLY_TEMPERATURE=APPLY_TEMPERATURE,
            )


class Partials(NamedTuple):
    """Partial results of rows; sums are relative to the largest logit that they include."""

    # int64 [num_rows, num_splits], z1 and its id, packed
    best: torch.Tensor
    # float32 [num_rows, num_splits], z2; written if the rule needs it
    second: torch.Tensor
    # float32 [num_rows, num_splits, 2], sums of exp(z - z1) and of (z - z1) exp(z - z1), which give
    # log-sum-exp and entropy; written if requests sample
    sums: torch.Tensor
    # float32 [num_rows], of the draft token
    logit: torch.Tensor
    # float32 [num_rows, 3], z1 and sums of the preserved tokens; written if requests sample
    preserved: torch.Tensor
    # float32 [num_rows, num_splits, 2], largest scaled logit of a probabilistic draft, and the sum
    # of powers of 2
    draft: torch.Tensor


# Scratch buffers are cached by device and size, so a warm batch size allocates nothing. All calls
# on a device must use one stream, as a sampler's steps do.
@functools.cache
def _cached_partials(size: int, device: torch.device) -> Partials:
    return Partials(
        best=torch.empty(size, dtype=torch.int64, device=device),
        second=torch.empty(size, device=device),
        sums=torch.empty(2 * size, device=device),
        logit=torch.empty(size, device=device),
        preserved=torch.empty(3 * size, device=device),
        draft=torch.empty(2 * size, device=device),
    )


def bucket_size(number: int, least: int) -> int:
    """Rounds up to a power of 2, so that few sizes are cached."""
    return 1 << (max(number, least) - 1).bit_length()


@functools.cache
def num_lanes(vocab: int) -> int:
    """SPLITS of `reduce_splits`, from the vocabulary only: all batch sizes share a variant."""
    return int(triton.next_power_of_2(triton.cdiv(vocab, block_size(vocab))))


@functools.cache
def block_size(vocab: int) -> int:
    """Logits that a program reads at a time."""
    return int(min(4096, max(256, triton.next_power_of_2(vocab))))


@functools.cache
def launch_settings(vocab: int, num_rows: int) -> tuple[int, int, int, int]:
    """Settings of `rows_kernel`: (splits, blocks of a split, block size, warps)."""
    # A block of 4,096 elements and 8 warps gives each thread 16 of them: two 16-byte loads of a
    # 16-bit dtype, four of float32. Few rows are split into single blocks, to fill the chip. Many
    # rows take fewer splits, down to about 2,048 programs: partial results stay few, and a partly
    # filled last wave costs little. None of nine other settings was faster on an H200.
    block = block_size(vocab)
    blocks = triton.cdiv(vocab, block)
    splits = max(1, min(blocks, 2048 // num_rows))
    blocks_per_split = triton.cdiv(blocks, splits)
    splits = triton.cdiv(vocab, blocks_per_split * block)
    return splits, blocks_per_split, block, 8 if block >= 2048 else 4


class Reduced(NamedTuple):
    """A step with its row statistics, as later kernels take it."""

    step: VerifyInputs
    engine_params: EngineParams
    constraints: Constraints | None
    sampling_inputs: SamplingInputs | None
    # Launches all kernels of the step
    launch_cache: LaunchCache
    partials: Partials
    # Splits of each row
    num_splits: int

    @property
    def num_positions(self) -> int:
        """POSITIONS of the kernels that read all rows of a request."""
        return bucket_size(self.step.num_speculative_tokens + 1, _MIN_POSITIONS)


def reduce_rows(
    step: VerifyInputs,
    engine_params: EngineParams,
    constraints: Constraints | None = None,
    sampling_inputs: SamplingInputs | None = None,
) -> Reduced:
    """Launches `rows_kernel`; arguments as in `kernels.fused.verify`."""
    logits = step.logits
    rule = engine_params.rule
    num_rows, vocab = logits.shape
    num_splits, blocks_per_split, block, warps = launch_settings(vocab, num_rows)
    partials = _cached_partials(bucket_size(num_rows * num_splits, 4096), logits.device)
    launch_cache = _launch_cache_of(step, engine_params, constraints, sampling_inputs)
    draft_stride, draft_step_stride = draft_strides(sampling_inputs)
    launch_cache.launch(
        rows_kernel,
        (num_rows, num_splits, 1),
        partials,
        logits,
        logits.stride(0),
        step.input_ids,
        None if sampling_inputs is None else step.records.table,
        None if sampling_inputs is None else engine_params.protected,
        None if sampling_inputs is None else constraints,
        None if sampling_inputs is None else sampling_inputs.expanded_idx_mapping,
        None if sampling_inputs is None else sampling_inputs.expanded_local_pos,
        None if sampling_inputs is None else sampling_inputs.sampling,
        draft_stride,
        draft_step_stride,
        num_rows,
        vocab,
        blocks_per_split,
        block,
        16 // logits.element_size(),
        rule.needs_second,
        sampling_inputs is not None,
        sampling_inputs is not None and sampling_inputs.apply_temperature,
        num_warps=warps,
        # Only the sums contain a multiplication followed by an addition.
        enable_fp_fusion=True,
    )
    return Reduced(
        step=step,
        engine_params=engine_params,
        constraints=constraints,
        sampling_inputs=sampling_inputs,
        launch_cache=launch_cache,
        partials=partials,
        num_splits=num_splits,
    )


def _launch_cache_of(
    step: VerifyInputs,
    engine_params: EngineParams,
    constraints: Constraints | None,
    sampling_inputs: SamplingInputs | None,
) -> LaunchCache:
    logits = step.logits
    key: list[Hashable] = [
        engine_params.rule.name,
        logits.device,
        logits.dtype,
        logits.data_ptr() % 16 == 0,
        step.input_ids.dtype,
        step.slots.dtype,
        engine_params.protected is None,
        constraints is None,
    ]
    if sampling_inputs is not None:
        key += [
            sampling_inputs.pos.dtype,
            sampling_inputs.expanded_idx_mapping.dtype,
            sampling_inputs.expanded_local_pos.dtype,
        ]
        sampling = sampling_inputs.sampling
        if (draft_logits := sampling.draft_logits) is not None:
            key += [
                draft_logits.dtype,
                draft_logits.data_ptr() % 16 == 0,
                sampling.next_seeds is None,
            ]
    return launch_cache_for(*key)


def draft_strides(sampling_inputs: SamplingInputs | None) -> tuple[int, int]:
    """Strides of the draft logits by slot and by position; 0 without any."""
    if sampling_inputs is None or sampling_inputs.sampling.draft_logits is None:
        return 0, 0
    slot_stride, step_stride, _ = sampling_inputs.sampling.draft_logits.stride()
    return slot_stride, step_stride
