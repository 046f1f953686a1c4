"""Attention of one layer as a checked operation of its own, for tests and notebooks; `bound` does not come by here."""

from ctypes import POINTER, addressof, byref, c_int, c_long, c_void_p
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels.cpu import structs
from nanokit.kernels.cpu.bound import PageTables
from nanokit.kernels.cpu.library import Library
from nanokit.kernels.cpu.library import library as default_library
from nanokit.kernels.cpu.team import team

if TYPE_CHECKING:
    from nanokit.kv.pages import PagedKV
    from nanokit.model.batch import Batch


class Norms(Protocol):
    """The norm of each head of queries and keys: weights fp32 [d], and what is added to the mean square."""

    q_norm: Tensor
    k_norm: Tensor
    eps: float


def attention(
    batch: "Batch",
    pages: "PagedKV",
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: Norms | None = None,
    *,
    layer: int = 0,
    cut_for: int | None = None,
    threads: int | None = None,
    library: Library | None = None,
) -> Tensor:
    """Normalize, rotate, store k and v in `layer` of the pages, attend: fp32 [rows, Hq, d].

    q [rows, Hq, d], k, v [rows, Hk, d]: of the batch's tokens, before rotation; cos, sin [positions, d / 2]. threads:
    of the team; cut_for: for how many threads the work is cut (default: the team's). Raises ParameterError; ValueError
    for a batch that would write where it must not.
    """
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    if dim % 16 or heads % kv_heads or not k.shape == v.shape == (rows, kv_heads, dim):
        raise ParameterError(
            "these heads are not for the kernels", found=[list(x.shape) for x in (q, k, v)],
            needed="q [rows, Hq, d], k and v [rows, Hk, d], Hk a divisor of Hq, 16 of d",
        )  # fmt: skip
    batch.check(
        vocab_size=1 + max(batch.token_ids, default=0), num_blocks=pages.num_blocks, block_size=pages.block_size
    )
    held = pages.layer(layer).keys.shape
    if len(batch.token_ids) != rows or (held[1], held[3]) != (kv_heads, dim):
        raise ParameterError(
            "the batch or the pages are not those of these heads",
            found=f"{len(batch.token_ids)} tokens, pages for {held[1]} heads of {held[3]}",
            needed=f"{rows} tokens, pages for {kv_heads} heads of {dim}",
        )
    longest = max(batch.kv_lens, default=0)
    if not cos.shape == sin.shape or cos.ndim != 2 or len(cos) < longest or cos.shape[1] != dim // 2:
        raise ParameterError(
            "no rotation for these positions", found=list(cos.shape), needed=f"[{longest} or more, {dim // 2}]"
        )
    library = library or default_library()
    crew = team(library, threads)
    q, k, v, cos, sin = (x.to(torch.float32).contiguous() for x in (q.clone(), k.clone(), v, cos, sin))
    weights = structs.Layer()
    if norms is not None:
        q_norm, k_norm = norms.q_norm.contiguous(), norms.k_norm.contiguous()
        weights.q_norm, weights.k_norm = q_norm.data_ptr(), k_norm.data_ptr()
    model = structs.Model(
        layers=1, heads=heads, kv_heads=kv_heads, head_dim=dim, eps=norms.eps if norms else 0.0,
        layer=addressof(weights),
    )  # fmt: skip
    full = np.array(pages.begin_step(batch), np.int64)
    words, tables = _words(batch, pages.block_size), PageTables(pages)
    step = structs.Step(
        rows, len(batch.query_lens), *(x.ctypes.data for x in words), cos.data_ptr(), sin.data_ptr(),
        *tables.step(layer), len(full), full.ctypes.data,
    )  # fmt: skip
    out = torch.empty_like(q)
    run = library.declare(
        "nk_attention", c_int, c_void_p, POINTER(structs.Model), POINTER(structs.Step), c_long, *[c_void_p] * 4
    )
    addresses = [x.data_ptr() for x in (q, k, v, out)]
    if run(crew.handle, byref(model), byref(step), cut_for or crew.threads, *addresses):
        raise MemoryError("no memory for the attention's plan")
    return out


def _words(batch: "Batch", block_size: int) -> list[np.ndarray]:
    """tokens, positions, first_row, first_block, blocks of nk.h's Step."""
    positions: list[int] = []
    blocks: list[int] = []
    first_row, first_block = [0], [0]
    for query_len, kv_len, table in zip(batch.query_lens, batch.kv_lens, batch.block_tables, strict=True):
        positions += range(kv_len - query_len, kv_len)
        blocks += table[: -(-kv_len // block_size)]
        first_row.append(len(positions))
        first_block.append(len(blocks))
    lists = (batch.token_ids, positions, first_row, first_block, blocks)
    return [np.array(each, np.int64) for each in lists]
