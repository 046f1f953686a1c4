"""The screened head's two passes over a row's proxy logits: the best of each block, then what may be larger than the
best of those. The arithmetic is that of kernels/screen.py, operation by operation, so that the same ids are left."""

import triton
import triton.language as tl


@triton.jit
def _score(x, temperature_ptr, added_ptr, row, at, there, TEMPERATURE: tl.constexpr, ADDED: tl.constexpr):
    """logit / temperature + added; -inf for what is no number, and beyond the row."""
    if TEMPERATURE:
        x = tl.div_rn(x, tl.load(temperature_ptr + row))
    if ADDED:
        x = x + tl.load(added_ptr + at, mask=there, other=0.0)
    return tl.where(there & (x == x), x, float("-inf"))


@triton.jit
def screen_first(
    proxy_ptr, offset_ptr, temperature_ptr, added_ptr, first_ptr, size, stride, added_stride,
    TEMPERATURE: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The id that looks best in each block, int64 [rows, blocks]. Programs: blocks, rows."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    there = ids < size
    middle = tl.load(proxy_ptr + row * stride + ids, mask=there, other=0.0)
    middle = middle + tl.load(offset_ptr + ids, mask=there, other=0.0)
    at = row * added_stride + ids
    scores = _score(middle, temperature_ptr, added_ptr, row, at, there, TEMPERATURE, ADDED)
    best = tl.min(tl.where(scores == tl.max(scores), ids, size))
    tl.store(first_ptr + row * tl.num_programs(0) + block, best.to(tl.int64))


@triton.jit
def screen_survivors(
    proxy_ptr, offset_ptr, radius_ptr, margin_ptr, reach_ptr, temperature_ptr, added_ptr, first_ptr, best_ptr,
    counts_ptr, left_ptr, size, stride, added_stride, OF_OFFSET: tl.constexpr, TINY: tl.constexpr,
    TEMPERATURE: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Ids whose bound reaches best [rows] and that are not first, int32 in left [rows, size], in no order, and their
    number; counts begin at zero. Programs: blocks, rows."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    there = ids < size
    offset = tl.load(offset_ptr + ids, mask=there, other=0.0)
    middle = tl.load(proxy_ptr + row * stride + ids, mask=there, other=0.0) + offset
    slack = tl.load(radius_ptr + ids, mask=there, other=0.0) * tl.load(reach_ptr + 2 * row)
    slack += tl.load(margin_ptr + ids, mask=there, other=0.0) * tl.load(reach_ptr + 2 * row + 1)
    slack += tl.abs(offset) * OF_OFFSET + TINY
    upper = middle + slack
    upper = tl.where(upper == upper, upper, float("inf"))
    at = row * added_stride + ids
    scores = _score(upper, temperature_ptr, added_ptr, row, at, there, TEMPERATURE, ADDED)
    first = tl.load(first_ptr + row * tl.num_programs(0) + block)
    hits = (there & (scores >= tl.load(best_ptr + row)) & (ids != first)).to(tl.int32)
    count = tl.sum(hits)
    if count > 0:
        start = tl.atomic_add(counts_ptr + row, count)
        tl.store(left_ptr + row * size + start + tl.cumsum(hits) - 1, ids, mask=hits > 0)
