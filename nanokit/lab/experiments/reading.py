"""Reading memory in order without computing, by the kernels' own threads: the speed that products are compared with."""

from collections.abc import Callable, Sequence

import numpy as np

from nanokit.kernels.cpu import NoKernelsError
from nanokit.kernels.cpu.bound import Functions
from nanokit.kernels.cpu.library import library
from nanokit.kernels.cpu.team import team
from nanokit.lab.bench.timing import milliseconds
from nanokit.lab.machine import measure_bandwidth


def reader_of(arrays: Sequence[np.ndarray], threads: int | None = None) -> Callable[[], object]:
    """A function that reads every byte of the arrays once, by so many threads (None: a step's). Raises
    NoKernelsError."""
    spans = np.array([array.ctypes.data for array in arrays], np.int64)
    sizes = np.array([array.nbytes for array in arrays], np.int64)
    stream, crew, kept = Functions(library()).stream, team(library(), threads), list(arrays)
    return lambda: stream(crew.handle, spans.ctypes.data, sizes.ctypes.data, len(kept))


def reading_speed(size: int, repeats: int) -> list[float]:
    """GB/s of reading a buffer of `size` bytes again and again, one sample a repeat; by torch where there are no
    kernels."""
    buffer = np.ones(size, np.uint8)  # a zeroed one may be a single shared page
    try:
        read = reader_of([buffer])
    except NoKernelsError:
        return list(measure_bandwidth(repeats=repeats, buffer_bytes=size).samples_gb_s)
    read()
    return [size / milliseconds(read) / 1e6 for _ in range(repeats)]
