"""Blocks of 32 weights: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL and MXFP4.

Layouts, little-endian, as ggml defines them (b = byte):

    Q4_0    scale f16 | 16 b nibbles                    w = d (q - 8)
    Q4_1    scale f16 | minimum f16 | 16 b nibbles      w = d q + m
    Q5_0    scale f16 | 4 b high bits | 16 b nibbles    w = d (q - 16)
    Q5_1    scale f16 | minimum f16 | 4 b | 16 b        w = d q + m
    Q8_0    scale f16 | 32 int8                         w = d q
    IQ4_NL  scale f16 | 16 b nibbles                    w = d IQ4_LEVELS[q]
    MXFP4   exponent u8 (e8m0) | 16 b nibbles           w = 2^(e-128) FP4_LEVELS[q]

Byte j of the nibbles holds weight j in its low half and weight j + 16 in its high half. Each function takes
blocks as raw bytes (uint8 [n, block_bytes]) and returns codes int8 [n, 32], scales float32 [n, 1] and
minimums or None. Whole-array numpy on a slice at a time; a compiled unpacker was rejected here because the
kernels bring one.
"""

import numpy as np

Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None]

IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
# e2m1 times two, so that all levels are whole; the block scale is halved in return.
FP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def floats(blocks: np.ndarray, at: int) -> np.ndarray:
    """The f16 at byte `at` of every block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def nibbles(packed: np.ndarray, run: int) -> np.ndarray:
    """uint8 [n, bytes] -> uint8 [n, 2 * bytes]: of each run of `run` bytes, all low halves, then all high
    halves.

    Works on 8 bytes at a time, down the blocks: numpy's inner loop is then long instead of 16 steps.
    """
    words = np.ascontiguousarray(packed).view(np.uint64)
    n, per_run = len(words), run // 8
    out = np.empty((n, 2 * words.shape[1]), np.uint64)
    mask = np.uint64(0x0F0F0F0F0F0F0F0F)
    for i in range(words.shape[1]):
        low = i // per_run * 2 * per_run + i % per_run
        np.bitwise_and(words[:, i], mask, out=out[:, low])
        np.bitwise_and(words[:, i] >> np.uint64(4), mask, out=out[:, low + per_run])
    return out.view(np.uint8)


def _fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """The 32 high bits stored at byte `at`: 0 or 16 per weight, uint8 [n, 32]."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def q4_0(blocks: np.ndarray) -> Unpacked:
    return nibbles(blocks[:, 2:], 16).view(np.int8) - np.int8(8), floats(blocks, 0), None


def q4_1(blocks: np.ndarray) -> Unpacked:
    return nibbles(blocks[:, 4:], 16).view(np.int8), floats(blocks, 0), floats(blocks, 2)


def q5_0(blocks: np.ndarray) -> Unpacked:
    codes = nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks, 2)
    return codes.view(np.int8) - np.int8(16), floats(blocks, 0), None


def q5_1(blocks: np.ndarray) -> Unpacked:
    codes = nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks, 4)
    return codes.view(np.int8), floats(blocks, 0), floats(blocks, 2)


def q8_0(blocks: np.ndarray) -> Unpacked:
    return blocks[:, 2:].view(np.int8), floats(blocks, 0), None


def iq4_nl(blocks: np.ndarray) -> Unpacked:
    return nibbles(blocks[:, 2:], 16).view(np.int8), floats(blocks, 0), None


def half_power(exponent: np.ndarray) -> np.ndarray:
    """2^(e - 128) of e8m0 bytes, float32: half of what they say, since levels are doubled; NaN for 255.

    From e = 2 on the exponent field is e - 1, below it the number is subnormal. 255 is NaN in e8m0; ggml would go on
    with 2^127, and refuses it when it checks a file.
    """
    wide = exponent.astype(np.uint32)
    bits = np.where(wide < 2, np.uint32(0x00200000) << wide, (wide - 1) << np.uint32(23))
    return np.where(wide == 255, np.float32(np.nan), bits.astype(np.uint32).view(np.float32))


def mxfp4(blocks: np.ndarray) -> Unpacked:
    return nibbles(blocks[:, 1:], 16).view(np.int8), half_power(blocks[:, :1]), None
