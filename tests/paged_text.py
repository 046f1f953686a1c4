"""Sequences of random queries, keys and values, and pages for them: what tests of attention are made of."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanokit.kv.pages import BLOCK_SIZE, PagedKV


@dataclass(frozen=True)
class Text:
    """One sequence: queries, keys and values of all its tokens, and its blocks."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: list[int]

    def __len__(self) -> int:
        return len(self.q)


@dataclass(frozen=True)
class World:
    """A layer's shape (heads, kv heads, head dim), and the format of its pages."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_format: str
    seed: int
    num_layers: int = 1

    def text(self, length: int, table: list[int]) -> Text:
        """The same numbers for the same length."""
        noise = torch.Generator().manual_seed(self.seed + length)
        q = 3 * torch.randn(length, self.num_heads, self.head_dim, generator=noise)
        k, v = torch.randn(2, length, self.num_kv_heads, self.head_dim, generator=noise)
        return Text(q, k, v, table)

    def pages(self, texts: list[Text], stale: float = 0.0, device: torch.device | str = "cpu") -> PagedKV:
        """Pages large enough for the texts, filled with what an earlier use left there; static ones clip a tenth."""
        blocks = 1 + max((b for text in texts for b in text.table), default=0)
        pages = PagedKV(self, blocks, self.kv_format, device)
        for tensor in (*pages.layer(0), pages.sealed(0)):
            if tensor is not None:
                tensor.fill_(stale if tensor.dtype.is_floating_point else 77)
        if self.kv_format == "int8-static":
            pages.calibrate(1.6 + 0.1 * torch.arange(2.0 * self.num_kv_heads).view(1, 2, -1))
        return pages


def blocks_of(length: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-length // BLOCK_SIZE)
