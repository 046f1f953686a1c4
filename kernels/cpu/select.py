"""Questions about one row of fp32 logits, answered in C (c/select.c, c/draw.c): same ids as kernels/selection.py."""

from ctypes import byref, c_double, c_float, c_int64, c_uint32, c_uint64, c_void_p
from math import log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanokit.kernels import selection
from nanokit.kernels.cpu.library import Library


class Selection:
    """See kernels/selection.py for what each answers. logits: fp32 on the CPU, a row's ids next to each other."""

    def __init__(self, library: Library) -> None:
        row = (c_void_p, c_int64)
        key = (c_float, c_uint64, c_uint64, c_uint32)
        self._argmax = library.declare("nk_row_argmax", c_int64, *row)
        self._largest = library.declare("nk_row_largest", c_int64, *row, c_int64, c_void_p)
        self._look = library.declare("nk_row_look", c_int64, *row, c_int64, c_double, c_void_p, c_void_p)
        self._mass = library.declare("nk_row_mass", c_double, *row, c_double, c_void_p)
        self._candidates = library.declare("nk_draw_candidates", c_int64, *row, *key, c_void_p, c_void_p)
        self._candidates_of = library.declare(
            "nk_draw_candidates_of", c_int64, c_void_p, *row, *key, c_void_p, c_void_p
        )

    def argmax(self, logits: Tensor) -> int:
        """See kernels/selection.py."""
        best: int = self._argmax(*_row(logits))
        return best

    def values(self, logits: Tensor, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """See kernels/selection.py."""
        return selection.values(logits, ids)

    def largest(self, logits: Tensor, count: int) -> NDArray[np.int64]:
        """See kernels/selection.py. Raises ValueError for NaN among the logits."""
        count = min(count, logits.numel())
        ids = np.empty(count, np.int64)
        found = self._largest(*_row(logits), count, ids.ctypes.data)
        if found < 0:
            raise MemoryError("no memory to sort logits")
        if found != count:
            raise ValueError("NaN among the logits")
        return ids

    def look(self, logits: Tensor, count: int, temperature: float) -> tuple[NDArray[np.int64], float]:
        """See kernels/selection.py."""
        address, size = _row(logits)
        ids, mass = np.empty(min(count, size), np.int64), c_double()
        found = self._look(address, size, len(ids), temperature, ids.ctypes.data, byref(mass))
        if found == -1:
            raise MemoryError("no memory to sort logits")
        return ids[: max(found, 0)], mass.value

    def mass(self, logits: Tensor, temperature: float) -> float:
        """See kernels/selection.py."""
        return self._weigh(logits, temperature)[0]

    def normalizer(self, logits: Tensor) -> Tensor:
        """See kernels/selection.py."""
        weighed = [self._weigh(row, 1.0) for row in logits]
        return torch.tensor([top + log(mass) for mass, top in weighed], dtype=torch.float32)

    def gumbel_candidates(
        self,
        logits: Tensor,
        temperature: float,
        seed: int,
        position: int,
        stream: int,
        ids: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """See kernels/selection.py; nearly always one."""
        address, size = _row(logits)
        if ids is not None:
            size = len(ids)
        found, scores = np.empty(size, np.int64), np.empty(size, np.float32)
        question = (size, temperature, seed, position, stream, found.ctypes.data, scores.ctypes.data)
        if ids is None:
            count = self._candidates(address, *question)
        else:
            count = self._candidates_of(address, ids.ctypes.data, *question)
        return found[:count]

    def _weigh(self, logits: Tensor, temperature: float) -> tuple[float, float]:
        """The mass, and the largest logit."""
        top = c_float()
        return self._mass(*_row(logits), temperature, byref(top)), top.value


def _row(logits: Tensor) -> tuple[int, int]:
    """Address and length of a row, checked: C would read whatever lies there."""
    if logits.dtype is not torch.float32 or logits.ndim != 1 or not logits.is_contiguous():
        raise ValueError(f"a row of logits is fp32, one piece of memory, not {logits.dtype} {logits.stride()}")
    size = logits.numel()
    if not 0 < size < 2**31:
        raise ValueError(f"a row of {size} logits")
    return logits.data_ptr(), size
