"""The weight formats of GGUF files: their geometry, their canonical codes and their values.

A `Format` knows how many weights and bytes a block has and how to read one. Formats that kernels are made
for (`has_codes`) decode to a `QTensor`; the plain ones are numbers already; the rest (the IQ1/IQ2/IQ3
grids, ternary, NVFP4) only dequantize, through the `gguf` library, which holds their large tables. Values
are bit equal to that library's for every type. Rejected: the library for all types (slower for each of the
common ones, and its whole result has to be copied), and a class per format with inheritance (a table of
functions says the same).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from nanokit.errors import ModelFileError
from nanokit.quant import blocks, kquants
from nanokit.quant.blocks import Unpacked
from nanokit.quant.qtensor import Coding, QTensor

__all__ = ["FORMATS", "Format", "QTensor", "dequantize"]

# Weights handled at a time: the float32 slice and its byte codes stay in a core's own cache.
_SLICE = 1 << 17


@dataclass(frozen=True)
class Format:
    """One GGML tensor type.

    block_size: weights per block; block_bytes: bytes per block. `unpack` reads raw blocks into codes,
    scales and minimums, `group` weights per scale, `table` the values of the codes (None: the codes
    themselves), `code_range` the lowest and highest code; `dtype` is the number type of a plain format. A
    format with neither is dequantized by the gguf library.
    """

    name: str
    block_size: int
    block_bytes: int
    unpack: Callable[[np.ndarray], Unpacked] | None = None
    group: int = 0
    code_range: tuple[int, int] = (0, 0)
    table: np.ndarray | None = None
    dtype: str | None = None

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block_size

    @property
    def has_codes(self) -> bool:
        """Whether `decode` is there: scales and whole-number codes, one scale per group."""
        return self.unpack is not None

    @property
    def coding(self) -> Coding | None:
        """What its codes are, None for a format that `decode` does not take."""
        return Coding(self.code_range, self.table is not None, self.group) if self.has_codes else None

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of this shape. ModelFileError when the columns are no whole number of blocks."""
        if not shape or shape[-1] % self.block_size:
            raise ModelFileError(
                f"{self.name} weights of shape {shape} do not fill whole blocks",
                found=f"{shape[-1] if shape else 0} columns",
                needed=f"a multiple of {self.block_size}",
            )
        return prod(shape) // self.block_size * self.block_bytes

    def decode(self, raw: np.ndarray, shape: tuple[int, ...]) -> QTensor:
        """Canonical codes of packed bytes (uint8, contiguous, row after row).

        Raises ModelFileError when the bytes do not match the shape, ValueError for a format without codes.
        """
        if self.unpack is None:
            raise ValueError(f"{self.name} has no canonical codes; use dequantize")
        return self._canonical(self.unpack(self._blocks(raw, shape)), shape)

    def _canonical(self, unpacked: Unpacked, shape: tuple[int, ...]) -> QTensor:
        codes, scales, minimums = unpacked
        grouped = (*shape[:-1], shape[-1] // self.group)
        return QTensor(
            format=self.name,
            shape=shape,
            codes=np.ascontiguousarray(codes).reshape(shape),
            scales=scales.reshape(grouped),
            minimums=None if minimums is None else minimums.reshape(grouped),
            group=self.group,
            table=self.table,
            code_range=self.code_range,
        )

    def _blocks(self, raw: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """`raw` as uint8 [blocks, block_bytes], its size checked against the shape."""
        needed = self.nbytes(shape)
        if raw.nbytes != needed:
            raise ModelFileError(
                f"{self.name} weights of shape {shape} have the wrong size",
                found=f"{raw.nbytes} bytes",
                needed=f"{needed} bytes",
            )
        return raw.reshape(-1).view(np.uint8).reshape(-1, self.block_bytes)

    def _values(self, part: np.ndarray, out: np.ndarray) -> None:
        """Weights of raw blocks `part`, written into `out` (float32, flat)."""
        if self.dtype is not None:
            numbers = part.reshape(-1).view(self.dtype)
            if self.name == "BF16":  # the upper half of a float32
                numbers = (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
            np.copyto(out, numbers)
        elif self.unpack is not None:
            self._canonical(self.unpack(part), out.shape).dequantize(out)
        else:
            np.copyto(out, _by_library(self.name, part).reshape(-1))


def _by_library(name: str, part: np.ndarray) -> np.ndarray:
    from gguf import GGMLQuantizationType, quants  # slow to import, and only rare files need it

    try:
        # As one row: the library walks through 16 rows at a time.
        return quants.dequantize(part.reshape(1, -1), GGMLQuantizationType[name])
    except (KeyError, NotImplementedError) as error:
        raise ModelFileError(
            f"the installed gguf library cannot dequantize {name}",
            found=str(error),
            needed="a version of the gguf library that knows this type",
            do="pip install -U gguf",
        ) from error


def _formats() -> dict[str, Format]:
    plain = [
        Format("F32", 1, 4, dtype="<f4"),
        Format("F16", 1, 2, dtype="<f2"),
        Format("BF16", 1, 2, dtype="<u2"),
    ]
    coded = [
        Format("Q4_0", 32, 18, blocks.q4_0, 32, (-8, 7)),
        Format("Q4_1", 32, 20, blocks.q4_1, 32, (0, 15)),
        Format("Q5_0", 32, 22, blocks.q5_0, 32, (-16, 15)),
        Format("Q5_1", 32, 24, blocks.q5_1, 32, (0, 31)),
        Format("Q8_0", 32, 34, blocks.q8_0, 32, (-128, 127)),
        Format("IQ4_NL", 32, 18, blocks.iq4_nl, 32, (0, 15), blocks.IQ4_LEVELS),
        Format("MXFP4", 32, 17, blocks.mxfp4, 32, (0, 15), blocks.FP4_LEVELS),
        Format("Q2_K", 256, 84, kquants.q2_k, 16, (0, 3)),
        Format("Q3_K", 256, 110, kquants.q3_k, 16, (-4, 3)),
        Format("Q4_K", 256, 144, kquants.q4_k, 32, (0, 15)),
        Format("Q5_K", 256, 176, kquants.q5_k, 32, (0, 31)),
        Format("Q6_K", 256, 210, kquants.q6_k, 16, (-32, 31)),
        Format("IQ4_XS", 256, 136, kquants.iq4_xs, 32, (0, 15), blocks.IQ4_LEVELS),
    ]
    library = [
        Format("IQ1_S", 256, 50),
        Format("IQ1_M", 256, 56),
        Format("IQ2_XXS", 256, 66),
        Format("IQ2_XS", 256, 74),
        Format("IQ2_S", 256, 82),
        Format("IQ3_XXS", 256, 98),
        Format("IQ3_S", 256, 110),
        Format("TQ1_0", 256, 54),
        Format("TQ2_0", 256, 66),
        Format("NVFP4", 64, 36),
    ]
    return {f.name: f for f in (*plain, *coded, *library)}


FORMATS: dict[str, Format] = _formats()


def dequantize(
    raw: np.ndarray,
    type_name: str,
    shape: tuple[int, ...],
    *,
    name: str = "a tensor",
    check_finite: bool = False,
) -> np.ndarray:
    """Weights as a new, writable float32 array of `shape`.

    raw: packed bytes, contiguous, row after row; works slice by slice, so that only the result is large.
    check_finite: refuse a weight that is NaN or infinite (a damaged scale), naming the tensor `name` and
    the place. Raises ModelFileError for an unknown type, bytes that do not match the shape, or a non-finite
    weight.
    """
    format_ = FORMATS.get(type_name)
    if format_ is None:
        raise ModelFileError(
            f"{name} has a type that cannot be turned into weights",
            found=type_name,
            needed=f"one of {', '.join(FORMATS)}",
            do="use another quantization of this model, Q4_K_M or Q8_0 for instance",
        )
    packed = format_._blocks(raw, shape)
    out = np.empty(shape, np.float32)
    flat = out.reshape(-1)
    step = max(1, _SLICE // format_.block_size)
    # A damaged scale may overflow on its way to the check, which says more than numpy's warning.
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, len(packed), step):
            part = packed[first : first + step]
            start = first * format_.block_size
            piece = flat[start : start + len(part) * format_.block_size]
            format_._values(part, piece)
            if check_finite and not np.isfinite(piece).all():
                _refuse(name, type_name, shape, start + int(np.argmin(np.isfinite(piece))), flat)
    return out


def _refuse(name: str, type_name: str, shape: tuple[int, ...], at: int, flat: np.ndarray) -> None:
    place = ", ".join(str(int(i)) for i in np.unravel_index(at, shape))
    raise ModelFileError(
        f"{name} holds a weight that is not a finite number",
        found=f"{flat[at]} at [{place}] ({type_name})",
        needed="finite weights",
        do="download the file again; if it stays so, the conversion that made it went wrong",
    )
