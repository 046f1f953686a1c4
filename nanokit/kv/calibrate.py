"""Scales of int8-static pages: the largest keys and values of a text.

A static cache (as static ONNX int8 and some accelerators have it) fixes its scales once, on a short text, and clips
what a longer one brings. A token's keys and values are read from fp32 pages of their own, where every backend puts
them, so none of it is the kernels' concern.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from nanokit.kernels.paged import read_kv
from nanokit.kv.pages import BLOCK_SIZE, KVShape, PagedKV
from nanokit.model.batch import Batch


class Model(Protocol):
    """nanokit.model.transformer.Transformer, or what computes like it."""

    @property
    def config(self) -> KVShape: ...
    @property
    def device(self) -> torch.device: ...
    def peaks_of(self, batch: Batch, pages: Any) -> Tensor: ...


@torch.inference_mode()
def kv_peaks(model: Model, ids: Sequence[int]) -> Tensor:
    """The largest magnitude of each layer's and head's keys and values over a text: fp32 [layers, 2 (keys, values),
    Hk], for `PagedKV.calibrate`. Keys are rotated ones, as pages hold them; activations are as exact as the model's
    kernels can compute them. ids: one token or more."""
    blocks = list(range(-(-len(ids) // BLOCK_SIZE)))
    pages = PagedKV(model.config, len(blocks), "fp32", model.device)
    model.peaks_of(Batch(list(ids), [len(ids)], [len(ids)], [blocks]), pages)
    everything = torch.tensor(blocks, device=model.device)
    layers = [read_kv(pages.layer(i), everything, len(ids)) for i in range(model.config.num_layers)]
    return torch.stack([torch.stack([x.abs().amax((1, 2)) for x in kv]) for kv in layers]).cpu()
