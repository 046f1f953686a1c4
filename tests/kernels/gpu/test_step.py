"""A step's tensors: against the batch's own integers, counted one by one."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from nanokit.errors import ParameterError
from nanokit.kernels.gpu import runtime
from nanokit.kernels.gpu.step import make_step
from nanokit.model.batch import Batch

properties = settings(max_examples=60, deadline=None)
sequences = st.lists(st.integers(0, 40).flatmap(lambda kv: st.tuples(st.integers(0, kv), st.just(kv))), max_size=5)


@given(lengths=sequences, tile_rows=st.integers(1, 9), block_size=st.sampled_from([16, 64]), draw=st.randoms())
@properties
def test_every_row_is_where_its_batch_says(lengths: list, tile_rows: int, block_size: int, draw) -> None:
    """A row in no tile or in two, a position or slot off by one, the neighbour's table or more of it than needed:
    attention goes by nothing else."""
    tables = [draw.sample(range(99), -(-kv // block_size) + 1) for _, kv in lengths]
    token_ids = [draw.randrange(50_000) for query, _ in lengths for _ in range(query)]
    batch = Batch(token_ids, [query for query, _ in lengths], [kv for _, kv in lengths], tables)
    step = make_step(batch, block_size, tile_rows, runtime.device())
    assert step.token_ids.tolist() == token_ids
    tiles, blocks = step.tiles.tolist(), step.blocks.tolist()
    row = 0
    for (query, kv), table in zip(lengths, tables, strict=True):
        for position in range(kv - query, kv):
            assert step.positions[row] == position
            assert step.slots[row] == table[position // block_size] * block_size + position % block_size
            [(first, _, at, begin)] = [tile for tile in tiles if tile[0] <= row < tile[0] + tile[1]]
            assert at + row - first == position
            assert blocks[begin : begin + -(-kv // block_size)] == table[:-1]
            row += 1
    assert row == step.rows == len(step.slots)
    assert all(0 < count <= tile_rows for _, count, _, _ in tiles)
    assert len(tiles) == sum(-(-query // tile_rows) for query, _ in lengths)
    assert len(blocks) == sum(-(-kv // block_size) for query, kv in lengths if query)
    assert step.longest == max((kv for query, kv in lengths if query), default=0)


def test_every_field_is_one_that_kernels_take() -> None:
    """Types, shapes and the 16 bytes that wide loads need, with odd numbers of rows before them."""
    step = make_step(Batch([7, 8, 9], [1, 2], [65, 3], [[1, 2], [0]]), 64, 1, runtime.device())
    for name in ("token_ids", "positions", "slots"):
        runtime.checked(name, getattr(step, name), torch.int64, (3,))
    runtime.checked("tiles", step.tiles, torch.int32, (3, 4))
    runtime.checked("blocks", step.blocks, torch.int32, (3,))


@pytest.mark.parametrize(("tile_rows", "block_size"), [(0, 64), (1, 0)])
def test_tiles_and_blocks_of_nothing_are_refused(tile_rows: int, block_size: int) -> None:
    """The scheduler would wait for a step without end, or read a division by zero."""
    with pytest.raises(ParameterError, match="cut like that"):
        make_step(Batch([], [], [], []), block_size, tile_rows, runtime.device())
