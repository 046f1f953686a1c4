"""One canonical form for every block format: a whole number per weight, a scale per group, perhaps a minimum.

    w = scale[g] * value(code) + minimum[g]        value(code) = code, or table[code] where there is a table

GGUF packs the same idea in twenty ways; kernels pack it in theirs. Between the two lies this form, so that
a backend learns to pack it once and a new file format costs no kernel. It takes a byte per weight and is
freed once packed. Rejected: keeping 6-bit sub-scales and the block's own scale apart (the product is exact
enough to be bit equal to the reference, and every consumer would have to multiply), and a float table (all
tables in use hold whole numbers that fit 8 bits, which is what integer kernels look up).
"""

from dataclasses import dataclass, replace

import numpy as np

from nanokit.quant.nested import Nested


@dataclass(frozen=True)
class Coding:
    """What is known of a matrix' codes before any is read. code_range: lowest and highest; table: whether they are
    places in one; group: weights that share a scale."""

    code_range: tuple[int, int]
    table: bool
    group: int


@dataclass(frozen=True)
class QTensor:
    """Quantized weights, unpacked.

    format: GGML type name, or that of an integer format ("int4-sym-g64"); shape: (…, rows, columns).
    codes: int8, of `shape`; with a table, indices 0…15 into it. code_range: lowest and highest code that the
    format can hold, (0, 15) for Q4_1, (-8, 7) for Q4_0, (-128, 127) for Q8_0 (ggml writes no -128, others may).
    scales, minimums: float32, shape (…, rows, columns // group); minimums is None for formats without.
    group: weights that share a scale, consecutive along the columns; divides the columns.
    table: int8 [16] or None.
    tensor_scale: the fp32 factor that all scales have in common, scales = fp32(e4m3 number * tensor_scale), so that a
    file can keep the other factor in a byte; 1.0 but for NVFP4.
    nested: how a file keeps the scales, where these are quantized themselves (nf4-dq); nothing computes with it.
    """

    format: str
    shape: tuple[int, ...]
    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray | None
    group: int
    table: np.ndarray | None
    code_range: tuple[int, int]
    tensor_scale: float = 1.0
    nested: Nested | None = None

    def rows(self, first: int, end: int) -> "QTensor":
        """The rows first … end - 1 (of the first dimension, where there are more than two), as views of these."""
        codes = self.codes[first:end]
        minimums = None if self.minimums is None else self.minimums[first:end]
        nested = None if self.nested is None else self.nested.rows(first, end)
        return replace(
            self, shape=codes.shape, codes=codes, scales=self.scales[first:end], minimums=minimums, nested=nested
        )

    def dequantize(self, out: np.ndarray | None = None) -> np.ndarray:
        """Weights as float32 of `shape`; written into `out` (float32, contiguous, as many elements) when
        given.

        Multiply, then add, each rounded to float32: the order that ggml uses, hence bit equal to it.
        """
        if out is None:
            out = np.empty(self.shape, np.float32)
        grouped = out.reshape(-1, self.group)
        codes = self.codes.reshape(-1, self.group)
        # One conversion pass and in-place passes: mixed-type ufuncs go through a slow cast buffer.
        np.copyto(grouped, codes if self.table is None else np.take(self.table, codes))
        grouped *= self.scales.reshape(-1, 1)
        if self.minimums is not None:
            grouped += self.minimums.reshape(-1, 1)
        return out
