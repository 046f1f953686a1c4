"""Memory for pages: one private mapping that the operating system backs page by page.

An unused pool then costs address space, not memory, and what is not needed any more can be given back while its
addresses stay. `torch.zeros` writes its zeros, and `numpy.zeros` asks for huge pages, of which each of 60 tensors would
fill one for its first token.
"""

import mmap
from math import prod

import torch
from torch import Tensor

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)  # a pool larger than memory is no mistake while most of it is unused


class Mapping:
    """Zeroed bytes, backed when touched, handed out one tensor after another."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self._used = 0
        self._begin = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next zeros."""
        tensor = torch.frombuffer(self._map, dtype=dtype, count=prod(shape), offset=self._used).view(shape)
        self._used += tensor.nbytes
        return tensor

    def give_back(self, tensor: Tensor) -> None:
        """Let the system take the memory of a contiguous tensor of `take` (or of a part of one), as far as whole pages
        of the system lie in it: zeros again where it does. Where a system cannot, all stays as it is."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = tensor.data_ptr() - self._begin
        begin = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (first + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
