"""Scales found by search instead of from the largest weight: the same format, the same bytes, less error.

A scale of peak / 7 wastes its steps on one weight of a group. A smaller one clips that weight and serves the others
better. `search` tries ratios to the plain scale for each group, then fits: with the codes held, the best scale (and
minimum) is a least squares problem; with that scale, the codes are nearest again.

    error = sum over the columns of importance * (value - weight)^2

importance: how strongly an input column moves the output, the mean square of the activations that it multiplies; None
counts all columns alike, which needs no data. Kept is what the format keeps (11 bits, fp16, e4m3 …), codes are nearest
for the kept numbers, and a group whose plain rounding was at least as good stays as it was: never worse than plain, in
the measure that was asked for.

Rejected: exact breakpoint search (every ratio at which a code changes: a hundred times the work, for an error some
parts in a thousand smaller), and squares of the weights as importance where there is no data (llama.cpp's way).
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.quant.float4 import NestedNF4
from nanokit.quant.grid import Grid, grid_of
from nanokit.quant.qtensor import QTensor
from nanokit.quant.weight_format import WeightFormat

_SLICE = 1 << 17  # weights at a time: they and what is computed from them stay in a core's own cache
_RATIOS = 12
_FITS = 2


def check_searchable(fmt: WeightFormat) -> None:
    """Raise ParameterError for a format whose scales no group may choose: several matrices share one, or (nf4-dq) what
    is kept of each depends on all others of the matrix."""
    if fmt.name == NestedNF4.name:
        raise ParameterError(
            f"the scales of {fmt.name} cannot be searched for",
            found="scales that are quantized together, which moves each one that was found",
            needed="a format that keeps scales one by one",
            do=f"leave out the rounding method: {fmt.name}; or search for scales of nf4",
        )
    if fmt.scope in ("qkv", "global"):
        raise ParameterError(
            f"the scale of {fmt.name} cannot be searched for",
            found="one scale for several matrices",
            needed="a scale of each group, row or matrix",
            do=f"leave out the rounding method: {fmt.name}",
        )


def search(
    weights: np.ndarray, fmt: WeightFormat, importance: Tensor | None = None, *, name: str = "a matrix"
) -> QTensor:
    """Quantize fp32 weights [rows, columns] with searched scales. importance: [columns], none below zero.

    Raises what `fmt.quantize` and `check_searchable` raise.
    """
    check_searchable(fmt)
    plain = fmt.quantize(weights, name)
    grid = grid_of(plain)
    rows, columns = weights.shape
    counts = _counts(importance, columns).view(-1, plain.group)
    shape, at_a_time = (rows, *counts.shape), max(1, _SLICE // columns)
    if fmt.scope == "tensor":  # one group of everything
        shape, at_a_time = (1, 1, weights.size), 1
        counts = counts.expand(rows, -1).reshape(1, -1)
    whole, rounded, codes = (
        torch.from_numpy(np.ascontiguousarray(each)).view(shape) for each in (weights, plain.dequantize(), plain.codes)
    )
    scales, minimums = _first(plain.scales, shape), _first(plain.minimums, shape)
    for first in range(0, shape[0], at_a_time):
        part = slice(first, first + at_a_time)
        found_scales, found_minimums = fit(whole[part], counts, grid)
        found = grid.nearest(steps_of(whole[part].double(), found_scales, found_minimums))
        off = found * found_scales[..., None] + found_minimums[..., None] - whole[part]
        before = (rounded[part].double() - whole[part]).square_().mul_(counts).sum(dim=-1)
        better = off.square_().mul_(counts).sum(dim=-1) < before
        codes[part] = torch.where(better[..., None], grid.codes_of(found), codes[part])
        scales[part] = torch.where(better, found_scales, scales[part])
        minimums[part] = torch.where(better, found_minimums, minimums[part])
    return replace(
        plain,
        codes=codes.view(weights.shape).numpy(),
        scales=_everywhere(scales, plain),
        minimums=_everywhere(minimums, plain) if grid.has_minimum else None,
    )


def fit(groups: Tensor, importance: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Scales and minimums (zeros for a format without), fp32 [n, k], for fp32 weights [n, k, group] and the importance
    [k, group] of their columns."""
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    base = torch.zeros_like(low)
    if grid.has_minimum:
        start = (high - low) / (grid.highest - grid.lowest)
        base = low - grid.lowest * start
    else:
        start = torch.maximum(high.abs(), low.abs()) / max(-grid.lowest, grid.highest)
        if -grid.lowest > grid.highest:  # the code that one side has more goes to the side of the peak, as in ggml
            start = torch.where(high > -low, -start, start)
    start = torch.where(start == 0, 1.0, start)
    best = _Best(steps_of(groups, start, base), importance, grid, start, base)
    for ratio, shift in _candidates(grid):
        best.consider(torch.full_like(start, ratio), torch.full_like(start, shift))
    for _ in range(_FITS):
        best.consider(*best.fitted())
    return best.scales, best.minimums


def steps_of(x: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """x [n, k, group] in steps from the minimum; a scale of zero counts as one, every value being zero with it."""
    return (x - minimums[..., None]) / torch.where(scales == 0, 1.0, scales)[..., None]


def _candidates(grid: Grid) -> list[tuple[float, float]]:
    """Ratios to the scale that reaches the ends of a group, and what is then added to the minimum, in its steps: the
    range that pays on real weights, from a little beyond the ends inwards. Many codes lose more by clipping."""
    if grid.scale_kind == "e8m0":
        return [(1.0, 0.0), (1.5, 0.0), (0.6, 0.0)]  # neighbouring powers of two
    narrow = 0.55 if grid.levels is not None or grid.highest - grid.lowest < 32 else 0.85
    if not grid.has_minimum:
        return [(ratio, 0.0) for ratio in np.linspace(1.04, narrow, _RATIOS).tolist()]
    span = grid.highest - grid.lowest
    cuts = np.linspace(0.0, (1 - narrow) / 2, 5).tolist()
    ends = [(low, 1 - high) for low in cuts for high in cuts]
    return [(high - low, span * low + grid.lowest * (1 - high + low)) for low, high in ends]


class _Best:
    """The best scale of each group so far. x: the weights in steps of `start` from `base`: squares of tiny weights
    would be zero."""

    def __init__(self, x: Tensor, importance: Tensor, grid: Grid, start: Tensor, base: Tensor) -> None:
        self._x, self._importance, self._grid, self._start, self._base = x, importance, grid, start, base
        self.scales, self.minimums = torch.zeros_like(start), torch.zeros_like(start)
        self._error = torch.full_like(start, torch.inf)

    def consider(self, ratio: Tensor, shift: Tensor) -> None:
        """Try scales of ratio * start and minimums of base + shift * start, as they would be kept."""
        scales = self._grid.kept(ratio * self._start)
        minimums = self._base
        if self._grid.has_minimum:
            minimums = self._grid.kept(self._base + shift * self._start)
        off = self._values(scales, minimums).sub_(self._x)
        error = off.square_().mul_(self._importance).sum(dim=-1)
        better = error < self._error
        self.scales = torch.where(better, scales, self.scales)
        self.minimums = torch.where(better, minimums, self.minimums)
        self._error = torch.where(better, error, self._error)

    def fitted(self) -> tuple[Tensor, Tensor]:
        """Ratio and shift of least weighted squares for the codes of the best so far; its own where the codes do not
        tell."""
        ratio, shift = self._relative(self.scales, self.minimums)
        v, w, x = self._nearest(ratio, shift), self._importance, self._x
        wv = w * v
        vv, vx = (wv * v).sum(dim=-1), (wv * x).sum(dim=-1)
        if not self._grid.has_minimum:
            found = vx / vv
            return torch.where(found.isfinite() & (found > 0), found, ratio), shift
        ones, v1, x1 = w.sum(dim=-1), wv.sum(dim=-1), (w * x).sum(dim=-1)
        found = (ones * vx - v1 * x1) / (ones * vv - v1 * v1)
        usable = found.isfinite() & (found > 0)
        return torch.where(usable, found, ratio), torch.where(usable, (x1 - found * v1) / ones, shift)

    def _values(self, scales: Tensor, minimums: Tensor) -> Tensor:
        ratio, shift = self._relative(scales, minimums)
        values = self._nearest(ratio, shift).mul_(ratio[..., None])
        return values.add_(shift[..., None]) if self._grid.has_minimum else values

    def _nearest(self, ratio: Tensor, shift: Tensor) -> Tensor:
        if self._grid.has_minimum:
            return self._grid.nearest(steps_of(self._x, ratio, shift))
        return self._grid.nearest(self._x / torch.where(ratio == 0, 1.0, ratio)[..., None])

    def _relative(self, scales: Tensor, minimums: Tensor) -> tuple[Tensor, Tensor]:
        return scales / self._start, (minimums - self._base) / self._start


def _counts(importance: Tensor | None, columns: int) -> Tensor:
    """Importance as fp32 of at most 1, ones where there is none."""
    if importance is None:
        return torch.ones(columns)
    if importance.shape != (columns,) or not importance.isfinite().all() or bool((importance < 0).any()):
        raise ValueError(f"importance is one number, zero or above, for each of {columns} columns")
    peak = importance.max()
    return (importance / peak).float() if peak > 0 else torch.ones(columns)


def _first(grouped: np.ndarray | None, shape: tuple[int, int, int]) -> Tensor:
    """Scales or minimums as [n, k], zeros where there are none; of a scale that serves all rows the first."""
    if grouped is None:
        return torch.zeros(shape[:2])
    return torch.from_numpy(grouped.reshape(-1)[: shape[0] * shape[1]].copy()).view(shape[:2])


def _everywhere(values: Tensor, plain: QTensor) -> np.ndarray:
    """The reverse of `_first`."""
    return values.expand(len(plain.scales), -1).contiguous().view(plain.scales.shape).numpy()
