"""Weights in the order in which the C product reads them.

Panels of 16 output rows, one row a lane (c/nk.h draws it). A weight keeps its codes and its scales: nothing is
quantized again. Codes of up to four bits take half a byte, wider ones a byte; scales and minimums take two bytes where
fp16 holds all of them exactly, and four otherwise. The canonical copy is dropped as soon as its panels are there, so
that a model is never in memory twice.

Rejected: keeping 5- and 6-bit codes packed (two more instructions for every 64 weights, in a kernel that is bound by
memory only while it does nothing else), and packing a tensor in its file's own blocks (scales in the way of every
vector load).
"""

from dataclasses import dataclass

import numpy as np

from nanokit.errors import ModelFileError
from nanokit.kernels.cpu.structs import Matrix
from nanokit.quant.qtensor import QTensor

LANES = 16
CODES4, TABLE4, CODES8, PLANES8 = range(4)
BIAS = {0: 0, 8: 1, 128: 2}  # c/nk.h: BIAS_0, BIAS_8, BIAS_128
ALIGNMENT = 64


@dataclass(frozen=True)
class Packed:
    """A matrix in panels. struct: what C reads; the arrays hold its memory: panels uint8 [panels, bytes], and the bias
    of its layer if it has one."""

    struct: Matrix
    arrays: tuple[np.ndarray, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return sum(array.nbytes for array in self.arrays)


def fits_four_bits(code_range: tuple[int, int]) -> bool:
    """Whether codes of this range are kept in half a byte."""
    lowest, highest = code_range
    return (lowest >= 0 and highest < 16) or (lowest >= -8 and highest < 8)


def check(name: str, q: QTensor) -> None:
    """Raise ModelFileError unless the C product can take the matrix."""
    columns = q.shape[-1]
    if len(q.shape) != 2 or columns % 32 or columns % q.group or (q.group != 16 and q.group % 32):
        raise ModelFileError(
            f"{name} does not fit the CPU kernels",
            found=f"shape {list(q.shape)} in groups of {q.group}",
            needed="two dimensions, columns a multiple of 32, and groups of 16 or of a multiple of 32 that divide them",
            do='load it with activations="fp32"',
        )


class Arena:
    """Memory for packed weights, in chunks that one matrix after the other fills, so that a step walks through it from
    one end to the other; large enough for huge pages, which numpy asks for."""

    CHUNK = 64 << 20

    def __init__(self) -> None:
        self._chunk, self._used = np.empty(0, np.uint8), 0

    def take(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] of unknown content, the first byte on 64."""
        if self._used + nbytes > len(self._chunk):
            chunk = np.empty(max(self.CHUNK, nbytes) + ALIGNMENT, np.uint8)
            self._chunk, self._used = chunk[-chunk.ctypes.data % ALIGNMENT :], 0
        out = self._chunk[self._used : self._used + nbytes]
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return out


def pack(name: str, q: QTensor, arena: Arena, bias: np.ndarray | None = None, *, planes: bool = False) -> Packed:
    """Panels of a matrix, in the arena. bias: fp32 [rows], added to its products. planes: 8-bit codes as two planes of
    nibbles, the upper one first, as a screened head reads them. Raises ModelFileError, see `check`."""
    check(name, q)
    rows, columns = q.shape
    kind, offset = _kind(q, planes)
    codes = np.empty((-(-rows // LANES) * LANES, columns), np.uint8)
    np.add(q.codes.view(np.uint8), np.uint8(offset if q.table is None else 0), out=codes[:rows])  # modulo 256
    codes[rows:] = offset if q.table is None else 0
    half = all(_fits_half(part) for part in (q.scales, q.minimums))
    parts = [_panels(codes, kind), *(_by_panel(part, half) for part in (q.scales, q.minimums) if part is not None)]
    panels, starts = _joined(parts, arena)
    first = [panels.ctypes.data + start for start in starts]
    added = None if bias is None else _padded(bias.astype(np.float32))
    table = (q.table.view(np.uint8) + np.uint8(128)).tolist() if q.table is not None else [0] * 16
    struct = Matrix(
        rows, columns, kind, BIAS[offset], q.group, int(half), parts[0].shape[1], panels.shape[1], *first[:2],
        None if q.minimums is None else first[2], None if added is None else added.ctypes.data, tuple(table),
    )  # fmt: skip
    return Packed(struct, (panels,) if added is None else (panels, added))


def _kind(q: QTensor, planes: bool) -> tuple[int, int]:
    """How the codes are kept, and the code that stands for zero."""
    if q.table is not None:
        return TABLE4, 128
    if fits_four_bits(q.code_range):
        return CODES4, 0 if q.code_range[0] >= 0 else 8
    return (PLANES8 if planes else CODES8), 128


def _panels(codes: np.ndarray, kind: int) -> np.ndarray:
    """uint8 [panels * 16, columns] in the byte order of c/nk.h, [panels, …]; codes may be overwritten."""
    panels = len(codes) // LANES
    if kind == CODES8:
        words = codes.view(np.uint32).reshape(panels, LANES, -1)
        return np.ascontiguousarray(words.transpose(0, 2, 1)).view(np.uint8).reshape(panels, -1)
    if kind == PLANES8:
        upper, lower = _panels(codes >> 4, CODES4), _panels(codes & 15, CODES4)
        return np.concatenate([upper, lower], axis=1)
    pairs = codes.view(np.uint32).reshape(panels, LANES, -1, 2)
    out = np.empty((panels, pairs.shape[2], LANES), np.uint32)
    np.left_shift(pairs[..., 1].transpose(0, 2, 1), 4, out=out)
    out |= pairs[..., 0].transpose(0, 2, 1)
    return out.view(np.uint8).reshape(panels, -1)


def _fits_half(values: np.ndarray | None) -> bool:
    if values is None:
        return True
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16) == values).all())


def _by_panel(values: np.ndarray, half: bool) -> np.ndarray:
    """[rows, groups] as the bytes of [panels, groups, 16], fp16 if `half`."""
    padded = _padded(values.astype(np.float16 if half else np.float32, copy=False))
    panels = np.ascontiguousarray(padded.reshape(-1, LANES, values.shape[1]).transpose(0, 2, 1))
    return panels.reshape(len(panels), -1).view(np.uint8)


def _joined(parts: list[np.ndarray], arena: Arena) -> tuple[np.ndarray, list[int]]:
    """Parts uint8 [panels, bytes] one after the other in each panel, and where each begins, a multiple of 64."""
    starts, end = [], 0
    for part in parts:
        starts.append(end)
        end += -(-part.shape[1] // ALIGNMENT) * ALIGNMENT
    out = arena.take(len(parts[0]) * end).reshape(-1, end)
    for start, part, stop in zip(starts, parts, [*starts[1:], end], strict=True):
        out[:, start : start + part.shape[1]] = part
        out[:, start + part.shape[1] : stop] = 0
    return out, starts


def _padded(values: np.ndarray) -> np.ndarray:
    missing = -len(values) % LANES
    return values if not missing else np.concatenate([values, np.zeros((missing, *values.shape[1:]), values.dtype)])
