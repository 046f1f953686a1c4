"""How quantized weights are kept in a file: plain arrays that any reader of safetensors can open, and a line of facts.

    codes      uint8 [rows, ceil(columns / 2)]    of up to four bits: column 2j in the low nibble of byte j, then 2j + 1
               int8  [rows, columns]              of more
    fifths     uint8 [rows, ceil(columns / 8)]    of five bits: the high bits, column 8j in bit 0 of byte j; codes then
                                                  holds the lower four
    scales     [rows, columns / group]            fp16 where it holds all of them exactly, else fp32; a byte where the
                                                  format has byte scales: e4m3 (nvfp4, times tensor_scale), or e8m0
                                                  (mxfp4: 2^(byte - 128), for levels that are doubled); or nested
                                                  (nf4-dq: a code of nested.LEVELS)
               [1, 1]                             where one scale serves the matrix
    minimums   like scales, or none
    seconds    fp32 [1, n]                        of nested scales: n = ceil(scales / 256)
    mean       fp32 [1, 1]                        of nested scales; scale = max(0, level * second + mean) / 127

Nibbles hold a code modulo 16, in two's complement where codes are negative. Bits per weight are counted from these very
arrays, scales included (`nominal_bits` before there are any: scales of two bytes). What is computed with later is not
this form but the backend's own.

Rejected: the blocks of ggml (scales between codes, 32 columns only), and one file layout for each format.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from nanokit.errors import ModelFileError, ParameterError
from nanokit.quant.float4 import NestedNF4, nested_scales
from nanokit.quant.formats import FORMATS
from nanokit.quant.nested import Nested, nests_of
from nanokit.quant.qtensor import Coding, QTensor
from nanokit.quant.weight_format import WeightFormat, is_format, weight_format

Parts = dict[str, np.ndarray]
ONE_SCALE = ("tensor", "qkv", "global")
BYTE_SCALES = {"nvfp4": "e4m3", "mxfp4": "e8m0", NestedNF4.name: "nested"}
SCALE_KINDS = {"f16": np.float16, "f32": np.float32, "e4m3": np.uint8, "e8m0": np.uint8, "nested": np.uint8}
E8M0_BIAS = 128


@dataclass(frozen=True)
class Entry:
    """What a file says of a matrix beside its arrays. format: its name; scale_kind: one of SCALE_KINDS."""

    format: str
    shape: tuple[int, ...]
    group: int
    code_range: tuple[int, int]
    scale_kind: str
    tensor_scale: float

    def to_json(self) -> dict[str, Any]:
        return {
            "format": self.format, "shape": list(self.shape), "group": self.group, "code_range": list(self.code_range),
            "scales": self.scale_kind, "tensor_scale": self.tensor_scale,
        }  # fmt: skip

    @property
    def coding(self) -> Coding:
        return Coding(self.code_range, table_of(self.format) is not None, self.group)

    @property
    def bits(self) -> int:
        """Of a code."""
        lowest, highest = self.code_range
        return max(4, (highest - lowest).bit_length())


def table_of(name: str) -> np.ndarray | None:
    """The values of a known format's codes, None where the codes are the values."""
    return weight_format(name).table if is_format(name) else FORMATS[name].table


def entry_of(q: QTensor) -> Entry:
    """How this matrix is going to be kept."""
    kind = BYTE_SCALES.get(q.format.lower())
    if kind is None:
        kind = "f16" if all(_fit_half(part) for part in (q.scales, q.minimums) if part is not None) else "f32"
    return Entry(q.format, q.shape, q.group, q.code_range, kind, q.tensor_scale)


def parts_of(q: QTensor) -> Parts:
    """The arrays of a matrix [rows, columns], by name. Raises ParameterError for scales of nf4-dq that are not those of
    its `nested`, whole: others cannot be kept in a byte."""
    entry = entry_of(q)
    parts: Parts = {}
    codes = q.codes.view(np.uint8)
    if entry.bits == 5:
        codes = codes - np.uint8(q.code_range[0] % 256)
        parts["fifths"] = np.packbits(codes >> np.uint8(4), axis=-1, bitorder="little")
    parts["codes"] = q.codes if entry.bits > 5 else _nibbles(codes & np.uint8(15))
    if entry.scale_kind == "nested":
        return parts | _nested_parts(q)
    one = is_format(q.format) and weight_format(q.format).scope in ONE_SCALE
    for name, values in (("scales", q.scales), ("minimums", q.minimums)):
        if values is not None:
            parts[name] = _kept(values[:1, :1] if one else values, entry)
    return parts


def has_minimums(name: str) -> bool:
    """Whether a format has a minimum beside each scale."""
    return "-asym-" in name or name.lower() in ("q4_1", "q5_1", "q2_k", "q4_k", "q5_k")


def nominal_bits(format_: WeightFormat, shape: tuple[int, ...]) -> float:
    """Bits per weight of a matrix in this format, known before it is quantized: scales of two bytes, where the format
    has no byte scales."""
    lowest, highest = format_.code_range
    code = 8 if (bits := max(4, (highest - lowest).bit_length())) > 5 else bits
    has_minimum = has_minimums(format_.name)
    scale = (8 if format_.name in BYTE_SCALES else 32 if format_.name == "nf4" else 16) * (1 + has_minimum)
    scales = 1 if format_.scope in ONE_SCALE else prod(shape) // format_.group_of(shape[-1])
    words = {"nvfp4": 1, NestedNF4.name: nests_of(scales) + 1}.get(format_.name, 0)
    return code + (scale * scales + 32 * words) / prod(shape)


def check_entry(entry: Entry, name: str) -> None:
    """Raise ModelFileError unless code range, group and nested scales are those of the format: arithmetic trusts
    them."""
    columns = entry.shape[-1]
    if is_format(entry.format):
        form = weight_format(entry.format)
        code_range, group = form.code_range, form.group_of(columns)
    else:
        known = FORMATS.get(entry.format)
        if known is None or not known.has_codes:
            raise ModelFileError(
                f"{name}: unknown weight format in a file", found=repr(entry.format)[:80],
                needed="a format of this version", do="quantize the model again",
            )  # fmt: skip
        code_range, group = known.code_range, known.group
    nested = entry.format.lower() == NestedNF4.name
    if (entry.code_range, entry.group, entry.scale_kind == "nested") != (code_range, group, nested):
        raise ModelFileError(
            f"{name} is not what {entry.format} is",
            found=f"codes {entry.code_range} in groups of {entry.group}, scales {entry.scale_kind}",
            needed=f"codes {code_range} in groups of {group}, scales {'' if nested else 'not '}nested",
            do="the file is damaged: quantize the model again",
        )


def stored_nbytes(q: QTensor) -> int:
    """Bytes of its arrays, and of a factor that all scales share."""
    return sum(part.nbytes for part in parts_of(q).values()) + (4 if q.tensor_scale != 1.0 else 0)


def restore(entry: Entry, parts: Parts, name: str, first: int = 0, rows_of_all: int | None = None) -> QTensor:
    """The matrix again, bit for bit; or the rows of it that the entry counts, from `first` on, where the whole one has
    `rows_of_all`. Raises ModelFileError, naming the tensor, for arrays that are not what the entry says, and for codes
    and scales that its format does not have."""
    rows, columns = entry.shape[0], entry.shape[-1]
    table = table_of(entry.format)
    grouped = (rows, columns // entry.group)
    codes = _codes(entry, parts, name)
    nested = None
    if entry.scale_kind == "nested":
        nested = _nested(parts, grouped, first, rows_of_all or rows, name)
        scales = nested_scales(nested)
    else:
        scales = _numbers(parts, "scales", entry, grouped, name)
    minimums = _numbers(parts, "minimums", entry, grouped, name) if has_minimums(entry.format) else None
    if (minimums is None) != ("minimums" not in parts):
        raise ModelFileError(f"{name} has minimums, which {entry.format} has not", do="quantize the model again")
    reach = max(abs(end) for end in (entry.code_range if table is None else (int(table.min()), int(table.max()))))
    with np.errstate(over="ignore", invalid="ignore"):
        furthest = np.abs(scales).max() * np.float32(reach) + (0 if minimums is None else np.abs(minimums).max())
    if not np.isfinite(furthest):
        raise ModelFileError(
            f"{name} holds a weight that is not a finite number", found=f"scales up to {np.abs(scales).max()}",
            needed="finite weights", do="quantize the model again",
        )  # fmt: skip
    return QTensor(
        entry.format, entry.shape, codes, scales, minimums, entry.group, table, entry.code_range, entry.tensor_scale,
        nested,
    )  # fmt: skip


def _nested_parts(q: QTensor) -> Parts:
    nested = q.nested
    whole = nested is not None and (nested.start, nested.seconds.shape) == (0, (1, nests_of(q.scales.size)))
    if nested is None or not whole or not np.array_equal(nested_scales(nested), q.scales):
        raise ParameterError(
            f"these scales of {q.format} cannot be kept",
            found="finished ones alone" if nested is None else "others than its own" if whole else "those of some rows",
            needed="a whole matrix as the format quantizes it, codes of the scales included",
            do="quantize the weights that a module has trained to the format once more, from floats",
        )
    return {"scales": nested.codes, "seconds": nested.seconds, "mean": np.full((1, 1), nested.mean, np.float32)}


def _nested(parts: Parts, grouped: tuple[int, int], first: int, rows: int, name: str) -> Nested:
    """Scales of rows from `first` on, of so many."""
    codes = _part(parts, "scales", grouped, np.uint8, name)
    seconds = _part(parts, "seconds", (1, nests_of(rows * grouped[1])), np.float32, name)
    mean = _part(parts, "mean", (1, 1), np.float32, name)
    if not (np.isfinite(seconds).all() and np.isfinite(mean).all() and min(seconds.min(), mean.min()) >= 0):
        raise ModelFileError(
            f"{name} holds nested scales that no weights have",
            found=f"mean {mean[0, 0]}, seconds from {seconds.min()} to {seconds.max()}",
            needed="finite numbers of zero or more",
            do="the file is damaged: quantize the model again",
        )
    return Nested(codes, seconds, float(mean[0, 0]), first * grouped[1])


def _codes(entry: Entry, parts: Parts, name: str) -> np.ndarray:
    rows, columns = entry.shape
    if entry.bits > 5:
        codes = np.ascontiguousarray(_part(parts, "codes", (rows, columns), np.int8, name))
    else:
        packed = _part(parts, "codes", (rows, -(-columns // 2)), np.uint8, name)
        codes = np.empty((rows, packed.shape[1], 2), np.uint8)
        np.bitwise_and(packed, 15, out=codes[..., 0])
        np.right_shift(packed, 4, out=codes[..., 1])
        codes = np.ascontiguousarray(codes.reshape(rows, -1)[:, :columns])
        if entry.bits == 5:
            fifths = _part(parts, "fifths", (rows, -(-columns // 8)), np.uint8, name)
            codes |= np.unpackbits(fifths, axis=-1, count=columns, bitorder="little") << np.uint8(4)
            codes += np.uint8(entry.code_range[0] % 256)
        elif entry.code_range[0] < 0:
            codes = (codes ^ np.uint8(8)) - np.uint8(8)
        codes = codes.view(np.int8)
    lowest, highest = entry.code_range
    if codes.size and not (lowest <= codes.min() and codes.max() <= highest):
        raise ModelFileError(
            f"{name} holds codes that {entry.format} does not have",
            found=f"{codes.min()} to {codes.max()}",
            needed=f"{lowest} to {highest}",
            do="the file is damaged: quantize the model again",
        )
    return codes


def _nibbles(codes: np.ndarray) -> np.ndarray:
    if codes.shape[-1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)


def _kept(values: np.ndarray, entry: Entry) -> np.ndarray:
    values = np.ascontiguousarray(values)
    if entry.scale_kind == "e8m0":
        return (np.frexp(values)[1] - 1 + E8M0_BIAS).astype(np.uint8)
    if entry.scale_kind == "e4m3":
        factors = torch.from_numpy(values / np.float32(entry.tensor_scale))
        return factors.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return values.astype(np.float16 if entry.scale_kind == "f16" else np.float32)


def _numbers(parts: Parts, which: str, entry: Entry, grouped: tuple[int, int], name: str) -> np.ndarray:
    """Scales or minimums of every group, fp32 [rows, groups]."""
    dtype = SCALE_KINDS[entry.scale_kind]
    wide = is_format(entry.format) and weight_format(entry.format).scope in ONE_SCALE
    one = wide and parts.get(which) is not None and parts[which].shape == (1, 1)
    kept = _part(parts, which, (1, 1) if one else grouped, dtype, name)
    if entry.scale_kind == "e8m0":
        values = np.ldexp(np.float32(1), kept.astype(np.int32) - E8M0_BIAS)
    elif entry.scale_kind == "e4m3":
        factors = torch.from_numpy(np.ascontiguousarray(kept)).view(torch.float8_e4m3fn).float().numpy()
        values = factors * np.float32(entry.tensor_scale)
    else:
        values = kept.astype(np.float32)
    return np.ascontiguousarray(np.broadcast_to(values, grouped), np.float32)


def _part(parts: Parts, which: str, shape: tuple[int, ...], dtype: type, name: str) -> np.ndarray:
    found = parts.get(which)
    if found is None or found.shape != shape or found.dtype != dtype:
        raise ModelFileError(
            f"the {which} of {name} are not what its entry says",
            found="none" if found is None else f"{found.dtype} {list(found.shape)}",
            needed=f"{np.dtype(dtype)} {list(shape)}",
            do="the file is damaged: quantize the model again",
        )
    return found


def _fit_half(values: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16) == values).all())
