"""Random inputs of the cases: weights in every kind of format, activations, pages.

Weights are drawn as codes and scales, not quantized from numbers: a product has to be right for all that a file can
hold, and drawing is quick.
"""

from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from nanokit.kernels.gpu import runtime
from nanokit.kernels.gpu.pack import COLUMNS, UNIT, Packed, pack
from nanokit.kernels.packable import LANES
from nanokit.kernels.paged import LayerPages
from nanokit.quant.blocks import FP4_LEVELS
from nanokit.quant.qtensor import QTensor

BLOCK_SIZE = 64  # tokens of a page
PAGE_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8, "int4": torch.uint8}
UNEVEN = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


@dataclass(frozen=True)
class Kind:
    """A weight format as the kernels see it. group: None for a whole row; minimums, half (scales in fp16)."""

    codes: tuple[int, int]
    group: int | None
    minimums: bool = False
    half: bool = True
    table: np.ndarray | None = None


KINDS = {
    "int4-sym-g32": Kind((-7, 7), 32),
    "Q4_1": Kind((0, 15), 32, minimums=True),
    "int8-sym-g32": Kind((-127, 127), 32),
    "fp4-g16": Kind((0, 15), 16, table=FP4_LEVELS),  # NVFP4's shape: 16 levels, a scale for 16 columns
    "table-g32": Kind((0, 15), 32, table=UNEVEN),
    "int4-asym-g64": Kind((0, 15), 64, minimums=True, half=False),
    "int4-sym-channel": Kind((-7, 7), None, half=False),
    "6-bit-g16": Kind((-32, 31), 16),
    "int8-asym-g32": Kind((-128, 127), 32, minimums=True, half=False),
}


def weights(name: str, rows: int, columns: int, seed: int = 0) -> QTensor:
    """A random matrix of one of KINDS, its weights of about 1 / sqrt(columns), scales over a factor of 16."""
    kind, noise = KINDS[name], np.random.default_rng(seed)
    group = kind.group or columns
    low, high = kind.codes
    codes = noise.integers(low, high, (rows, columns), endpoint=True, dtype=np.int8)
    largest = np.abs(kind.table).max() if kind.table is not None else max(-low, high)
    grid = (rows, columns // group)
    scales = 2 ** noise.uniform(-2, 2, grid) / largest / columns**0.5
    minimums = -scales * high / 2 if kind.minimums else None
    return QTensor(
        name, (rows, columns), codes, _stored(scales, kind), None if minimums is None else _stored(minimums, kind),
        group, kind.table, kind.codes,
    )  # fmt: skip


def _stored(values: np.ndarray, kind: Kind) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32) if kind.half else values.astype(np.float32)


def activations(rows: int, columns: int, seed: int = 0) -> Tensor:
    """fp32 [rows, columns] on the CPU: rows of different size, some groups all zero."""
    noise = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=noise) * 2 ** (2 * torch.randn(rows, 1, generator=noise))
    x.view(rows, -1, 16)[torch.rand(rows, columns // 16, generator=noise) < 0.1] = 0
    return x


def there(x: Tensor) -> Tensor:
    """x on the device of the kernels."""
    return x.to(runtime.device())


def packed_copies(name: str, rows: int, columns: int, copies: int) -> list[Packed]:
    """As many matrices of random codes, in the layout of `pack` and made on the device: only their speed is asked."""
    kind = KINDS[name]
    model = pack(name, weights(name, LANES, 64 * (kind.group or 64)))
    group = kind.group or columns
    panels, units = -(-rows // LANES), -(-columns // COLUMNS[model.kind])
    codes = noise_bytes(copies, panels, units, LANES, UNIT)
    shape = (copies, panels, -(-units * COLUMNS[model.kind] // group), LANES)
    scales = torch.full(shape, 0.01, dtype=model.scales.dtype, device=codes.device)
    minimums = torch.full_like(scales, -0.05) if kind.minimums else None
    return [
        replace(
            model, shape=(rows, columns), group=group, codes=codes[i], scales=scales[i],
            minimums=None if minimums is None else minimums[i],
        )
        for i in range(copies)
    ]  # fmt: skip


def noise_bytes(*shape: int) -> Tensor:
    """uint8, random; whatever lay in memory where kernels are only compiled."""
    if runtime.instead_of_running is not None:
        return torch.empty(shape, dtype=torch.uint8, device=runtime.device())
    return torch.randint(256, shape, dtype=torch.uint8, device=runtime.device())


def empty_pages(kv_format: str, blocks: int, heads: int, dim: int) -> LayerPages:
    """Zeroed pages of one layer on the CPU, in the layout of nanokit/kv/pages.py."""
    dtype, groups = PAGE_TYPES[kv_format], BLOCK_SIZE // LANES
    per_byte = 2 if kv_format == "int4" else 1
    keys = torch.zeros(blocks, heads, groups, dim, LANES // per_byte, dtype=dtype)
    values = torch.zeros(blocks, heads, groups, LANES, dim // per_byte, dtype=dtype)
    if dtype.is_floating_point:
        return LayerPages(keys, values, None, None)
    scales = torch.zeros(2, blocks, heads, BLOCK_SIZE)
    return LayerPages(keys, values, scales[0].clone(), scales[1].clone())


def page_copies(kv_format: str, blocks: int, heads: int, dim: int, copies: int) -> list[LayerPages]:
    """Pages on the device whose speed is asked: random codes, or numbers of about 1."""
    found = []
    for _ in range(copies):
        made = empty_pages(kv_format, 0, heads, dim)
        keys, values = (_noise((blocks, *x.shape[1:]), x.dtype) for x in made[:2])
        scales = [None if x is None else torch.full((blocks, *x.shape[1:]), 0.01, device=keys.device) for x in made[2:]]
        found.append(LayerPages(keys, values, *scales))
    return found


def _noise(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if not dtype.is_floating_point:
        return noise_bytes(*shape).view(dtype)
    if runtime.instead_of_running is not None:
        return torch.empty(shape, dtype=dtype, device=runtime.device())
    return torch.randn(shape, dtype=dtype, device=runtime.device())


def nbytes(pages: LayerPages) -> int:
    """Bytes of all four tensors."""
    return sum(prod(x.shape) * x.element_size() for x in pages if x is not None)


def on_device(pages: LayerPages) -> LayerPages:
    """A copy of the pages there."""
    return LayerPages(*(None if x is None else there(x).clone() for x in pages))


@dataclass(frozen=True)
class Batch:
    """A step in plain integers, as nanokit.model.batch.Batch, which lies a floor above."""

    token_ids: list[int]
    query_lens: list[int]
    kv_lens: list[int]
    block_tables: list[list[int]]
