"""One step on the device: where each row's token lies, and how the rows are cut into tiles for attention.

What the scheduler says in plain integers (model/batch.py) becomes one array on the host and one copy: a GPU takes
about as long for a copy of 8 bytes as for one of 8 KB. The tensors of a `Step` are pieces of that array, each of them
on 16 bytes.

A tile is up to `tile_rows` successive rows of one sequence: a decoded token, some drafted ones and a chunk of a
prompt differ in how many there are, and in nothing else.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels.gpu.runtime import ALIGNMENT

if TYPE_CHECKING:
    from nanokit.model.batch import Batch


@dataclass(frozen=True)
class Step:
    """A resolved step of `rows` tokens, in tensors on the device.

    token_ids, positions, slots: int64 [rows]; a slot is block id * block size + offset in the block. tiles: int32
    [tiles, 4], a tile's first row, its number of rows, the position of its first row, and where in `blocks` the table
    of its sequence begins. blocks: int32, the block ids of all sequences that have rows. tile_rows: no tile has more.
    longest: tokens of the longest context. block_size: tokens of a block.
    """

    rows: int
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    tiles: Tensor
    blocks: Tensor
    tile_rows: int
    longest: int
    block_size: int


def make_step(batch: "Batch", block_size: int, tile_rows: int, device: torch.device) -> Step:
    """Resolve a batch and copy it to the device. Sequences without new tokens take no part in it.

    The batch is trusted (`Batch.check`). Raises ParameterError for tiles or blocks of no rows.
    """
    if tile_rows < 1 or block_size < 1:
        raise ParameterError(
            "no step is cut like that", found=f"tiles of {tile_rows} rows, blocks of {block_size}", needed="1 or more"
        )
    positions: list[int] = []
    slots: list[int] = []
    tiles: list[int] = []
    blocks: list[int] = []
    longest = 0
    for query_len, kv_len, table in zip(batch.query_lens, batch.kv_lens, batch.block_tables, strict=True):
        if query_len == 0:
            continue
        new = range(kv_len - query_len, kv_len)
        for first in new[::tile_rows]:
            row = len(positions) + first - new.start
            tiles += (row, min(tile_rows, kv_len - first), first, len(blocks))
        positions += new
        slots += [table[p // block_size] * block_size + p % block_size for p in new]
        blocks += table[: -(-kv_len // block_size)]
        longest = max(longest, kv_len)
    fields = [(batch.token_ids, torch.int64), (positions, torch.int64), (slots, torch.int64)]
    fields += [(tiles, torch.int32), (blocks, torch.int32)]
    token_ids, positions_, slots_, tiles_, blocks_ = _copied(fields, device)
    return Step(
        len(positions), token_ids, positions_, slots_, tiles_.view(-1, 4), blocks_, tile_rows, longest, block_size
    )


def _copied(fields: list[tuple[list[int], torch.dtype]], device: torch.device) -> list[Tensor]:
    """Lists of integers as tensors on the device: pieces of one array that was copied once."""
    starts = [0, *accumulate(-(-len(n) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for n, dtype in fields)]
    host = torch.empty(starts[-1], dtype=torch.uint8)
    for (numbers, dtype), start in zip(fields, starts, strict=False):
        _piece(host, numbers, dtype, start).copy_(torch.tensor(numbers, dtype=dtype))
    there = host.to(device)
    return [_piece(there, numbers, dtype, start) for (numbers, dtype), start in zip(fields, starts, strict=False)]


def _piece(array: Tensor, numbers: list[int], dtype: torch.dtype, start: int) -> Tensor:
    return array[start : start + len(numbers) * dtype.itemsize].view(dtype)
