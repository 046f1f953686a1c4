"""The header of one GGUF file, read in one pass over a memory map, nothing trusted before it is checked.

    "GGUF" | version u32 | tensors u64 | pairs u64
    pairs:   key | type u32 | value                       strings: length u64, UTF-8 bytes
    infos:   name | dims u32 | dim u64 … | type u32 | offset u64
    padding to the alignment, then the data, which every offset counts from

Every count and length is compared with the bytes that are left before anything is made from it, so that a
damaged header costs no memory, and every fault ends in a ModelFileError that names the key or tensor.
Offsets must follow each other without gap or overlap, as ggml demands: a wrong offset otherwise reads
another tensor's weights silently. Strings must be UTF-8, as the format says; replacing bad bytes was
rejected, for it could make two tokens of a vocabulary equal. A file that is cut short *while* it is mapped
cannot be caught here (the system ends the process).
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanokit.gguf import types
from nanokit.gguf.cursor import ALIGNMENT, COUNTS, KEYS, PLACES, SIZE, TENSORS, U32, U64, Cursor
from nanokit.gguf.mapping import map_file, refuse_foreign

_LEAST_INFO = 8 + 1 + 4 + 8 + 4 + 8  # a name of one byte, one dimension
_LEAST_PAIR = 8 + 1 + 4 + 1  # a key of one byte, a value of one byte


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it is.

    type: GGML type name, "Q4_1" for instance; shape: numpy order, (rows, columns); GGUF stores the fastest
    dimension first. offset: bytes from the start of `file`; nbytes: without padding.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: Path


class ValueKind(NamedTuple):
    """As what the file stores a value: "UINT32", "STRING", …; element: of an array, "" otherwise."""

    type: str
    element: str = ""


@dataclass(frozen=True)
class Header:
    """One file's metadata and tensor table, with the map that the tensors lie in. kinds: of the metadata's values."""

    path: Path
    version: int
    alignment: int
    metadata: dict[str, Any]
    kinds: dict[str, ValueKind]
    tensors: dict[str, TensorInfo]
    mapped: mmap.mmap


def read_header(path: Path) -> Header:
    """Map and check one file. Raises ModelFileError for anything but a sound GGUF file of version 2 or 3."""
    mapped = map_file(path)
    refuse_foreign(path, mapped)
    cursor = Cursor(path, mapped)
    version = _read_version(cursor)
    cursor.part = COUNTS
    n_tensors = cursor.count("the number of tensors", least_bytes=_LEAST_INFO)
    n_pairs = cursor.count("the number of metadata keys", least_bytes=_LEAST_PAIR)
    cursor.part = KEYS
    metadata, kinds = _read_metadata(cursor, n_pairs)
    cursor.part = ALIGNMENT
    alignment = _checked_alignment(cursor, metadata, kinds, n_tensors)
    cursor.part = TENSORS
    entries = _read_tensors(cursor, n_tensors)
    cursor.part = PLACES
    tensors = _placed(cursor, entries, alignment)
    return Header(path, version, alignment, metadata, kinds, tensors, mapped)


def _read_version(cursor: Cursor) -> int:
    cursor.need(len(types.MAGIC), "the first four bytes")
    version: int = cursor.number(U32, "the version")
    if version not in types.VERSIONS:
        if int.from_bytes(U32.pack(version), "big") in types.VERSIONS:
            cursor.fail(
                "the file is big-endian",
                found="numbers with the highest byte first",
                needed="a little-endian file",
                do="get the little-endian file of this model",
            )
        cursor.fail(
            "the GGUF version is not supported",
            found=version,
            needed=" or ".join(map(str, types.VERSIONS)),
            do="convert the model again with a current converter" if version < 2 else "update nanokit",
        )
    return version


def _read_metadata(cursor: Cursor, n_pairs: int) -> tuple[dict[str, Any], dict[str, ValueKind]]:
    """All keys, and what kind of value each has."""
    metadata: dict[str, Any] = {}
    kinds: dict[str, ValueKind] = {}
    for i in range(n_pairs):
        key = cursor.string(f"metadata key {i + 1} of {n_pairs}", types.MAX_KEY_BYTES)
        what = f"metadata key {key!r}"
        if key in metadata:
            cursor.fail(f"{what} is there twice", found="a second entry", needed="one entry")
        metadata[key], kinds[key] = _read_value(cursor, what)
    return metadata, kinds


def _checked_alignment(cursor: Cursor, metadata: dict[str, Any], kinds: dict[str, ValueKind], n_tensors: int) -> int:
    """It decides where the data begins; where there are data, that cannot be behind the file's end."""
    value = metadata.get("general.alignment", types.DEFAULT_ALIGNMENT)
    kind = kinds.get("general.alignment", ValueKind("UINT32"))
    if kind.type != "UINT32" or value == 0 or value & (value - 1):
        cursor.fail(
            "general.alignment is unusable",
            found=f"{value!r} of type {kind.type}",
            needed="a power of two, of type UINT32",
        )
    if n_tensors and value > cursor.size:
        cursor.fail("general.alignment is larger than the file", found=value, needed=f"at most {cursor.size}")
    return int(value)


def _read_value(cursor: Cursor, what: str) -> tuple[Any, ValueKind]:
    type_id: int = cursor.number(U32, f"the type of {what}")
    if type_id == types.STRING:
        return cursor.string(what), ValueKind("STRING")
    if type_id == types.ARRAY:
        return _read_array(cursor, what)
    if type_id not in types.SCALARS:
        cursor.fail(f"{what} has an unknown type", found=type_id, needed="0 to 12, as GGUF numbers them")
    name, layout = types.SCALARS[type_id]
    value = cursor.number(layout, what)
    return _as_bool(cursor, what, value) if type_id == types.BOOL else value, ValueKind(name)


def _as_bool(cursor: Cursor, what: str, value: int) -> bool:
    if value > 1:
        cursor.fail(f"{what} is no truth value", found=value, needed="0 or 1")
    return value == 1


def _read_array(cursor: Cursor, what: str) -> tuple[list[Any], ValueKind]:
    """A list of Python values; an empty one is allowed."""
    type_id: int = cursor.number(U32, f"the element type of {what}")
    if type_id != types.STRING and type_id not in types.SCALARS:
        name = types.VALUE_NAMES.get(type_id, f"type {type_id}")
        cursor.fail(f"{what} is an array of {name}", found=name, needed="numbers, truth values or strings")
    kind = ValueKind("ARRAY", types.VALUE_NAMES[type_id])
    n: int = cursor.number(U64, f"the length of {what}")
    least = U64.size if type_id == types.STRING else types.SCALARS[type_id][1].size
    if n * least > cursor.size - cursor.at:
        cursor.fail(
            f"the array of {what} reaches past the end of the file",
            found=f"{cursor.size - cursor.at} bytes left of a file of {cursor.size}",
            needed=f"at least {n * least} bytes for {n} elements",
        )
    cursor.elements_left -= n
    if cursor.elements_left < 0:
        cursor.fail(
            f"{what} is too long",
            found=f"{n} elements",
            needed=f"{types.MAX_ELEMENTS} in all arrays together",
        )
    if type_id == types.STRING:
        return _read_strings(cursor, what, n), kind
    begin = cursor.need(n * least, what)
    values: list[Any] = np.frombuffer(cursor.mapped, types.SCALARS[type_id][1].format, n, begin).tolist()
    return [_as_bool(cursor, what, value) for value in values] if type_id == types.BOOL else values, kind


def _read_strings(cursor: Cursor, what: str, n: int) -> list[str]:
    """The vocabulary's loop: `cursor.string` unrolled, as hundreds of thousands of calls would cost."""
    mapped, size, at, length_at = cursor.mapped, cursor.size, cursor.at, U64.unpack_from
    strings: list[str] = []
    add = strings.append
    try:
        for _ in range(n):
            begin = at + 8
            end = begin + length_at(mapped, at)[0]
            if end > size:
                break
            add(str(mapped[begin:end], "utf-8"))
            at = end
    except (struct.error, UnicodeDecodeError):
        pass  # read once more below, which says what is wrong and where
    cursor.at = at
    while len(strings) < n:
        strings.append(cursor.string(f"element {len(strings)} of {what}"))
    return strings


_Entry = tuple[types.TensorType, tuple[int, ...], int]


def _read_tensors(cursor: Cursor, n_tensors: int) -> dict[str, _Entry]:
    """All infos: type, shape in numpy order, and offset from the start of the data."""
    entries: dict[str, _Entry] = {}
    for i in range(n_tensors):
        name = cursor.string(f"the name of tensor {i + 1} of {n_tensors}", types.MAX_NAME_BYTES)
        what = f"tensor {name!r}"
        if name in entries:
            cursor.fail(f"{what} is there twice", found="a second entry", needed="one entry")
        entries[name] = _read_info(cursor, what)
    return entries


def _placed(cursor: Cursor, entries: dict[str, _Entry], alignment: int) -> dict[str, TensorInfo]:
    """Their places in the file: the data begins after the last info, padded. All offsets are compared before all sizes,
    so that a wrong offset is not taken for a short file."""
    data_begin = _padded(cursor.at, alignment)
    sizes = {name: prod(shape) // kind.block_size * kind.block_bytes for name, (kind, shape, _) in entries.items()}
    expected = 0
    for name, (_, _, offset) in entries.items():
        if offset != expected:
            cursor.fail(
                f"tensor {name!r} is not where its predecessor ends",
                found=f"offset {offset}",
                needed=f"offset {expected} (no gap, no overlap, general.alignment {alignment})",
            )
        expected = _padded(offset + sizes[name], alignment)
    cursor.part = SIZE
    tensors: dict[str, TensorInfo] = {}
    for name, (kind, shape, offset) in entries.items():
        left = max(0, cursor.size - data_begin - offset)
        if sizes[name] > left:
            cursor.fail(
                f"the file ends before tensor {name!r} does",
                found=f"{left} of its bytes (the file has {cursor.size})",
                needed=f"{sizes[name]} bytes from byte {data_begin + offset} on",
            )
        tensors[name] = TensorInfo(name, kind.name, shape, data_begin + offset, sizes[name], cursor.path)
    return tensors


def _read_info(cursor: Cursor, what: str) -> _Entry:
    """Type, shape in numpy order, and offset from the start of the data, of one tensor."""
    n_dims: int = cursor.number(U32, f"the dimensions of {what}")
    if not 1 <= n_dims <= types.MAX_DIMS:
        cursor.fail(f"{what} has an impossible number of dimensions", n_dims, f"1 to {types.MAX_DIMS}")
    dims = [int(cursor.number(U64, f"the dimensions of {what}")) for _ in range(n_dims)]
    type_id: int = cursor.number(U32, f"the type of {what}")
    offset: int = cursor.number(U64, f"the offset of {what}")
    shape = tuple(reversed(dims))
    if 0 in dims or prod(dims) >= 1 << 63:
        cursor.fail(f"{what} has impossible dimensions", shape, "dimensions above 0, below 2**63 weights in all")
    kind = types.TENSOR_TYPES.get(type_id)
    if kind is None:
        cursor.fail(
            f"{what} has an unknown type",
            found=f"type {type_id} ({types.RETIRED_TYPES.get(type_id, 'not known to nanokit')})",
            needed=f"one of {', '.join(t.name for t in types.TENSOR_TYPES.values())}",
            do="use another quantization of this model, Q4_K_M or Q8_0 for instance",
        )
    if dims[0] % kind.block_size:
        cursor.fail(
            f"the columns of {what} are no whole number of {kind.name} blocks",
            found=f"{dims[0]} columns",
            needed=f"a multiple of {kind.block_size}",
        )
    return kind, shape, offset


def _padded(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment
