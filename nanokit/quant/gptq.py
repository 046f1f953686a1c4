"""GPTQ: weights rounded one column after another, each taking the error of those before it upon itself.

Frantar et al. 2022, arXiv:2210.17323. What a layer computes is W x; with the inputs' second moments H = mean(x x^T),
its error is the trace of (W - Q) H (W - Q)^T. Columns are not independent in it: what rounding one of them does to the
output can partly be undone by the columns that have not been rounded yet. With U upper triangular, H^-1 = U^T U:

    for each column j:   q_j = nearest(w_j)
                         w_k -= (w_j - q_j) U[j, k] / U[j, j]     for all k > j

Columns are updated inside a block first, and behind it once the block is done, by one product. The most active come
first, for the last have nobody left to correct them. Scales (and minimums) are found beforehand, on the weights as they
are, by the search that counts a column by its activity (rounding.fit): in this order groups are not done one by one.

U comes from a Cholesky factor of H with its rows and columns reversed, in fp64: H = R R^T with R upper triangular,
U = R^-1. That is the factor of the inverse without the inverse; H, R and U are never there all three (PEAK_BYTES). A
column whose input was always zero says nothing: it
has the mean second moment and no neighbours, and is rounded to nearest. `damp` of the mean second moment is added to
all of them; where that leaves H without a factor, ten times as much, and a hundred times; then H is refused by name.

Rejected: columns in their own order with scales found as each group is reached (the paper's way with groups): on the
default model it takes less off the error that a text shows than the weighted search alone.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.quant.grid import Grid, grid_of
from nanokit.quant.qtensor import QTensor
from nanokit.quant.rounding import search
from nanokit.quant.weight_format import WeightFormat

DAMP = 0.1  # the paper has .01, which with few tokens fits the calibration text and not others
PEAK_BYTES = 20  # for each pair of columns: the moments in fp32, and two fp64 matrices of their size
_BLOCK = 64
_TRIES = 3


def gptq(
    weights: np.ndarray, fmt: WeightFormat, moments: Tensor, damp: float = DAMP, *, name: str = "a matrix"
) -> QTensor:
    """Quantize fp32 weights [rows, columns] for inputs with second moments [columns, columns].

    damp: what is added to the diagonal, as a share of its mean. Raises what `rounding.search` raises, and
    ParameterError for second moments that are not finite, or not positive definite however they are damped.
    """
    diagonal = _checked(moments, weights.shape[1], name)
    start = search(weights, fmt, diagonal, name=name)
    grid = grid_of(start)
    order = torch.argsort(diagonal, descending=True, stable=True)
    factor = _inverse_factor(_backwards(moments, diagonal, order), damp, name).float()
    groups = (order // start.group).tolist()
    scales = torch.from_numpy(np.ascontiguousarray(start.scales.T))
    minimums = torch.zeros_like(scales)
    if start.minimums is not None:
        minimums = torch.from_numpy(np.ascontiguousarray(start.minimums.T))
    values = torch.empty(weights.shape[::-1])
    values[order] = _corrected(torch.from_numpy(weights.T)[order], factor, grid, scales, minimums, groups)
    return replace(start, codes=np.ascontiguousarray(grid.codes_of(values).T))


def _corrected(left: Tensor, factor: Tensor, grid: Grid, scales: Tensor, minimums: Tensor, groups: list[int]) -> Tensor:
    """Code values [columns, rows] of the weights `left`, which are used up. scales, minimums: [groups, rows]; groups:
    the group of each column."""
    safe = torch.where(scales == 0, 1.0, scales)
    for first in range(0, len(left), _BLOCK):
        block = left[first : first + _BLOCK]
        inside = factor[first : first + _BLOCK, first : first + _BLOCK]
        errors = torch.empty_like(block)
        for j, (row, each) in enumerate(zip(inside, groups[first : first + _BLOCK], strict=True)):
            value = grid.nearest((block[j] - minimums[each]) / safe[each])
            errors[j] = (block[j] - value * scales[each] - minimums[each]) / row[j]
            block[j + 1 :].addr_(row[j + 1 :], errors[j], alpha=-1)
            block[j] = value
        left[first + _BLOCK :].addmm_(factor[first : first + _BLOCK, first + _BLOCK :].T, errors, alpha=-1)
    return left


def _checked(moments: Tensor, columns: int, name: str) -> Tensor:
    """The diagonal of second moments that can be used, fp64."""
    diagonal = moments.diagonal().double()
    if moments.shape != (columns, columns) or not moments.isfinite().all() or bool((diagonal < 0).any()):
        raise ParameterError(
            f"{name} cannot be rounded by gptq for these second moments",
            found=f"shape {list(moments.shape)}, diagonal from {float(diagonal.min()):.3g}",
            needed=f"finite numbers [{columns}, {columns}], none below zero on the diagonal",
        )
    return diagonal


def _backwards(moments: Tensor, diagonal: Tensor, order: Tensor) -> Tensor:
    """Second moments in fp64, the last column of `order` first, dead columns alone in them."""
    last_first = order.flip(0)
    picked = moments[last_first[:, None], last_first].double()
    dead = diagonal[last_first] == 0
    picked[dead] = 0
    picked[:, dead] = 0
    picked.diagonal()[dead] = diagonal.mean() if not dead.all() else 1.0
    return picked


def _inverse_factor(backwards: Tensor, damp: float, name: str) -> Tensor:
    """Upper triangular U, fp64, with U^T U the inverse of the damped second moments. backwards: these, rows and columns
    reversed; used up, so that a caller who keeps no name for them holds one matrix less."""
    plain = backwards.diagonal().clone()
    for attempt in range(_TRIES):
        backwards.diagonal().copy_(plain + damp * 10**attempt * float(plain.mean()))
        lower, failed = torch.linalg.cholesky_ex(backwards)
        if not failed:
            del backwards
            upper = lower.flip(0, 1)
            del lower
            one = torch.eye(len(upper), dtype=torch.float64)
            return torch.linalg.solve_triangular(upper, one, upper=True, out=one)
        del lower
    raise ParameterError(
        f"{name} cannot be rounded by gptq for these second moments",
        found=f"no Cholesky factor with {damp * 10 ** (_TRIES - 1):g} of their mean added",
        needed="second moments of inputs, which are positive semidefinite",
        do="round it with awq or search, or calibrate with a longer text",
    )
