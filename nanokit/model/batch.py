"""The scheduler's view of one forward: plain Python integers, no tensors.

Prefill, a chunk of a prefill, decode and the verification of drafted tokens are one call over flattened
tokens:

    token_ids     a0 a1 a2 | b7 | c4 c5        the new tokens of every sequence, one after the other
    query_lens    3          1    2            new tokens of each sequence (0: the row takes no part)
    kv_lens       3          8    6            tokens in context after this step
    block_tables  [5]        [0,2] [4,1]       block ids; token position p lies in block p // block_size

The tokens of a sequence take the positions kv_len - query_len ... kv_len - 1. Blocks are *ids*: the KV layer
turns (layer, id) into an address or an index, so that the scheduler runs, and is tested, on any machine.
Tensors here were rejected: every device would want another layout of them (see `plan()` of the backends).
"""

from collections import Counter
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True)
class Batch:
    """One ragged forward; see the module's drawing. Never changed after it was built."""

    token_ids: list[int]
    query_lens: list[int]
    kv_lens: list[int]
    block_tables: list[list[int]]

    def check(self, *, vocab_size: int, num_blocks: int, block_size: int) -> None:
        """Raise ValueError when a kernel that trusted this batch could read or write where it must not.

        Beyond lengths and ranges: a block that one sequence writes in this step stands in no other table,
        because two writers, or a reader of a page being written, would make a row depend on its neighbours.
        """
        rows = len(self.query_lens)
        if not rows == len(self.kv_lens) == len(self.block_tables):
            raise ValueError(f"{rows} query lengths, {len(self.kv_lens)} KV lengths, {len(self.block_tables)} tables")
        if sum(self.query_lens) != len(self.token_ids):
            raise ValueError(f"query lengths sum to {sum(self.query_lens)}, tokens: {len(self.token_ids)}")
        if self.token_ids and (min(self.token_ids) < 0 or max(self.token_ids) >= vocab_size):
            raise ValueError(f"a token id lies outside 0…{vocab_size - 1}")
        blocks = list(chain.from_iterable(self.block_tables))
        if blocks and (min(blocks) < 0 or max(blocks) >= num_blocks):
            raise ValueError(f"a block id lies outside 0…{num_blocks - 1}")
        uses = Counter(blocks) if rows > 1 or len(set(blocks)) < len(blocks) else None
        for row, (query, kv, table) in enumerate(zip(self.query_lens, self.kv_lens, self.block_tables, strict=True)):
            if not 0 <= query <= kv:
                raise ValueError(f"row {row}: {query} new tokens in a context of {kv}")
            if len(table) * block_size < kv:
                raise ValueError(f"row {row}: {len(table)} blocks of {block_size} for a context of {kv}")
            if query and uses:
                written = table[(kv - query) // block_size : (kv - 1) // block_size + 1]
                shared = [block for block in written if uses[block] > 1]
                if shared:
                    raise ValueError(f"row {row} writes blocks {shared}, which another row also holds")
