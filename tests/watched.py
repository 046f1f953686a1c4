"""A model that checks itself: every row of a step against one forward over its whole history, bit for bit."""

from typing import Any

import torch

from nanokit.kv.pages import BLOCK_SIZE, PagedKV
from nanokit.model.batch import Batch


class Watcher:
    """Forwards to the model and compares every row that comes back, hidden states and logits, bit for bit."""

    def __init__(self, model: Any, kv_format: str) -> None:
        self._model, self._kv_format = model, kv_format
        self.vocab_size, self.head, self.config = model.vocab_size, model.head, model.config
        self.activations = model.activations
        self._written: dict[int, int] = {}
        self.rows = 0

    def forward(self, batch: Batch, kv: Any) -> torch.Tensor:
        hidden = self._model.forward(batch, kv)
        start = 0
        for query, length, table in zip(batch.query_lens, batch.kv_lens, batch.block_tables, strict=True):
            slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(length)]
            self._written.update(zip(slots[length - query :], batch.token_ids[start : start + query], strict=True))
            history = [self._written[slot] for slot in slots]
            pages = PagedKV(self.config, len(table), self._kv_format)
            if kv.kv_peaks is not None:
                pages.calibrate(kv.kv_peaks)
            full = self._model.forward(Batch(history, [length], [length], [list(range(len(table)))]), pages)
            got, expected = hidden[start : start + query], full[length - query :]
            assert torch.equal(got, expected)
            assert torch.equal(self.head.logits(got), self.head.logits(expected))
            start += query
            self.rows += query
        return hidden
