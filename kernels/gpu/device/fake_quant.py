"""Triton code of fake quantization. A program takes GROUPS groups, BLOCK columns of each at a time."""

import triton
import triton.language as tl

ROUNDING = tl.constexpr(
    1.5 * 2.0**52
)  # fp64: added and taken away again, it leaves the nearest whole number, ties even
LARGEST = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)  # fp32
HALF = tl.constexpr(1 << 41)  # of the last of eleven bits, in the digits of fp64
SMALLEST = tl.constexpr(2.0**-116)  # of a scale or minimum that is not zero


@triton.jit
def _within(x):
    return tl.abs(x) <= LARGEST  # false for NaN


@triton.jit
def _eleven_bits(x):
    """fp64 to the nearest number of eleven significant bits that fp32 holds, ties to even; what is not finite stays."""
    bits = x.to(tl.int64, bitcast=True)
    rounded = ((bits + (HALF - 1) + ((bits >> 42) & 1)) & (-2 * HALF)).to(tl.float64, bitcast=True)
    rounded = tl.where(tl.abs(rounded) < SMALLEST, 0.0, rounded)
    return tl.where(tl.abs(x) <= LARGEST, rounded, x).to(tl.float32)


@triton.jit
def quantize(
    w_ptr,  # fp32 [groups, group]
    scales_ptr,  # fp32 [groups], read where GIVEN
    minimums_ptr,  # fp32 [groups], read where GIVEN and not SYMMETRIC
    out_ptr,  # fp32 [groups, group]
    bits_ptr,  # uint8 [groups, group / 8], written where TRAINING: bit j of byte i: the gradient of 8 i + j passes
    groups,
    GROUP: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    GIVEN: tl.constexpr,
    TRAINING: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = index < groups
    minimum = tl.zeros((GROUPS,), tl.float32)
    if GIVEN:
        scale = tl.load(scales_ptr + index, mask=inside, other=0.0)
        if not SYMMETRIC:
            minimum = tl.load(minimums_ptr + index, mask=inside, other=0.0)
    else:
        low = tl.full((GROUPS,), float("inf"), tl.float32)
        high = tl.full((GROUPS,), float("-inf"), tl.float32)
        for first in range(0, GROUP, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            some = (columns < GROUP)[None, :]
            w = tl.load(w_ptr + index[:, None] * GROUP + columns[None, :], mask=inside[:, None] & some, other=0.0)
            w = tl.where(w == w, w, float("inf"))  # minima and maxima may pass over NaN; infinity ends as NaN below
            low = tl.minimum(low, tl.min(tl.where(some, w, float("inf")), axis=1))
            high = tl.maximum(high, tl.max(tl.where(some, w, float("-inf")), axis=1))
        low64, high64 = low.to(tl.float64), high.to(tl.float64)
        if SYMMETRIC:
            scale = _eleven_bits(tl.maximum(tl.abs(low64), tl.abs(high64)) / HIGHEST)
        else:
            scale = _eleven_bits((high64 - low64) / (HIGHEST - LOWEST))
            minimum = _eleven_bits(low64 - LOWEST * scale.to(tl.float64))
    scale64, minimum64 = scale.to(tl.float64), minimum.to(tl.float64)
    lower, upper = LOWEST * scale64, HIGHEST * scale64
    spanned = _within(lower) & _within(upper) & _within(lower + minimum64) & _within(upper + minimum64) & (scale >= 0)
    scale = tl.where(spanned, scale, float("nan"))
    divisor = tl.where(scale == 0, 1.0, scale).to(tl.float64)

    for first in range(0, GROUP, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        there = inside[:, None] & (columns < GROUP)[None, :]
        w = tl.load(w_ptr + index[:, None] * GROUP + columns[None, :], mask=there, other=0.0)
        steps = (w.to(tl.float64) - minimum64[:, None]) / divisor[:, None]
        steps = tl.where((scale == 0)[:, None], 0.0, steps)
        code = (steps + ROUNDING) - ROUNDING  # zero comes out as 0.0, never -0.0
        beyond = (code < LOWEST) | (code > HIGHEST)
        code = tl.minimum(tl.maximum(code, LOWEST), HIGHEST).to(tl.float32)
        value = code * scale[:, None] + minimum[:, None]
        value = tl.where(_within(w), value, float("nan"))
        tl.store(out_ptr + index[:, None] * GROUP + columns[None, :], value, mask=there)
        if TRAINING:
            passes = tl.reshape(1 - beyond.to(tl.int32), (GROUPS, BLOCK // 8, 8))
            bits = tl.sum(passes << tl.arange(0, 8)[None, None, :], axis=2)
            byte = first // 8 + tl.arange(0, BLOCK // 8)
            there = inside[:, None] & (byte < GROUP // 8)[None, :]
            tl.store(bits_ptr + index[:, None] * (GROUP // 8) + byte[None, :], bits.to(tl.uint8), mask=there)


@triton.jit
def pass_through(
    upstream_ptr,  # fp32 [weights]
    bits_ptr,  # uint8 [weights / 8], as above
    out_ptr,  # fp32 [weights]
    weights,
    BYTES: tl.constexpr,
):
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    bit = tl.arange(0, 8)
    offsets = byte[:, None] * 8 + bit[None, :]
    there = offsets < weights
    bits = tl.load(bits_ptr + byte, mask=byte * 8 < weights, other=0).to(tl.int32)
    passes = (bits[:, None] >> bit[None, :]) & 1
    upstream = tl.load(upstream_ptr + offsets, mask=there, other=0.0)
    tl.store(out_ptr + offsets, tl.where(passes != 0, upstream, 0.0), mask=there)
