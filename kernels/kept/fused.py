"""Which tokens keep their probability at a row: device functions for all that read it."""

import triton
import triton.language as tl

from vllm_mars.kernels.constants import C


@triton.jit
def num_kept(protected, guard, row):
    """How many places the list of a row's kept tokens has, for `kept_tokens`."""
    places = tl.full([], C.MOST_ENDS, tl.int32)
    if protected is not None:
        places += protected.num_ids
    if guard is not None:
        places += tl.load(guard.num_followers + row)
    return places


@triton.jit
def kept_tokens(first, record_ptr, protected, guard, row, vocab):
    """KEPT_CHUNK tokens of that list from a place on, each token once; -1 where none is."""
    place = first + tl.arange(0, C.KEPT_CHUNK)
    token = tl.load(record_ptr + C.COLUMN.ENDS + place, mask=place < C.MOST_ENDS, other=-1)
    num_others = tl.full([], C.MOST_ENDS, tl.int32)
    if protected is not None:
        token = _unless_protected(token, protected, vocab)
        num_others += protected.num_ids
        is_own = (place >= C.MOST_ENDS) & (place < num_others)
        own = tl.load(protected.ids + place - C.MOST_ENDS, mask=is_own, other=-1).to(tl.int64)
        token = tl.maximum(token, own)
    if guard is not None:
        number = place - num_others
        is_follower = (number >= 0) & (number < tl.load(guard.num_followers + row))
        list_ptr = guard.followers + row.to(tl.int64) * C.MOST_FOLLOWERS
        follower = tl.load(list_ptr + number, mask=is_follower, other=-1).to(tl.int64)
        follower = tl.where(is_end(follower, record_ptr), -1, follower)
        if protected is not None:
            follower = _unless_protected(follower, protected, vocab)
        token = tl.maximum(token, follower)
    return tl.where(token < vocab, token, -1)


@triton.jit
def _unless_protected(token, protected, vocab):
    """-1 in the place of what is protected anyway."""
    is_token = (token >= 0) & (token < vocab)
    is_both = tl.load(protected.mask + token, mask=is_token, other=0) != 0
    return tl.where(is_both, -1, token)


@triton.jit
def is_end(token, record_ptr):
    """Whether each token ends the request."""
    ends_ptr = record_ptr + C.COLUMN.ENDS
    ends = tl.load(ends_ptr + tl.arange(0, C.MOST_ENDS))
    found = token < token
    # Few requests have more than one or two, which stand first.
    for j in range(0, tl.sum((ends >= 0).to(tl.int32), axis=0)):
        found = found | (token == tl.load(ends_ptr + j))
    return found


@triton.jit
def is_kept(token, protected, guard, row, record_ptr, vocab):
    """Whether each token is kept at a row; none of them is above the vocabulary."""
    found = is_end(token, record_ptr)
    if protected is not None:
        is_token = (token >= 0) & (token < vocab)
        found = found | (tl.load(protected.mask + token, mask=is_token, other=0) != 0)
    if guard is not None:
        list_ptr = guard.followers + row.to(tl.int64) * C.MOST_FOLLOWERS
        for j in range(0, tl.load(guard.num_followers + row)):
            found = found | (token == tl.load(list_ptr + j))
    return found
