"""Reading by vector loads of one width from any address on: c/align.c does it, lab/experiments/loads.py times it."""

from ctypes import c_int64, c_uint64, c_void_p

import numpy as np

from nanokit.errors import ParameterError
from nanokit.kernels.cpu.library import Library
from nanokit.kernels.cpu.library import library as default_library

WIDTHS = (16, 32, 64)  # bytes a load


class Loads:
    """The loads of one build. widths: those of `WIDTHS` that it has as single instructions; the others are left out,
    for a load that the compiler makes of two says nothing about one."""

    def __init__(self, library: Library | None = None) -> None:
        library = library or default_library()
        total = library.declare("nk_load_widths", c_int64)()
        self._read = library.declare("nk_read_by", c_uint64, c_void_p, c_int64, c_int64, c_int64)
        self.widths = tuple(width for width in WIDTHS if total & width)

    def read(self, data: np.ndarray, width: int, passes: int = 1) -> int:
        """Read uint8 `data` from its first byte on `passes` times; returns the exclusive or of its 64-bit words, over
        all passes. Steps are of eight loads: what is left over at the end is not read. Raises ParameterError for a
        width that is not in `widths`, and for an array that is not one piece of bytes."""
        if width not in self.widths:
            raise ParameterError("not a width of these loads", found=width, needed=" | ".join(map(str, self.widths)))
        if data.dtype != np.uint8 or not data.flags.c_contiguous:
            raise ParameterError("only bytes in one piece are read", found=f"{data.dtype}, strides {data.strides}")
        found: int = self._read(data.ctypes.data, data.nbytes, passes, width)
        return found
