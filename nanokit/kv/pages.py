"""The pages that hold keys and values.

A block is `BLOCK_SIZE` tokens of *all* layers; what is shared, evicted and handed over is a block id, and only this
file and the kernels know where (layer, id) lies. Layout 2, per layer:

    keys    [block][kv head][token / 16][dim][token % 16]     16 tokens of one dimension side by side: q.k runs
    values  [block][kv head][token / 16][token % 16][dim]     along tokens, p.v runs along dimensions
    scales  [block][kv head][token]                           fp32, of int8 and int4 pages; keys and values their own

    int4    keys [block][kv head][token / 16][dim][8]         byte j: token j (low nibble) and token j + 8
            values [block][kv head][token / 16][token % 16][dim / 2]      byte i: dimension i and i + dim / 2

    kivi4   sealed [block][kv head][record]                   a record as kernels/kivi.py draws it
            open pages of fp16, each block's layers together: [block][layer][keys, then values]

so that a vector unit of 16 fp32 lanes reads both without a transpose. int8-static pages are int8 pages. Whatever
changes a byte of this changes `LAYOUT` (1 had no kivi4). Every tensor starts on 64 bytes, and a block of it is a
multiple of 128, so that no vector load of a page straddles two cache lines. What a store on disk has to keep of a full
block is contiguous in each layer: the block of every tensor, of kivi4 pages the sealed one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels.kivi import record_bytes
from nanokit.kernels.paged import LANES, LayerPages, checked_peaks
from nanokit.kv.mapping import Mapping
from nanokit.kv.open_pages import BLOCK_SIZE, OpenPages, open_blocks
from nanokit.model.batch import Batch

LAYOUT = 2
BLOCK_ALIGNMENT = 128
DTYPES = {
    "fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8, "int8-static": torch.int8, "int4": torch.uint8,
    "kivi4": torch.float16,
}  # fmt: skip
CPU_FORMATS = ("kivi4",)  # which the Triton kernels do not have
SCALED = ("int8", "int8-static", "int4")


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
    """Where the tensors of each layer begin, int64 [layers]; 0 where the format has none."""

    keys: np.ndarray
    values: np.ndarray
    key_scales: np.ndarray
    value_scales: np.ndarray
    sealed: np.ndarray


@dataclass(frozen=True)
class PoolBytes:
    """Memory of a pool: per_block for each block; and of kivi4 pages open_per_block more for as many blocks, at most,
    as are open at a time."""

    per_block: int
    open_per_block: int
    open_blocks: int

    def of(self, num_blocks: int) -> int:
        """Bytes of so many blocks."""
        return num_blocks * self.per_block + min(num_blocks, self.open_blocks) * self.open_per_block

    def blocks_in(self, nbytes: int) -> int:
        """The most blocks that so many bytes hold."""
        all_open = nbytes // (self.per_block + self.open_per_block)
        return min(all_open, self.open_blocks) + max(0, nbytes - self.of(self.open_blocks)) // self.per_block


class PagedKV:
    """Key and value pages of every layer, zeroed (an unwritten slot is never attended to, but never NaN either).

    kv_format: one of `DTYPES`: "fp32", "fp16"; "int8", "int4", with one fp32 scale for each token and head;
    "int8-static", int8 pages with one scale for each layer and head (`calibrate` sets it, what lies beyond is clipped);
    "kivi4" (kernels/kivi.py). `layer(i)` gives the tensors that a step writes, in the layout above. Raises
    ParameterError for an unknown format, and for a shape whose blocks cannot be aligned.
    """

    block_size = BLOCK_SIZE

    def __init__(
        self, shape: KVShape, num_blocks: int, kv_format: str = "fp32", device: torch.device | str = "cpu"
    ) -> None:
        self.num_blocks, self.kv_format, self.device = num_blocks, kv_format, torch.device(device)
        self.kv_peaks: Tensor | None = None
        self._layer_peaks: list[Tensor] = []
        self._peaks_shape = (shape.num_layers, 2, shape.num_kv_heads)
        tensors = _tensors(shape, kv_format)
        self._open: OpenPages | None = None
        self._sealed: list[Tensor] = []
        if kv_format == "kivi4":
            (keys, _), (values, _), *_ = tensors
            self._open = OpenPages(shape.num_layers, tuple(keys), tuple(values), num_blocks, self.device)
            tensors = [_record(shape)]
        if self.device.type == "cpu":
            take = Mapping(num_blocks * PagedKV.bytes_per_block(shape, kv_format)).take
        else:
            take = partial(torch.zeros, device=self.device)
        each_layer = [
            [take((num_blocks, *block), dtype=dtype) if block else None for block, dtype in tensors]
            for _ in range(shape.num_layers)
        ]
        if self._open:
            self._layers, self._sealed = self._open.layers, [sealed for [sealed] in each_layer if sealed is not None]
        else:
            self._layers = [LayerPages(*layer) for layer in each_layer]

    @staticmethod
    def bytes_per_block(shape: KVShape, kv_format: str = "fp32") -> int:
        """Bytes of one block over all layers: keys, values and their scales; of kivi4 a sealed one."""
        tensors = [_record(shape)] if kv_format == "kivi4" else _tensors(shape, kv_format)
        return shape.num_layers * sum(prod(block) * dtype.itemsize for block, dtype in tensors if block)

    @staticmethod
    def pool_bytes(shape: KVShape, kv_format: str, max_seqs: int, token_budget: int) -> PoolBytes:
        """What a pool takes under an engine of these sizes."""
        once = PagedKV.bytes_per_block(shape, kv_format)
        if kv_format != "kivi4":
            return PoolBytes(once, 0, 0)
        return PoolBytes(once, PagedKV.bytes_per_block(shape, "fp16"), open_blocks(max_seqs, token_budget))

    def layer(self, index: int) -> LayerPages:
        """The pages of one layer that tokens are written to."""
        return self._layers[index]

    def sealed(self, index: int) -> Tensor | None:
        """The sealed pages of one layer, uint8 [blocks, Hk, record]; None but for kivi4."""
        return self._sealed[index] if self._open else None

    def peaks(self, index: int) -> Tensor | None:
        """Of int8-static pages: what keys and values of each head are scaled by, fp32 [2, Hk]; else None."""
        return None if self.kv_peaks is None else self._layer_peaks[index]

    def check_static(self) -> None:
        """Raises ParameterError for pages that `calibrate` would refuse."""
        if self.kv_format != "int8-static":
            raise ParameterError("only int8-static pages are calibrated", found=self.kv_format, needed="int8-static")

    def calibrate(self, peaks: Tensor) -> None:
        """Set the largest magnitudes, fp32 [layers, 2 (keys, values), Hk], that tokens written from now on are scaled
        by. Raises ParameterError for peaks that are no scales of these pages, and for another format."""
        self.check_static()
        self.kv_peaks = checked_peaks(peaks, self._peaks_shape)
        self._layer_peaks = [layer.to(self.device, copy=True) for layer in self.kv_peaks]  # each on 16 bytes and more

    def begin_step(self, batch: Batch) -> list[int]:
        """Called by whoever plans a step, before it is run. Returns the blocks to seal after its tokens are written and
        before anybody attends: none but of kivi4 pages. Raises ParameterError for int8-static pages without peaks,
        NanokitError for tokens that can no longer be written (see open_pages)."""
        if self.kv_format == "int8-static" and self.kv_peaks is None:
            raise ParameterError(
                "int8-static pages have not been calibrated",
                found="no peaks",
                needed="the largest magnitude of each layer's and head's keys and values, from a text",
                do="call calibrate(kv_peaks(model, ids)) with the function of nanokit.kv.calibrate",
            )
        return self._open.begin_step(batch) if self._open else []

    def release(self, blocks: Sequence[int]) -> None:
        """Nobody will write on in these blocks; whoever gets one anew begins at its first token."""
        if self._open:
            self._open.release(list(blocks))

    def check_integrity(self, max_seqs: int, token_budget: int) -> None:
        """Raise AssertionError for open pages that an engine of these sizes cannot have."""
        if self._open:
            self._open.check_integrity(open_blocks(max_seqs, token_budget))

    def addresses(self) -> Addresses:
        """The same pages for C. They hold for as long as this object lives. Raises ParameterError for pages that do not
        lie in ordinary memory."""
        if self.device.type != "cpu":
            raise ParameterError("only pages in ordinary memory have addresses", found=str(self.device), needed="cpu")
        tensors = [(*layer, self.sealed(index)) for index, layer in enumerate(self._layers)]
        found = [[0 if tensor is None else tensor.data_ptr() for tensor in layer] for layer in tensors]
        return Addresses(*np.array(found, np.int64).reshape(-1, 5).T.copy())


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
    scales = (heads, BLOCK_SIZE) if kv_format in SCALED else ()
    return [
        ((*groups, shape.head_dim, LANES // packed), dtype),
        ((*groups, LANES, shape.head_dim // packed), dtype),
        (scales, torch.float32),
        (scales, torch.float32),
    ]


def _record(shape: KVShape) -> tuple[Sequence[int], torch.dtype]:
    """One sealed block of a layer."""
    if shape.head_dim % LANES:
        raise ParameterError(
            "kivi4 pages cannot be made of these heads",
            found=f"heads of {shape.head_dim}",
            needed=f"a multiple of {LANES}",
            do="use int4 or int8 pages",
        )
    return (shape.num_kv_heads, record_bytes(shape.head_dim, BLOCK_SIZE)), torch.uint8
