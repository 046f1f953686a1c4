"""Activations on the device: codes and scales with the bits of kernels/activations.py, laid out for the products.

The codes of a16 are two int8 planes, since tensor cores multiply bytes. The sums of codes over 16 columns come along:
a product with a weight format that has minimums adds minimum * sum, and no product then has to look at a code again.
They are whole numbers below 2^24, so that fp32 holds them exactly in whatever order they are added.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels.activations import GROUPS, LIMIT, LIMIT_A16, MODES
from nanokit.kernels.gpu.device import activations as device
from nanokit.kernels.gpu.runtime import checked, launch

SUMMED = 16  # columns that share one of the sums
STEP = 32  # columns of a unit of packed weights
BLOCK, BLOCK_ROW = 1024, 4096  # columns that a program holds at a time


@dataclass(frozen=True)
class Activations:
    """The input of a product. mode fp32: x alone, fp32 [rows, columns]. Every other mode: codes int8 [planes, rows,
    columns], the two planes of a16 (256 * high + low) or one; scales fp32 [rows, columns / group]; sums fp32 [rows,
    columns / 16], the sum of 16 columns' codes."""

    mode: str
    x: Tensor | None = None
    codes: Tensor | None = None
    scales: Tensor | None = None
    sums: Tensor | None = None
    group: int = 0

    def dequantize(self) -> Tensor:
        """code * scale, fp32 [rows, columns]; x itself where nothing is quantized."""
        if self.codes is None or self.scales is None:
            assert self.x is not None
            return self.x
        codes = self.codes[-1].float() + (256.0 * self.codes[0].float() if len(self.codes) == 2 else 0.0)
        return (codes.unflatten(1, (-1, self.group)) * self.scales[:, :, None]).flatten(1)


def quantize(x: Tensor, mode: str, peak: Tensor | None = None) -> Activations:
    """Quantize x, fp32 [rows, columns]; codes and scales are bit for bit those of kernels.activations.quantize.

    mode: one of kernels.activations.MODES; fp32 keeps x. peak: of mode static, fp32 [1] on the device, the largest
    magnitude that a code can stand for. Raises ParameterError for an unknown mode, for columns that are no multiple of
    32, and for tensors that a kernel cannot take; ValueError for static without a peak.
    """
    check_mode(mode)
    rows, columns = checked("the activations", x, torch.float32, (-1, -1)).shape
    if mode == "fp32":
        return Activations(mode, x)
    made = allocate(mode, rows, columns, x.device)
    if mode in GROUPS:
        block = min(BLOCK, triton.next_power_of_2(columns))
        grid = rows, triton.cdiv(columns, block)
        launch(device.quantize_groups, grid, x, *outputs(made), rows, columns, *constants(mode), block)
        return made
    if mode == "tensor":
        peak = x.abs().amax().view(1)
    elif mode == "static":
        if peak is None:
            raise ValueError("static activations need a peak")
        checked("the peak", peak, torch.float32, (1,))
    given = None if mode == "token" else peak
    block = min(BLOCK_ROW, triton.next_power_of_2(columns))
    arguments = x, given, *outputs(made), rows, columns, LIMIT, given is not None, block
    launch(device.quantize_rows, (rows,), *arguments)
    return made


def check_mode(mode: str) -> None:
    """Raises ParameterError for an activation mode that there is not."""
    if mode not in MODES:
        raise ParameterError("unknown activation mode", found=repr(mode), needed="one of " + ", ".join(MODES))


def allocate(mode: str, rows: int, columns: int, where: torch.device) -> Activations:
    """Room for what a kernel writes: x for mode fp32, codes, scales and sums for others. Raises ParameterError for
    columns that these do not divide."""
    if mode == "fp32":
        return Activations(mode, torch.empty(rows, columns, dtype=torch.float32, device=where))
    if columns % STEP:
        raise ParameterError(
            "activations cannot be cut into whole units", found=f"{columns} columns", needed=f"a multiple of {STEP}"
        )
    group = GROUPS.get(mode, columns)
    return Activations(
        mode,
        codes=torch.empty(2 if mode == "a16" else 1, rows, columns, dtype=torch.int8, device=where),
        scales=torch.empty(rows, columns // group, dtype=torch.float32, device=where),
        sums=torch.empty(rows, columns // SUMMED, dtype=torch.float32, device=where),
        group=group,
    )


def outputs(made: Activations) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What quantizing kernels write, in their order."""
    return made.codes, made.scales, made.sums


def constants(mode: str) -> tuple[int, int, int]:
    """LIMIT, GROUP and PLANES of a group mode, or of fp32, whose GROUP is 0."""
    return (LIMIT_A16, GROUPS[mode], 2) if mode == "a16" else (LIMIT, GROUPS.get(mode, 0), 1)
