"""Windows through a model: in batches, in chunks, over pages laid out as asked; what is kept are hidden states.

Hidden states and not logits: of a window of 512, those of the scored half take half a megabyte (576 columns), its
logits 50 (49,152 ids). The head is asked for a few rows at a time where they are compared.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, cat

from nanokit.errors import ParameterError
from nanokit.lab.progress import stop_if
from nanokit.model.batch import Batch

LAYOUTS = ("consecutive", "scattered")


@dataclass(frozen=True)
class Pass:
    """How windows go through a model. batch: windows computed together. chunk: tokens of each window in one forward.
    layout: of the pages of a window, consecutive block ids or ids scattered over the pool."""

    batch: int = 1
    chunk: int = 512
    layout: str = "consecutive"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ParameterError("unknown page layout", found=repr(self.layout), needed=" or ".join(LAYOUTS))
        if self.batch < 1 or self.chunk < 1:
            raise ParameterError("batch and chunk count from 1", found=f"batch {self.batch}, chunk {self.chunk}")

    def blocks(self, length: int, block_size: int) -> int:
        """KV blocks that a pass over windows of this length needs."""
        return self.batch * -(-length // block_size)

    def tables(self, blocks: Sequence[int]) -> list[list[int]]:
        """The block table of each window of a batch."""
        ids = list(blocks)
        if self.layout == "scattered":
            random.Random(0).shuffle(ids)
        each = len(ids) // self.batch
        return [ids[at : at + each] for at in range(0, each * self.batch, each)]


def hidden_states(
    forward: Callable[[Batch], Tensor],
    windows: Sequence[Sequence[int]],
    first: int,
    tables: Sequence[Sequence[int]],
    how: Pass,
    cancel: threading.Event | None = None,
) -> Iterator[Tensor]:
    """Of each window its hidden states from row `first` on, [length - first, hidden_size], in order.

    forward: of one step, [rows, hidden_size], all windows being of one length. tables: of `Pass.tables`.
    Raises StoppedError before the next forward once `cancel` is set.
    """
    length = len(windows[0])
    for at in range(0, len(windows), how.batch):
        group = windows[at : at + how.batch]
        kept: list[list[Tensor]] = [[] for _ in group]
        for start in range(0, length, how.chunk):
            stop_if(cancel)
            end = min(length, start + how.chunk)
            ids = [token for window in group for token in window[start:end]]
            lens, mine = [end - start] * len(group), [list(table) for table in tables[: len(group)]]
            rows = forward(Batch(ids, lens, [end] * len(group), mine)).split(end - start)
            if end > first:
                for parts, part in zip(kept, rows, strict=True):
                    parts.append(part[max(0, first - start) :].float().clone())
        yield from (cat(parts) for parts in kept)
