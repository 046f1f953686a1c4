"""Attention over paged keys and values, for rows of all kinds in one step: decoded, drafted, and of a prompt.

The context is cut into chunks of `CHUNK` tokens, counted from its beginning whatever the step. Inside a chunk a softmax
runs over blocks of tokens (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"), and chunks are
folded from left to right. One program does all chunks of a tile and a KV head (whole); where these are too few for a
GPU, each chunk has its own program and a second kernel folds what they left (split; Dao et al. 2023, "Flash-Decoding").
Both do the same operations in the same order, and what a row does not see adds nothing, so that a row's bits depend
neither on the way, nor on the rows beside it, nor on how its prompt was cut. They do depend on what orders a sum:
CHUNK, the block, the stacked query rows of a program, its warps. All of it follows from the model's shape, nothing from
the step at hand; so does `tile_rows`, which steps of a model are made with.

Pages are multiplied as they are stored: scales of keys multiply scores, scales of values multiply weights. On tensor
cores a factor has 11 bits. Numbers in fp16 and codes of int8 and int4 have no more, so only queries and weights are
cut in two, and two products added; fp32 pages take three (tf32x3). Either way a term is off by 2^-20 of it.

Error, for a row and head with V = sum p |v| over its tokens and S = the largest scale * sum |q||k| of them: at most
e (3 + 2 S) V, where e = 2^-22 if products are in fp32 (the interpreter) and e = 2^-18 in tf32: twice e S is what scores
err (as much as a weight, and as much as their sum, are off by), the rest is of the products with v and of sums.
What is not finite comes out not finite, though not always as the same; and of no row that does not see it.

Rejected: a fold in any order (a row would depend on which programs finish first); as many splits as fill the GPU, and
larger tiles for prompts (on its batch mates); a block as a chunk (parts would be half of all traffic of int4 pages).
"""

import math

import torch
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels.gpu import runtime
from nanokit.kernels.gpu.device import attention as kernels
from nanokit.kernels.gpu.step import Step
from nanokit.kernels.paged import LANES, LayerPages

CHUNK = 256
STACKED = 16  # query rows of a program: the fewest that tensor cores take
ENOUGH_PROGRAMS = 256  # from here on, whole: about two for each multiprocessor of a large GPU
MOST_PARTS = 64 << 20  # bytes of parts that chunks may leave, else whole: a prompt at a long context has rows enough
FORMATS = {torch.float32: 1, torch.float16: 1, torch.int8: 1, torch.uint8: 2}  # numbers in an element of a page


def tile_rows(num_heads: int, num_kv_heads: int) -> int:
    """Rows of a tile, for `make_step`: always the same for a model, see the module."""
    return max(1, STACKED // (num_heads // num_kv_heads))


def attention(q: Tensor, pages: LayerPages, step: Step, *, scale: float, split: bool | None = None) -> Tensor:
    """Row i of q, fp32 [rows, Hq, d], attends to positions 0 … its own of its sequence: fp32 [rows, Hq, d].

    pages: of one layer, with the step's tokens written; fp32, fp16, int8 or int4 (`LayerPages`). scale: of scores,
    1 / sqrt(d). split: a program for each chunk, or not; None: by how many programs there would be. Raises
    ParameterError for shapes that do not fit each other or the kernel.
    """
    heads, kv_heads, dim = _shape(q, pages.keys, step.block_size)
    _check_pages(pages, kv_heads, dim, step.block_size)
    q = runtime.checked("q", q, torch.float32, (step.rows, heads, dim))
    out = torch.empty_like(q)
    if not step.rows:
        return out
    tiles, chunks = len(step.tiles), -(-step.longest // CHUNK)
    if split is None:
        enough = tiles * kv_heads >= ENOUGH_PROGRAMS or chunks * q.nbytes > MOST_PARTS
        split = chunks > 1 and not enough
    padded, stacked = _power_of_two(dim), _power_of_two(step.tile_rows * (heads // kv_heads))
    constants = (heads, kv_heads, dim, padded, stacked, step.block_size, CHUNK, _block(padded), split)
    inputs = (*pages, step.tiles, step.blocks, scale * math.log2(math.e), step.rows)
    if not split:
        runtime.launch(kernels.attend, (tiles, kv_heads), q, out, None, *inputs, *constants)
        return out
    parts, norms = q.new_empty((chunks, *q.shape)), q.new_empty((chunks, step.rows, heads, 2))
    runtime.launch(kernels.attend, (tiles, kv_heads, chunks), q, parts, norms, *inputs, *constants)
    runtime.launch(
        kernels.merge, (step.rows, heads), parts, norms, out, step.positions, step.rows, heads, dim, padded, CHUNK,
        warps=1,
    )  # fmt: skip
    return out


def _block(padded: int) -> int:
    """Tokens of a block: 4,096 numbers of keys, as many as registers hold beside the values; 16 to 64."""
    return max(LANES, min(64, 4096 // padded))


def _power_of_two(least: int) -> int:
    """The lowest power of two that is neither below `least` nor below what a product on tensor cores takes."""
    return max(STACKED, 1 << (least - 1).bit_length())


def _shape(q: Tensor, keys: Tensor, block_size: int) -> tuple[int, int, int]:
    """Query heads, KV heads, dimensions of a head."""
    if q.ndim == 3 and keys.ndim == 5:
        (heads, dim), kv_heads = q.shape[1:], keys.shape[1]
        if heads and dim and kv_heads and dim % 16 == heads % kv_heads == block_size % 64 == 0:
            return heads, kv_heads, dim
    raise ParameterError(
        "these heads or pages are not for the kernel",
        found=f"queries {list(q.shape)}, keys {list(keys.shape)}, blocks of {block_size}",
        needed="queries [rows, a multiple of KV heads, a multiple of 16], blocks of a multiple of 64",
    )


def _check_pages(pages: LayerPages, kv_heads: int, dim: int, block_size: int) -> None:
    keys, values, *scales = pages
    if keys.dtype not in FORMATS:
        raise ParameterError(
            "pages in an unknown format", found=keys.dtype, needed=f"one of {', '.join(map(str, FORMATS))}"
        )
    groups, packed = block_size // LANES, FORMATS[keys.dtype]
    runtime.checked("keys", keys, keys.dtype, (-1, kv_heads, groups, dim, LANES // packed))
    runtime.checked("values", values, keys.dtype, (len(keys), kv_heads, groups, LANES, dim // packed))
    for each in scales:
        if (each is None) != keys.dtype.is_floating_point:
            raise ParameterError(
                "pages of codes have scales, and no others", found=f"{keys.dtype}, scales {each is not None}"
            )
        if each is not None:
            runtime.checked("scales", each, torch.float32, (len(keys), kv_heads, block_size))
