"""Products with quantized weights against fp64: what the tests of every backend hold theirs to.

The bound. A product is one fma a step (two in formats with minimums) on terms that are exact whole numbers times
rounded scales. With u = 2^-24, s steps and M = sum of (|scale code| + |minimum|) |x|, every fma adds at most u M, and
the roundings inside the terms (scale times scale, a whole number beyond 2^24, the two roundings that a portable fma
takes) at most 4 u M together: |error| <= (2 s + 4) u (M + |bias|). That is M / 150,000 at the sizes of these tests. In
fp32, where no step is exact, a step is a column.
"""

import numpy as np
import torch
from torch import Tensor

from nanokit.kernels.activations import quantize
from nanokit.kernels.packable import fits_four_bits
from nanokit.quant.qtensor import QTensor

PEAK = 2.5  # of static activations: some are beyond it


def activations(rows: int, columns: int, seed: int) -> Tensor:
    """Rows of different size, some groups all zero."""
    noise = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=noise) * 2 ** (4 * torch.randn(rows, 1, generator=noise))
    x.view(rows, -1, 16)[torch.rand(rows, columns // 16, generator=noise) < 0.1] = 0
    return x


def layouts(q: QTensor) -> list[bool]:
    """Whether codes can lie in two planes, besides in one piece."""
    return [False] if q.table is not None or fits_four_bits(q.code_range) else [False, True]


def assert_product(q: QTensor, bias: np.ndarray | None, x: Tensor, mode: str, got: Tensor) -> None:
    """See the module."""
    if mode == "fp32":
        a = x.double()
    else:
        seen = quantize(x, mode, PEAK)
        a = seen.codes.double() * seen.scales.double().repeat_interleave(seen.group, 1)
    values = torch.from_numpy(q.codes if q.table is None else q.table[q.codes]).double()
    scaled = values * torch.from_numpy(q.scales).double().repeat_interleave(q.group, 1)
    minimums = torch.zeros(1).double()
    if q.minimums is not None:
        minimums = torch.from_numpy(q.minimums).double().repeat_interleave(q.group, 1)
    added = torch.zeros(len(values)) if bias is None else torch.from_numpy(bias)
    expected = a @ (scaled + minimums).T + added
    size = a.abs() @ (scaled.abs() + minimums.abs()).T + added.abs()
    columns = 1 if mode == "fp32" else 16 if q.group == 16 or mode == "a8g16" else 32
    steps = x.shape[1] / columns
    assert got.dtype == torch.float32
    assert got.shape == expected.shape
    excess = (got.cpu() - expected).abs() - (2 * steps + 4) * 2.0**-24 * size
    assert excess.max() <= 0, (q.format, mode, tuple(x.shape), float(excess.max()))
