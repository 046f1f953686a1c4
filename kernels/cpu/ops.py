"""Single operations of the C kernels, checked on every call: for tests and notebooks.

A model's step is one call of `bound`; 150 checked calls would cost a quarter of it.
"""

from ctypes import POINTER, byref, c_float, c_int, c_long, c_void_p

import numpy as np
import torch
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels.cpu import structs
from nanokit.kernels.cpu.bound import MODES
from nanokit.kernels.cpu.library import Library, library
from nanokit.kernels.cpu.pack import Arena, Packed, pack
from nanokit.kernels.cpu.team import team
from nanokit.quant.qtensor import QTensor


class Linear:
    """A packed matrix and its product. weights: [out, in]; bias: fp32 [out]; planes: 8-bit codes as nibble planes;
    arena: where it is packed, behind what was packed there before.

    Raises ModelFileError when the shape does not suit the kernels.
    """

    def __init__(
        self,
        weights: QTensor,
        bias: np.ndarray | None = None,
        *,
        planes: bool = False,
        arena: Arena | None = None,
        threads: int | None = None,
        library: Library | None = None,
    ) -> None:
        self._library = library or _library()
        self._team = team(self._library, threads)
        self.packed: Packed = pack("the matrix", weights, arena or Arena(), bias, planes=planes)
        self.shape = weights.shape
        matrix = POINTER(structs.Matrix)
        self._linear = self._library.declare(
            "nk_linear", c_int, c_void_p, matrix, c_long, c_float, c_long, c_void_p, c_void_p, c_long
        )
        self._unpack = self._library.declare("nk_unpack", None, matrix, c_void_p)

    def __call__(self, x: Tensor, mode: str, peak: float | None = None) -> Tensor:
        """x [rows, in] quantized by `mode`, times the weights: fp32 [rows, out].

        peak: the magnitude that `static` scales by (and `tensor`: that of x if None). Raises ParameterError.
        """
        rows, columns = self.shape
        if mode not in MODES or (mode == "static" and peak is None):
            raise ParameterError("not a mode of the CPU kernels", found=mode, needed=", ".join(MODES))
        if x.ndim != 2 or x.shape[1] != columns:
            raise ParameterError("x does not fit the matrix", found=list(x.shape), needed=f"[rows, {columns}]")
        x = x.to(torch.float32).contiguous()
        if mode == "tensor" and peak is None:
            peak = float(x.abs().max()) if len(x) else 0.0
        padded = -(-rows // 16) * 16
        out = torch.empty(len(x), padded, dtype=torch.float32)
        where = (self._team.handle, byref(self.packed.struct), MODES[mode], peak or 0.0, len(x))
        if self._linear(*where, x.data_ptr(), out.data_ptr(), padded):
            raise MemoryError("no memory for the activations")
        return out[:, :rows]

    def unpack(self) -> Tensor:
        """The weights as they are packed, fp32 [out, in]."""
        out = torch.empty(self.shape, dtype=torch.float32)
        self._unpack(byref(self.packed.struct), out.data_ptr())
        return out


def quantize(x: Tensor, mode: str, peak: float = 0.0, library: Library | None = None) -> tuple[Tensor, Tensor]:
    """Codes int32 [rows, columns] and scales fp32 [rows, columns / 16 or 32] of x [rows, columns].

    peak: the magnitude that `tensor` and `static` scale by. Raises ParameterError for another mode, and for columns
    that are no multiple of 32.
    """
    if mode not in MODES:
        raise ParameterError("not a mode of the CPU kernels", found=mode, needed=", ".join(MODES))
    if x.ndim != 2 or x.shape[1] % 32:
        raise ParameterError("x does not fill whole groups", found=list(x.shape), needed="[rows, a multiple of 32]")
    library = library or _library()
    function = library.declare(
        "nk_quantize", c_int, c_long, c_long, c_long, c_float, c_void_p, c_void_p, c_void_p, c_long
    )
    group = 16 if mode == "a8g16" else 32
    x = x.to(torch.float32).contiguous()
    codes = torch.empty(x.shape, dtype=torch.int32)
    scales = torch.empty(len(x), x.shape[1] // group, dtype=torch.float32)
    where = (len(x), x.shape[1], MODES[mode], peak, x.data_ptr(), codes.data_ptr(), scales.data_ptr(), group)
    if function(*where):
        raise MemoryError("no memory for the activations")
    return codes, scales


_library = library
