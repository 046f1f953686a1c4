"""The prefix cache: right answers whatever the hash, only whole computed blocks, leaves evicted first."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokit.kv.pool import BlockPool
from nanokit.kv.prefix import PrefixCache, chained_hash


def cache_of(num_blocks: int = 16, hash_function=chained_hash) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks)
    return pool, PrefixCache(pool, 2, hash_function)


def fill(pool: BlockPool, cache: PrefixCache, tokens: list[int]) -> list[int]:
    """Compute a sequence in blocks of its own and register it."""
    blocks = [pool.allocate() for _ in range(-(-len(tokens) // 2))]
    cache.register(None, tokens, blocks)
    return blocks


def hit(cache: PrefixCache, tokens: list[int]) -> list[int]:
    return [node.block for node in cache.match(tokens)]


HASHES = [chained_hash, lambda parent, tokens: 0, lambda parent, tokens: hash(tokens) % 2]


@pytest.mark.parametrize("hash_function", HASHES)
def test_equal_tokens_after_another_prefix_are_another_block(hash_function):
    """openvino.genai #3722, vllm-mlx #444: a colliding key gave another prompt's KV."""
    pool, cache = cache_of(hash_function=hash_function)
    first = fill(pool, cache, [1, 2, 7, 7])
    second = fill(pool, cache, [3, 4, 7, 7])
    assert hit(cache, [1, 2, 7, 7, 0]) == first
    assert hit(cache, [3, 4, 7, 7, 0]) == second
    assert hit(cache, [7, 7, 7, 7, 0]) == []
    assert hit(cache, [3, 4, 1, 2, 0]) == second[:1]
    cache.check_integrity()


def test_a_hit_never_covers_the_last_token():
    """nano-vllm #144: a prompt that was cached whole left a query of length zero."""
    pool, cache = cache_of()
    blocks = fill(pool, cache, [1, 2, 3, 4])
    assert hit(cache, [1, 2, 3, 4]) == blocks[:1]
    assert hit(cache, [1, 2, 3, 4, 5]) == blocks
    assert hit(cache, [1, 2]) == hit(cache, [1]) == []


def test_partial_blocks_are_not_registered():
    pool, cache = cache_of()
    blocks = fill(pool, cache, [1, 2, 3])
    assert cache.num_cached == 1
    assert hit(cache, [1, 2, 3, 4, 5]) == blocks[:1]


def test_a_duplicate_stays_private_and_its_continuation_is_found():
    pool, cache = cache_of()
    first = fill(pool, cache, [1, 2])
    second = fill(pool, cache, [1, 2, 3, 4])
    assert hit(cache, [1, 2, 3, 4, 5]) == [first[0], second[1]]
    assert not pool.is_cached(second[0])
    cache.check_integrity()


def test_leaves_are_evicted_before_the_blocks_they_hang_on():
    pool, cache = cache_of(4)
    blocks = fill(pool, cache, [1, 2, 3, 4, 5, 6, 7, 8])
    pool.release(blocks)
    for left in (3, 2, 1, 0):
        pool.allocate()
        assert hit(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == blocks[:left]
        cache.check_integrity()


def test_the_least_recently_used_chain_goes_first():
    pool, cache = cache_of(2)
    a, b = fill(pool, cache, [1, 2]), fill(pool, cache, [3, 4])
    pool.release(a)
    pool.release(b)
    pool.hold(a[0])
    pool.release(a)
    pool.allocate()
    assert hit(cache, [1, 2, 0]) == a
    assert hit(cache, [3, 4, 0]) == []


def test_leaf_first_also_when_the_leaf_was_released_later():
    """A chain below a duplicate is released after its parents, so the plain LRU order would take a parent
    first."""
    pool, cache = cache_of(4)
    first = fill(pool, cache, [1, 2, 3, 4])
    second = fill(pool, cache, [1, 2])  # private copy …
    third = [second[0], pool.allocate()]
    cache.register(None, [1, 2, 9, 9], third)  # … whose continuation hangs below first[0]
    pool.release(first)
    pool.release(third)
    assert pool.available == 4
    pool.allocate()  # the private copy was free
    pool.allocate()
    assert hit(cache, [1, 2, 3, 4, 0]) == first[:1]  # the oldest release, a leaf
    pool.allocate()
    assert hit(cache, [1, 2, 9, 9, 0]) == first[:1]  # oldest is first[0], but a leaf hangs below it
    cache.check_integrity()


def test_a_held_block_below_an_evicted_one_leaves_the_tree_but_not_the_pool():
    pool, cache = cache_of(3)
    first = fill(pool, cache, [1, 2])
    blocks = [pool.allocate(), pool.allocate()]
    tail = cache.register(None, [1, 2, 3, 4], blocks)
    pool.release(first)
    assert pool.allocate() == first[0]
    assert cache.num_cached == 0
    assert pool.references(blocks[1]) == 1
    cache.check_integrity()
    assert tail is not None
    assert not tail.alive
    cache.register(tail, [1, 2, 3, 4], blocks)  # and comes back under its own blocks when it goes on
    assert hit(cache, [1, 2, 3, 4, 5]) == blocks
    cache.check_integrity()


def test_the_integrity_check_sees_a_stale_entry():
    pool, cache = cache_of()
    fill(pool, cache, [1, 2, 3, 4])
    node = cache.match([1, 2, 3])[0]
    del node.children[next(iter(node.children))]
    with pytest.raises(AssertionError, match="hangs below nothing"):
        cache.check_integrity()


@given(st.integers(0, 2**32), st.sampled_from(HASHES))
def test_a_hit_always_holds_the_tokens_asked_for(seed, hash_function):
    """Random sequences over a small pool: each block's real content is kept beside it and compared on every
    hit."""
    rng = random.Random(seed)
    pool, cache = cache_of(8, hash_function)
    content: dict[int, tuple[int, ...]] = {}
    running: list[list[int]] = []
    for _ in range(40):
        if running and (rng.random() < 0.4 or pool.available < 4):
            pool.release(running.pop(rng.randrange(len(running))))
        elif pool.available >= 4:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
            nodes = cache.match(tokens)
            for node in nodes:
                pool.hold(node.block)
            blocks = [node.block for node in nodes]
            for index, block in enumerate(blocks):
                assert content[block] == tuple(tokens[: 2 * index + 2])
            while 2 * len(blocks) < len(tokens):
                blocks.append(pool.allocate())
                content[blocks[-1]] = tuple(tokens[: 2 * len(blocks)])
            cache.register(nodes[-1] if nodes else None, tokens, blocks)
            running.append(blocks)
        pool.check_integrity(running)
        cache.check_integrity()
