"""Originals of kivi4 pages: kept while they can be written again, and their memory given back after that."""

import mmap
from types import SimpleNamespace

import psutil
import pytest
import torch

from nanokit.errors import NanokitError
from nanokit.kernels.paged import write_kv
from nanokit.kv.mapping import Mapping
from nanokit.kv.open_pages import BLOCK_SIZE, KEPT, open_blocks
from nanokit.kv.pages import PagedKV
from nanokit.kv.pool import BlockPool
from nanokit.model.batch import Batch

SHAPE = SimpleNamespace(num_layers=4, num_kv_heads=4, head_dim=64)
BYTES = PagedKV.bytes_per_block(SHAPE, "fp16")


def write(pages: PagedKV, table: list[int], first: int, end: int) -> list[int]:
    """What a step does to the open pages; ones everywhere."""
    full = pages.begin_step(Batch([0] * (end - first), [end - first], [end], [table]))
    slots = torch.tensor([table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(first, end)])
    ones = torch.ones(end - first, 4, 64)
    for layer in range(4):
        write_kv(pages.layer(layer), slots, ones, ones)
    return full


def kept(pages: PagedKV, table: list[int]) -> list[bool]:
    """Of each block: whether its first token is still there, in all layers alike."""
    found = [[bool(x[block].any()) for i in range(4) for x in pages.layer(i)[:2]] for block in table]
    assert all(len(set(each)) == 1 for each in found)
    return [each[0] for each in found]


def test_a_step_says_which_blocks_it_fills() -> None:
    """Also those that were full before a rollback, of all its sequences, and none of a sequence that takes no part."""
    pages = PagedKV(SHAPE, 9, "kivi4")
    assert write(pages, [4, 2, 7], 0, 130) == [4, 2]
    assert write(pages, [4, 2, 7], 130, 131) == []
    assert write(pages, [4, 2, 7], 70, 131) == [2]
    assert write(pages, [4, 2, 7], 131, 192) == [7]
    batch = Batch([0] * 3, [1, 0, 2], [64, 192, 65], [[0], [4, 2, 7], [1, 3]])
    assert pages.begin_step(batch) == [0, 1]
    assert PagedKV(SHAPE, 9, "int4").begin_step(batch) == []


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED") or mmap.PAGESIZE > BYTES, reason="nothing can be given back")
def test_originals_go_when_a_page_and_the_deepest_speculation_lie_behind() -> None:
    """Too early, and a rollback seals zeros; never, and a page takes more memory than before."""
    pages, table = PagedKV(SHAPE, 20, "kivi4"), list(range(19, -1, -1))
    for first in range(0, 1000, 25):
        write(pages, table, first, first + 25)
        gone = max(0, (first - KEPT) // BLOCK_SIZE)
        here = -(-(first + 25) // BLOCK_SIZE)
        assert kept(pages, table[:here]) == [False] * gone + [True] * (here - gone)


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED") or mmap.PAGESIZE > BYTES, reason="nothing can be given back")
def test_memory_falls_after_sealing() -> None:
    """Resident bytes of the process: a long sequence keeps a few blocks open, and what nobody holds keeps none."""
    pages, table = PagedKV(SHAPE, 512, "kivi4"), list(range(512))
    process = psutil.Process()
    write(pages, table, 0, 32768)
    full = process.memory_info().rss
    pages.begin_step(Batch([0], [1], [32705], [table]))
    fallen = full - process.memory_info().rss
    assert abs(fallen - (512 - 1 - KEPT // BLOCK_SIZE) * BYTES) < 4 << 20
    assert kept(pages, table[-3:]) == [True] * 3
    pages.release(table)
    assert kept(pages, table[-3:]) == [False] * 3


def test_pages_of_a_shared_prefix_may_be_given_back_by_either() -> None:
    """Who finds blocks in the prefix cache reads them sealed; the one that wrote them may still be a page further."""
    pages = PagedKV(SHAPE, 12, "kivi4")
    write(pages, [0, 1, 2, 3], 0, 200)
    write(pages, [0, 1, 2, 4, 5, 6], 192, 350)
    write(pages, [0, 1, 2, 4, 5, 6], 350, 351)
    if hasattr(mmap, "MADV_DONTNEED") and mmap.PAGESIZE <= BYTES:
        assert kept(pages, [0, 1, 2, 3, 4, 5]) == [False, False, False, True, True, True]
    write(pages, [0, 1, 2, 3], 193, 201)  # its own page is its own


def test_a_block_used_again_begins_anew() -> None:
    pages = PagedKV(SHAPE, 4, "kivi4")
    write(pages, [0, 1], 0, 70)
    pages.release([0, 1])
    with pytest.raises(NanokitError, match=r"(?s)written again.*token 70"):
        write(pages, [0, 1], 70, 71)
    write(pages, [1, 0], 0, 70)
    write(pages, [1, 0], 70, 71)
    assert kept(pages, [1, 0]) == [True, True]


def test_the_pool_tells_of_blocks_that_nobody_holds() -> None:
    """A finished sequence leaves its last pages open: over a day of short requests all of the pool."""
    pool, told = BlockPool(4), []
    pool.released = told.extend
    a, b, c = (pool.allocate() for _ in range(3))
    pool.hold(b)
    pool.release([a, b])
    assert told == [a]
    pool.cache(c)
    pool.release([b, c])
    assert told == [a, c, b]


def test_the_memory_check_counts_every_open_block() -> None:
    """Sequences at every place in their pages, steps of the whole budget, in one part and in two, as two activation
    modes have it: never more open blocks than `open_blocks`."""
    draw = torch.Generator().manual_seed(0)
    for max_seqs, budget, parts in ((1, 1, 1), (1, 512, 1), (3, 64, 1), (4, 300, 1), (3, 64, 2), (4, 300, 2)):
        pages = PagedKV(SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=16), 400, "kivi4")
        tables = [list(range(100 * i, 100 * i + 100)) for i in range(max_seqs)]
        lengths, most = [0] * max_seqs, 0
        for _ in range(60):
            room, queries = budget, []
            for i in range(max_seqs):
                least = max_seqs - i - 1
                some = int(torch.randint(1, room - least + 1, (1,), generator=draw))
                queries.append(min(some, 6400 - lengths[i]))
                room -= queries[-1]
            order = torch.randperm(max_seqs, generator=draw).tolist()
            queries = [queries[i] for i in order]
            lengths = [length + query for length, query in zip(lengths, queries, strict=True)]
            for part in range(parts):
                mine = [i for i in range(max_seqs) if order[i] % parts == part]
                took = [queries[i] for i in mine]
                pages.begin_step(Batch([0] * sum(took), took, [lengths[i] for i in mine], [tables[i] for i in mine]))
                pages.check_integrity(max_seqs, budget)
                assert pages._open is not None
                most = max(most, len(pages._open._open))
        assert 0 < most <= open_blocks(max_seqs, budget)


def test_a_step_of_two_modes_leaves_the_pages_of_two_steps_open() -> None:
    """One prompt fills a step; in the next another does, in a part that is computed before the first one's first
    decode, with which alone its pages are given back."""
    pages = PagedKV(SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=16), 200, "kivi4")
    tables = [list(range(64 * i, 64 * i + 64)) for i in range(3)]
    budget, most = 2048, 0
    for part in ([(0, 0, 190)], [(0, 190, 191)], [(1, 0, 2047)], [(0, 191, 192), (2, 0, 2046)], [(1, 2047, 2048)]):
        queries = [end - first for _, first, end in part]
        pages.begin_step(Batch([0] * sum(queries), queries, [end for *_, end in part], [tables[i] for i, *_ in part]))
        pages.check_integrity(3, budget)
        assert pages._open is not None
        most = max(most, len(pages._open._open))
    assert most > open_blocks(3, 0) + budget // BLOCK_SIZE
    with pytest.raises(AssertionError, match="at most 12 were counted"):
        pages.check_integrity(3, 0)
    pages._open._gone.update(pages._open._open)
    with pytest.raises(AssertionError, match="open and gone"):
        pages.check_integrity(3, budget)


def test_a_part_of_a_mapping_is_given_back_to_its_borders() -> None:
    """Half a page of the system belongs to a neighbour: giving it back would clear numbers that are in use."""
    mapping = Mapping(8 * mmap.PAGESIZE)
    whole = mapping.take((8 * mmap.PAGESIZE,), torch.uint8)
    whole.fill_(1)
    begin, end = mmap.PAGESIZE // 2, 5 * mmap.PAGESIZE - 1
    mapping.give_back(whole[begin:end])
    mapping.give_back(whole[6 * mmap.PAGESIZE + 1 : 7 * mmap.PAGESIZE])
    assert whole[: mmap.PAGESIZE].all()
    assert whole[4 * mmap.PAGESIZE :].all()
    if hasattr(mmap, "MADV_DONTNEED"):
        assert not whole[mmap.PAGESIZE : 4 * mmap.PAGESIZE].any()
