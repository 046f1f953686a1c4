"""The fp16 originals of kivi4 pages: where they lie, and how long they are needed.

Every block id has both forms, open (here) and sealed. A page is sealed from its originals in each step that writes into
it and leaves it full, so tokens that were drafted and rolled back leave no trace once others are written in their
place: the originals are kept until nothing can be written there again. That is so when `KEPT` tokens behind the page
are committed: a page, and the deepest speculation. What a step begins with is committed, so

    positions   0 ········ 64 ········ 128 ········ 192 ········ 256 ···│ first position of the step
                │ given back │ given back │ KEPT = 128 tokens and more ──┘ originals stay

Then their memory goes back to the system, as it does when the last holder of a block lets it go: somebody who finds it
in the prefix cache reads its sealed form, and somebody who gets it as a new block begins at its first token. The
originals of a block lie in one piece over all layers, so that one call of the system gives them back.

Rejected: sealing when a page is committed (what a row sees would depend on how far speculation had got), and a small
pool of originals with ids of its own (a second allocator, which may run dry in the middle of a step).
"""

from functools import partial
from itertools import takewhile
from math import prod

import torch

from nanokit.errors import NanokitError
from nanokit.kernels.paged import LayerPages
from nanokit.kv.mapping import Mapping
from nanokit.model.batch import Batch

BLOCK_SIZE = 64
DEEPEST_SPECULATION = 64  # tokens that may be rolled back
KEPT = BLOCK_SIZE + DEEPEST_SPECULATION


def open_blocks(max_seqs: int, token_budget: int) -> int:
    """The most blocks whose originals are in memory at a time. Of a sequence: the last KEPT tokens, the page under way,
    and the end of what a step adds; and whole pages of a step's tokens. Twice these: a step of several activation modes
    is computed part by part, and a sequence gives back what its last step added when its own part begins."""
    return max_seqs * (KEPT // BLOCK_SIZE + 2) + 2 * (token_budget // BLOCK_SIZE)


class OpenPages:
    """keys, values: one block of one layer of each. Layers as fp16 `LayerPages`, their blocks apart."""

    def __init__(
        self, layers: int, keys: tuple[int, ...], values: tuple[int, ...], num_blocks: int, device: torch.device
    ) -> None:
        shape = (num_blocks, layers, 2, prod(keys))
        self._mapping = Mapping(2 * prod(shape)) if device.type == "cpu" else None
        take = self._mapping.take if self._mapping else partial(torch.zeros, device=device)
        self._all = take(shape, dtype=torch.float16)
        self.layers = [
            LayerPages(each[:, 0].unflatten(-1, keys), each[:, 1].unflatten(-1, values), None, None)
            for each in self._all.unbind(1)
        ]
        self._open: set[int] = set()  # blocks whose originals are kept
        self._gone: set[int] = set()  # and those whose originals were given back

    def begin_step(self, batch: Batch) -> list[int]:
        """Take note of what a step is about to write. Returns the blocks that it fills, to be sealed before anybody
        attends to them. Raises NanokitError for a token in the middle of a page whose originals are gone."""
        full: list[int] = []
        for query_len, kv_len, table in zip(batch.query_lens, batch.kv_lens, batch.block_tables, strict=True):
            if not query_len:
                continue
            first = kv_len - query_len
            page = first // BLOCK_SIZE
            if first % BLOCK_SIZE and table[page] in self._gone:
                raise NanokitError(
                    "tokens of a sealed page cannot be written again",
                    found=f"a step that begins at token {first}, after at least {(page + 1) * BLOCK_SIZE + KEPT}",
                    needed=f"at most {DEEPEST_SPECULATION} tokens rolled back",
                    do="begin at the first token of a page, or use pages of another format",
                )
            written = table[page : -(-kv_len // BLOCK_SIZE)]
            self._open.update(written)
            self._gone.difference_update(written)
            full += table[page : kv_len // BLOCK_SIZE]
            behind = reversed(table[: max(0, (first - KEPT) // BLOCK_SIZE)])
            self.release(list(takewhile(self._open.__contains__, behind)))
        return full

    def check_integrity(self, most: int) -> None:
        """Raise AssertionError unless every block has one state, and at most so many are open."""
        assert not self._open & self._gone, f"open and gone: {self._open & self._gone}"
        assert self._open <= set(range(len(self._all))), f"open, but not in the pool: {self._open}"
        assert len(self._open) <= most, f"{len(self._open)} blocks are open, at most {most} were counted"

    def release(self, blocks: list[int]) -> None:
        """Nobody will write on in these blocks."""
        for block in blocks:
            if block in self._open:
                self._open.remove(block)
                self._gone.add(block)
                if self._mapping:
                    self._mapping.give_back(self._all[block])
