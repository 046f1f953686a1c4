"""What the formats with a fixed block have in common: those of float4.py and ggml's blocks of 32 (ggml.py).

Such a format is one way of rounding a block; the walk over a matrix, slice by slice so that all copies of a slice stay
in a core's cache, the refusals and the result are the same for all of them and stand here. A class per format is a
small one: its constants and `round_blocks`.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from nanokit.errors import ModelFileError, ParameterError
from nanokit.quant.blocks import Unpacked
from nanokit.quant.nested import Nested
from nanokit.quant.qtensor import QTensor

# Weights handled at a time.
_SLICE = 1 << 16


def extremes(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest of each group, [n, 1]; NaN where there is one.

    Of short groups by columns of a transposed copy: numpy goes down those with vector instructions, and over 32
    neighbours one by one.
    """
    if groups.shape[1] > 128:
        return groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    turned = np.ascontiguousarray(groups.T)
    return turned.min(axis=0)[:, None], turned.max(axis=0)[:, None]


class Common(NamedTuple):
    """What the blocks of a matrix have in common. factor: fp32, of all scales; nested: their peaks, where a matrix
    keeps these together: a row for each block."""

    factor: float = 1.0
    nested: Nested | None = None

    def of(self, part: slice) -> "Common":
        """For some blocks of the matrix."""
        return self if self.nested is None else Common(self.factor, self.nested.rows(part.start, part.stop))


class BlockFormat:
    """A `WeightFormat` (quant/weight_format.py). block: weights that share a scale, consecutive columns; reach: what a
    scale is multiplied by at most."""

    name: str
    block: int
    code_range: tuple[int, int] = (0, 15)
    table: np.ndarray | None = None
    reach: float = 1.0
    scope = "group"

    def common(self, blocks: np.ndarray) -> Common:
        """Of a whole matrix, float32 [blocks, block]. Where its weights are not finite, neither is the factor, or a
        nested peak."""
        return Common()

    def round_blocks(self, part: np.ndarray, common: Common) -> Unpacked:
        """Codes int8 [n, block], scales float32 [n, 1] and minimums, or None, of finite float32 [n, block]."""
        raise NotImplementedError

    def group_of(self, columns: int) -> int:
        """See `WeightFormat`."""
        return self._group_of(columns, "a matrix")

    def _group_of(self, columns: int, name: str) -> int:
        if not columns or columns % self.block:
            raise ParameterError(
                f"{name} cannot be quantized to {self.name}",
                found=f"{columns} columns",
                needed=f"a multiple of {self.block} columns: its groups have no other size",
            )
        return self.block

    def quantize(self, weights: np.ndarray, name: str = "a matrix", span: tuple[float, float] | None = None) -> QTensor:
        """See `WeightFormat`. ModelFileError also for weights beyond what the format's scales can hold."""
        if span is not None:
            raise ParameterError(f"{self.name} has a scale for each of its blocks", found=f"a span of {span}")
        group = self._group_of(weights.shape[-1], name)
        blocks = np.asarray(weights, np.float32).reshape(-1, group)
        codes, scales = np.empty(blocks.shape, np.int8), np.empty((len(blocks), 1), np.float32)
        minimums: np.ndarray | None = None
        step = _SLICE // group
        for first in range(0, len(blocks), step):  # before any arithmetic: NaN would pass for a code
            if not np.isfinite(blocks[first : first + step]).all():
                self._refuse(blocks[first : first + step], name)
        common = self.common(blocks)
        for first in range(0, len(blocks), step):
            part = slice(first, first + step)
            with np.errstate(over="ignore", invalid="ignore"):  # a scale beyond fp32 is refused right below
                codes[part], scales[part], lowest = self.round_blocks(blocks[part], common.of(part))
                spanned = np.isfinite(scales[part] * np.float32(self.reach)).all()
            if not spanned or not (lowest is None or np.isfinite(lowest).all()):
                self._refuse(blocks[part], name)
            if lowest is not None:
                minimums = np.empty_like(scales) if minimums is None else minimums
                minimums[part] = lowest
        grouped = (*weights.shape[:-1], weights.shape[-1] // group)
        nested = common.nested and replace(common.nested, codes=common.nested.codes.reshape(grouped))
        return QTensor(
            format=self.name,
            shape=weights.shape,
            codes=codes.reshape(weights.shape),
            scales=scales.reshape(grouped),
            minimums=None if minimums is None else minimums.reshape(grouped),
            group=group,
            table=self.table,
            code_range=self.code_range,
            tensor_scale=common.factor,
            nested=nested,
        )

    def _refuse(self, part: np.ndarray, name: str) -> None:
        raise ModelFileError(
            f"{name} holds weights that {self.name} cannot span",
            found=f"weights from {part.min()} to {part.max()}",
            needed="finite weights that its scales can reach",
        )
