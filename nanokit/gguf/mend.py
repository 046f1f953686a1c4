"""What is wrong in the structure of a GGUF file and can be put right from the file alone.

A writer that counts wrong spoils the table, not the data: an alignment that cannot be, offsets that leave gaps or
overlap. Types and shapes say how long every tensor is, and the format leaves no choice where each one lies: in the
order of the table, padded to the alignment. So when the tensors, laid out so, end exactly where the file ends, their
places are known. (No two alignments end there with other places: what a larger one adds is a multiple of the smaller
one, and the padding at the end, the only doubt, is less than that.) Bytes behind the last tensor belong to none.

Rejected: guessing where a file is longer or shorter than its tensors and the table is wrong too; believing the order of
the table against offsets that fill the data without a gap in another order.
"""

import mmap
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from nanokit.errors import ModelFileError
from nanokit.gguf.cursor import ALIGNMENT, PLACES, HeaderError
from nanokit.gguf.header import Table, ValueKind, padded, read_header, read_table, usable_alignment
from nanokit.gguf.types import DEFAULT_ALIGNMENT
from nanokit.gguf.write import Entry, Key

KEY = "general.alignment"
TRIED = tuple(1 << power for power in range(3, 21))
SHOWN = 3  # names in a sentence


@dataclass(frozen=True)
class Mended:
    """Everything in the file, to be written again. said: a sentence for each thing that was put right; empty: the
    structure is sound."""

    keys: dict[str, Key]
    entries: list[Entry]
    said: tuple[str, ...]


class _Layout(NamedTuple):
    """begin: of the data in the file; offsets: from there; end: of the last tensor in the file; padding: after it."""

    begin: int
    offsets: list[int]
    end: int
    padding: int

    def fits(self, size: int) -> bool:
        """Whether a file of this size ends where they do."""
        return size in (self.end, self.end + self.padding)


def mend(path: Path) -> Mended:
    """Read a file whose alignment, offsets or size may be wrong. Nothing is written.

    Raises HeaderError for other faults of the header, for a file that is cut short and for places that nothing proves;
    ModelFileError for one of several shards.
    """
    table = read_table(path)
    if table.metadata.get("split.count", 1) != 1:
        raise ModelFileError(
            f"{path}: a shard is not mended by itself",
            found=f"split.count {table.metadata['split.count']}",
            needed="a model in one file",
            do="convert the model again from its source",
        )
    alignment, layout, said = _placed(table)
    keys = {name: Key(table.kinds[name], value) for name, value in table.metadata.items()}
    if alignment != (keys[KEY].value if KEY in keys else DEFAULT_ALIGNMENT) or keys.get(KEY, _u32(0)).kind != _U32:
        keys[KEY] = _u32(alignment)
    entries = [
        Entry(name, each.type.name, each.shape, partial(_bytes, table.mapped, layout.begin + offset, each.nbytes))
        for (name, each), offset in zip(table.entries.items(), layout.offsets, strict=True)
    ]
    return Mended(keys, entries, tuple(said))


_U32 = ValueKind("UINT32")


def _u32(value: int) -> Key:
    return Key(_U32, value)


def _bytes(mapped: mmap.mmap, begin: int, nbytes: int) -> np.ndarray:
    return np.frombuffer(mapped, np.uint8, nbytes, begin)


def _layout(table: Table, alignment: int) -> _Layout:
    begin = padded(table.end, alignment)
    offsets, at, end = [], 0, 0
    for each in table.entries.values():
        offsets.append(at)
        end = at + each.nbytes
        at = padded(end, alignment)
    return _Layout(begin, offsets, begin + end, at - end)


def _placed(table: Table) -> tuple[int, _Layout, list[str]]:
    """The alignment, the places that are proved, and what is said of the change."""
    size, stored = len(table.mapped), [each.offset for each in table.entries.values()]
    value, kind = table.metadata.get(KEY, DEFAULT_ALIGNMENT), table.kinds.get(KEY, _U32)
    stated = value if usable_alignment(value, kind) and value <= size else None
    if stated is not None:
        layout = _layout(table, stated)
        if layout.offsets == stored:
            if layout.end > size:
                read_header(table.path)  # which says what is missing
            return stated, layout, _surplus(table, layout)
        if layout.fits(size):
            _refuse_other_order(table, stated)
            return stated, layout, [_moved(table, layout)]
    first = (value, DEFAULT_ALIGNMENT) if type(value) is int and value in TRIED else (DEFAULT_ALIGNMENT,)
    for alignment in dict.fromkeys((*first, *TRIED)):
        layout = _layout(table, alignment)
        if layout.offsets == stored and layout.fits(size):
            was = f"{value!r:.40} of type {kind.type}" if KEY in table.metadata else "not stated"
            proof = "the tensors lie so, and end where the file does"
            return alignment, layout, [f"{KEY} is {alignment}, in place of {was}: {proof}"]
    _unproved(table, stated)


def _surplus(table: Table, layout: _Layout) -> list[str]:
    beyond = len(table.mapped) - layout.end
    if not table.entries or beyond == layout.padding:
        return []
    if beyond < layout.padding:
        return [f"the file is padded after its last tensor, by {layout.padding - beyond} bytes"]
    return [f"{beyond - layout.padding} bytes after the last tensor are gone: no tensor is named that they belong to"]


def _moved(table: Table, layout: _Layout) -> str:
    wrong = [
        f"{name} from {each.offset} to {offset}"
        for (name, each), offset in zip(table.entries.items(), layout.offsets, strict=True)
        if each.offset != offset
    ]
    rest = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return f"offsets follow each other again: {', '.join(wrong[:SHOWN])}{rest}; so placed, they end where the file does"


def _refuse_other_order(table: Table, alignment: int) -> None:
    expected = 0
    for each in sorted(table.entries.values(), key=lambda entry: entry.offset):
        if each.offset != expected:
            return
        expected = padded(expected + each.nbytes, alignment)
    _fail(
        table,
        PLACES,
        "the offsets of the tensors contradict the order of the table",
        "tensors that fill the data without a gap in either order",
        "one order, or the source",
    )


def _unproved(table: Table, stated: int | None) -> NoReturn:
    """Nothing that fits: the file is longer or shorter than its tensors, or alignment and offsets are both wrong."""
    size = len(table.mapped)
    if stated is None:
        value, kind = table.metadata[KEY], table.kinds[KEY].type
        what, found = f"{KEY} is unusable, and no other one is proved", f"{value!r:.40} of type {kind}"
        needed = "offsets that follow each other for one, up to the end of the file"
        _fail(table, ALIGNMENT, what, f"{found}, a file of {size} bytes", needed)
    layout = _layout(table, stated)
    name = next(
        name
        for (name, each), offset in zip(table.entries.items(), layout.offsets, strict=True)
        if each.offset != offset
    )
    what = f"tensor {name!r} is not where its predecessor ends, and its place is not proved"
    _fail(table, PLACES, what, f"a file of {size} bytes", f"one of {layout.end}, where the tensors would end")


def _fail(table: Table, part: str, what: str, found: str, needed: str) -> NoReturn:
    do = "download the file again, or convert the model again from its source"
    raise HeaderError(f"{table.path}: {what}", found=found, needed=needed, do=do, part=part)
