"""Writing GGUF files, by the gguf library's writer: a whole new one, or a copy with something replaced.

Tensors are made one at a time, while the file is written: a model of many gigabytes costs the memory of its largest
matrix. A copy keeps metadata key by key, in the file's own types (but for empty arrays, which the library cannot
write), and tensors byte for byte. The library's reader was rejected for the copy: it takes seconds for a vocabulary.
"""

import logging
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanokit.errors import ModelFileError
from nanokit.gguf import types
from nanokit.gguf.header import ValueKind
from nanokit.gguf.reader import GGUFFile
from nanokit.paths import replacing

_LAYOUTS = dict(types.SCALARS.values())
_GEOMETRY = {each.name: each for each in types.TENSOR_TYPES.values()}
# llama.cpp's LLAMA_FTYPE_… of a file whose matrices are mostly of a type.
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32, "TQ1_0": 36,
              "TQ2_0": 37, "MXFP4": 38}  # fmt: skip


class Key(NamedTuple):
    """A metadata value, and as what it is stored."""

    kind: ValueKind
    value: Any


@dataclass(frozen=True)
class Entry:
    """A tensor to be written. type: GGML name; shape: of its weights, in numpy order; make: gives its data when it is
    written, any array of `nbytes` bytes in the order of the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        geometry = _GEOMETRY[self.type]
        return prod(self.shape) // geometry.block_size * geometry.block_bytes


def write_gguf(target: Path, keys: Mapping[str, Key], entries: Iterable[Entry]) -> None:
    """Write `target` with this metadata and these tensors, in this order; an existing file is replaced at the end.

    keys: "general.architecture" among them; "general.alignment" (32 without it) is honoured. Raises ModelFileError
    without an architecture, for a number that what it is stored as cannot hold (before a tensor is made), and for a
    tensor that is made with another number of bytes than it has to have; OSError for a place that cannot be written;
    ValueError, from the library, for values that are not of their kind.
    """
    architecture = keys.get("general.architecture")
    if architecture is None or architecture.kind.type != "STRING":
        raise ModelFileError(
            "a GGUF file without an architecture cannot be written",
            found=f"general.architecture {'is not there' if architecture is None else f'= {architecture.value!r:.40}'}",
            needed="what kind of model it is, a STRING such as llama",
            do="convert the model again from its source",
        )
    for name, key in keys.items():
        check_key(name, key)
    import gguf  # takes half a second

    entries = list(entries)
    with replacing(target) as scratch:
        writer = gguf.GGUFWriter(scratch, str(architecture.value))
        for name, (kind, value) in keys.items():
            if name == "general.alignment":
                writer.add_custom_alignment(value)
            elif name != "general.architecture" and not (kind.type == "ARRAY" and not value):
                element = gguf.GGUFValueType[kind.element] if kind.element else None
                writer.add_key_value(name, value, gguf.GGUFValueType[kind.type], sub_type=element)
        for each in entries:
            _announce(writer, each)
        level = logging.getLogger("gguf.gguf_writer").level
        logging.getLogger("gguf.gguf_writer").setLevel(max(level, logging.WARNING))  # it counts tensors aloud
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for each in entries:
                writer.write_tensor_data(_made(each))
        finally:
            logging.getLogger("gguf.gguf_writer").setLevel(level)
            writer.close()


def check_key(name: str, key: Key) -> None:
    """Raise ModelFileError for a number beyond the range of what it is stored as, or so small that zero would be left
    of it, and for a text that UTF-8 does not have."""
    kind = key.kind.element or key.kind.type
    values = key.value if key.kind.type == "ARRAY" else [key.value]
    if not all(_fits(kind, each) for each in values):
        wrong = next(each for each in values if not _fits(kind, each))
        raise ModelFileError(
            f"{name} cannot be stored as {'an array of ' if key.kind.element else ''}{kind}",
            found=f"{wrong!r:.80}",
            needed=_range(kind),
        )


def _fits(kind: str, value: Any) -> bool:
    try:
        if kind == "STRING":
            value.encode()
            return True
        layout = _LAYOUTS[kind]
        return bool(layout.unpack(layout.pack(value))[0]) == bool(value)
    except (struct.error, OverflowError, UnicodeEncodeError):
        return False


def _range(kind: str) -> str:
    if kind == "STRING":
        return "characters of Unicode"
    if kind in ("FLOAT32", "FLOAT64"):
        floats = np.finfo(kind.lower())
        return f"a number, of 0 or from {floats.smallest_subnormal:.2g} to {floats.max:.2g} on either side of it"
    if kind == "BOOL":
        return "a truth value"
    whole = np.iinfo(kind.lower())
    return f"a whole number from {whole.min} to {whole.max}"


def _made(entry: Entry) -> np.ndarray:
    data = np.ascontiguousarray(entry.make()).reshape(-1).view(np.uint8)
    if data.nbytes != entry.nbytes:
        raise ModelFileError(
            f"tensor {entry.name!r} has another size than its shape and type say",
            found=f"{data.nbytes} bytes",
            needed=f"{entry.nbytes} bytes for {list(entry.shape)} in {entry.type}",
        )
    return data


def _announce(writer: Any, entry: Entry) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType[entry.type]
    # A dtype that is not that of bytes keeps the library from taking the shape for one in bytes.
    writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), entry.nbytes, raw_dtype=kind)


def copied(source: GGUFFile) -> tuple[dict[str, Key], dict[str, Entry]]:
    """Everything in a file, to be written again: what is not changed stays byte for byte."""
    keys = {name: Key(source.kinds[name], value) for name, value in source.metadata.items()}
    entries = {
        name: Entry(name, info.type, info.shape, lambda name=name: source.raw(name))  # type: ignore[misc]
        for name, info in source.tensors.items()
    }
    return keys, entries


def rewrite(
    source: Path,
    target: Path,
    replaced: Mapping[str, Entry | None],
    keys: Mapping[str, Key | None] | None = None,
) -> None:
    """Write `target`: the model of `source` as `rewritten` gives it; one in several shards becomes one file.

    Raises ModelFileError for a source that is damaged, otherwise as `write_gguf`.
    """
    write_gguf(target, *rewritten(GGUFFile.open(source), replaced, keys))


def rewritten(
    source: GGUFFile, replaced: Mapping[str, Entry | None], keys: Mapping[str, Key | None] | None = None
) -> tuple[dict[str, Key], list[Entry]]:
    """A file with these tensors and this metadata in place of its own; None leaves one out, and what the file does not
    have yet comes last. That it was one of several shards is forgotten. Where tensors are replaced, what the file says
    of its own type becomes that of most of its weights."""
    new_keys, entries = copied(source)
    new_keys = {name: key for name, key in new_keys.items() if not name.startswith("split.")}
    entries |= replaced  # type: ignore[arg-type]
    kept = [each for each in entries.values() if each]
    file_type = main_type(kept) if replaced else None
    if file_type is not None:
        if "general.file_type" in new_keys:
            new_keys["general.file_type"] = Key(ValueKind("UINT32"), file_type)
        # the format wants it beside quantized tensors
        new_keys.setdefault("general.quantization_version", Key(ValueKind("UINT32"), 2))
    new_keys |= keys or {}  # type: ignore[arg-type]
    return {k: v for k, v in new_keys.items() if v}, kept


def main_type(entries: Iterable[Entry]) -> int | None:
    """What a file of these tensors calls itself: the type that most of their weights have. None for a type without a
    number, and for no tensors."""
    sizes: dict[str, int] = {}
    for each in entries:
        sizes[each.type] = sizes.get(each.type, 0) + prod(each.shape)
    return FILE_TYPES.get(max(sizes, key=sizes.__getitem__)) if sizes else None
