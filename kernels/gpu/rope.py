"""What happens to queries, keys and values between their products and attention: head norms, rotation, the pages.

One launch for all of it. Rotation is the reference's, operation by operation, so without head norms q and the pages
have its bits; a head norm's sum is in another order, and moves a number by some units in the last place (24 u, as
gpu.rows says). Rejected: rotating keys when attention reads them, which is done once more for each later token.
"""

import torch
import triton
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels.activations import LIMIT
from nanokit.kernels.gpu.device import rope as device
from nanokit.kernels.gpu.runtime import checked, launch
from nanokit.kernels.paged import LANES, LIMIT_INT4, LayerPages

LIMITS = {torch.float32: 0, torch.float16: 0, torch.int8: LIMIT, torch.uint8: LIMIT_INT4}


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pages: LayerPages,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    *,
    peaks: Tensor | None = None,
) -> None:
    """Norm and rotate q [rows, Hq, d] in place; norm and rotate k, and store k and v [rows, Hk, d] in the pages.

    fp32 all; k and v stay as they are. cos, sin fp32 [rows, d / 2]; slots int64 [rows], each another and within the
    pages (not checked: that would wait for the device). q_norm, k_norm: weights fp32 [d] of each head's norm, or None.
    peaks: fp32 [2, Hk], what keys and values in pages of codes are scaled by; None: each token's own.
    Raises ParameterError for tensors that a kernel cannot take, and for heads that are no multiple of 16.
    """
    rows, heads, dim = checked("the queries", q, torch.float32, (-1, -1, -1)).shape
    kv_heads = k.shape[1]
    if dim % LANES:
        raise ParameterError("these heads are not for the kernels", found=f"{dim} numbers", needed=f"{LANES} or more")
    for name, x in (("the keys", k), ("the values", v)):
        checked(name, x, torch.float32, (rows, kv_heads, dim))
    for name, x in (("cos", cos), ("sin", sin)):
        checked(name, x, torch.float32, (rows, dim // 2))
    checked("the slots", slots, torch.int64, (rows,))
    for name, weight in (("the queries' norm", q_norm), ("the keys' norm", k_norm)):
        if weight is not None:
            checked(name, weight, torch.float32, (dim,))
    if peaks is not None:
        checked("the peaks", peaks, torch.float32, (2, kv_heads))
    keys, values, key_scales, value_scales, block_size = _checked_pages(pages, kv_heads, dim)
    launch(
        device.rotate_and_store, (rows, heads + kv_heads), q, k, v, cos, sin, slots, q_norm, k_norm, eps,
        keys, values, key_scales, value_scales, peaks,
        heads, kv_heads, dim, block_size, LIMITS[pages.keys.dtype], triton.next_power_of_2(dim // 2), warps=1,
    )  # fmt: skip


def _checked_pages(
    pages: LayerPages, kv_heads: int, dim: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int]:
    """The pages as the kernel takes them, and the tokens of a block. Keys of int4 come as words, for what is atomic."""
    keys, values, key_scales, value_scales = pages
    if keys.dtype not in LIMITS:
        raise ParameterError("no kernel writes such pages", found=keys.dtype, needed=", ".join(map(str, LIMITS)))
    packed = 2 if keys.dtype == torch.uint8 else 1
    blocks, _, groups, _, _ = checked(
        "the pages' keys", keys, keys.dtype, (-1, kv_heads, -1, dim, LANES // packed)
    ).shape
    checked("the pages' values", values, keys.dtype, (blocks, kv_heads, groups, LANES, dim // packed))
    if LIMITS[keys.dtype]:
        for name, scales in (("the keys' scales", key_scales), ("the values' scales", value_scales)):
            assert scales is not None
            checked(name, scales, torch.float32, (blocks, kv_heads, groups * LANES))
    return keys.view(torch.int32) if packed == 2 else keys, values, key_scales, value_scales, groups * LANES
