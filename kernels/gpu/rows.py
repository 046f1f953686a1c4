"""RMSNorm and the SiLU gate, each ending in the input of the product that follows.

One launch where the scale is a group's: the numbers go from registers into codes, and fp32 is never written. Scales of
a whole row, or of the step, take a second launch (gpu.activations.quantize), as a program that holds only a part of the
row cannot know them; the norm does hold it, but a mode that needs calibration or coarsens outliers is not worth
a kernel of its own.

Errors, relative to each number, u = 2^-24: what the norm computes is within 24 u of the exact result (a sum of squares
whose longest chain is some forty additions, halved by the root, and five more roundings); what the gate computes within
(8 + 2 |gate|) u, since a GPU's exp rounds gate * log2(e) first. Codes are those of the numbers computed, bit for bit.
"""

import torch
import triton
from torch import Tensor

from nanokit.kernels.activations import GROUPS
from nanokit.kernels.gpu.activations import BLOCK, Activations, allocate, check_mode, constants, outputs, quantize
from nanokit.kernels.gpu.device import rows as device
from nanokit.kernels.gpu.runtime import checked, launch

MOST_WARPS = 16


def rms_norm(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    mode: str,
    peak: Tensor | None = None,
    delta: Tensor | None = None,
) -> Activations:
    """hidden / rms(hidden) * weight, as the input of a product in this mode (kernels.activations.MODES).

    hidden fp32 [rows, columns]; weight fp32 [columns]. delta, of hidden's shape: added to hidden first, in place (the
    residual). peak: fp32 [1], of mode static. Raises ParameterError for tensors that a kernel cannot take, columns that
    the mode does not divide, and an unknown mode; ValueError for static without a peak.
    """
    check_mode(mode)
    rows, columns = checked("the hidden states", hidden, torch.float32, (-1, -1)).shape
    checked("the norm's weight", weight, torch.float32, (columns,))
    if delta is not None:
        checked("what is added to the hidden states", delta, torch.float32, (rows, columns))
    fused = _fused(mode)
    made = allocate(fused, rows, columns, hidden.device)
    block = triton.next_power_of_2(columns)
    arguments = hidden, delta, weight, made.x, *outputs(made), rows, columns, eps, *constants(fused), block
    launch(device.norm, (rows,), *arguments, warps=_warps(block))
    return _finished(made, mode, peak)


def silu_gate(gate: Tensor, up: Tensor, mode: str, peak: Tensor | None = None) -> Activations:
    """silu(gate) * up, as the input of a product in this mode; both fp32 [rows, columns]. peak, errors: as rms_norm."""
    check_mode(mode)
    rows, columns = checked("the gate", gate, torch.float32, (-1, -1)).shape
    checked("what the gate lets through", up, torch.float32, (rows, columns))
    fused = _fused(mode)
    made = allocate(fused, rows, columns, gate.device)
    block = min(BLOCK, triton.next_power_of_2(columns))
    arguments = gate, up, made.x, *outputs(made), rows, columns, *constants(fused), block
    launch(device.gate, (rows, triton.cdiv(columns, block)), *arguments)
    return _finished(made, mode, peak)


def _warps(block: int) -> int:
    """Warps for a row in registers. Never more threads than columns: those left over would do the columns of others
    again, and might read hidden states to which delta has been added already."""
    return min(MOST_WARPS, max(4, block // 512), max(1, block // 32))


def _fused(mode: str) -> str:
    """What the kernel itself writes: fp32 for the modes that are quantized afterwards."""
    return mode if mode in GROUPS else "fp32"


def _finished(made: Activations, mode: str, peak: Tensor | None) -> Activations:
    return made if made.mode == mode else quantize(made.dequantize(), mode, peak)
