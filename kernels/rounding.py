"""Weights onto a format's grid, some rows at a time: the arithmetic of fake quantization in torch.

A slice and everything that is computed from it stay in a core's cache: a pass over whole matrices for each operation
took six times as long. What is proven is not computed:

- Symmetric integers divide in fp32. Scales have eleven significant bits, so a weight of 24 that is not exactly half way
  between two codes is off by more than fp32's rounding of the quotient (a tie t has at most 8 bits, t * scale at most
  19: weight and t * scale are multiples of the weight's last bit, hence their quotients differ by more than half of the
  last bit of t). With a minimum the difference is rounded first: those divide in fp64, as scales of more bits do.
- Symmetric groups whose scale is their own peak's have no weight beyond the bounds: a scale rounded to eleven bits puts
  the peak at most 1 / 16 of a step past the outermost code.

Formats of fixed blocks (nvfp4 … q8_0) round with their own `round_blocks` where the scale comes from the weights: ties,
inverses and clamps are their owners' affair, and a copy here could only differ. With given scales they take the value
that is nearest, a tie the even code.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanokit.quant.blocked import BlockFormat
from nanokit.quant.integer import BITS, SMALLEST, IntegerFormat

RoundedTo = IntegerFormat | BlockFormat

SLICE = 1 << 17  # weights at a time
LARGEST = torch.finfo(torch.float32).max
HALF = 1 << 53 - BITS - 1  # of the last bit that a scale keeps, in the digits of fp64


class Rounded(NamedTuple):
    """values: fp32 [groups, group]; passes: bool, where the gradient does, None: everywhere."""

    values: Tensor
    passes: Tensor | None


def has_minimum(fmt: RoundedTo) -> bool:
    """Whether groups of this format have a minimum beside their scale."""
    return not fmt.symmetric if isinstance(fmt, IntegerFormat) else fmt.table is None and fmt.code_range[0] == 0


def rounded(groups: Tensor, fmt: RoundedTo, scales: Tensor | None, minimums: Tensor | None) -> Rounded:
    """Weights [groups, group] of any float type. scales, minimums: fp32, of as many elements as there are groups; None:
    those that the groups give."""
    if scales is not None:
        scales = scales.reshape(-1, 1) + 0.0  # no -0.0, which would make zeros of that sign
        minimums = None if minimums is None else minimums.reshape(-1, 1)
        if fmt.table is not None:
            return _given_levels(groups, fmt.table, scales)
        return _given_integers(groups, fmt, scales, torch.zeros_like(scales) if minimums is None else minimums)
    if isinstance(fmt, BlockFormat):
        return _own_blocks(groups, fmt)
    if not fmt.wide:
        return _own_integers(groups, fmt, None)
    low, high = groups.detach().float().aminmax()
    return _own_integers(groups, fmt, ranges(low.view(1, 1), high.view(1, 1), fmt))


def _own_integers(groups: Tensor, fmt: IntegerFormat, shared: tuple[Tensor, Tensor] | None) -> Rounded:
    """With scales that the groups give. shared: scale and minimum [1, 1] of them all, where there is but one."""
    values = torch.empty(groups.shape, dtype=torch.float32, device=groups.device)
    passes = None if fmt.symmetric else torch.empty(groups.shape, dtype=torch.bool, device=groups.device)
    for part in _slices(groups):
        some = groups[part].float()
        scales, minimums = shared or ranges(*some.aminmax(dim=1, keepdim=True), fmt)
        _integers(some, fmt, scales, minimums, values[part], None if passes is None else passes[part], fmt.symmetric)
    return Rounded(values, passes)


def _given_integers(groups: Tensor, fmt: RoundedTo, scales: Tensor, minimums: Tensor) -> Rounded:
    """With scales and minimums fp32 [groups, 1] from elsewhere."""
    values = torch.empty(groups.shape, dtype=torch.float32, device=groups.device)
    passes = torch.empty(groups.shape, dtype=torch.bool, device=groups.device)
    few_bits = not has_minimum(fmt) and bool((eleven_bits(scales.double()) == scales).all())
    for part in _slices(groups):
        some = groups[part].float()
        _integers(some, fmt, scales[part], minimums[part], values[part], passes[part], few_bits)
        values[part].masked_fill_(~some.isfinite(), torch.nan)
    return Rounded(values, passes)


def _integers(
    some: Tensor,
    fmt: RoundedTo,
    scales: Tensor,
    minimums: Tensor,
    out: Tensor,
    passes: Tensor | None,
    few_bits: bool,
) -> None:
    """A slice, fp32 [n, group], into `out` and `passes`. scales, minimums: [n, 1], or [1, 1] for all."""
    lowest, highest = fmt.code_range
    scales = torch.where(_spanned(fmt, scales, minimums), scales, torch.nan)
    divisors = torch.where(scales == 0, torch.inf, scales)  # a scale of 0 has the code 0 alone
    if few_bits:
        codes = torch.div(some, divisors, out=out)
    else:
        codes = (some.double() - minimums.double()).div_(divisors.double())
    codes.round_()
    if passes is not None:
        torch.logical_or(codes < lowest, codes > highest, out=passes).logical_not_()
    codes.clamp_(lowest, highest).add_(0.0)  # no -0.0: codes are whole numbers, which have one zero
    out.copy_(codes).mul_(scales)
    if has_minimum(fmt):
        out.add_(minimums)


def _spanned(fmt: RoundedTo, scales: Tensor, minimums: Tensor) -> Tensor:
    """Whether all values of a group are fp32 numbers, and its scale is not below zero where that has no meaning (q4_0's
    and q5_0's have the sign of the peak): bool [n, 1]."""
    wide, offset = scales.double(), minimums.double()
    ends = torch.cat([end * wide for end in fmt.code_range], dim=1)
    reached = torch.cat([ends, ends + offset], dim=1).abs().le(LARGEST).all(dim=1, keepdim=True)
    return reached & (scales >= 0) if isinstance(fmt, IntegerFormat) else reached


def ranges(low: Tensor, high: Tensor, fmt: IntegerFormat) -> tuple[Tensor, Tensor]:
    """Scales and minimums, fp32, for groups with weights low … high; see integer.py."""
    lowest, highest = fmt.code_range
    low, high = low.double(), high.double()
    if fmt.symmetric:
        scales = eleven_bits(torch.maximum(low.abs(), high.abs()) / highest)
        return scales.float(), torch.zeros_like(scales, dtype=torch.float32)
    scales = eleven_bits((high - low) / (highest - lowest))
    return scales.float(), eleven_bits(low - lowest * scales).float()


def eleven_bits(x: Tensor) -> Tensor:
    """fp64, rounded as integer.py rounds scales: ties to even, 0 below the smallest; NaN and infinity as they are."""
    bits = x.contiguous().view(torch.int64)
    rounded = ((bits + (HALF - 1) + (bits >> 53 - BITS & 1)) & -2 * HALF).view(torch.float64)
    return torch.where(x.isfinite(), torch.where(rounded.abs() < SMALLEST, 0.0, rounded), x)


def _own_blocks(groups: Tensor, fmt: BlockFormat) -> Rounded:
    """Blocks by the format's own rule; the gradient passes everywhere (kernels/fake_quant.py says why)."""
    found = groups.detach().float().cpu().numpy()
    values = np.empty(found.shape, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        common = fmt.common(found)
        for part in _slices(groups):
            some = found[part]
            fine = np.isfinite(some).all(axis=1, keepdims=True) & bool(np.isfinite(common.factor))
            codes, scales, minimums = fmt.round_blocks(some if fine.all() else np.where(fine, some, 0), common.of(part))
            levels = codes if fmt.table is None else np.take(fmt.table, codes)
            out = np.multiply(levels, scales, out=values[part])
            if minimums is not None:
                out += minimums
            fine &= np.isfinite(scales * np.float32(fmt.reach))
            if not fine.all():
                out[~fine[:, 0]] = np.nan
    return Rounded(torch.from_numpy(values).to(groups.device), None)


class Levels(NamedTuple):
    """The grid of a table format: its values, ascending, with their codes, and the bounds between them. The grid goes
    on by its outermost step at both ends, so that `beyond` means what it does for integers: the nearest would be a code
    that is not there. int8 [n], int8 [n], n + 1 numbers."""

    values: Tensor
    codes: Tensor
    bounds: list[float]


def levels_of(table: np.ndarray) -> Levels:
    """Bounds are moved down by a hair where a tie takes the code above, which is then the even one."""
    values, codes = np.unique(table, return_index=True)  # of e2m1's two zeros the first
    steps = np.diff(values.astype(np.float64))
    ends = np.concatenate([[values[0] - steps[0]], values, [values[-1] + steps[-1]]])
    bounds = (ends[1:] + ends[:-1]) / 2
    up = np.concatenate([codes % 2 == 0, codes[-1:] % 2 == 1])
    bounds = np.where(up, np.nextafter(bounds, -np.inf), bounds)
    return Levels(torch.from_numpy(values), torch.from_numpy(codes.astype(np.int8)), bounds.tolist())


def _given_levels(groups: Tensor, table: np.ndarray, scales: Tensor) -> Rounded:
    """The nearest values of a table under scales fp32 [groups, 1] from elsewhere."""
    levels = levels_of(table)
    values = torch.empty(groups.shape, dtype=torch.float32, device=groups.device)
    passes = torch.empty(groups.shape, dtype=torch.bool, device=groups.device)
    largest = int(levels.values.int().abs().max())
    scales = torch.where((scales.double() * largest).abs() <= LARGEST, scales, torch.nan)
    numbers = levels.values.to(groups.device, torch.float32)
    for part in _slices(groups):
        place, passes[part] = _places(groups[part], levels, scales[part])
        values[part] = numbers.index_select(0, place.flatten()).view_as(place).mul_(scales[part])
        values[part].masked_fill_(~groups[part].isfinite(), torch.nan)
    return Rounded(values, passes)


def _places(some: Tensor, levels: Levels, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Which level is nearest, int32, and whether the one of the grid that goes on would be. A comparison for each bound
    on a slice in cache: a binary search takes ten times as long."""
    steps = some.double() / torch.where(scales == 0, torch.inf, scales.double())
    above = torch.zeros(steps.shape, dtype=torch.uint8, device=steps.device)
    for bound in levels.bounds:
        above.add_(steps > bound)
    last = len(levels.values)
    passes = (above > 0).logical_and_(above <= last).logical_or_(steps.isnan())
    return above.int().sub_(1).clamp_(0, last - 1), passes


def given_codes(groups: Tensor, fmt: RoundedTo, scales: Tensor, minimums: Tensor | None) -> Tensor:
    """The codes under given scales: int8 [groups, group]. Weights and scales are finite."""
    codes = torch.empty(groups.shape, dtype=torch.int8)
    levels = None if fmt.table is None else levels_of(fmt.table)
    for part in _slices(groups):
        if levels is not None:
            codes[part] = levels.codes[_places(groups[part], levels, scales[part])[0]]
        else:
            steps = groups[part].double() if minimums is None else groups[part].double() - minimums[part].double()
            steps /= torch.where(scales[part] == 0, torch.inf, scales[part].double())
            codes[part] = steps.round_().clamp_(*fmt.code_range).to(torch.int8)
    return codes


def _slices(groups: Tensor) -> list[slice]:
    step = max(1, SLICE // groups.shape[1])
    return [slice(first, first + step) for first in range(0, len(groups), step)]
