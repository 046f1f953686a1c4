"""Super-blocks of 256 weights: Q2_K … Q6_K and IQ4_XS.

A super-block has f16 scales (and minimums) and small whole-number sub-scales for its 8 groups of 32 or 16
groups of 16. Here a sub-block becomes a group with a float32 scale of its own (`d * sub-scale`), which is
the product that ggml forms before it multiplies by the code, so nothing is lost. Layouts (b = byte,
xN = groups of N):

    Q2_K    16 b sub-scales (scale, minimum: 4 bits each) | 64 b codes | d f16 | dmin f16    x16
    Q3_K    32 b high bits | 64 b low bits | 12 b 6-bit sub-scales | d f16                   x16
    Q4_K    d f16 | dmin f16 | 12 b 6-bit sub-scales and minimums | 128 b nibbles            x32
    Q5_K    d f16 | dmin f16 | 12 b | 32 b high bits | 128 b nibbles                         x32
    Q6_K    128 b low nibbles | 64 b high bits | 16 int8 sub-scales | d f16 (last)           x16
    IQ4_XS  d f16 | 2 b high and 4 b low bits of the sub-scales | 128 b nibbles              x32

Codes of fewer than four bits are stored in planes: a run of bytes holds the first 32 weights in bits 0-1,
the next 32 in bits 2-3, and so on. Functions take and return what those of `blocks` do, with scales [n,
groups].
"""

import numpy as np

from nanokit.quant.blocks import Unpacked, floats, nibbles


def _planes(packed: np.ndarray, run: int, bits: int) -> np.ndarray:
    """uint8 [n, bytes] -> uint8 [n, bytes * 8 // bits]: of each `run` bytes, plane after plane."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    planes = packed.reshape(len(packed), -1, 1, run) >> shifts
    planes &= np.uint8((1 << bits) - 1)
    return planes.reshape(len(packed), -1)


def _six_bit_pairs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 sub-scales and 8 sub-minimums of Q4_K and Q5_K, float32 [n, 8] each.

    Bytes 0-3 and 4-7 hold six bits of scales and minimums 0-3; their two top bits, with a nibble of bytes
    8-11 each, make scales and minimums 4-7.
    """
    first, second, last = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 0x3F, (last & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    minimums = np.concatenate([second & 0x3F, (last >> 4) | ((second >> 2) & 0x30)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def q2_k(blocks: np.ndarray) -> Unpacked:
    sub = blocks[:, :16]
    scales = floats(blocks, 80) * (sub & 0x0F).astype(np.float32)
    minimums = floats(blocks, 82) * (sub >> 4).astype(np.float32)
    return _planes(blocks[:, 16:80], 32, 2).view(np.int8), scales, -minimums


def q3_k(blocks: np.ndarray) -> Unpacked:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    sub = _planes(low, 8, 4) | (_planes(high, 4, 2) << np.uint8(4))
    scales = floats(blocks, 108) * (sub.view(np.int8) - np.int8(32)).astype(np.float32)
    # A high bit that is *clear* subtracts four.
    codes = _planes(blocks[:, 32:96], 32, 2) | (_planes(blocks[:, :32], 32, 1) << np.uint8(2))
    return codes.view(np.int8) - np.int8(4), scales, None


def q4_k(blocks: np.ndarray) -> Unpacked:
    sub_scales, sub_minimums = _six_bit_pairs(blocks[:, 4:16])
    codes = nibbles(blocks[:, 16:], 32)
    return codes.view(np.int8), floats(blocks, 0) * sub_scales, -(floats(blocks, 2) * sub_minimums)


def q5_k(blocks: np.ndarray) -> Unpacked:
    sub_scales, sub_minimums = _six_bit_pairs(blocks[:, 4:16])
    codes = nibbles(blocks[:, 48:], 32) | (_planes(blocks[:, 16:48], 32, 1) << np.uint8(4))
    return codes.view(np.int8), floats(blocks, 0) * sub_scales, -(floats(blocks, 2) * sub_minimums)


def q6_k(blocks: np.ndarray) -> Unpacked:
    scales = floats(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    codes = nibbles(blocks[:, :128], 64) | (_planes(blocks[:, 128:192], 32, 2) << np.uint8(4))
    return codes.view(np.int8) - np.int8(32), scales, None


def iq4_xs(blocks: np.ndarray) -> Unpacked:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    low = np.repeat(blocks[:, 4:8], 2, axis=1) >> np.tile(np.array([0, 4], np.uint8), 4)
    sub = (low & np.uint8(0x0F)) | ((high & 3).astype(np.uint8) << np.uint8(4))
    scales = floats(blocks, 0) * (sub.view(np.int8) - np.int8(32)).astype(np.float32)
    return nibbles(blocks[:, 8:], 16).view(np.int8), scales, None
