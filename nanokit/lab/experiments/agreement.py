"""How far one engine's output is from another's: divergence of distributions, best tokens, greedy answers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanokit.engine.load import LoadedEngine
from nanokit.model.batch import Batch

CHUNK = 64  # rows compared at a time: in fp64, those of a whole text would take a gigabyte


def logits_of(engine: LoadedEngine, ids: Sequence[int]) -> Tensor:
    """Logits after every token of a text, fp32 [len(ids), vocab_size], computed in one forward."""
    blocks = [engine.pool.allocate() for _ in range(-(-len(ids) // engine.config.block_size))]
    try:
        hidden = engine.model.forward(Batch(list(ids), [len(ids)], [len(ids)], [blocks]), engine.kv)
        with torch.inference_mode():
            return engine.model.head.logits(hidden)
    finally:
        engine.pool.release(blocks)


def divergence(expected: Tensor, found: Tensor) -> Tensor:
    """KL(expected || found) of every row in nats, fp64 [rows]. Both: logits [rows, vocab_size]."""
    parts = [
        _divergence(e.double(), f.double()) for e, f in zip(expected.split(CHUNK), found.split(CHUNK), strict=True)
    ]
    return torch.cat(parts)


def _divergence(expected: Tensor, found: Tensor) -> Tensor:
    p, q = expected.log_softmax(dim=-1), found.log_softmax(dim=-1)
    return (p.exp() * (p - q)).sum(dim=-1)


def top1(expected: Tensor, found: Tensor) -> float:
    """Share of rows whose largest logit is that of the same id."""
    return float((expected.argmax(dim=-1) == found.argmax(dim=-1)).double().mean())


def kept(expected: Sequence[int], found: Sequence[int]) -> int:
    """How many tokens two answers have in common before they first differ."""
    pairs = enumerate(zip(expected, found, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(expected))
