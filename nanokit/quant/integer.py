"""INT8 and INT4 weights, made here from float ones: symmetric or with a minimum, a scale for each group of columns.

    name               code_range    scale                   minimum
    int4-sym-g64       -7 … 7        max |w| / 7             none
    int4-asym-g32      0 … 15        (max w - min w) / 15    min w
    int8-sym-g32       -127 … 127    max |w| / 127           none
    int8-asym-g32      -128 … 127    (max w - min w) / 255   min w + 128 scale
    …-channel          a group is a whole row

    code = clamp(rint((w - minimum) / scale))      rint to even

in fp64, scale and minimum rounded to fp32 first: codes are the nearest for the numbers that are kept. A group of one
value has scale 0 and codes 0; with a minimum it is that value, without one it is zero only if the value is. Symmetric
4-bit codes leave -8 unused, so that w and -w quantize alike; using it (a scale of max |w| / -8, as ggml does) makes a
slightly finer grid and was rejected for the simpler one. The asymmetric range is that of the weights alone,
zero included only if they include it: nothing here is padded, and a row of weights near 1 should not pay for it.

Choosing a format for each layer (a policy) is not this file's affair.
"""

import re
from dataclasses import dataclass

import numpy as np

from nanokit.errors import ModelFileError, ParameterError
from nanokit.quant.qtensor import QTensor

# Weights handled at a time: their float64 copies stay in a core's own cache.
_SLICE = 1 << 16
_NAME = re.compile(r"int([48])-(sym|asym)-(?:g([1-9][0-9]{0,5})|channel)")


@dataclass(frozen=True)
class IntegerFormat:
    """bits: 4 or 8; symmetric: no minimum; group: columns that share a scale, None for a whole row."""

    bits: int
    symmetric: bool
    group: int | None

    @property
    def name(self) -> str:
        kind = "sym" if self.symmetric else "asym"
        return f"int{self.bits}-{kind}-" + ("channel" if self.group is None else f"g{self.group}")

    @property
    def code_range(self) -> tuple[int, int]:
        """Lowest and highest code."""
        if self.symmetric:
            return 1 - 2 ** (self.bits - 1), 2 ** (self.bits - 1) - 1
        return (0, 15) if self.bits == 4 else (-128, 127)

    def quantize(self, weights: np.ndarray, name: str = "a matrix") -> QTensor:
        """Quantize float32 weights of shape (…, rows, columns). name: what messages call them.

        Raises ParameterError for columns that the group does not divide, naming the groups that would do, and
        ModelFileError for weights that are not finite, or whose range is not.
        """
        columns = weights.shape[-1]
        group = self.group or columns
        if columns % group:
            raise ParameterError(
                f"{name} cannot be quantized to {self.name}",
                found=f"{columns} columns",
                needed=f"a group that divides them: {', '.join(fitting_groups(columns))}",
            )
        groups = weights.reshape(-1, group)
        codes = np.empty(groups.shape, np.int8)
        scales = np.empty((len(groups), 1), np.float32)
        minimums = None if self.symmetric else np.empty_like(scales)
        step = max(1, _SLICE // group)
        for first in range(0, len(groups), step):
            part = slice(first, first + step)
            scale, minimum = self._grid(groups[part].astype(np.float64), name)
            scales[part] = scale
            if minimums is not None:
                minimums[part] = minimum
            with np.errstate(divide="ignore", invalid="ignore"):
                steps = np.where(scale > 0, (groups[part] - minimum) / scale, 0.0)
            codes[part] = np.clip(np.rint(steps), *self.code_range)
        grouped = (*weights.shape[:-1], columns // group)
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

    def _grid(self, part: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Scales and minimums (zero where symmetric) of groups [n, group] in float64, with float32's values."""
        lowest, highest = self.code_range
        low, high = part.min(axis=1, keepdims=True), part.max(axis=1, keepdims=True)
        if self.symmetric:
            high = np.maximum(np.abs(low), np.abs(high))
            low = np.zeros_like(high)
        with np.errstate(invalid="ignore"):
            scale = _single((high - low) / (highest if self.symmetric else highest - lowest))
            # Adding zero turns -0.0 into 0.0: which of the two is the smallest is not numpy's to decide.
            minimum = low if self.symmetric else _single(low - lowest * scale + 0.0)
            products = np.stack([lowest * scale, highest * scale])
            reach = np.abs(np.stack([products, products + minimum]))
        if not (reach <= np.finfo(np.float32).max).all():
            raise ModelFileError(
                f"{name} holds weights that {self.name} cannot span",
                found=f"weights from {part.min()} to {part.max()}",
                needed="finite weights whose range is a float32 number",
            )
        return scale, minimum


def _single(x: np.ndarray) -> np.ndarray:
    """Rounded to float32's values; what is beyond them becomes infinite."""
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(np.float64)


def integer_format(name: str) -> IntegerFormat:
    """The format of a name such as `int4-sym-g64` or `int8-asym-channel`. Raises ParameterError."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ParameterError(
            "unknown integer format",
            found=repr(name),
            needed="int4 or int8, sym or asym, g and the group's columns or channel, joined by hyphens",
            do="write int4-sym-g64 or int8-asym-channel, for instance",
        )
    return IntegerFormat(int(match[1]), match[2] == "sym", int(match[3]) if match[3] else None)


def fitting_groups(columns: int) -> list[str]:
    """The groups that divide so many columns, as names: multiples of 16 up to 256, which kernels take, and channel."""
    return [f"g{group}" for group in range(16, 257, 16) if columns % group == 0] + ["channel"]
