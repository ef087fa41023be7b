"""Preserved tokens of a row: stop ids, protected tokens, and followers of `Constraints`."""

import triton
import triton.language as tl

from vllm_mars.kernels.constants import C


@triton.jit
def num_preserved(protected, constraints, row):
    """Length of a row's list of preserved tokens, including padding."""
    size = tl.full([], C.MAX_STOP_IDS, tl.int32)
    if protected is not None:
        size += protected.num_ids
    if constraints is not None:
        size += tl.load(constraints.num_followers + row)
    return size


@triton.jit
def preserved_tokens(first, record_ptr, protected, constraints, row, vocab):
    """Loads PRESERVED_CHUNK entries of that list: each token once, and -1 as padding."""
    index = first + tl.arange(0, C.PRESERVED_CHUNK)
    token = tl.load(record_ptr + C.COLUMN.STOP_IDS + index, mask=index < C.MAX_STOP_IDS, other=-1)
    num_others = tl.full([], C.MAX_STOP_IDS, tl.int32)
    if protected is not None:
        token = _unless_protected(token, protected, vocab)
        num_others += protected.num_ids
        is_protected = (index >= C.MAX_STOP_IDS) & (index < num_others)
        protected_id = tl.load(
            protected.ids + index - C.MAX_STOP_IDS, mask=is_protected, other=-1
        ).to(tl.int64)
        token = tl.maximum(token, protected_id)
    if constraints is not None:
        number = index - num_others
        is_follower = (number >= 0) & (number < tl.load(constraints.num_followers + row))
        list_ptr = constraints.followers + row.to(tl.int64) * C.MAX_FOLLOWERS
        follower = tl.load(list_ptr + number, mask=is_follower, other=-1).to(tl.int64)
        follower = tl.where(is_end(follower, record_ptr), -1, follower)
        if protected is not None:
            follower = _unless_protected(follower, protected, vocab)
        token = tl.maximum(token, follower)
    return tl.where(token < vocab, token, -1)


@triton.jit
def _unless_protected(token, protected, vocab):
    """Replaces protected tokens by -1, since they are listed separately."""
    is_token = (token >= 0) & (token < vocab)
    is_both = tl.load(protected.mask + token, mask=is_token, other=0) != 0
    return tl.where(is_both, -1, token)


@triton.jit
def is_end(token, record_ptr):
    """Whether each token is a stop id of the request."""
    stop_ids_ptr = record_ptr + C.COLUMN.STOP_IDS
    stop_ids = tl.load(stop_ids_ptr + tl.arange(0, C.MAX_STOP_IDS))
    is_stop = tl.full(token.shape, False, tl.int1)
    # Stop ids come first and then -1; most requests have one or two.
    for j in range(0, tl.sum((stop_ids >= 0).to(tl.int32), axis=0)):
        is_stop = is_stop | (token == tl.load(stop_ids_ptr + j))
    return is_stop


@triton.jit
def is_preserved(token, protected, constraints, row, record_ptr, vocab):
    result = is_end(token, record_ptr)
    if protected is not None:
        is_token = (token >= 0) & (token < vocab)
        result = result | (tl.load(protected.mask + token, mask=is_token, other=0) != 0)
    if constraints is not None:
        list_ptr = constraints.followers + row.to(tl.int64) * C.MAX_FOLLOWERS
        for j in range(0, tl.load(constraints.num_followers + row)):
            result = result | (token == tl.load(list_ptr + j))
    return result
