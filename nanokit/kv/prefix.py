"""Finding KV that was already computed: full blocks keyed by a chained hash, verified by comparison.

A cached block is a node of a tree: its tokens, and the node before it. KV of a token depends on *everything*
before it, so two blocks of equal tokens with different parents are different. The hash only narrows the
search: a hit also needs equal tokens and *the same parent node* (object identity, all the way to the root),
so a colliding hash costs time, never a wrong answer. Replace the hash by a constant and every answer stays
right; a test does.

KV also depends on how it was computed: the same tokens under other activations are other numbers. That is the
`salt` of a chain, given to its first block and the same in all of it; chains of unlike salt are strangers.

Rules
- Only full blocks that have been computed are registered; what a step is about to compute is not there yet.
- A hit never covers the last token of a sequence: its hidden state is needed to draw the next one.
- Two sequences that compute the same block in the same step keep one block each. The tree knows the first;
  the second stays private to its sequence (pages are never swapped under a running one), and its later,
  different blocks hang below the first's node.
- Eviction takes the least recently released block, or, when cached blocks hang below that, the deepest of
  them.

Rejected: a radix tree with edges of any length (splitting edges buys nothing when pages are fixed blocks),
and trusting a strong hash (slower than comparing 64 integers, and only probably right).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nanokit.kv.pool import BlockPool

HashFunction = Callable[[int, tuple[int, ...]], int]


def chained_hash(parent: int, tokens: tuple[int, ...]) -> int:
    """Python's own tuple hash: the same in every process for integers, and C speed."""
    return hash((parent, tokens))


@dataclass(eq=False, slots=True)
class Node:
    """One cached block. Compared by identity."""

    key: int
    tokens: tuple[int, ...]
    parent: "Node | None"
    block: int
    depth: int  # blocks from the start of the sequence to the end of this one
    salt: str  # how the KV of its chain was computed
    children: "dict[Node, None]" = field(default_factory=dict)  # a dict as an ordered set: eviction is repeatable
    alive: bool = True  # False once evicted; a sequence may still remember the node


class PrefixCache:
    """The tree of cached blocks of one pool; it becomes the pool's evictor."""

    def __init__(self, pool: BlockPool, block_size: int, hash_function: HashFunction = chained_hash) -> None:
        self.pool, self.block_size = pool, block_size
        self._hash = hash_function
        self._buckets: dict[int, list[Node]] = {}
        self._by_block: dict[int, Node] = {}
        pool.evictor = self

    @property
    def num_cached(self) -> int:
        """Cached blocks, held or evictable."""
        return len(self._by_block)

    def match(self, tokens: Sequence[int], salt: str = "") -> list[Node]:
        """The longest chain of cached blocks of this salt that `tokens` starts with, short of its last token. Holds
        nothing."""
        chain: list[Node] = []
        parent = None
        for end in range(self.block_size, len(tokens), self.block_size):
            parent = self._find(parent, tuple(tokens[end - self.block_size : end]), salt)
            if parent is None:
                break
            chain.append(parent)
        return chain

    def register(self, tail: Node | None, tokens: Sequence[int], blocks: Sequence[int], salt: str = "") -> Node | None:
        """Enter the full blocks of a sequence that are computed.

        tail: what the last call, or a match, returned for this sequence; tokens: those that are computed,
        from the first; blocks: its block table; salt: how all of them were computed. Returns the node of its last
        full block (another sequence's, if that one was first), or None when there is none.
        """
        if tail and not tail.alive:  # another sequence's block, evicted since: enter our own from the start
            tail = None
        for index in range(tail.depth if tail else 0, len(tokens) // self.block_size):
            first = index * self.block_size
            piece = tuple(tokens[first : first + self.block_size])
            tail = self._find(tail, piece, salt) or self._enter(tail, piece, blocks[index], salt)
        return tail

    def clear(self) -> None:
        """Forget every cached block. Those that a sequence holds stay in the pool."""
        for node in list(self._by_block.values()):
            self._forget(node)

    def _key(self, parent: Node | None, tokens: tuple[int, ...]) -> int:
        return self._hash(parent.key if parent else 0, tokens)

    def _find(self, parent: Node | None, tokens: tuple[int, ...], salt: str) -> Node | None:
        for node in self._buckets.get(self._key(parent, tokens), ()):
            if node.parent is parent and node.tokens == tokens and node.salt == salt:
                return node
        return None

    def _enter(self, parent: Node | None, tokens: tuple[int, ...], block: int, salt: str) -> Node:
        node = Node(self._key(parent, tokens), tokens, parent, block, parent.depth + 1 if parent else 1, salt)
        self.pool.cache(block)
        self._buckets.setdefault(node.key, []).append(node)
        self._by_block[block] = node
        if parent:
            parent.children[node] = None
        return node

    def evict(self, oldest: int) -> None:
        """Forget the deepest evictable block at or below `oldest`; see `Evictor`."""
        node = self._by_block[oldest]
        below = list(node.children)
        while below:
            candidate = below.pop()
            if self.pool.references(candidate.block) == 0:
                node, below = candidate, list(candidate.children)
            else:
                below.extend(candidate.children)
        # What is left below is held by sequences with private copies of this prefix: it leaves the tree, not
        # the pool.
        doomed = [node]
        for entry in doomed:
            doomed.extend(entry.children)
        for entry in doomed:
            self._forget(entry)

    def _forget(self, node: Node) -> None:
        bucket = self._buckets[node.key]
        bucket.remove(node)
        if not bucket:
            del self._buckets[node.key]
        del self._by_block[node.block]
        if node.parent:
            del node.parent.children[node]
        node.alive = False
        self.pool.uncache(node.block)

    def check_integrity(self) -> None:
        """Raise AssertionError unless tree, buckets and pool agree."""
        in_buckets = [node for bucket in self._buckets.values() for node in bucket]
        assert len(in_buckets) == len(self._by_block), "buckets and blocks name different nodes"
        for node in in_buckets:
            assert node.alive, f"block {node.block}: a forgotten node is still found"
            assert self._by_block.get(node.block) is node, f"block {node.block} belongs to another node"
            assert len(node.tokens) == self.block_size, f"block {node.block} is not full"
            assert node.key == self._key(node.parent, node.tokens), f"block {node.block}: stale key"
            assert node.parent is None or (node.parent.alive and node in node.parent.children), (
                f"block {node.block} hangs below nothing"
            )
            assert all(child.parent is node and child.alive for child in node.children), (
                f"block {node.block} keeps a child that left"
            )
            assert node.parent is None or node.parent.salt == node.salt, f"block {node.block}: a chain of two salts"
            assert self._find(node.parent, node.tokens, node.salt) is node, f"block {node.block} is entered twice"
        for block in range(self.pool.num_blocks):
            assert self.pool.is_cached(block) == (block in self._by_block), f"block {block}: pool disagrees"
