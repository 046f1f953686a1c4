"""Keys and values in pages, in plain torch: what a page holds after a write, and what a row sees of it.

nanokit/kv/pages.py draws the layout. An int8 or int4 page has one fp32 scale for each token and head, of its keys and
of its values: a token's numbers are final when it is written, so that nothing is ever scaled again, and a head's
outliers do not coarsen another head. Codes and scales are those of kernels/activations.py, with the ends ±127 and ±7;
int4 codes are stored as code + 8, two in a byte.

Rejected: a scale for each page (rescaling 64 tokens when a larger one arrives), for each key dimension (better in
theory, but it must be known before the first token is; kivi.py seals whole pages so), and the code -8 (the two ends
would round differently).

A scale may be given instead, for each layer and head: int8-static pages, what lies beyond being clipped.
"""

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels.activations import LIMIT, to_codes

if TYPE_CHECKING:
    from nanokit.model.batch import Batch

LANES = 16
LIMIT_INT4, ZERO_INT4 = 7, 8  # codes -7 … 7, stored as 1 … 15


class LayerPages(NamedTuple):
    """The pages of one layer. keys [blocks, Hk, tokens / 16, d, 16], values [blocks, Hk, tokens / 16, 16, d]: fp32,
    fp16 or int8, or uint8 with two int4 codes in a byte: keys [..., d, 8], values [..., 16, d / 2]; key_scales,
    value_scales: fp32 [blocks, Hk, tokens] of int8 and int4 pages, else None."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None


class Pages(Protocol):
    """Where keys and values lie; nanokit/kv/pages.py says what each method gives."""

    block_size: int
    kv_format: str

    def layer(self, index: int) -> LayerPages: ...
    def sealed(self, index: int) -> Tensor | None: ...
    def peaks(self, index: int) -> Tensor | None: ...
    def begin_step(self, batch: "Batch") -> list[int]: ...


def write_kv(pages: LayerPages, slots: Tensor, k: Tensor, v: Tensor, peaks: Tensor | None = None) -> None:
    """Store k, v [n, Hk, d] in the pages; slots [n] = block id * block size + offset in the block. peaks: fp32 [2, Hk],
    what codes of keys and of values are scaled by; None: each token's own."""
    keys, values, key_scales, value_scales = pages
    block_size = keys.shape[2] * LANES
    block, offset = slots // block_size, slots % block_size
    if key_scales is not None and value_scales is not None:
        limit = LIMIT_INT4 if keys.dtype == torch.uint8 else LIMIT
        k, key_scales[block, :, offset] = to_codes(k, _peak(k, peaks, 0), limit)
        v, value_scales[block, :, offset] = to_codes(v, _peak(v, peaks, 1), limit)
    group, lane = offset // LANES, offset % LANES
    if keys.dtype == torch.uint8:
        _write_int4_keys(keys, block, group, lane, (k + ZERO_INT4).to(torch.uint8))
        first, second = (v + ZERO_INT4).to(torch.uint8).chunk(2, dim=-1)
        values[block, :, group, lane, :] = first | second << 4
    else:
        keys[block, :, group, :, lane] = k.to(keys.dtype)
        values[block, :, group, lane, :] = v.to(values.dtype)


def _peak(x: Tensor, peaks: Tensor | None, which: int) -> Tensor:
    """What x [n, Hk, d] is scaled by, [n, Hk]. A number that is not finite stays in the scale: codes cannot hold it."""
    own = x.abs().amax(dim=-1)
    return own if peaks is None else torch.where(own.isfinite(), peaks[which], own)


def checked_peaks(peaks: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """A copy of peaks for pages of (layers, 2, KV heads). Raises ParameterError for another shape, and for one that no
    text gives: not finite, or not above zero."""
    if tuple(peaks.shape) != shape:
        raise ParameterError(
            "the peaks of keys and values are not these pages'", found=list(peaks.shape),
            needed=f"{list(shape)}: layers, keys and values, KV heads",
        )  # fmt: skip
    peaks = peaks.to(torch.float32, copy=True).contiguous()
    for layer, kind, head in ((peaks <= 0) | ~peaks.isfinite()).nonzero().tolist()[:1]:
        raise ParameterError(
            f"the peak of layer {layer}, {('keys', 'values')[kind]} of head {head} cannot be a scale",
            found=float(peaks[layer, kind, head]),
            needed="a finite number above zero",
            do='use kv_format="int8", whose scales are each token\'s own',
        )
    return peaks


def _write_int4_keys(keys: Tensor, block: Tensor, group: Tensor, lane: Tensor, codes: Tensor) -> None:
    """codes [n, Hk, d]. A byte is of two tokens, lanes j and j + 8: lower ones first, then upper, each leaves the other
    as it is."""
    half = LANES // 2
    for shift, here in ((0, lane < half), (4, lane >= half)):
        at = block[here], slice(None), group[here], slice(None), lane[here] % half
        keys[at] = keys[at] & (0xF0 >> shift) | codes[here] << shift


def read_kv(pages: LayerPages, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
    """The first kv_len tokens of a sequence as they are stored, gathered to [Hk, kv_len, d] in fp32."""
    _, _, key_scales, value_scales = pages
    keys, values = _numbers(pages.keys[blocks]), _numbers(pages.values[blocks])
    k = keys.permute(1, 0, 2, 4, 3).flatten(1, 3)[:, :kv_len]
    v = values.permute(1, 0, 2, 3, 4).flatten(1, 3)[:, :kv_len]
    if key_scales is not None and value_scales is not None:
        k = k * key_scales[blocks].transpose(0, 1).flatten(1)[:, :kv_len, None]
        v = v * value_scales[blocks].transpose(0, 1).flatten(1)[:, :kv_len, None]
    return k, v


def _numbers(stored: Tensor) -> Tensor:
    """What is stored, or the codes of it, in fp32; a byte's low nibbles are the first half of the last dimension."""
    if stored.dtype != torch.uint8:
        return stored.float()
    return torch.cat((stored & 15, stored >> 4), dim=-1).float() - ZERO_INT4
