"""The pages that hold keys and values.

A block is `BLOCK_SIZE` tokens of *all* layers; what is shared, evicted and handed over is a block id, and only this
file and the kernels know where (layer, id) lies. Layout 1, per layer:

    keys    [block][kv head][token / 16][dim][token % 16]     16 tokens of one dimension side by side: q.k runs
    values  [block][kv head][token / 16][token % 16][dim]     along tokens, p.v runs along dimensions
    scales  [block][kv head][token]                           fp32, of int8 and int4 pages; keys and values their own

    int4    keys [block][kv head][token / 16][dim][8]         byte j: token j (low nibble) and token j + 8
            values [block][kv head][token / 16][token % 16][dim / 2]      byte i: dimension i and i + dim / 2

so that a vector unit of 16 fp32 lanes reads both without a transpose. Whatever changes a byte of this changes
`LAYOUT`. Every tensor starts on 64 bytes, and a block of it is a multiple of 128, so that no vector load of a page
straddles two cache lines.

In ordinary memory all of it is one private mapping that the operating system backs page by page: an unused pool costs
address space, not memory. `torch.zeros` writes its zeros, and `numpy.zeros` asks for huge pages, of which each of 60
tensors would fill one for its first token. On a GPU every tensor is one of torch's, and takes its memory at once.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels.paged import LANES, LayerPages

LAYOUT = 1
BLOCK_SIZE = 64
BLOCK_ALIGNMENT = 128
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8, "int4": torch.uint8}


class KVShape(Protocol):
    """What the pages need to know of a model."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True)
class Addresses:
    """Where the tensors of each layer begin, int64 [layers]; scales are 0 where the format has none."""

    keys: np.ndarray
    values: np.ndarray
    key_scales: np.ndarray
    value_scales: np.ndarray


class PagedKV:
    """Key and value pages of every layer, zeroed (an unwritten slot is never attended to, but never NaN either).

    kv_format: "fp32", "fp16", "int8" or "int4" (with one fp32 scale for each token and head). `layer(i)` gives the
    tensors in the layout above. Raises ParameterError for an unknown format, and for a shape whose blocks cannot be
    aligned.
    """

    block_size = BLOCK_SIZE

    def __init__(
        self, shape: KVShape, num_blocks: int, kv_format: str = "fp32", device: torch.device | str = "cpu"
    ) -> None:
        self.num_blocks, self.kv_format, self.device = num_blocks, kv_format, torch.device(device)
        tensors = _tensors(shape, kv_format)
        if self.device.type == "cpu":
            take = _Memory(num_blocks * PagedKV.bytes_per_block(shape, kv_format)).take
        else:
            take = partial(torch.zeros, device=self.device)
        self._layers = [
            LayerPages(*(take((num_blocks, *block), dtype=dtype) if block else None for block, dtype in tensors))
            for _ in range(shape.num_layers)
        ]

    @staticmethod
    def bytes_per_block(shape: KVShape, kv_format: str = "fp32") -> int:
        """Bytes of one block over all layers: keys, values and their scales."""
        sizes = [prod(block) * dtype.itemsize for block, dtype in _tensors(shape, kv_format) if block]
        return shape.num_layers * sum(sizes)

    def layer(self, index: int) -> LayerPages:
        """The pages of one layer, in layout 1."""
        return self._layers[index]

    def addresses(self) -> Addresses:
        """The same pages for C. They hold for as long as this object lives. Raises ParameterError for pages that do not
        lie in ordinary memory."""
        if self.device.type != "cpu":
            raise ParameterError("only pages in ordinary memory have addresses", found=str(self.device), needed="cpu")
        found = [[0 if tensor is None else tensor.data_ptr() for tensor in layer] for layer in self._layers]
        return Addresses(*np.array(found, np.int64).reshape(-1, 4).T.copy())


def _tensors(shape: KVShape, kv_format: str) -> list[tuple[Sequence[int], torch.dtype]]:
    """One block of the four tensors of `LayerPages`: shape (empty where the format has none) and number type."""
    if kv_format not in DTYPES:
        raise ParameterError("unknown kv_format", found=repr(kv_format), needed="one of " + ", ".join(DTYPES))
    dtype, heads = DTYPES[kv_format], shape.num_kv_heads
    if kv_format == "int4" and shape.head_dim % 2:
        raise ParameterError("two int4 codes share a byte", found=f"heads of {shape.head_dim}", needed="an even number")
    groups, packed = (heads, BLOCK_SIZE // LANES), 2 if kv_format == "int4" else 1
    block = prod(groups) * LANES * shape.head_dim * dtype.itemsize // packed
    if block % BLOCK_ALIGNMENT:
        raise ParameterError(
            f"{kv_format} pages of this model cannot be aligned",
            found=f"{heads} KV heads of {shape.head_dim}: {block} bytes of keys in a block",
            needed=f"a multiple of {BLOCK_ALIGNMENT}",
        )
    scales = (heads, BLOCK_SIZE) if kv_format in ("int8", "int4") else ()
    return [
        ((*groups, shape.head_dim, LANES // packed), dtype),
        ((*groups, LANES, shape.head_dim // packed), dtype),
        (scales, torch.float32),
        (scales, torch.float32),
    ]


class _Memory:
    """Zeroed bytes, backed when touched, handed out one tensor after another."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.frombuffer(self._map, dtype=dtype, count=prod(shape), offset=self._used).view(shape)
        self._used += tensor.nbytes
        return tensor
