"""Norms of heads, rotation, and the write into the pages: one program for a row's query head, or for its key and value.

Only in int4 pages do programs meet: a byte of keys is of two tokens. Each program changes its own nibble by an atomic
exclusive or of what it finds there and what it wants there; nobody else changes that nibble, so the order is free.
"""

import triton
import triton.language as tl

from nanokit.kernels.gpu.device.activations import magnitudes, scale_and_inverse, to_codes
from nanokit.kernels.gpu.device.rows import inverse_rms

INFINITE = tl.constexpr(0x7F800000)  # as `magnitudes` gives it


@triton.jit
def _rotated(x_ptr, norm_ptr, cos, sin, i, inside, eps, DIM: tl.constexpr):
    """Both halves of a head, normed if there is a weight, then rotated; pairs (i, i + DIM / 2)."""
    first = tl.load(x_ptr + i, mask=inside, other=0.0)
    second = tl.load(x_ptr + DIM // 2 + i, mask=inside, other=0.0)
    if norm_ptr is not None:
        scale = inverse_rms(tl.sum(first * first + second * second, axis=0), DIM, eps)
        first = first * scale * tl.load(norm_ptr + i, mask=inside, other=0.0)
        second = second * scale * tl.load(norm_ptr + DIM // 2 + i, mask=inside, other=0.0)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _quantized(first, second, scale_ptr, peak_ptr, LIMIT: tl.constexpr):
    """Codes of both halves of a head by their common peak, or by one that is given; stores the scale. A peak that is
    not finite stays, since codes cannot hold it."""
    peak = tl.maximum(tl.max(magnitudes(first), axis=0), tl.max(magnitudes(second), axis=0))
    if peak_ptr is not None:
        peak = tl.where(peak < INFINITE, magnitudes(tl.load(peak_ptr)), peak)
    scale, inverse = scale_and_inverse(peak, LIMIT)
    tl.store(scale_ptr, scale)
    return to_codes(first, inverse, LIMIT), to_codes(second, inverse, LIMIT)


@triton.jit
def _change_nibble(word_ptr, shift, codes, inside):
    """Set four bits of each int32 to code + 8."""
    found = (tl.load(word_ptr, mask=inside, other=0) >> shift) & 15
    tl.atomic_xor(word_ptr, (found ^ (codes + 8)) << shift, mask=inside, sem="relaxed")


@triton.jit
def _store(
    k, k_second, v, v_second, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, peaks_ptr, slot, head, i, inside,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """One token's key and value of one head, as nanokit/kv/pages.py draws them. LIMIT: 0 (numbers), 127 or 7.
    peaks_ptr: what the keys of each head are scaled by, then the values; None: their own."""
    page = slot // BLOCK_SIZE * KV_HEADS + head
    offset = slot % BLOCK_SIZE
    group = page * (BLOCK_SIZE // 16) + offset // 16
    lane = offset % 16
    if LIMIT != 0:
        at = page * BLOCK_SIZE + offset
        key_peak = None if peaks_ptr is None else peaks_ptr + head
        value_peak = None if peaks_ptr is None else peaks_ptr + KV_HEADS + head
        k, k_second = _quantized(k, k_second, key_scales_ptr + at, key_peak, LIMIT)
        v, v_second = _quantized(v, v_second, value_scales_ptr + at, value_peak, LIMIT)
    if LIMIT == 7:
        words = keys_ptr + group * (DIM * 2) + lane // 4 % 2 + i * 2
        shift = (lane % 4 * 8 + lane // 8 * 4).to(tl.int32)
        _change_nibble(words, shift, k, inside)
        _change_nibble(words + DIM, shift, k_second, inside)
        pair = (v + 8) | ((v_second + 8) << 4)
        tl.store(values_ptr + (group * 16 + lane) * (DIM // 2) + i, pair.to(tl.uint8), mask=inside)
    else:
        at = keys_ptr + group * (DIM * 16) + lane + i * 16
        tl.store(at, k.to(keys_ptr.dtype.element_ty), mask=inside)
        tl.store(at + DIM * 8, k_second.to(keys_ptr.dtype.element_ty), mask=inside)
        at = values_ptr + (group * 16 + lane) * DIM + i
        tl.store(at, v.to(values_ptr.dtype.element_ty), mask=inside)
        tl.store(at + DIM // 2, v_second.to(values_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rotate_and_store(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, eps,
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, peaks_ptr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, LIMIT: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Program (row, head): query heads first, then those of keys and values. HALF: a power of two, DIM / 2 or more.
    keys_ptr: of int32 for int4 pages."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, HALF)
    inside = i < DIM // 2
    cos = tl.load(cos_ptr + row * (DIM // 2) + i, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + row * (DIM // 2) + i, mask=inside, other=0.0)
    if head < HEADS:
        query = q_ptr + (row * HEADS + head) * DIM
        first, second = _rotated(query, q_norm_ptr, cos, sin, i, inside, eps, DIM)
        tl.store(query + i, first, mask=inside)
        tl.store(query + DIM // 2 + i, second, mask=inside)
    else:
        at = (row * KV_HEADS + head - HEADS) * DIM
        k, k_second = _rotated(k_ptr + at, k_norm_ptr, cos, sin, i, inside, eps, DIM)
        v = tl.load(v_ptr + at + i, mask=inside, other=0.0)
        v_second = tl.load(v_ptr + at + DIM // 2 + i, mask=inside, other=0.0)
        _store(
            k, k_second, v, v_second, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, peaks_ptr,
            tl.load(slots_ptr + row), head - HEADS, i, inside, KV_HEADS, DIM, BLOCK_SIZE, LIMIT,
        )  # fmt: skip
