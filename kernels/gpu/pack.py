"""Weights in the order in which the Triton product reads them.

Panels of 16 output rows; a row in units of 32 bytes, which hold 64 columns of 4-bit codes or 32 of 8-bit ones:

    codes       uint8 [panels, units, 16 rows, 32 bytes]
                4 bits: byte j of a unit = column j (low nibble) and column 32 + j (high): the 32 columns of one dot lie
                in one nibble, so that unpacking them is a mask or a shift and moves nothing between threads.
                Nibbles are codes in two's complement, those of 0 … 15 less 8 (`added`); with a table, indices
                8 bits: byte j = column j
    scales      fp16 or fp32 [panels, groups, 16 rows], and minimums alike: a dot's scales lie side by side

A unit of a panel is 512 bytes in one piece, four panels of one program 2 KB: whole lines of memory. Codes are the
file's own, nothing is quantized again; scales take two bytes where fp16 holds all of them exactly, and four otherwise.
A row of codes can be found by itself (embeddings, the rescoring of a screened head).

Rejected: rows one after the other (a unit of 16 rows would be 16 far places), the panels of kernels/cpu (they
interleave four columns of 16 rows for one vector instruction), and rearranging nibbles for one tensor-core instruction
(Marlin's way: one layout an architecture).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanokit.errors import ModelFileError
from nanokit.kernels.gpu import runtime
from nanokit.kernels.gpu.device.codes import lookup
from nanokit.kernels.packable import LANES, fits_four_bits
from nanokit.quant.qtensor import QTensor

CODES4, TABLE4, CODES8, PLANES8 = range(4)
UNIT = 32  # bytes of a row that lie together
COLUMNS = {CODES4: 64, TABLE4: 64, CODES8: 32, PLANES8: 64}  # of a unit
TIMES = {CODES4: 16, TABLE4: 1, CODES8: 1, PLANES8: 1}  # what device/codes.py makes of a code


@dataclass(frozen=True)
class Packed:
    """A matrix on the device. shape: rows (outputs), columns; kind: of the four above; added: to a stored code, 8 or 0;
    planes of PLANES8: codes [2, …], upper nibbles first, each laid out as 4-bit codes; table: int8 [16] of TABLE4;
    lookup: PTX of the table, "" without one, None where kernels are interpreted; bias: fp32 [rows]. minimums, table and
    bias are None where there are none."""

    name: str
    shape: tuple[int, int]
    kind: int
    added: int
    group: int
    codes: Tensor
    scales: Tensor
    minimums: Tensor | None
    table: Tensor | None
    lookup: str | None
    bias: Tensor | None

    @property
    def units(self) -> int:
        """Units of a row."""
        return self.codes.shape[-3]

    @property
    def arrays(self) -> list[Tensor]:
        """What a product reads."""
        return [x for x in (self.codes, self.scales, self.minimums, self.bias) if x is not None]

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return sum(x.nbytes for x in self.arrays)


def pack(name: str, q: QTensor, bias: np.ndarray | None = None, *, planes: bool = False) -> Packed:
    """Pack a matrix onto the device. bias: fp32 [rows], added to its products. planes: 8-bit codes as two planes of
    nibbles, as a screened head reads them. Raises ModelFileError for a shape or group that the product cannot take."""
    rows, columns = _checked(name, q)
    kind = _kind(q, planes)
    added = 8 if kind == CODES4 and q.code_range[0] >= 0 else 0
    codes = torch.from_numpy(np.ascontiguousarray(q.codes)).to(runtime.device()) - added
    codes = _padded(codes.view(torch.uint8), -(-rows // LANES) * LANES, -(-columns // COLUMNS[kind]) * COLUMNS[kind])
    half, groups = _fit_half(q), -(-codes.shape[1] // q.group)
    scales, minimums = (None if x is None else _by_panel(x, groups, half) for x in (q.scales, q.minimums))
    assert scales is not None
    table = None if q.table is None else torch.from_numpy(q.table.astype(np.int8))
    text = None if runtime.INTERPRETED else "" if table is None else lookup(table.tolist())
    return Packed(
        name, (rows, columns), kind, added, q.group, _units(codes, kind), scales, minimums,
        None if table is None else table.to(runtime.device()), text,
        None if bias is None else torch.from_numpy(bias.astype(np.float32)).to(runtime.device()),
    )  # fmt: skip


def _checked(name: str, q: QTensor) -> tuple[int, int]:
    columns = q.shape[-1]
    if len(q.shape) != 2 or columns % 32 or columns % q.group or (q.group != 16 and q.group % 32):
        raise ModelFileError(
            f"{name} does not fit the GPU kernels",
            found=f"shape {list(q.shape)} in groups of {q.group}",
            needed="two dimensions, columns a multiple of 32, and groups of 16 or of a multiple of 32 that divide them",
            do='load it with device="cpu" and activations="fp32"',
        )
    return q.shape[0], columns


def _kind(q: QTensor, planes: bool) -> int:
    if q.table is not None:
        return TABLE4
    if fits_four_bits(q.code_range):
        return CODES4
    return PLANES8 if planes else CODES8


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """Rows and columns of zeros added: their scales are zero."""
    return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))


def _units(codes: Tensor, kind: int) -> Tensor:
    """Stored codes uint8 [rows, columns] in the order of the module's drawing."""
    if kind == PLANES8:
        return torch.stack([_units(codes >> 4, CODES4), _units(codes, CODES4)])
    if kind in (CODES4, TABLE4):
        low, high = (codes & 15).view(len(codes), -1, 2, UNIT).unbind(2)
        codes = low | (high << 4)
    return codes.reshape(-1, LANES, codes.numel() // len(codes) // UNIT, UNIT).transpose(1, 2).contiguous()


def _by_panel(values: np.ndarray, groups: int, half: bool) -> Tensor:
    """[rows, groups] as [panels, groups, 16]."""
    x = torch.from_numpy(values.astype(np.float16 if half else np.float32)).to(runtime.device())
    x = _padded(x, -(-len(x) // LANES) * LANES, groups)
    return x.view(-1, LANES, groups).transpose(1, 2).contiguous()


def _fit_half(q: QTensor) -> bool:
    with np.errstate(over="ignore"):
        parts = [part for part in (q.scales, q.minimums) if part is not None]
        return all(bool((part.astype(np.float16) == part).all()) for part in parts)
