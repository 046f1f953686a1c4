"""Tensors of an opened model as a GGUF file keeps them.

A source gives rows of q and k in transformers' order, whatever it was read from; llama files have them in the order of
interleaved rope. Vectors (norms, biases) are always F32, as every converter writes them. A tensor is read, rounded and
packed when it is written, one at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from nanokit.gguf.write import Entry
from nanokit.model.calibrate import Progress
from nanokit.model.source import FLOATS, ModelSource, interleaved_heads
from nanokit.quant.ggml import to_blocks


def entry_of(source: ModelSource, name: str, target: str) -> Entry:
    """The tensor `name` of a source, to be written as `target`, a GGUF name, in the type in which the source has it:
    F32, F16, BF16, or one that `quant.ggml.to_blocks` packs."""
    stored = source.stored[name]
    heads = interleaved_heads(source.config, target)
    if len(stored.shape) == 1:
        return Entry(target, "F32", stored.shape, partial(_floats, source, name, "F32", heads))
    make: Callable[[], np.ndarray]
    if stored.type in FLOATS:
        make = partial(_floats, source, name, stored.type, heads)
    else:
        make = partial(_blocks, source, name, heads)
    return Entry(target, stored.type.upper(), stored.shape, make)


def counted(entries: Sequence[Entry], progress: Progress | None) -> list[Entry]:
    """The same, with a word to `progress` after each that has been made: (done, in all, name)."""
    if progress is None:
        return list(entries)

    def make(each: Entry, number: int) -> np.ndarray:
        made = each.make()
        progress(number, len(entries), each.name)
        return made

    return [replace(each, make=partial(make, each, number)) for number, each in enumerate(entries, 1)]


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """From half-split to interleaved rope order: the inverse of `source.unpermute`. rows: [heads * head_dim, …]."""
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _floats(source: ModelSource, name: str, kind: str, heads: int) -> np.ndarray:
    values = source.tensor(name).to(FLOATS[kind])
    if kind == "BF16":  # which numpy does not have
        values = values.view(torch.int16)
    return interleaved(values.numpy(), heads) if heads else values.numpy()


def _blocks(source: ModelSource, name: str, heads: int) -> np.ndarray:
    q = source.quantized(name, 0, source.stored[name].shape[0])
    assert q is not None, f"{name} is no matrix of codes"
    blocks = to_blocks(q).reshape(q.shape[0], -1)
    return interleaved(blocks, heads) if heads else blocks
