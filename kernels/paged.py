"""Keys and values in pages, in plain torch: what a page holds after a write, and what a row sees of it.

nanokit/kv/pages.py draws the layout. An int8 page has one fp32 scale for each token and head, of its keys and of its
values: a token's numbers are final when it is written, so that nothing is ever scaled again, and a head's outliers do
not coarsen another head. Rejected: a scale for each page (rescaling 64 tokens when a larger one arrives), and for each
key dimension (better in theory, but it must be known before the first token is).
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from nanokit.kernels.activations import quantize

LANES = 16


class LayerPages(NamedTuple):
    """The pages of one layer. keys [blocks, Hk, tokens / 16, d, 16], values [blocks, Hk, tokens / 16, 16, d]: fp32,
    fp16 or int8; key_scales, value_scales: fp32 [blocks, Hk, tokens] of int8 pages, else None."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None


class Pages(Protocol):
    """Where keys and values lie."""

    block_size: int

    def layer(self, index: int) -> LayerPages: ...


def write_kv(pages: LayerPages, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k, v [n, Hk, d] in the pages; slots [n] = block id * block size + offset in the block."""
    keys, values, key_scales, value_scales = pages
    block_size = keys.shape[2] * LANES
    block, offset = slots // block_size, slots % block_size
    if key_scales is not None and value_scales is not None:
        k, key_scales[block, :, offset] = _by_token_and_head(k)
        v, value_scales[block, :, offset] = _by_token_and_head(v)
    group, lane = offset // LANES, offset % LANES
    keys[block, :, group, :, lane] = k.to(keys.dtype)
    values[block, :, group, lane, :] = v.to(values.dtype)


def _by_token_and_head(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [n, Hk, d] and scales [n, Hk] of x [n, Hk, d], each head of a token a row of mode `token`."""
    q = quantize(x.flatten(0, 1), "token")
    return q.codes.view(x.shape), q.scales.view(x.shape[:2])


def read_kv(pages: LayerPages, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
    """The first kv_len tokens of a sequence as they are stored, gathered to [Hk, kv_len, d] in fp32."""
    keys, values, key_scales, value_scales = pages
    k = keys[blocks].permute(1, 0, 2, 4, 3).flatten(1, 3)[:, :kv_len].float()
    v = values[blocks].permute(1, 0, 2, 3, 4).flatten(1, 3)[:, :kv_len].float()
    if key_scales is not None and value_scales is not None:
        k = k * key_scales[blocks].transpose(0, 1).flatten(1)[:, :kv_len, None]
        v = v * value_scales[blocks].transpose(0, 1).flatten(1)[:, :kv_len, None]
    return k, v
