"""Four-bit floats with a scale for each block: NVFP4, MXFP4, NF4 and NF4 with nested scales.

    nvfp4   16 weights   e2m1 levels, block scale e4m3, one fp32 factor a matrix
            factor = peak of the matrix / (6 * 448), a multiplier; block scale = block peak / (6 factor) to the nearest
            e4m3 number within 2^-9 … 448. Level: the nearest, a tie to the even code.
    mxfp4   32 weights   e2m1 levels, block scale 2^(floor(log2(block peak)) - 2). A tie to the smaller level.
    nf4     64 weights   levels at quantiles of a normal distribution, scale = block peak. A tie to the lower level.
    nf4-dq  64 weights   the same levels, scale = block peak as nested.py keeps it: a byte and a 64th part of 8 more. A
                         tie to the even code.

Sources: NVIDIA's ModelOpt and the compressed-tensors library for NVFP4, ggml for MXFP4 (the gguf library, whose codes
these are), bitsandbytes for NF4 and its nested scales (Dettmers et al. 2023).

A `QTensor` holds whole numbers as levels and finished fp32 scales, so
- e2m1 levels are doubled and scales halved: nothing changes. `tensor_scale` of NVFP4 is half of its owners' factor.
- NF4's levels become rint(127 level), its scale block peak / 127. The codes are bitsandbytes' own; the values differ
  from its fp32 levels by at most .5 / 127 of the block's peak. Integer kernels look up what 8 bits hold.
- nf4-dq's scales are its kept peaks / 127: kernels run it as they run NF4, in 4.5 bits a weight, two-byte scales being
  too short for either. What nesting saves, .37 bits, it saves in files. Its codes are the nearest for the kept scale,
  of the whole levels; bitsandbytes takes NF4's, which are the nearest for a scale that nobody keeps.

Signs of zero. e2m1 has a -0. NVFP4's owners keep the sign of a negative weight that rounds to zero, and so do these
codes (8); a weight of -0 is 0, and ggml writes 0 for both. The value is 0 in any case, and a quantized NVFP4 matrix
quantized again has 0 in place of 8.

Small numbers. Kernels count fp32's subnormal numbers as zero, so that no scale here is one: NVFP4's factor is at least
2^-116 (the smallest block scale is then normal), an NF4 or nf4-dq block whose scale would be subnormal is zero, and an
MXFP4 block with a peak below 2^-123 that is not zero has the exponent byte 2. The gguf library goes down to 0 there,
and wraps around below 2^-125.

Same codes when a dequantized matrix is quantized again: always for MXFP4 and NF4; for NVFP4, but for the -0, in every
block whose peak is at least 1 / 28,672 of the matrix's, below which e4m3 has fewer than its four bits. For nf4-dq in
every block whose dequantized peak is at least 1 / 12 of the matrix's. There no scale need be the same, for dequantized
blocks have another mean and other seconds; but a kept peak is off by 9 / 1280 of the matrix's at most, so that those
scales change by less than 9 %, and the first level to change its code does so at 11 %. Smaller blocks have errors of
their own size in their scales; below 9 / 1280 of the matrix's peak, zeros may be all that is left of one.
"""

import numpy as np

from nanokit.quant.blocked import BlockFormat, Common, extremes
from nanokit.quant.blocks import FP4_LEVELS, Unpacked, half_power
from nanokit.quant.nested import Nested, nest

# Half way between e2m1's levels, doubled as they are: 0 1 2 3 4 6 8 12.
FP4_BOUNDS = np.array([0.5, 1.5, 2.5, 3.5, 5, 7, 10], np.float32)
FP4_LARGEST, E4M3_LARGEST, E4M3_SMALLEST = 6.0, 448.0, 2.0**-9
# bitsandbytes' table: quantiles of a normal distribution that hold equal shares on each side of zero, up to ±1.
NF4_LEVELS = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32,
)  # fmt: skip
NF4_BOUNDS = ((NF4_LEVELS[1:].astype(np.float64) + NF4_LEVELS[:-1]) / 2).astype(np.float32)
NF4_TABLE = np.rint(127 * NF4_LEVELS.astype(np.float64)).astype(np.int8)
NF4_MIDDLES = (NF4_TABLE[1:].astype(np.float64) + NF4_TABLE[:-1]) / 2
NORMAL = np.float32(2.0**-126)


def count_above(x: np.ndarray, bounds: np.ndarray, up: int = 0) -> np.ndarray:
    """How many of the ascending bounds each x exceeds, uint8; bit i of `up`: reaching the bound i is enough.

    A comparison for each bound on a slice in cache; numpy's binary search takes ten times as long.
    """
    found = np.zeros(x.shape, np.uint8)
    for i, bound in enumerate(bounds.tolist()):
        found += x >= bound if up >> i & 1 else x > bound
    return found


def peaks_of(part: np.ndarray) -> np.ndarray:
    """Largest magnitude of each block, [n, 1]."""
    low, high = extremes(part)
    return np.maximum(high, np.abs(low))


def e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest e4m3 number of each x in 2^-9 … 448, ties to even; float32 in, float32 out."""
    exponent = np.maximum(np.frexp(x)[1] - 1, -6) - 3  # of the last of three bits; below 2^-6 numbers are subnormal
    return np.ldexp(np.rint(np.ldexp(x, -exponent)), exponent)


class NVFP4(BlockFormat):
    """See the module."""

    name = "nvfp4"
    block = 16
    table = FP4_LEVELS
    reach = 2 * FP4_LARGEST
    ties_up = 0b0101010  # of FP4_BOUNDS, those below an even code

    def common(self, blocks: np.ndarray) -> Common:
        peak = np.float32(max(blocks.max(initial=0), -blocks.min(initial=0)))
        return Common(float(max(peak / np.float32(FP4_LARGEST * E4M3_LARGEST), np.float32(2.0**-116)) / 2))

    def round_blocks(self, part: np.ndarray, common: Common) -> Unpacked:
        half = np.float32(common.factor)
        block_scales = peaks_of(part) / (np.float32(FP4_LARGEST) * (2 * half))
        scales = e4m3(np.clip(block_scales, np.float32(E4M3_SMALLEST), np.float32(E4M3_LARGEST))) * half
        steps = np.abs(part.astype(np.float64)) / scales
        codes = count_above(steps, FP4_BOUNDS, self.ties_up)
        codes |= (part < 0).view(np.uint8) << np.uint8(3)
        return codes.view(np.int8), scales, None


class MXFP4(BlockFormat):
    """See the module."""

    name = "mxfp4"
    block = 32
    table = FP4_LEVELS

    def round_blocks(self, part: np.ndarray, common: Common) -> Unpacked:
        peaks = peaks_of(part)
        # In fp32, as ggml: just below a high power of two its logarithm is rounded up to the whole number.
        with np.errstate(divide="ignore"):
            exponents = np.where(peaks > 0, np.maximum(np.floor(np.log2(peaks)) - 2 + 127, 2), 0).astype(np.uint8)
        scales = half_power(exponents)
        codes = count_above(np.abs(part) / scales, FP4_BOUNDS)
        if exponents.max(initial=0) == 253:  # the two highest levels are beyond fp32
            np.minimum(codes, np.where(exponents == 253, np.uint8(5), np.uint8(7)), out=codes)
        codes += ((part < 0) & (codes > 0)).view(np.uint8) << np.uint8(3)
        return codes.view(np.int8), scales, None


class NF4(BlockFormat):
    """See the module."""

    name = "nf4"
    block = 64
    table = NF4_TABLE
    reach = 127.0

    def round_blocks(self, part: np.ndarray, common: Common) -> Unpacked:
        peaks = peaks_of(part)
        scales = peaks / np.float32(127)
        kept = scales >= NORMAL
        scales[~kept] = 0
        inverse = np.divide(np.float32(1), peaks, out=np.zeros_like(peaks), where=kept)
        codes = count_above(part * inverse, NF4_BOUNDS)  # of a block without a scale: those of 0
        return codes.view(np.int8), scales, None


class NestedNF4(BlockFormat):
    """nf4-dq: see the module."""

    name = "nf4-dq"
    block = 64
    table = NF4_TABLE
    reach = 127.0
    ties_up = 0x2AAA  # of NF4_MIDDLES, those below an even code

    def common(self, blocks: np.ndarray) -> Common:
        return Common(nested=nest(peaks_of(blocks)))

    def round_blocks(self, part: np.ndarray, common: Common) -> Unpacked:
        assert common.nested is not None
        scales = nested_scales(common.nested)
        steps = part.astype(np.float64) / np.where(scales == 0, np.inf, scales)  # a scale of 0 has the code of 0
        return count_above(steps, NF4_MIDDLES, self.ties_up).view(np.int8), scales, None


def nested_scales(nested: Nested) -> np.ndarray:
    """The scales of nf4-dq's blocks, fp32 of the shape of the codes."""
    scales = nested.peaks() / np.float32(127)
    return np.where(scales < NORMAL, np.float32(0), scales)
