"""A GGUF model: its metadata, and its tensors as views of the mapped file or as float32.

The `gguf` library reads such files too; it takes seconds for the vocabulary of a small model, accepts
offsets that overlap and reports a file that is cut short as a reshape that failed. It writes the files of
the tests and checks this reader there.
"""

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from nanokit.errors import ModelFileError
from nanokit.gguf.header import TensorInfo
from nanokit.gguf.shards import read_shards
from nanokit.quant.formats import dequantize

__all__ = ["GGUFFile", "TensorInfo"]


@dataclass(frozen=True)
class GGUFFile:
    """A checked GGUF model, of one file or several.

    path: the file that was opened; files: all of its shards, in order. metadata: Python numbers, strings,
    booleans and lists, of the first shard. tensors: by name, in the order of the files. alignment: of the
    first shard, in bytes. The files stay mapped for as long as this object or an array from `raw` lives.
    """

    path: Path
    files: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    alignment: int
    _data: dict[Path, np.ndarray] = field(repr=False)

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
            tensors={name: info for header in headers for name, info in header.tensors.items()},
            alignment=headers[0].alignment,
            _data={header.path: header.data for header in headers},
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
        return self._data[info.file][info.offset : info.offset + info.nbytes]

    def tensor(self, name: str) -> np.ndarray:
        """A tensor as a new float32 array of `shape`.

        Raises ModelFileError for a type that holds no weights and for a weight that is not finite.
        """
        info = self.info(name)
        label = f"{info.file}: tensor {name!r}"
        return dequantize(self.raw(name), info.type, info.shape, name=label, check_finite=True)
