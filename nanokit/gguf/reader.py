"""A GGUF model: its metadata, and its tensors as views of the mapped file, as float32 or as canonical codes.

The `gguf` library reads such files too; it takes seconds for the vocabulary of a small model, accepts
offsets that overlap and reports a file that is cut short as a reshape that failed. It writes the files of
the tests and checks this reader there.

Whatever has been read and converted is dropped from the map again: the system keeps the file in its cache, but it
no longer counts as this process's memory beside the copy that was made.
"""

import difflib
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from nanokit.errors import ModelFileError
from nanokit.gguf.header import TensorInfo, ValueKind
from nanokit.gguf.shards import read_shards
from nanokit.quant.formats import FORMATS, QTensor, dequantize

__all__ = ["GGUFFile", "TensorInfo"]

# Linux also maps neighbours of a page that is touched, up to a huge page of them: thousands of reads would leave as
# many such runs mapped.
_AROUND = 1 << 21


@dataclass(frozen=True)
class GGUFFile:
    """A checked GGUF model, of one file or several.

    path: the file that was opened; files: all of its shards, in order. metadata: Python numbers, strings,
    booleans and lists, of the first shard; kinds: as what they are stored there. tensors: by name, in the order
    of the files. alignment: of the first shard, in bytes. The files stay mapped for as long as this object or an
    array from `raw` lives.
    """

    path: Path
    files: tuple[Path, ...]
    metadata: dict[str, Any]
    kinds: dict[str, ValueKind]
    tensors: dict[str, TensorInfo]
    alignment: int
    _maps: dict[Path, mmap.mmap] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Map and check a model file and, where it is one of several shards, the others beside it.

        Reads headers only. Raises ModelFileError for a file that is missing, foreign, damaged, cut short or
        of an unsupported version, and for a set of shards that is incomplete or does not agree.
        """
        path = Path(path).expanduser()
        headers = read_shards(path)
        return cls(
            path=path,
            files=tuple(header.path for header in headers),
            metadata=headers[0].metadata,
            kinds=headers[0].kinds,
            tensors={name: info for header in headers for name, info in header.tensors.items()},
            alignment=headers[0].alignment,
            _maps={header.path: header.mapped for header in headers},
        )

    def info(self, name: str) -> TensorInfo:
        """A tensor's entry. Raises ModelFileError, with the names most like it, when there is none."""
        if name not in self.tensors:
            close = difflib.get_close_matches(name, self.tensors, n=3)
            raise ModelFileError(
                f"{self.path}: tensor {name!r} is missing",
                found=f"{len(self.tensors)} tensors" + (f", {', '.join(close)} among them" if close else ""),
                needed=name,
            )
        return self.tensors[name]

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes as stored: uint8, flat, a read-only view of the map."""
        info = self.info(name)
        return np.frombuffer(self._maps[info.file], np.uint8)[info.offset : info.offset + info.nbytes]

    def tensor(self, name: str) -> np.ndarray:
        """A tensor as a new float32 array of `shape`.

        Raises ModelFileError for a type that holds no weights and for a weight that is not finite.
        """
        info = self.info(name)
        values = dequantize(self.raw(name), info.type, info.shape, name=_label(info), check_finite=True)
        self._drop(info, 0, info.nbytes)
        return values

    def quantized(self, name: str, first: int = 0, end: int | None = None) -> QTensor | None:
        """Codes, scales and minimums as stored, of a whole tensor or of the rows first … end - 1 of a matrix, or None
        for a type that has none.

        Raises ModelFileError, as `tensor` does, for a weight that is not finite.
        """
        info = self.info(name)
        if info.type not in FORMATS or not FORMATS[info.type].has_codes:
            return None
        whole, rows = self.raw(name), info.shape[0]
        end = rows if end is None else end
        start, stop = (info.nbytes * row // rows for row in (first, end))
        with np.errstate(over="ignore", invalid="ignore"):  # the scale of a K type may be infinite times zero
            codes = FORMATS[info.type].decode(whole[start:stop], (end - first, *info.shape[1:]))
            bound = np.abs(codes.scales).max() * np.float32(128)
            if codes.minimums is not None:
                bound += np.abs(codes.minimums).max()
        if not np.isfinite(bound):  # look at each weight: refused with its place, or huge and finite after all
            dequantize(whole, info.type, info.shape, name=_label(info), check_finite=True)
            start, stop = 0, info.nbytes
        self._drop(info, start, stop)
        return codes

    def _drop(self, info: TensorInfo, start: int, stop: int) -> None:
        """Unmap the pages of bytes of a tensor; one that is touched again comes back from the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            mapped = self._maps[info.file]
            first = max(0, info.offset + start - _AROUND) // mmap.PAGESIZE * mmap.PAGESIZE
            last = min(info.offset + stop + _AROUND, len(mapped))
            mapped.madvise(mmap.MADV_DONTNEED, first, last - first)


def _label(info: TensorInfo) -> str:
    return f"{info.file}: tensor {info.name!r}"
