"""Weights into ggml's blocks: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0, of 32, and the ternary TQ1_0 and TQ2_0, of 256; byte for
byte what the gguf library writes.

    q4_0 q5_0   d = p / -8, / -16, p the weight of largest magnitude with its sign (the first of equals)
                code = trunc(w / d + 8.5) - 8, at most 7 (+ 16.5, - 16, 15): ties go up, and all 16 (32) codes are used
    q4_1 q5_1   d = (max - min) / 15, / 31, m = min           code = trunc((w - m) / d + .5), at most 15 (31)
    q8_0        d = max |w| / 127                             code = w / d, ties away from zero
    tq1_0 tq2_0 d = max |w|                                   code = w / d, ties away from zero: -1, 0 or 1

Codes come from d in fp32, by multiplication with its fp32 inverse; the file then keeps d and m as fp16. (So the codes
are not the nearest for what is kept; that is what the owner does.) Where d is so small that its inverse is infinite,
fp16 keeps 0 and the codes count for nothing; they are those that the x86 conversion of what is no number gives. Scales
beyond fp16 are refused: the library would write an infinite one.

`to_blocks` packs the codes and scales of these formats and of MXFP4, quantized here or anywhere. Quantized again, a
dequantized matrix has the same codes where fp16 holds scale and minimum to its eleven bits (scales of 2^-14 and more)
and the range is not hundreds of times narrower than its distance from zero.

Rejected: the library itself for this, 16 rows at a time in a dozen copies of each.
"""

from collections.abc import Callable

import numpy as np

from nanokit.errors import ParameterError
from nanokit.quant.blocked import BlockFormat, Common, extremes
from nanokit.quant.blocks import Unpacked
from nanokit.quant.qtensor import QTensor

# Added before the digits are cut off, it rounds half away from zero: the largest fp32 number below .5, so that the sum
# of it and a number just below a half stays below 1.
BELOW_HALF = np.float32(0.5 - 2.0**-25)


class _Peak(BlockFormat):
    """q4_0 and q5_0. half: half the number of codes, 8 or 16."""

    block = 32

    def __init__(self, name: str, half: int) -> None:
        self.name, self.half, self.code_range = name, half, (-half, half - 1)

    def round_blocks(self, part: np.ndarray, common: Common) -> Unpacked:
        low, high = extremes(part)
        peak = np.where(high > -low, high, low)
        equal = (high == -low)[:, 0]
        if equal.any():
            some = part[equal]
            peak[equal] = np.take_along_axis(some, np.abs(some).argmax(axis=1, keepdims=True), axis=1)
        steps = peak / np.float32(-self.half)
        inverse, beyond = _inverse(steps)
        product = part * inverse
        product += np.float32(self.half + 0.5)
        codes = product.astype(np.int8)
        np.minimum(codes, 2 * self.half - 1, out=codes)
        codes[beyond] = 0
        codes -= np.int8(self.half)
        return codes, _half(steps), None


class _Spread(BlockFormat):
    """q4_1 and q5_1. highest: code, 15 or 31."""

    block = 32

    def __init__(self, name: str, highest: int) -> None:
        self.name, self.code_range = name, (0, highest)

    def round_blocks(self, part: np.ndarray, common: Common) -> Unpacked:
        highest = self.code_range[1]
        low, high = extremes(part)
        steps = (high - low) / np.float32(highest)
        inverse, beyond = _inverse(steps)
        product = part - low
        product *= inverse
        product += np.float32(0.5)
        codes = product.astype(np.int8)
        np.minimum(codes, highest, out=codes)
        codes[beyond] = 0
        return codes, _half(steps), _half(low)


class _Even(BlockFormat):
    """q8_0, tq1_0 and tq2_0. highest: code that is used, 127 or 1."""

    def __init__(self, name: str, block: int, highest: int, code_range: tuple[int, int]) -> None:
        self.name, self.block, self.highest, self.code_range = name, block, highest, code_range

    def round_blocks(self, part: np.ndarray, common: Common) -> Unpacked:
        low, high = extremes(part)
        steps = np.maximum(high, -low) / np.float32(self.highest)
        inverse, beyond = _inverse(steps)
        product = part * inverse
        product += np.copysign(BELOW_HALF, product)
        codes = product.astype(np.int8)
        codes[beyond] = 0
        return codes, _half(np.abs(steps)), None


def _inverse(steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """1 / step in fp32, 0 where the step is; and in which blocks it is beyond fp32, bool [n]: 0 for those as well."""
    inverse = np.divide(np.float32(1), steps, out=np.zeros_like(steps), where=steps != 0)
    beyond = np.isinf(inverse)
    inverse[beyond] = 0
    return inverse, beyond[:, 0]


def _half(values: np.ndarray) -> np.ndarray:
    """Rounded to fp16's values; what is beyond them becomes infinite."""
    return values.astype(np.float16).astype(np.float32)


GGML_FORMATS: dict[str, BlockFormat] = {
    each.name: each
    for each in (
        _Peak("q4_0", 8),
        _Spread("q4_1", 15),
        _Peak("q5_0", 16),
        _Spread("q5_1", 31),
        _Even("q8_0", 32, 127, (-128, 127)),
    )
}
# For models that were trained with weights of -1, 0 and 1: others do not survive it.
TERNARY_FORMATS: dict[str, BlockFormat] = {name: _Even(name, 256, 1, (-1, 1)) for name in ("tq1_0", "tq2_0")}


def to_blocks(q: QTensor) -> np.ndarray:
    """A matrix in the bytes of its type (quant/blocks.py draws them): uint8 (…, rows, bytes of a row).

    q: in one of `GGML_FORMATS`, `TERNARY_FORMATS` or mxfp4, under the name of either case. Raises ParameterError for
    another format.
    """
    pack = _PACK.get(q.format.lower())
    if pack is None:
        raise ParameterError(
            "these weights cannot be packed into blocks", found=q.format, needed=f"one of {', '.join(_PACK)}"
        )
    raw = np.concatenate(pack(q), axis=1)
    return raw.reshape(*q.shape[:-1], -1)


def _halves(values: np.ndarray | None) -> np.ndarray:
    assert values is not None
    return np.ascontiguousarray(values.reshape(-1, 1), "<f4").astype("<f2").view(np.uint8)


def _unsigned(q: QTensor, lowest: int) -> np.ndarray:
    """uint8 [blocks, 32], 0 for the lowest code."""
    return np.ascontiguousarray(q.codes).view(np.uint8).reshape(-1, 32) - np.uint8(lowest % 256)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """The lower four bits, weight j in the low half of byte j and weight j + 16 in its high half; 8 bytes at a time."""
    words = codes.view(np.uint64) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (words[:, :2] | words[:, 2:] << np.uint64(4)).view(np.uint8)


def _fifths(codes: np.ndarray) -> np.ndarray:
    return np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")


def _q4_0(q: QTensor) -> list[np.ndarray]:
    return [_halves(q.scales), _nibbles(_unsigned(q, -8))]


def _q4_1(q: QTensor) -> list[np.ndarray]:
    return [_halves(q.scales), _halves(q.minimums), _nibbles(_unsigned(q, 0))]


def _q5_0(q: QTensor) -> list[np.ndarray]:
    codes = _unsigned(q, -16)
    return [_halves(q.scales), _fifths(codes), _nibbles(codes)]


def _q5_1(q: QTensor) -> list[np.ndarray]:
    codes = _unsigned(q, 0)
    return [_halves(q.scales), _halves(q.minimums), _fifths(codes), _nibbles(codes)]


def _q8_0(q: QTensor) -> list[np.ndarray]:
    return [_halves(q.scales), _unsigned(q, 0)]


def _mxfp4(q: QTensor) -> list[np.ndarray]:
    exponents = np.frexp(q.scales.reshape(-1, 1))[1] + 127  # scale 2^(e - 128), which frexp calls 1/2 2^(e - 127)
    return [exponents.astype(np.uint8), _nibbles(_unsigned(q, 0))]


def _trits(q: QTensor) -> np.ndarray:
    """uint8 [blocks, 256], 0 to 2."""
    return (q.codes.reshape(-1, 256) + np.int8(1)).view(np.uint8)


def _tq1_0(q: QTensor) -> list[np.ndarray]:
    """Five weights a byte, as digits to the base 3 of a number below 243, which is stretched to 256 so that a reader
    gets a digit by a multiplication. Weights 0 … 159 lie five times 32 apart, 160 … 239 five times 16, and the last 16
    four times 4, with an empty last digit."""
    trits, bytes_ = _trits(q), []
    for first, end, apart in ((0, 160, 32), (160, 240, 16), (240, 256, 4)):
        digits = trits[:, first:end].reshape(len(trits), -1, apart)
        powers = np.array([81, 27, 9, 3, 1], np.uint16)[: digits.shape[1], None]
        bytes_.append(((digits * powers).sum(axis=1, dtype=np.uint16) * 256 + 242) // 243)
    return [np.concatenate(bytes_, axis=1).astype(np.uint8), _halves(q.scales)]


def _tq2_0(q: QTensor) -> list[np.ndarray]:
    """Two bits a weight: byte j of each half has weights j, j + 32, j + 64 and j + 96 of it, lowest bits first."""
    quarters = _trits(q).reshape(-1, 2, 4, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return [np.bitwise_or.reduce(quarters, axis=2).reshape(len(quarters), -1), _halves(q.scales)]


_PACK: dict[str, Callable[[QTensor], list[np.ndarray]]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "mxfp4": _mxfp4,
    "tq1_0": _tq1_0, "tq2_0": _tq2_0,
}  # fmt: skip
