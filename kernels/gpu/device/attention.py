"""Attention over pages on the device: chunks of the context, and their fold from left to right.

A program holds the query heads of one KV head for a tile of rows, stacked to [M, D] (row m: head m % GROUP of the
tile's row m // GROUP), and walks the pages in blocks of BLOCK tokens. D is DIM padded to a power of two.

Nothing that a row does not see reaches it, be it NaN (0 * NaN is NaN): its scores are replaced, and where some row does
not see all of a block, values that are not finite are taken out of the product and make the rows that see them NaN.
"""

import triton
import triton.language as tl

LANES = tl.constexpr(16)  # tokens side by side in a page of keys
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _product(a, b, EXACT: tl.constexpr):
    """a [M, K] · b [K, N] on tensor cores. EXACT: b's numbers have at most the 11 bits of tf32, so that only a is cut
    in two and the products with b's lower half are spared."""
    if EXACT:
        high = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        low = tl.dot(a - high, b, input_precision="tf32")
        return tl.dot(high, b, low, input_precision="tf32")
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _value_dims(packed: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr):
    """The dimension of each column of a tile of values, DIM or more where there is none. Packed values lie in halves,
    each padded by itself."""
    column = tl.arange(0, D)
    if packed and D != DIM:
        half = column % (D // 2)
        return tl.where(half < DIM // 2, half + column // (D // 2) * (DIM // 2), DIM)
    return column


@triton.jit
def _keys(here, DIM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Keys [D, BLOCK] of BLOCK tokens, unscaled, fp32."""
    dim = tl.arange(0, D)[:, None]
    if here.dtype.element_ty == tl.uint8:
        byte = tl.arange(0, BLOCK // 2)[None, :]
        pairs = tl.load(here + byte // 8 * (8 * DIM) + dim * 8 + byte % 8, mask=dim < DIM, other=0x88)
        both = tl.join((pairs & 15).to(tl.int8), (pairs >> 4).to(tl.int8))
        in_order = tl.permute(tl.reshape(both, [D, BLOCK // LANES, 8, 2]), [0, 1, 3, 2])
        return tl.reshape(in_order - 8, [D, BLOCK]).to(tl.float32)
    token = tl.arange(0, BLOCK)[None, :]
    offset = token // LANES * (LANES * DIM) + dim * LANES + token % LANES
    return tl.load(here + offset, mask=dim < DIM, other=0).to(tl.float32)


@triton.jit
def _values(here, DIM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Values [BLOCK, D] of BLOCK tokens, unscaled, fp32."""
    token = tl.arange(0, BLOCK)[:, None]
    if here.dtype.element_ty == tl.uint8:
        byte = tl.arange(0, D // 2)[None, :]
        pairs = tl.load(here + token * (DIM // 2) + byte, mask=byte < DIM // 2, other=0x88)
        both = tl.join((pairs & 15).to(tl.int8), (pairs >> 4).to(tl.int8))
        return tl.reshape(tl.permute(both - 8, [0, 2, 1]), [BLOCK, D]).to(tl.float32)
    dim = tl.arange(0, D)[None, :]
    return tl.load(here + token * DIM + dim, mask=dim < DIM, other=0).to(tl.float32)


@triton.jit
def _block(
    peak, total, acc, q, position, pages, blocks_ptr, kv_head, start, factor,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add BLOCK tokens from `start` on to a softmax under way. MASKED: some row does not see all of them."""
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr = pages
    SCALED: tl.constexpr = keys_ptr.dtype.element_ty.is_int()
    PER_BYTE: tl.constexpr = 2 if keys_ptr.dtype.element_ty == tl.uint8 else 1
    EXACT: tl.constexpr = keys_ptr.dtype.element_ty != tl.float32
    token = start + tl.arange(0, BLOCK)
    page = tl.load(blocks_ptr + start // PAGE).to(tl.int64) * KV_HEADS + kv_head
    first = page * PAGE + start % PAGE
    score = _product(q, _keys(keys_ptr + first * (DIM // PER_BYTE), DIM, D, BLOCK), EXACT)
    if SCALED:
        score = score * (tl.load(key_scales_ptr + first + tl.arange(0, BLOCK)) * factor)[None, :]
    else:
        score = score * factor
    values = _values(values_ptr + first * (DIM // PER_BYTE), DIM, D, BLOCK)
    seen = token[None, :] <= position[:, None]
    if MASKED:
        score = tl.where(seen, score, NOTHING)
    top = tl.maximum(peak, tl.max(score, axis=1))
    base = tl.where(top == NOTHING, 0.0, top)
    p = tl.exp2(score - base[:, None])
    old = tl.exp2(peak - base)
    total = total * old + tl.sum(p, axis=1)
    if SCALED:
        p = p * tl.load(value_scales_ptr + first + tl.arange(0, BLOCK))[None, :]
        if MASKED:
            p = tl.where(seen, p, 0.0)
    elif MASKED:
        finite = tl.abs(values) < float("inf")
        broken = tl.sum(tl.where(finite, 0, 1), axis=1) > 0
        values = tl.where(finite, values, 0.0)
        total += tl.sum(tl.where(seen & broken[None, :], float("nan"), 0.0), axis=1)
    return top, total, acc * old[:, None] + _product(p, values, EXACT)


@triton.jit
def _chunk(
    q, position, pages, blocks_ptr, kv_head, chunk, first_position, end, factor,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr, PAGE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum and sum [M], and weighted values [M, D] of the softmax over one chunk; -inf, 0 and 0 where a row sees
    nothing of it."""
    peak = tl.full([M], NOTHING, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    begin = chunk * CHUNK
    stop = tl.minimum(begin + CHUNK, end)
    edge = tl.minimum(tl.maximum((first_position + 1) // BLOCK * BLOCK, begin), stop)  # before it every row sees all
    for start in range(begin, edge, BLOCK):
        peak, total, acc = _block(peak, total, acc, q, position, pages, blocks_ptr, kv_head, start, factor,
                                  KV_HEADS, DIM, D, PAGE, BLOCK, False)  # fmt: skip
    for start in range(edge, stop, BLOCK):
        peak, total, acc = _block(peak, total, acc, q, position, pages, blocks_ptr, kv_head, start, factor,
                                  KV_HEADS, DIM, D, PAGE, BLOCK, True)  # fmt: skip
    return peak, total, acc


@triton.jit
def _fold(peak, total, acc, next_peak, next_total, next_acc):
    """Two neighbouring parts of a softmax as one: peak, total [M], acc [M, D]. Every row sees the first token, so that
    at most one of the peaks is -inf."""
    top = tl.maximum(peak, next_peak)
    old, new = tl.exp2(peak - top), tl.exp2(next_peak - top)
    return top, total * old + next_total * new, acc * old[:, None] + next_acc * new[:, None]


@triton.jit(do_not_specialize=["rows"])
def attend(
    q_ptr, out_ptr, norms_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, tiles_ptr, blocks_ptr, factor,
    rows,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    PAGE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KV_HEADS), or with SPLIT (tiles, KV_HEADS, chunks).

    Whole: out [rows, HEADS, DIM] is the result. SPLIT: out [chunks, rows, HEADS, DIM] takes the weighted values of each
    chunk and norms [chunks, rows, HEADS, 2] its maxima and sums, for `merge`. factor: scale * log2(e).
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile, kv_head = tiles_ptr + 4 * tl.program_id(0), tl.program_id(1)
    first_row, count, first_position = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    blocks_ptr += tl.load(tile + 3)
    end = first_position + count
    pages = (keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr)
    stacked = tl.arange(0, M)
    in_tile = stacked // GROUP < count
    head = (first_row + stacked // GROUP).to(tl.int64) * HEADS + kv_head * GROUP + stacked % GROUP
    position = first_position + stacked // GROUP
    dim = tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + head[:, None] * DIM + dim, mask=in_tile[:, None] & (dim < DIM), other=0.0)
    dim = _value_dims(keys_ptr.dtype.element_ty == tl.uint8, DIM, D)[None, :]
    if SPLIT:
        chunk = tl.program_id(2)
        if chunk * CHUNK < end:
            peak, total, acc = _chunk(q, position, pages, blocks_ptr, kv_head, chunk, first_position, end, factor,
                                      KV_HEADS, DIM, D, M, PAGE, CHUNK, BLOCK)  # fmt: skip
            head += chunk.to(tl.int64) * rows * HEADS
            tl.store(norms_ptr + 2 * head, peak, mask=in_tile)
            tl.store(norms_ptr + 2 * head + 1, total, mask=in_tile)
            tl.store(out_ptr + head[:, None] * DIM + dim, acc, mask=in_tile[:, None] & (dim < DIM))
    else:
        peak = tl.full([M], NOTHING, tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, D], tl.float32)
        for chunk in range(0, (end + CHUNK - 1) // CHUNK):
            part = _chunk(q, position, pages, blocks_ptr, kv_head, chunk, first_position, end, factor,
                          KV_HEADS, DIM, D, M, PAGE, CHUNK, BLOCK)  # fmt: skip
            peak, total, acc = _fold(peak, total, acc, part[0], part[1], part[2])
        tl.store(out_ptr + head[:, None] * DIM + dim, tl.div_rn(acc, total[:, None]),
                 mask=in_tile[:, None] & (dim < DIM))  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def merge(
    parts_ptr, norms_ptr, out_ptr, positions_ptr, rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, HEADS): fold what `attend` stored for each chunk that the row sees, as the whole one would have."""
    row = tl.program_id(0).to(tl.int64)
    head = row * HEADS + tl.program_id(1) + tl.arange(0, 1)
    dim = tl.arange(0, D)[None, :]
    peak = tl.full([1], NOTHING, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, D], tl.float32)
    here = head
    for _ in range(0, tl.load(positions_ptr + row).to(tl.int32) // CHUNK + 1):
        part = tl.load(parts_ptr + here[:, None] * DIM + dim, mask=dim < DIM, other=0.0)
        peak, total, acc = _fold(
            peak, total, acc, tl.load(norms_ptr + 2 * here), tl.load(norms_ptr + 2 * here + 1), part
        )
        here += rows * HEADS
    tl.store(out_ptr + head[:, None] * DIM + dim, tl.div_rn(acc, total[:, None]), mask=dim < DIM)
