"""Safetensors files written one tensor at a time.

The library wants all tensors of a file at once. The format needs only their shapes in advance: eight bytes that count
a JSON header (name -> dtype, shape, offsets of its data), the header, the data without a gap
(github.com/huggingface/safetensors, "Format"). So a shard of five gigabytes costs the memory of its largest tensor.
Wider types come first, which keeps every tensor at a multiple of its own size, and the header is filled up to a
multiple of eight, as the library has it.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanokit.model.source import FLOATS

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Planned:
    """A tensor to be written. type: a key of FLOATS; make: gives it when its turn comes, in that type."""

    name: str
    type: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * FLOATS[self.type].itemsize


def shards(tensors: Sequence[Planned], limit: int) -> list[list[Planned]]:
    """Cut into files of at most `limit` bytes of data, in order; a tensor beyond that has a file of its own."""
    cut: list[list[Planned]] = []
    size = 0
    for each in tensors:
        if not cut or size + each.nbytes > limit:
            cut.append([])
            size = 0
        cut[-1].append(each)
        size += each.nbytes
    return cut


def write_checkpoint(folder: Path, tensors: Sequence[Planned], limit: int, mark: str) -> None:
    """model.safetensors in `folder`, or its shards and their index. limit: of a shard, in bytes; mark: a text that
    every file carries in its metadata. Raises OSError."""
    cut = shards(tensors, limit)
    if len(cut) == 1:
        write_file(folder / "model.safetensors", cut[0], mark)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(cut, 1):
        name = f"model-{number:05}-of-{len(cut):05}.safetensors"
        write_file(folder / name, shard, mark)
        places |= {each.name: name for each in shard}
    index = {"metadata": {"total_size": sum(each.nbytes for each in tensors)}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def write_file(path: Path, tensors: Sequence[Planned], mark: str) -> None:
    """One file. Raises OSError."""
    ordered = sorted(tensors, key=lambda each: -FLOATS[each.type].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt", "written_by": mark}}
    end = 0
    for each in ordered:
        header[each.name] = {"dtype": each.type, "shape": each.shape, "data_offsets": [end, end + each.nbytes]}
        end += each.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for each in ordered:
            made = each.make()
            assert (made.dtype, tuple(made.shape)) == (FLOATS[each.type], each.shape), f"{each.name} was not planned so"
            out.write(made.contiguous().reshape(-1).view(torch.uint8).numpy().data)
