"""Sealed pages of four bits: keys by channel, values by token (KIVI: Liu et al. 2024, arXiv 2402.02750).

Keys have dimensions that are large in every token, values do not: so the scale of a key belongs to a dimension, over 32
tokens, and that of a value to a token, over `value_group` dimensions. Codes 0 … 15 are asymmetric, x ~ code * scale +
minimum, and a scale needs all its tokens at once: a page is *open*, in fp16, until its 64 tokens are there, and is then
sealed from them.

    minimum = min x    scale = fp16((max x - min x) / 15)    code = clamp(rint((x - minimum) * (1 / scale)), 0, 15)

in fp32, each operation rounded once, `rint` to even, 1 / 0 taken as 0; the minimum is one of the numbers, so fp16 holds
it. A group with a number that is not finite gets a scale that is none, and with it whatever is computed from the page;
its minimum and its codes are 0. code * scale is exact in fp32: one fused operation and two give the same bits.

What a row sees depends on its position alone: a row in page p (position // 64) attends to page p as it was written and
to every earlier page sealed, also within one step. So a step first writes its tokens, then seals the pages that are
full now (again, if tokens of them were rolled back and written anew), then attends.

Of each head of each block, one record of `record_bytes`, in this order (pages.py says why 16 and 8 lie so):

    keys     uint8 [token / 16][dim][8]              byte j: token j (low half) and token j + 8
    values   uint8 [token][dim / 2]                  byte i: dimension i and i + dim / 2
    keys     fp16 [token / 32][scale, minimum][dim]
    values   fp16 [dim / value_group][scale, minimum][token]

Rejected: a scale for each page's 64 tokens (a quarter of the scales' bytes, a third more error), and a window of the
last tokens in fp16, as the paper has it (what a row sees would depend on how its prompt was cut).
"""

import torch
from torch import Tensor

from nanokit.kernels.paged import LANES, LayerPages
from nanokit.kernels.paged import read_kv as read_open

GROUP = 32  # tokens that share a key's scale
LEVELS = 15


def value_group(head_dim: int) -> int:
    """Dimensions that share a value's scale: 32, or all of a head that is no multiple of 32."""
    return GROUP if head_dim % GROUP == 0 else head_dim


def record_bytes(head_dim: int, block_size: int) -> int:
    """Bytes of one head of one sealed block; a multiple of 128 for heads of 16 n."""
    codes = block_size * head_dim  # of keys and values together, half a byte each
    return codes + 4 * (block_size // GROUP * head_dim + head_dim // value_group(head_dim) * block_size)


def seal(pages: LayerPages, sealed: Tensor, blocks: list[int]) -> None:
    """Write the records of some full blocks. pages: open, fp16; sealed: uint8 [blocks, Hk, record_bytes]."""
    keys, values = pages.keys[blocks].float(), pages.values[blocks].float()  # [n, Hk, 4, d, 16], [n, Hk, 4, 16, d]
    dim, per_group = values.shape[-1], GROUP // LANES
    by_channel = keys.unflatten(2, (-1, per_group)).transpose(3, 4).flatten(-2)  # [n, Hk, 2, d, 32]
    codes, *key_params = _quantize(by_channel)
    codes = codes.unflatten(-1, (per_group, LANES)).transpose(3, 4).flatten(2, 3)
    key_codes = codes[..., : LANES // 2] | codes[..., LANES // 2 :] << 4
    by_token = values.flatten(2, 3).unflatten(-1, (-1, value_group(dim)))  # [n, Hk, 64, groups, value_group]
    codes, *value_params = _quantize(by_token)
    first, second = codes.flatten(-2).chunk(2, dim=-1)
    params = (torch.stack(key_params, 3), torch.stack([each.transpose(2, 3) for each in value_params], 3))
    parts = (key_codes, first | second << 4, *(each.contiguous().view(torch.uint8) for each in params))
    sealed[blocks] = torch.cat([part.flatten(2) for part in parts], -1)


def _quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 of x [..., group], scales and minimums fp16 [...]."""
    low, high = x.amin(-1) + 0.0, x.amax(-1)  # + 0.0: a minimum of -0 is 0
    scale = ((high - low) / torch.tensor(float(LEVELS), device=x.device)).half()
    finite = x.isfinite().all(-1)
    scale, low = torch.where(finite, scale, torch.nan), torch.where(finite, low, 0.0)
    step = scale.float()
    inverse = torch.where(step > 0, torch.ones_like(step) / step, 0.0)
    codes = ((x - low[..., None]) * inverse[..., None]).round().clamp(0, LEVELS).nan_to_num(0.0)
    return codes.to(torch.uint8), scale, low.half()


def unseal(sealed: Tensor, head_dim: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Keys and values [n, Hk, block_size, d] in fp32 of records [n, Hk, record_bytes]."""
    half, groups = block_size * head_dim // 2, block_size // GROUP
    key_codes, value_codes, key_params, value_params = sealed.split(
        [half, half, 4 * groups * head_dim, sealed.shape[-1] - 2 * half - 4 * groups * head_dim], -1
    )
    key_codes = key_codes.unflatten(-1, (-1, head_dim, LANES // 2))
    codes = torch.cat((key_codes & 15, key_codes >> 4), -1).transpose(-1, -2).flatten(2, 3)  # [n, Hk, block_size, d]
    scale, low = _numbers(key_params).unflatten(-1, (groups, 2, head_dim)).unbind(3)
    k = codes.unflatten(2, (groups, GROUP)).float() * scale[:, :, :, None] + low[:, :, :, None]
    value_codes = value_codes.unflatten(-1, (block_size, head_dim // 2))
    codes = torch.cat((value_codes & 15, value_codes >> 4), -1).unflatten(-1, (-1, value_group(head_dim)))
    scale, low = _numbers(value_params).unflatten(-1, (-1, 2, block_size)).transpose(2, 4).unbind(3)
    v = codes.float() * scale[..., None] + low[..., None]
    return k.flatten(2, 3), v.flatten(3, 4)


def _numbers(halves: Tensor) -> Tensor:
    """uint8 [..., 2 n] as the fp16 numbers that they are, in fp32 [..., n]."""
    return halves.contiguous().view(torch.float16).float()


def read_kv(pages: LayerPages, sealed: Tensor, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
    """What a row of the last of these blocks sees of the first kv_len tokens: [Hk, kv_len, d] in fp32."""
    _, _, groups, dim, _ = pages.keys.shape
    size = groups * LANES
    k, v = unseal(sealed[blocks[:-1]], dim, size)
    last_k, last_v = read_open(pages, blocks[-1:], kv_len - (len(blocks) - 1) * size)
    join = lambda old, last: torch.cat((old.transpose(0, 1).flatten(1, 2), last), 1)  # noqa: E731
    return join(k, last_k), join(v, last_v)
