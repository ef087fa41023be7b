"""What the rule needs to know of each row, in one Triton kernel that reads each row once.

Symbols: V vocabulary, R rows that are read, S splits of a row.

    rows_kernel    grid (R, S)   streams V / S logits, keeps the two largest values of each lane and
                                 the chunk of 16 bytes that the largest came from, reduces them,
                                 looks up the id, and writes one partial result; by a price there is
                                 no second largest
    reduce_splits  a device function with which the next kernel joins a row's partial results

Buffers: best [R, S] int64 (value and id of z1, packed); second [R, S] float32 (z2); logit [R]
float32 (of the draft token); where a request samples also sums [R, S, 2] float32 (sums of
exp(z - z1) and of (z - z1) exp(z - z1), of which the log-sum-exp and the entropy of a row are made)
and kept [R, 3] float32 (the largest logit of the kept tokens, and these sums relative to it). So
nothing behind this kernel but what draws looks at the logits. The bonus row of a request that
samples is not read: only a draw looks at it.

Bytes moved: R * V * itemsize once, plus 20 * R * S twice. Not materialised: gathered rows, float32
copies, softmax, masks of the logits' size.

Packing: a float32 maps to an int32 of the same order, NaN to the largest. It stands above the
complement of the id in an int64, so that one integer maximum finds the largest value and, of
equals, the lowest id, and a NaN wins over everything, as in torch.argmax.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from vllm_mars.kernels.terms import MOST_ENDS, Column, Draws, Rule, Step
from vllm_mars.kernels.terms import RECORD_SIZE as RECORD_SIZE_

ENDS = tl.constexpr(MOST_ENDS)
FIRST_END = tl.constexpr(int(Column.ENDS))
RECORD_SIZE = tl.constexpr(RECORD_SIZE_)
# Kept tokens that are read at a time: those of most models are fewer.
KEPT_CHUNK = tl.constexpr(256)
# Indices start where vLLM's views of them start, so their alignment would only multiply the
# compiled variants; nothing is gained from it.
_UNALIGNED = ["input_ids_ptr", "row_slots_ptr", "row_places_ptr"]
_LEAST = tl.constexpr(-3e38)
# So far below the largest logit, exp is 0 and its product with the distance has to be.
_NOTHING = tl.constexpr(-1e4)
# exp(x) is 2**(x * this). libdevice's 2**x takes one instruction, where `tl.exp` takes five for
# results that no float32 holds in full.
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _pack(value, token_id):
    """Orders (value, lowest id) pairs as int64; -0.0 counts as 0.0 and NaN as the largest."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = tl.where(value != value, 0x7FFFFFFF, ordered)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token_id).to(tl.int64)


@triton.jit
def unpack_value(packed):
    """The float32 of a packed pair."""
    ordered = (packed >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def unpack_id(packed):
    """The token id of a packed pair, as int32."""
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _top2_of_pairs(first, second, CHUNKS: tl.constexpr):
    """Joins the two largest values of neighbouring groups, given as [CHUNKS, 2]."""
    first_a, first_b = tl.split(first)
    second_a, second_b = tl.split(second)
    # FMNMX.NAN: a NaN anywhere becomes the first; what then stands second is never looked at.
    first = tl.maximum(first_a, first_b, propagate_nan=tl.PropagateNan.ALL)
    second = tl.maximum(tl.minimum(first_a, first_b), tl.maximum(second_a, second_b))
    return first, second


@triton.jit
def _top2_of_chunks(value, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """The two largest values of each chunk, [CHUNKS] each, by a tree within one thread."""
    a, b = tl.split(tl.reshape(value, [CHUNKS, CHUNK // 2, 2]))
    first = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    second = tl.minimum(a, b)
    if CHUNK == 8:
        first, second = _top2_of_pairs(
            tl.reshape(first, [CHUNKS, 2, 2]), tl.reshape(second, [CHUNKS, 2, 2]), CHUNKS
        )
    return _top2_of_pairs(first, second, CHUNKS)


@triton.jit
def _max_of_chunks(value, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """The largest value of each chunk, [CHUNKS], by the same tree."""
    a, b = tl.split(tl.reshape(value, [CHUNKS, CHUNK // 2, 2]))
    first = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    if CHUNK == 8:
        a, b = tl.split(tl.reshape(first, [CHUNKS, 2, 2]))
        first = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    a, b = tl.split(first)
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _find(row_ptr, chunk, value, vocab, CHUNK: tl.constexpr):
    """The lowest id of a chunk whose logit is the value, or a NaN as it is."""
    token_id = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(row_ptr + token_id, mask=token_id < vocab, other=float("-inf")).to(tl.float32)
    value = value + tl.zeros([CHUNK], tl.float32)
    found = (logit == value) | ((logit != logit) & (value != value))
    return tl.min(tl.where(found, token_id, 0x7FFFFFFF), axis=0)


@triton.jit
def num_kept(protected):
    """How many places the list of a request's kept tokens has, for `kept_tokens`."""
    places = tl.full([], ENDS, tl.int32)
    if protected is not None:
        places += protected.num_ids
    return places


@triton.jit
def kept_tokens(first, record_ptr, protected, vocab):
    """KEPT_CHUNK tokens of that list from a place on, each token once; -1 where none is."""
    place = first + tl.arange(0, KEPT_CHUNK)
    token = tl.load(record_ptr + FIRST_END + place, mask=place < ENDS, other=-1)
    if protected is not None:
        is_end = (token >= 0) & (token < vocab)
        # What is protected anyway.
        is_both = tl.load(protected.mask + token, mask=is_end, other=0) != 0
        token = tl.where(is_both, -1, token)
        is_own = (place >= ENDS) & (place < protected.num_ids + ENDS)
        own = tl.load(protected.ids + place - ENDS, mask=is_own, other=-1).to(tl.int64)
        token = tl.maximum(token, own)
    return tl.where(token < vocab, token, -1)


@triton.jit
def _sum_kept(out_ptr, row_ptr, record_ptr, protected, vocab):
    """Writes the sums over the kept tokens of a row, relative to the largest of their logits."""
    largest = tl.full([], _LEAST, tl.float32)
    total = tl.zeros([], tl.float32)
    moment = tl.zeros([], tl.float32)
    for first in range(0, num_kept(protected), KEPT_CHUNK):
        token = kept_tokens(first, record_ptr, protected, vocab)
        value = tl.load(row_ptr + token, mask=token >= 0, other=float("-inf")).to(tl.float32)
        now = tl.maximum(largest, tl.max(value, axis=0))
        shift = tl.maximum(largest - now, _NOTHING)
        moment = (moment + total * shift) * tl.exp(shift)
        below = tl.maximum(value - now, _NOTHING)
        weight = tl.exp(below)
        total = total * tl.exp(shift) + tl.sum(weight, axis=0)
        moment += tl.sum(weight * below, axis=0)
        largest = now
    tl.store(out_ptr, largest)
    tl.store(out_ptr + 1, total)
    tl.store(out_ptr + 2, moment)


@triton.jit(
    do_not_specialize=["num_rows", "blocks_per_split"],
    do_not_specialize_on_alignment=_UNALIGNED,
)
def rows_kernel(
    # `Partials`
    partials,
    # [num_rows, vocab]
    logits_ptr,
    logits_stride,
    # [num_rows]: a row's draft token is the next entry
    input_ids_ptr,
    # Where requests sample: [S, RECORD_SIZE], `Protected` or None, slot and place within its
    # request of each row, [num_rows] each, and by slot
    records_ptr,
    protected,
    row_slots_ptr,
    row_places_ptr,
    temperature_ptr,
    num_rows,
    vocab,
    blocks_per_split,
    BLOCK: tl.constexpr,
    # Logits of one 16-byte load: 8 of a 16-bit dtype, 4 of float32.
    CHUNK: tl.constexpr,
    WITH_SECOND: tl.constexpr,
    WITH_SUM: tl.constexpr,
):
    row = tl.program_id(0)
    split = tl.program_id(1)
    if WITH_SUM:
        # A request's bonus row is its last. Of one that samples only a draw looks at it.
        place_behind = tl.load(row_places_ptr + row + 1, mask=row + 1 < num_rows, other=0)
        slot = tl.load(row_slots_ptr + row).to(tl.int64)
        temperature = tl.load(temperature_ptr + slot)
        if (place_behind == 0) & (temperature != 0.0):
            return
    # int64 before the multiply: a row can start past 2**31 elements.
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride

    CHUNKS: tl.constexpr = BLOCK // CHUNK
    # Ids are followed for chunks, not for logits: that is two thirds of the loop's instructions.
    chunk = split * blocks_per_split * CHUNKS + tl.arange(0, CHUNKS)
    # Of a lane that meets nothing above -inf the first chunk counts as the best.
    best = tl.full([CHUNKS], float("-inf"), tl.float32)
    best_chunk = chunk
    second = tl.full([CHUNKS], float("-inf"), tl.float32)
    # Of each lane relative to its largest logit, or to this where it has met none above -inf.
    sums = tl.zeros([CHUNKS], tl.float32)
    moments = tl.zeros([CHUNKS], tl.float32)
    base = tl.full([CHUNKS], _LEAST, tl.float32)
    for _ in range(0, blocks_per_split):
        token_id = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        # -inf is neutral to a maximum.
        value = tl.load(row_ptr + token_id, mask=token_id < vocab, other=float("-inf"))
        if WITH_SECOND:
            first, runner_up = _top2_of_chunks(value.to(tl.float32), CHUNKS, CHUNK)
        else:
            first = _max_of_chunks(value.to(tl.float32), CHUNKS, CHUNK)
        # Strictly larger: of equal logits the lowest id stays. The first NaN wins for good.
        better = (first > best) | ((first != first) & (best == best))
        if WITH_SECOND:
            second = tl.where(better, tl.maximum(best, runner_up), tl.maximum(first, second))
        best = tl.where(better, first, best)
        best_chunk = tl.where(better, chunk, best_chunk)
        if WITH_SUM:
            now = tl.maximum(best, _LEAST)
            shift = base - now
            decay = libdevice.exp2(shift * LOG2_E)
            moments = (moments + sums * shift) * decay
            sums = sums * decay
            below = tl.maximum(value.to(tl.float32) - now[:, None], _NOTHING)
            weight = libdevice.exp2(below * LOG2_E)
            sums += tl.sum(weight, axis=1)
            moments += tl.sum(weight * below, axis=1)
            base = now
        chunk += CHUNKS

    packed = _pack(best, best_chunk)
    winner = tl.max(packed, axis=0)
    loses = packed != winner
    first = unpack_value(winner)
    # The winning chunk once more, from the cache, for the id within it.
    first_id = _find(row_ptr, unpack_id(winner), first, vocab, CHUNK)
    out = row.to(tl.int64) * tl.num_programs(1) + split
    tl.store(partials.best + out, _pack(first, first_id))
    if WITH_SECOND:
        # z2 is the largest of what the winning lane holds second and the other lanes hold first.
        tl.store(partials.second + out, tl.max(tl.where(loses, best, second), axis=0))
    if WITH_SUM:
        shift = base - tl.maximum(first, _LEAST)
        tl.store(partials.sums + 2 * out, tl.sum(sums * tl.exp(shift), axis=0))
        moment = tl.sum((moments + sums * shift) * tl.exp(shift), axis=0)
        tl.store(partials.sums + 2 * out + 1, moment)
    if split == 0:
        draft = tl.load(input_ids_ptr + row + 1, mask=row + 1 < num_rows, other=-1)
        in_vocab = (draft >= 0) & (draft < vocab)
        logit = tl.load(row_ptr + draft, mask=in_vocab, other=float("-inf"))
        tl.store(partials.logit + row, logit.to(tl.float32))
        if WITH_SUM:
            record_ptr = records_ptr + slot * RECORD_SIZE
            _sum_kept(partials.kept + 3 * row, row_ptr, record_ptr, protected, vocab)


@triton.jit
def reduce_splits(partials, row, mask, num_splits, SPLITS: tl.constexpr, WITH_SECOND: tl.constexpr):
    """z1's packed pair, and z2, or z1 where that was not read, of each given row."""
    splits = tl.arange(0, SPLITS)
    index = row.to(tl.int64)[:, None] * num_splits + splits[None, :]
    valid = mask[:, None] & (splits < num_splits)[None, :]
    packed = tl.load(partials.best + index, mask=valid, other=-0x7FFFFFFFFFFFFFFF)
    winner = tl.max(packed, axis=1)
    second = unpack_value(winner)
    if WITH_SECOND:
        loses = packed != winner[:, None]
        seconds = tl.load(partials.second + index, mask=valid, other=float("-inf"))
        firsts = tl.where(valid, unpack_value(packed), float("-inf"))
        second = tl.max(tl.where(loses, firsts, seconds), axis=1)
    return winner, second


@triton.jit
def log_sum_exp(partials, row, mask, first, num_splits, SPLITS: tl.constexpr):
    """The log-sum-exp and the entropy of each given row, of which `first` is the largest logit."""
    splits = tl.arange(0, SPLITS)
    index = row.to(tl.int64)[:, None] * num_splits + splits[None, :]
    valid = mask[:, None] & (splits < num_splits)[None, :]
    packed = tl.load(partials.best + index, mask=valid, other=-0x7FFFFFFFFFFFFFFF)
    sums = tl.load(partials.sums + 2 * index, mask=valid, other=0.0)
    moments = tl.load(partials.sums + 2 * index + 1, mask=valid, other=0.0)
    largest = tl.where(valid, tl.maximum(unpack_value(packed), _LEAST), _LEAST)
    shift = tl.maximum(largest - first[:, None], _NOTHING)
    total = tl.sum(sums * tl.exp(shift), axis=1)
    moment = tl.sum((moments + sums * shift) * tl.exp(shift), axis=1)
    return first + tl.log(total), tl.log(total) - moment / total


@triton.jit
def kept_sums(partials, row, is_number, lse):
    """The sums of p and of -p log p over the kept tokens of each row; 0 where it is no number."""
    kept_ptr = partials.kept + 3 * row
    log_p = tl.load(kept_ptr, mask=is_number, other=_LEAST) - lse
    total = tl.load(kept_ptr + 1, mask=is_number, other=0.0)
    moment = tl.load(kept_ptr + 2, mask=is_number, other=0.0)
    p = tl.where(is_number, tl.exp(log_p), 0.0)
    surprise = tl.where(p > 0.0, -p * (moment + total * log_p), 0.0)
    return p * total, surprise


class Partials(NamedTuple):
    """The partial results of rows. What was not asked for is not written.

    Attributes:
        best, second: `[num_rows, num_splits]`; sums: `[num_rows, num_splits, 2]`; logit:
            `[num_rows]`; kept: `[num_rows, 3]`; see above.
    """

    best: torch.Tensor
    second: torch.Tensor
    sums: torch.Tensor
    logit: torch.Tensor
    kept: torch.Tensor


# By device and power-of-2 size, so that nothing is allocated once a batch size is warm. Calls on
# one device must follow each other on one stream, as a sampler's steps do.
_WORKSPACE: dict[tuple[torch.device, int], Partials] = {}


def num_lanes(vocab: int) -> int:
    """SPLITS for `reduce_splits`: a power of 2 that holds the splits of a row in any batch.

    It depends on the vocabulary alone, so that batches of all sizes share one variant.
    """
    return triton.next_power_of_2(triton.cdiv(vocab, block_size(vocab)))


def block_size(vocab: int) -> int:
    """Logits that a program reads at a time."""
    return min(4096, max(256, triton.next_power_of_2(vocab)))


def launch_settings(vocab: int, num_rows: int) -> tuple[int, int, int]:
    """Settings of `rows_kernel`: (blocks of a split, block size, warps).

    A block of 4,096 elements and 8 warps gives each thread 16 of them: two 16-byte loads of a
    16-bit dtype, four of float32. Few rows are split into single blocks, to fill the chip; many
    rows take fewer splits, down to about 2,048 programs, so that partial results stay few while a
    last wave that is not full costs little. On an H200 none of nine other settings was faster.
    """
    block = block_size(vocab)
    blocks = triton.cdiv(vocab, block)
    splits = max(1, min(blocks, 2048 // max(1, num_rows)))
    return triton.cdiv(blocks, splits), block, 8 if block >= 2048 else 4


def reduce_rows(step: Step, rule: Rule, draws: Draws | None = None) -> tuple[Partials, int]:
    """Launches `rows_kernel`.

    Args:
        step: what is read of it are the logits and the draft tokens, and where requests sample the
            tokens that end them.
        rule: of the engine.
        draws: of the step, where requests sample; then the sums are found, too.

    Returns:
        The partial results, and `num_splits` of each row.
    """
    logits, device = step.logits, step.logits.device
    num_rows, vocab = logits.shape
    blocks_per_split, block, warps = launch_settings(vocab, num_rows)
    num_splits = triton.cdiv(vocab, blocks_per_split * block)
    key = device, triton.next_power_of_2(max(num_rows * num_splits, 4096))
    if key not in _WORKSPACE:
        best = torch.empty(key[1], dtype=torch.int64, device=device)
        sizes = key[1], 2 * key[1], key[1], 3 * key[1]
        _WORKSPACE[key] = Partials(best, *(torch.empty(size, device=device) for size in sizes))
    partials = _WORKSPACE[key]
    if num_rows:
        rows_kernel[(num_rows, num_splits)](
            partials,
            logits,
            logits.stride(0),
            step.input_ids,
            None if draws is None else step.records.table,
            None if draws is None else rule.protected,
            None if draws is None else draws.row_slots,
            None if draws is None else draws.row_places,
            None if draws is None else draws.sampling.temperature,
            num_rows,
            vocab,
            blocks_per_split,
            BLOCK=block,
            CHUNK=16 // logits.element_size(),
            WITH_SECOND=rule.name != "price",
            WITH_SUM=draws is not None,
            num_warps=warps,
        )
    return partials, num_splits
