"""Who holds which KV block: ids, reference counts, and the order in which cached blocks are given up.

    free ──allocate──▶ held (references ≥ 1) ──last release──▶ free            when its content is not cached
     ▲                  ▲                         └──────────▶ evictable       when its content is cached
     └────── evict ─────┼───────────────────────────── ┘
                        └── hold (a prefix hit) ── evictable

A block is `block_size` tokens of all layers; this file never learns what is in it. An evictable block is as
good as free: `available` counts both, and `allocate` asks the owner of the cached contents (the `Evictor`) to
forget one when the free list is empty. Reference counts, not owners, because forked sequences, prefix hits
and a transfer in flight all hold a block for the same reason: it must not be reused yet.

Rejected: evicting at release time (a cache that is empty whenever the pool is), and a free list that mixes
cached and uncached blocks in one LRU order (a cached block would be given up while unused ones exist).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol


class PoolExhausted(Exception):  # noqa: N818 - a state the scheduler plans for, not an error a person sees
    """`allocate` was called with neither a free nor an evictable block left."""


class Evictor(Protocol):
    """Owner of the cached contents."""

    def evict(self, oldest: int) -> None:
        """Forget the content of at least one evictable block, by calling `pool.uncache`.

        oldest: the evictable block whose last release is longest ago.
        """


class BlockPool:
    """`num_blocks` block ids, 0 … num_blocks - 1, all free at first."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.evictor: Evictor | None = None
        self.released: Callable[[list[int]], None] | None = None  # told of blocks that nobody holds any more
        self._references = [0] * num_blocks
        self._cached = [False] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block used last is the warmest
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest release first

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._evictable)

    @property
    def held(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.available

    def references(self, block: int) -> int:
        """How many holders the block has."""
        return self._references[block]

    def is_cached(self, block: int) -> bool:
        """Whether the evictor knows the content of the block."""
        return self._cached[block]

    def allocate(self) -> int:
        """A block with one reference and no cached content. Raises PoolExhausted."""
        if not self._free:
            if not self._evictable or self.evictor is None:
                raise PoolExhausted(f"all {self.num_blocks} blocks are held")
            self.evictor.evict(next(iter(self._evictable)))
        block = self._free.pop()
        self._references[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more reference to a block that is held or evictable."""
        if self._references[block] == 0:
            if block not in self._evictable:
                raise ValueError(f"block {block} is free: there is nothing to hold")
            del self._evictable[block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less, from the last block to the first, so that a chain's tail is evicted before its
        head."""
        left = []
        for block in reversed(list(blocks)):
            if self._references[block] == 0:
                raise ValueError(f"block {block} is released more often than it was held")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._cached[block]:
                    self._evictable[block] = None
                else:
                    self._free.append(block)
                left.append(block)
        if left and self.released is not None:
            self.released(left)

    def cache(self, block: int) -> None:
        """The evictor now knows this held block's content: its last release makes it evictable, not free."""
        if self._references[block] == 0 or self._cached[block]:
            raise ValueError(f"block {block} cannot become cached: not held, or cached already")
        self._cached[block] = True

    def uncache(self, block: int) -> None:
        """The evictor has forgotten this block; an evictable one becomes free."""
        if not self._cached[block]:
            raise ValueError(f"block {block} is not cached")
        self._cached[block] = False
        if self._references[block] == 0:
            del self._evictable[block]
            self._free.append(block)

    def check_integrity(self, holders: Iterable[Iterable[int]] | None = None) -> None:
        """Raise AssertionError unless every block is in exactly one state.

        holders: the block tables of all who hold blocks; given, the counts must be exactly theirs.
        """
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is twice on the free list"
        assert not free & evictable, f"both free and evictable: {free & evictable}"
        for block in range(self.num_blocks):
            count, cached = self._references[block], self._cached[block]
            expected = "held" if count > 0 else "evictable" if cached else "free"
            actual = "free" if block in free else "evictable" if block in evictable else "held"
            assert actual == expected, f"block {block}: {actual}, but {count} references, cached={cached}"
        if holders is not None:
            counts = [0] * self.num_blocks
            for table in holders:
                for block in table:
                    counts[block] += 1
            assert counts == self._references, f"references {self._references}, held by tables {counts}"
