"""The block pool: every block in exactly one state, cached blocks given up last and oldest first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokit.kv.pool import BlockPool, PoolExhausted


class Forgetful:
    """Evicts exactly the block the pool names, and writes down which."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool, self.evicted = pool, []
        pool.evictor = self

    def evict(self, oldest: int) -> None:
        self.evicted.append(oldest)
        self.pool.uncache(oldest)


def test_an_exhausted_pool_says_so_and_stays_whole():
    pool = BlockPool(2)
    held = [pool.allocate(), pool.allocate()]
    with pytest.raises(PoolExhausted):
        pool.allocate()
    pool.check_integrity([held])
    pool.release(held)
    assert pool.available == 2


def test_a_block_with_two_holders_is_not_reused_after_one_release():
    """mini-sglang #142: pages freed while another table still pointed at them."""
    pool = BlockPool(2)
    shared = pool.allocate()
    pool.hold(shared)
    pool.release([shared])
    assert pool.allocate() != shared
    with pytest.raises(PoolExhausted):
        pool.allocate()


def test_a_double_release_is_refused():
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(ValueError, match="released more often"):
        pool.release([block])


def test_uncached_free_blocks_are_used_before_cached_ones_and_those_tail_first():
    pool = BlockPool(4)
    forgetful = Forgetful(pool)
    chain = [pool.allocate() for _ in range(3)]
    for block in chain:
        pool.cache(block)
    pool.release(chain)
    pool.allocate()
    assert forgetful.evicted == []
    for _ in range(3):
        pool.allocate()
    assert forgetful.evicted == chain[::-1]


def test_holding_a_free_block_is_refused():
    """A hit on a block whose content was forgotten would read somebody else's KV."""
    with pytest.raises(ValueError, match="is free"):
        BlockPool(1).hold(0)


def test_the_integrity_check_sees_a_lost_and_a_doubly_held_block():
    pool = BlockPool(3)
    held = [pool.allocate(), pool.allocate()]
    with pytest.raises(AssertionError, match="held by tables"):
        pool.check_integrity([held[:1]])
    with pytest.raises(AssertionError, match="held by tables"):
        pool.check_integrity([held, held])
    pool._free.append(held[0])
    with pytest.raises(AssertionError, match="free"):
        pool.check_integrity()


@given(st.lists(st.tuples(st.sampled_from(["allocate", "hold", "release", "cache"]), st.integers(0, 9))))
def test_any_sequence_of_operations_keeps_every_block_accounted_for(operations):
    pool = BlockPool(5)
    Forgetful(pool)
    held: list[int] = []  # one entry a reference
    for name, number in operations:
        if name == "allocate":
            if pool.available:
                held.append(pool.allocate())
            else:
                with pytest.raises(PoolExhausted):
                    pool.allocate()
        elif held:
            block = held[number % len(held)]
            if name == "hold":
                pool.hold(block)
                held.append(block)
            elif name == "release":
                pool.release([block])
                held.remove(block)
            elif not pool.is_cached(block):
                pool.cache(block)
        pool.check_integrity([held])
        assert pool.held == len(set(held))
