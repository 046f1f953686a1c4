"""Quantizing on the device: the arithmetic of kernels/activations.py, which norms, gates and KV pages share.

A row lies in registers as [BLOCK] columns; codes go out as they lie, so that a thread's four or more neighbours leave
in one store. The peaks of groups and the sums of 16 columns are taken by reshaping, not by another load.
"""

import triton
import triton.language as tl

TINY = tl.constexpr(2.0**-100)  # as kernels/activations.py
TO_INTEGER = tl.constexpr(1.5 * 2**23)  # added and taken away, it rounds what is below 2^22 to even
MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def magnitudes(x):
    """|x| as the whole numbers that its bits are: in the same order, and a NaN above infinity, where max keeps it."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def scale_and_inverse(peak_bits, LIMIT: tl.constexpr):
    """peak / LIMIT and LIMIT / peak, 0 and 0 below TINY; the peak as `magnitudes` gives it."""
    peak = peak_bits.to(tl.float32, bitcast=True)
    vanishing = peak < TINY
    divisor = tl.where(vanishing, 1.0, peak)
    scale = tl.where(vanishing, 0.0, tl.div_rn(divisor, LIMIT * 1.0))
    return scale, tl.where(vanishing, 0.0, tl.div_rn(LIMIT * 1.0, divisor))


@triton.jit
def to_codes(x, inverse, LIMIT: tl.constexpr):
    """rint(x * inverse) within ±LIMIT, int32; 0 for what is not a number. Clamped first: LIMIT is a whole number, and
    only below 2^22 does the addition round."""
    y = x * inverse
    y = tl.where(y == y, y, 0.0)
    y = tl.minimum(tl.maximum(y, -LIMIT * 1.0), LIMIT * 1.0)
    return ((y + TO_INTEGER) - TO_INTEGER).to(tl.int32)


@triton.jit
def store_codes(codes, codes_ptr, sums_ptr, row, first, rows, columns, PLANES: tl.constexpr, BLOCK: tl.constexpr):
    """Store codes [BLOCK] of a row from column `first` on, and their sums over 16 columns."""
    column = first + tl.arange(0, BLOCK)
    inside = column < columns
    here = codes_ptr + row * columns + column
    if PLANES == 2:
        high = (codes + 128) >> 8
        tl.store(here, high.to(tl.int8), mask=inside)
        tl.store(here + rows.to(tl.int64) * columns, (codes - 256 * high).to(tl.int8), mask=inside)
    else:
        tl.store(here, codes.to(tl.int8), mask=inside)
    part = first // 16 + tl.arange(0, BLOCK // 16)
    sums = tl.sum(tl.reshape(codes, [BLOCK // 16, 16]), axis=1).to(tl.float32)
    tl.store(sums_ptr + row * (columns // 16) + part, sums, mask=part < columns // 16)


@triton.jit
def store_groups(
    x, codes_ptr, scales_ptr, sums_ptr, row, first, rows, columns,
    LIMIT: tl.constexpr, GROUP: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize x [BLOCK], the columns of a row from `first` on, each GROUP by its own peak, and store all of it."""
    grouped = tl.reshape(x, [BLOCK // GROUP, GROUP])
    scale, inverse = scale_and_inverse(tl.max(magnitudes(grouped), axis=1), LIMIT)
    group = first // GROUP + tl.arange(0, BLOCK // GROUP)
    tl.store(scales_ptr + row * (columns // GROUP) + group, scale, mask=group < columns // GROUP)
    codes = tl.reshape(to_codes(grouped, inverse[:, None], LIMIT), [BLOCK])
    store_codes(codes, codes_ptr, sums_ptr, row, first, rows, columns, PLANES, BLOCK)


@triton.jit
def store_input(
    x, x_ptr, codes_ptr, scales_ptr, sums_ptr, row, first, rows, columns,
    LIMIT: tl.constexpr, GROUP: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store x [BLOCK], the columns of a row from `first` on, as a product's input: as it is if GROUP is 0, or
    quantized."""
    if GROUP == 0:
        column = first + tl.arange(0, BLOCK)
        tl.store(x_ptr + row * columns + column, x, mask=column < columns)
    else:
        store_groups(x, codes_ptr, scales_ptr, sums_ptr, row, first, rows, columns, LIMIT, GROUP, PLANES, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def quantize_groups(
    x_ptr, codes_ptr, scales_ptr, sums_ptr, rows, columns,
    LIMIT: tl.constexpr, GROUP: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, i): BLOCK columns from i * BLOCK on."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + column, mask=column < columns, other=0.0)
    store_groups(x, codes_ptr, scales_ptr, sums_ptr, row, first, rows, columns, LIMIT, GROUP, PLANES, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def quantize_rows(
    x_ptr, peak_ptr, codes_ptr, scales_ptr, sums_ptr, rows, columns,
    LIMIT: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program row: one scale for all its columns. GIVEN: from the peak at peak_ptr; else from the row's own."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if GIVEN:
        peak = tl.load(peak_ptr).to(tl.int32, bitcast=True)
    else:
        largest = tl.zeros([BLOCK], tl.int32)
        for first in range(0, columns, BLOCK):
            x = tl.load(x_ptr + row * columns + first + column, mask=first + column < columns, other=0.0)
            largest = tl.maximum(largest, magnitudes(x))
        peak = tl.max(largest, axis=0)
    scale, inverse = scale_and_inverse(peak, LIMIT)
    tl.store(scales_ptr + row, scale)
    for first in range(0, columns, BLOCK):
        x = tl.load(x_ptr + row * columns + first + column, mask=first + column < columns, other=0.0)
        store_codes(to_codes(x, inverse, LIMIT), codes_ptr, sums_ptr, row, first, rows, columns, 1, BLOCK)
