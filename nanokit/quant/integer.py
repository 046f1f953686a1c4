"""INT8 and INT4 weights, made here from float ones: symmetric or with a minimum, by scales of any reach.

    name                      code_range    scale                   minimum
    int4-sym-g64              -7 … 7        max |w| / 7             none
    int4-asym-g32             0 … 15        (max w - min w) / 15    min w
    int8-sym-g32              -127 … 127    max |w| / 127           none
    int8-asym-g32             -128 … 127    (max w - min w) / 255   min w + 128 scale
    int8-sym-…-reduced        -63 … 63      max |w| / 63            none
    int8-asym-…-reduced       -64 … 63      (max w - min w) / 127   min w + 64 scale

    -g16 …    a scale for so many columns       -tensor   one for a matrix
    -channel  one for a row                     -qkv      one for the q, k and v of a layer
                                                -global   one for all matrices of a model

    code = clamp(rint((w - minimum) / scale))      rint to even

in fp64. Scale and minimum are rounded to eleven significant bits first, ties to even, so that fp16 holds them wherever
its exponent does and a scale takes two bytes in files and kernels; the exponent stays fp32's, for weights of tiny std.
Codes are the nearest for the numbers that are kept. What lies below 2^-116 becomes 0: kernels count subnormal numbers
as zero, and from there on every value on the grid is a normal number or zero. A group of one value has scale 0 and
codes 0; with a minimum it is that value (to eleven bits), without one it is zero only if the value is. `reduced` is the
seven-bit range that ONNX's exporters use where products of eight bits would saturate in sixteen (reduce_range).

A dequantized matrix quantized again: the same codes and scales without a minimum. With one the same codes if the scale
is at least 2^-9 of the minimum, as it is in every group that holds zero or weights of both signs. In narrower groups
the minimum's own rounding is many steps (Q4_1 has the same limit), and weights beyond the grid get its end.

Symmetric 4-bit codes leave -8 unused, so that w and -w quantize alike; using it (a scale of max |w| / -8, as ggml does)
makes a slightly finer grid and was rejected for the simpler one. The asymmetric range is that of the weights alone,
zero included only if they include it: nothing here is padded, and a row of weights near 1 should not pay for it. Scales
in fp32 were rejected: they doubled what scales cost, and cost the product kernels more than that.

Choosing a format for each layer (a policy) is not this file's affair.
"""

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nanokit.errors import ModelFileError, ParameterError
from nanokit.quant.blocked import extremes
from nanokit.quant.qtensor import QTensor

# Weights handled at a time: their float64 copies stay in a core's own cache.
_SLICE = 1 << 16
INTEGER_NAME = re.compile(
    r"(?!int4.*reduced)int([48])-(sym|asym)-(?:g([1-9][0-9]{0,5})|(channel|tensor|qkv|global))(-reduced)?"
)
BITS = 11  # of a scale: those of fp16
SMALLEST = 2.0**-116  # of a scale or minimum that is not 0

Wide = Literal["tensor", "qkv", "global"]
WIDE: dict[str, Wide] = {"tensor": "tensor", "qkv": "qkv", "global": "global"}


@dataclass(frozen=True)
class IntegerFormat:
    """bits: 4 or 8; symmetric: no minimum; group: columns that share a scale, None for a whole row; wide: what shares
    one where that is more than a row (group is None then); reduced: 8-bit codes that use seven bits."""

    bits: int
    symmetric: bool
    group: int | None
    wide: Wide | None = None
    reduced: bool = False

    @property
    def name(self) -> str:
        kind = "sym" if self.symmetric else "asym"
        reach = f"g{self.group}" if self.group else self.wide or "channel"
        return f"int{self.bits}-{kind}-{reach}" + ("-reduced" if self.reduced else "")

    @property
    def scope(self) -> str:
        """What one scale serves: group, channel, tensor, qkv or global."""
        return "group" if self.group else self.wide or "channel"

    @property
    def code_range(self) -> tuple[int, int]:
        """Lowest and highest code."""
        half = 2 ** (self.bits - 1 - self.reduced)
        if self.symmetric:
            return 1 - half, half - 1
        return (0, 15) if self.bits == 4 else (-half, half - 1)

    @property
    def table(self) -> None:
        """Codes are the values."""
        return None

    def group_of(self, columns: int) -> int:
        """Columns that share a scale; all of them where rows do too. Raises ParameterError, see `quantize`."""
        return self._group_of(columns, "a matrix")

    def _group_of(self, columns: int, name: str) -> int:
        group = self.group or columns
        if not columns or columns % group:
            raise ParameterError(
                f"{name} cannot be quantized to {self.name}",
                found=f"{columns} columns",
                needed=f"a group that divides them: {', '.join(fitting_groups(columns))}",
            )
        return group

    def quantize(self, weights: np.ndarray, name: str = "a matrix", span: tuple[float, float] | None = None) -> QTensor:
        """Quantize float32 weights of shape (…, rows, columns). name: what messages call them. span: lowest and highest
        weight that the one scale has to reach: needed for qkv and global, for tensor their own where not given; weights
        beyond it get the end of the grid.

        Raises ParameterError for columns that the group does not divide, naming the groups that would do, and for a
        span that is missing or has no use; ModelFileError for weights that are not finite, or whose range is not.
        """
        group = self._group_of(weights.shape[-1], name)
        groups = weights.reshape(-1, group)
        shared = self._shared_grid(groups, name, span)
        codes = np.empty(groups.shape, np.int8)
        scales = np.empty((len(groups), 1), np.float32)
        minimums = None if self.symmetric else np.empty_like(scales)
        step = max(1, _SLICE // group)
        for first in range(0, len(groups), step):
            part = slice(first, first + step)
            scale, minimum = shared or self._grid(*extremes(groups[part]), name)
            scales[part] = scale
            if minimums is not None:
                minimums[part] = minimum
            with np.errstate(divide="ignore", invalid="ignore"):
                steps = np.where(scale > 0, (groups[part] - minimum) / scale, 0.0)
            codes[part] = np.clip(np.rint(steps), *self.code_range)
        grouped = (*weights.shape[:-1], weights.shape[-1] // group)
        return QTensor(
            format=self.name,
            shape=weights.shape,
            codes=codes.reshape(weights.shape),
            scales=scales.reshape(grouped),
            minimums=None if minimums is None else minimums.reshape(grouped),
            group=group,
            table=None,
            code_range=self.code_range,
        )

    def _shared_grid(
        self, groups: np.ndarray, name: str, span: tuple[float, float] | None
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """The grid of everything, where one is shared by more than a row."""
        if self.wide is None:
            if span is not None:
                raise ParameterError(f"{self.name} takes its scales from the weights", found=f"a span of {span}")
            return None
        if span is None and self.wide != "tensor":
            raise ParameterError(
                f"{name} alone does not tell the scale of {self.name}",
                needed="a span: the lowest and highest weight of all matrices that share it",
            )
        low, high = extremes(groups.reshape(1, -1))
        if not np.isfinite([low, high]).all():
            self._refuse(low, high, name)
        if span is not None:
            low, high = (np.full((1, 1), end) for end in span)
        return self._grid(low, high, name)

    def _grid(self, low: np.ndarray, high: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Scales and minimums (zero where symmetric) in float64, for weights low … high [n, 1]."""
        lowest, highest = self.code_range
        given = low, high = low.astype(np.float64), high.astype(np.float64)
        if self.symmetric:
            high = np.maximum(np.abs(low), np.abs(high))
            low = np.zeros_like(high)
        with np.errstate(invalid="ignore"):
            scale = _eleven_bits((high - low) / (highest if self.symmetric else highest - lowest))
            minimum = low if self.symmetric else _eleven_bits(low - lowest * scale)
            products = np.stack([lowest * scale, highest * scale])
            reach = np.abs(np.stack([products, products + minimum]))
        if not (reach <= np.finfo(np.float32).max).all():
            self._refuse(*given, name)
        return scale, minimum

    def _refuse(self, low: np.ndarray, high: np.ndarray, name: str) -> None:
        raise ModelFileError(
            f"{name} holds weights that {self.name} cannot span",
            found=f"weights from {low.min()} to {high.max()}",
            needed="finite weights whose range is a float32 number",
        )


def _eleven_bits(x: np.ndarray) -> np.ndarray:
    """The nearest numbers of eleven significant bits, float64; 0, never -0.0, for what is below `SMALLEST`."""
    fraction, exponent = np.frexp(x)
    rounded = np.ldexp(np.rint(np.ldexp(fraction, BITS)), exponent - BITS)
    return np.where(np.abs(rounded) < SMALLEST, 0.0, rounded)


def integer_format(name: str) -> IntegerFormat:
    """The format of a name such as `int4-sym-g64` or `int8-asym-channel`. Raises ParameterError."""
    match = INTEGER_NAME.fullmatch(name)
    if match is None:
        raise ParameterError(
            "unknown integer format",
            found=repr(name),
            needed="int4 or int8, sym or asym, and g with the group's columns, channel, tensor, qkv or global, joined "
            "by hyphens; after an int8 perhaps -reduced",
            do="write int4-sym-g64 or int8-asym-channel, for instance",
        )
    bits, kind, group, reach, reduced = match.groups()
    return IntegerFormat(int(bits), kind == "sym", int(group) if group else None, WIDE.get(reach), reduced is not None)


def fitting_groups(columns: int) -> list[str]:
    """The groups that divide so many columns, as names: multiples of 16 up to 256, which kernels take, and channel."""
    return [f"g{group}" for group in range(16, 257, 16) if columns % group == 0] + ["channel"]
