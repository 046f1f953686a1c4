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
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from nanokit.gguf import types
from nanokit.gguf.cursor import ALIGNMENT, COUNTS, KEYS, PLACES, SIZE, TENSORS, U32, U64, Cursor
from nanokit.gguf.mapping import map_file, refuse_foreign
from nanokit.gguf.values import ValueKind, read_value

__all__ = [
    "Header",
    "Table",
    "TableEntry",
    "TensorInfo",
    "ValueKind",
    "padded",
    "read_header",
    "read_table",
    "usable_alignment",
]

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


class TableEntry(NamedTuple):
    """A tensor as the table has it. shape: numpy order; offset: from the start of the data, as stored."""

    type: types.TensorType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Without padding."""
        return prod(self.shape) // self.type.block_size * self.type.block_bytes


@dataclass(frozen=True)
class Table:
    """What a file says, before its alignment and its offsets are believed. end: where the table does, in bytes."""

    path: Path
    version: int
    metadata: dict[str, Any]
    kinds: dict[str, ValueKind]
    entries: dict[str, TableEntry]
    end: int
    mapped: mmap.mmap


def read_header(path: Path) -> Header:
    """Map and check one file. Raises ModelFileError for anything but a sound GGUF file of version 2 or 3."""
    cursor, version, n_tensors, metadata, kinds = _read_keys(path)
    cursor.part = ALIGNMENT
    alignment = _checked_alignment(cursor, metadata, kinds, n_tensors)
    cursor.part = TENSORS
    entries = _read_tensors(cursor, n_tensors)
    cursor.part = PLACES
    tensors = _placed(cursor, entries, alignment)
    return Header(path, version, alignment, metadata, kinds, tensors, cursor.mapped)


def read_table(path: Path) -> Table:
    """Map one file and read its header, leaving alignment and offsets as they stand. Raises HeaderError for any other
    fault of the header."""
    cursor, version, n_tensors, metadata, kinds = _read_keys(path)
    cursor.part = TENSORS
    entries = _read_tensors(cursor, n_tensors)
    return Table(path, version, metadata, kinds, entries, cursor.at, cursor.mapped)


def usable_alignment(value: object, kind: ValueKind) -> bool:
    """Whether it can be one, as it is stored."""
    return kind.type == "UINT32" and isinstance(value, int) and value > 0 and not value & (value - 1)


def padded(n: int, alignment: int) -> int:
    """The next multiple of the alignment."""
    return -(-n // alignment) * alignment


def _read_keys(path: Path) -> tuple[Cursor, int, int, dict[str, Any], dict[str, ValueKind]]:
    """Up to the tensor table: the place there, version, number of tensors, metadata and its kinds."""
    mapped = map_file(path)
    refuse_foreign(path, mapped)
    cursor = Cursor(path, mapped)
    version = _read_version(cursor)
    cursor.part = COUNTS
    n_tensors = cursor.count("the number of tensors", least_bytes=_LEAST_INFO)
    n_pairs = cursor.count("the number of metadata keys", least_bytes=_LEAST_PAIR)
    cursor.part = KEYS
    metadata, kinds = _read_metadata(cursor, n_pairs)
    return cursor, version, n_tensors, metadata, kinds


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
        metadata[key], kinds[key] = read_value(cursor, what)
    return metadata, kinds


def _checked_alignment(cursor: Cursor, metadata: dict[str, Any], kinds: dict[str, ValueKind], n_tensors: int) -> int:
    """It decides where the data begins; where there are data, that cannot be behind the file's end."""
    value = metadata.get("general.alignment", types.DEFAULT_ALIGNMENT)
    kind = kinds.get("general.alignment", ValueKind("UINT32"))
    if not usable_alignment(value, kind):
        cursor.fail(
            "general.alignment is unusable",
            found=f"{value!r} of type {kind.type}",
            needed="a power of two, of type UINT32",
        )
    if n_tensors and value > cursor.size:
        cursor.fail("general.alignment is larger than the file", found=value, needed=f"at most {cursor.size}")
    return int(value)


def _read_tensors(cursor: Cursor, n_tensors: int) -> dict[str, TableEntry]:
    """All infos."""
    entries: dict[str, TableEntry] = {}
    for i in range(n_tensors):
        name = cursor.string(f"the name of tensor {i + 1} of {n_tensors}", types.MAX_NAME_BYTES)
        what = f"tensor {name!r}"
        if name in entries:
            cursor.fail(f"{what} is there twice", found="a second entry", needed="one entry")
        entries[name] = _read_info(cursor, what)
    return entries


def _placed(cursor: Cursor, entries: dict[str, TableEntry], alignment: int) -> dict[str, TensorInfo]:
    """Their places in the file: the data begins after the last info, padded. All offsets are compared before all sizes,
    so that a wrong offset is not taken for a short file."""
    data_begin = padded(cursor.at, alignment)
    expected = 0
    for name, entry in entries.items():
        if entry.offset != expected:
            cursor.fail(
                f"tensor {name!r} is not where its predecessor ends",
                found=f"offset {entry.offset}",
                needed=f"offset {expected} (no gap, no overlap, general.alignment {alignment})",
            )
        expected = padded(entry.offset + entry.nbytes, alignment)
    cursor.part = SIZE
    tensors: dict[str, TensorInfo] = {}
    for name, entry in entries.items():
        begin, nbytes = data_begin + entry.offset, entry.nbytes
        left = max(0, cursor.size - begin)
        if nbytes > left:
            cursor.fail(
                f"the file ends before tensor {name!r} does",
                found=f"{left} of its bytes (the file has {cursor.size})",
                needed=f"{nbytes} bytes from byte {begin} on",
            )
        tensors[name] = TensorInfo(name, entry.type.name, entry.shape, begin, nbytes, cursor.path)
    return tensors


def _read_info(cursor: Cursor, what: str) -> TableEntry:
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
    return TableEntry(kind, shape, offset)
