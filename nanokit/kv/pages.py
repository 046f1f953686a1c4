"""The pages that hold keys and values.

A block is `BLOCK_SIZE` tokens of *all* layers; what is shared, evicted and handed over is a block id, and only this
file and the kernels know where (layer, id) lies. Layout 1, per layer:

    keys    [block][kv head][token / 16][dim][token % 16]     16 tokens of one dimension side by side: q.k runs
    values  [block][kv head][token / 16][token % 16][dim]     along tokens, p.v runs along dimensions

so that a vector unit of 16 fp32 lanes reads both without a transpose. Whatever changes a byte of this changes
`LAYOUT`. Pages are allocated lazily by the operating system: an unused pool costs address space, not memory.
"""

from typing import Protocol

import torch
from torch import Tensor

from nanokit.kernels.reference import LANES

LAYOUT = 1
BLOCK_SIZE = 64
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


class KVShape(Protocol):
    """What the pages need to know of a model."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class PagedKV:
    """Key and value pages of every layer, zeroed (an unwritten slot is never attended to, but never NaN either).

    kv_format: "fp32" or "fp16". `layer(i)` gives (keys, values) in the layout above.
    """

    block_size = BLOCK_SIZE

    def __init__(self, shape: KVShape, num_blocks: int, kv_format: str = "fp32") -> None:
        self.num_blocks, self.kv_format = num_blocks, kv_format
        groups = (num_blocks, shape.num_kv_heads, BLOCK_SIZE // LANES)
        dtype = DTYPES[kv_format]
        self._layers = [
            (
                torch.zeros(*groups, shape.head_dim, LANES, dtype=dtype),
                torch.zeros(*groups, LANES, shape.head_dim, dtype=dtype),
            )
            for _ in range(shape.num_layers)
        ]

    @staticmethod
    def bytes_per_block(shape: KVShape, kv_format: str = "fp32") -> int:
        """Bytes of one block over all layers, keys and values."""
        itemsize = torch.empty(0, dtype=DTYPES[kv_format]).element_size()
        return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * BLOCK_SIZE * itemsize

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of one layer, in layout 1."""
        return self._layers[index]
