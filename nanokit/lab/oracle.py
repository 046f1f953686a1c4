"""What a product of quantized numbers has to be, computed another way: matrices to try, fp64, and a bound.

The bound is that of the kernels' own tests (tests/kernels/test_cpu_product.py), so that a notebook and a test cannot
disagree about what "equal" means.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nanokit.kernels import activations
from nanokit.lab.experiments.product import random_weights
from nanokit.lab.sides import Side
from nanokit.quant.float4 import MXFP4
from nanokit.quant.qtensor import QTensor

TABLE = "MXFP4"  # 4-bit codes that are places in a table, as NVFP4's are
FORMATS = ("int4-sym-g32", "int4-asym-g32", "int8-sym-g32", "int8-asym-g32", "int8-sym-g16", TABLE)


def matrix(name: str, outputs: int, columns: int) -> QTensor:
    """Normal weights in one of `FORMATS`."""
    if name == TABLE:
        noise = np.random.default_rng(0).standard_normal((outputs, columns), np.float32)
        return replace(MXFP4().quantize(noise), format=TABLE)
    return random_weights(name, outputs, columns)


def bound(weights: QTensor, x: Tensor, mode: str, peak: float | None = None) -> tuple[Tensor, Tensor]:
    """The product of the codes in fp64, and how far from it a kernel may be: both fp64 [rows, outputs].

    A kernel adds whole numbers exactly within a step of 32 columns (16 where a scale is for 16) and rounds once a step,
    twice in formats with minimums: at most (2 steps + 4) 2^-24 sum |w| |x|, the 4 for what is rounded inside a term.
    The reference, which rounds once a column, is not bound to it by proof; it is only seen to keep to it.
    """
    seen = activations.quantize(x, mode, peak)
    a = seen.codes.double() * seen.scales.double().repeat_interleave(seen.group, 1)
    values = torch.from_numpy(weights.codes if weights.table is None else weights.table[weights.codes]).double()
    scaled = values * _wide(weights.scales, weights.group)
    minimums = torch.zeros(1).double() if weights.minimums is None else _wide(weights.minimums, weights.group)
    steps = x.shape[1] / (16 if weights.group == 16 or mode == "a8g16" else 32)
    size = a.abs() @ (scaled.abs() + minimums.abs()).T
    return a @ (scaled + minimums).T, (2 * steps + 4) * 2.0**-24 * size


def _wide(values: np.ndarray, group: int) -> Tensor:
    return torch.from_numpy(values).double().repeat_interleave(group, 1)


def same_codes(side: Side, x: Tensor, mode: str, peak: float | None = None) -> bool:
    """Whether codes and scales have the bits of the contract; of a mode with one scale a row, a backend may keep it
    once or for every group."""
    expected, (codes, scales) = activations.quantize(x, mode, peak), side.codes(x, mode, peak)
    wanted = expected.scales.repeat_interleave(scales.shape[1] // expected.scales.shape[1], 1)
    return bool((codes == expected.codes).all()) and bool((scales == wanted).all())
