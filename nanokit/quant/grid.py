"""What a weight format can hold: the values of its codes, and the scales that it keeps.

Searching for scales and correcting errors (rounding.py, gptq.py) ask the same two questions of every format: which code
value is nearest to so many steps, and which scale is kept where one was wished for. A `Grid` answers them for whole
tensors at a time.

    format          nearest                          kept scale
    int4, int8      rint, clamped                    eleven significant bits (quant/integer.py)
    q4_0 … q8_0     rint, clamped                    fp16
    nvfp4           in its table                     e4m3 number * tensor_scale
    mxfp4           in its table                     a power of two
    nf4             in its table                     fp32 (nf4-dq is not asked: rounding.check_searchable says why)

A table is looked up at floor(2 * steps): all midpoints of whole levels are multiples of a half, so that 513 entries
hold every answer exactly, at a tenth of the time of a binary search. Steps on a midpoint take the upper level.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanokit.quant.float4 import E4M3_LARGEST, E4M3_SMALLEST, NORMAL
from nanokit.quant.integer import BITS, SMALLEST
from nanokit.quant.qtensor import QTensor

_REACH = 256  # of the look-up: twice the largest level that int8 holds, and a little


@dataclass(frozen=True)
class Grid:
    """lowest, highest: of the code values; levels, codes: [513] value and code by floor(2 * steps), None where the
    codes are the values; scale_kind: "eleven", "half", "e4m3", "e8m0" or "single"; tensor_scale: of e4m3."""

    lowest: int
    highest: int
    levels: Tensor | None
    codes: Tensor | None
    has_minimum: bool
    scale_kind: str
    tensor_scale: float

    def nearest(self, steps: Tensor) -> Tensor:
        """The code values nearest to `steps`, of its type; those of NaN are not defined."""
        if self.levels is None:
            return steps.round().clamp_(self.lowest, self.highest)
        return self.levels.to(steps.dtype).index_select(0, _places(steps)).view_as(steps)

    def codes_of(self, values: Tensor) -> Tensor:
        """int8 codes of values that `nearest` gave."""
        if self.codes is None:
            return values.to(torch.int8)
        return self.codes.index_select(0, _places(values)).view_as(values)

    def kept(self, scales: Tensor) -> Tensor:
        """The scales, or minimums, that the format keeps in place of these: fp32."""
        return _KEPT[self.scale_kind](scales.float(), self.tensor_scale)


def grid_of(plain: QTensor) -> Grid:
    """Of the format that made this matrix."""
    levels = codes = None
    lowest, highest = plain.code_range
    if plain.table is not None:
        table = torch.from_numpy(plain.table).double()
        lowest, highest = int(table.min()), int(table.max())
        middles = (torch.arange(-_REACH, _REACH + 1) + 0.5) / 2  # of the intervals that floor(2 * steps) tells apart
        nearest = (middles[:, None] - table).abs().argmin(dim=1)
        levels, codes = table[nearest].float(), nearest.to(torch.int8)
    name = plain.format.lower()
    kind = "eleven" if name.startswith("int") else {"nvfp4": "e4m3", "mxfp4": "e8m0", "nf4": "single"}.get(name, "half")
    return Grid(lowest, highest, levels, codes, plain.minimums is not None, kind, plain.tensor_scale)


def _places(steps: Tensor) -> Tensor:
    return steps.mul(2).floor_().clamp_(-_REACH, _REACH).add_(_REACH).to(torch.int32).flatten()


def _eleven(scales: Tensor, _: float) -> Tensor:
    mantissa, exponent = torch.frexp(scales)
    rounded = torch.ldexp((mantissa * 2**BITS).round(), exponent - BITS)
    return torch.where(rounded.abs() < SMALLEST, 0.0, rounded)


def _half(scales: Tensor, _: float) -> Tensor:
    return scales.clamp(-65504, 65504).half().float()


def _e4m3(scales: Tensor, tensor_scale: float) -> Tensor:
    return (scales / tensor_scale).clamp(E4M3_SMALLEST, E4M3_LARGEST).to(torch.float8_e4m3fn).float() * tensor_scale


def _e8m0(scales: Tensor, _: float) -> Tensor:
    return torch.exp2(scales.clamp(min=2.0**-126).log2().round().clamp(-126, 126))


def _single(scales: Tensor, _: float) -> Tensor:
    return torch.where(scales.abs() < float(NORMAL), 0.0, scales)


_KEPT = {"eleven": _eleven, "half": _half, "e4m3": _e4m3, "e8m0": _e8m0, "single": _single}
