"""Weights in the order in which the C product reads them.

Panels of 16 output rows, one row a lane (c/nk.h draws it). A weight keeps its codes and its scales: nothing is
quantized again. Codes of up to four bits take half a byte, wider ones a byte; scales and minimums take two bytes where
fp16 holds all of them exactly, or what is left of them without a factor that all share (NVFP4's), and four otherwise.
The canonical copy is dropped as soon as its panels are there, so that a model is never in memory twice; what is large
is read and packed some rows at a time, since a head of 150,000 rows takes half a gigabyte as bytes alone.

Rejected: keeping 5- and 6-bit codes packed (two more instructions for every 64 weights, in a kernel that is bound by
memory only while it does nothing else), and packing a tensor in its file's own blocks (scales in the way of every
vector load).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nanokit.errors import ModelFileError
from nanokit.kernels.cpu.structs import Matrix
from nanokit.kernels.packable import LANES, fits_four_bits
from nanokit.quant.qtensor import QTensor

CODES4, TABLE4, CODES8, PLANES8 = range(4)
BIAS = {0: 0, 8: 1, 128: 2}  # c/nk.h: BIAS_0, BIAS_8, BIAS_128
ALIGNMENT = 64
PIECE = 1 << 20  # weights packed at a time: few enough that their copies stay in a cache

# The rows first … end - 1 of a matrix.
ReadRows = Callable[[int, int], QTensor]


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


def check(name: str, shape: tuple[int, ...], group: int) -> None:
    """Raise ModelFileError unless the C product can take the matrix."""
    columns = shape[-1]
    if len(shape) != 2 or columns % 32 or columns % group or (group != 16 and group % 32):
        raise ModelFileError(
            f"{name} does not fit the CPU kernels",
            found=f"shape {list(shape)} in groups of {group}",
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
        self._used += _aligned(nbytes)
        return out

    def give_back(self, nbytes: int) -> None:
        """Undo the last `take`, which was of so many bytes."""
        self._used -= _aligned(nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pack(name: str, q: QTensor, arena: Arena, bias: np.ndarray | None = None, *, planes: bool = False) -> Packed:
    """Panels of a matrix, in the arena. bias: fp32 [rows], added to its products. planes: 8-bit codes as two planes of
    nibbles, the upper one first, as a screened head reads them. Raises ModelFileError, see `check`."""
    return pack_rows(name, q.shape, q.rows, arena, bias, planes=planes)


def pack_rows(
    name: str,
    shape: tuple[int, ...],
    read: ReadRows,
    arena: Arena,
    bias: np.ndarray | None = None,
    *,
    planes: bool = False,
    half: bool = True,
) -> Packed:
    """`pack` of a matrix that is read some rows at a time. half: keep scales and minimums in fp16 if it holds them all;
    where the first that it does not comes late, everything is read a second time."""
    rows, step = shape[0], max(LANES, PIECE // shape[-1] // LANES * LANES)
    q = read(0, min(step, rows))
    check(name, shape, q.group)
    form = _Form.of(q, planes, half and _fit_half(q))
    panels = arena.take(-(-rows // LANES) * form.panel_bytes).reshape(-1, form.panel_bytes)
    form.write(q, panels[: step // LANES])
    for first in range(step, rows, step):
        q = read(first, min(first + step, rows))
        if form.half and not _fit_half(q):
            arena.give_back(panels.nbytes)
            return pack_rows(name, shape, read, arena, bias, planes=planes, half=False)
        form.write(q, panels[first // LANES : (first + step) // LANES])
    added = None if bias is None else _padded(bias.astype(np.float32))
    codes, scales, *minimums = (panels.ctypes.data + start for start in form.starts)
    struct = Matrix(
        rows, shape[1], form.kind, BIAS[form.zero], q.group, int(form.half), form.factor, form.code_bytes,
        form.panel_bytes, codes, scales, minimums[0] if minimums else None,
        None if added is None else added.ctypes.data, tuple(form.table.tolist()),
    )  # fmt: skip
    return Packed(struct, (panels,) if added is None else (panels, added))


@dataclass(frozen=True)
class _Form:
    """How a matrix is kept. zero: the code that stands for 0, or 128 with a table, whose entries are unsigned too;
    half: scales and minimums are fp16; factor: of all scales, beside what is stored of them; starts: where codes,
    scales and minimums begin in a panel."""

    kind: int
    zero: int
    table: np.ndarray
    half: bool
    factor: float
    code_bytes: int
    starts: tuple[int, ...]
    panel_bytes: int

    @classmethod
    def of(cls, q: QTensor, planes: bool, half: bool) -> "_Form":
        kind, zero = _kind(q, planes)
        table = np.zeros(16, np.uint8) if q.table is None else q.table.view(np.uint8) + np.uint8(128)
        columns = q.shape[1]
        code_bytes = LANES * columns // (2 if kind in (CODES4, TABLE4) else 1)
        scale_bytes = LANES * (columns // q.group) * (2 if half else 4)
        ends = np.cumsum([_aligned(n) for n in (code_bytes, scale_bytes, *([scale_bytes] * (q.minimums is not None)))])
        factor = q.tensor_scale if half else 1.0
        return cls(kind, zero, table, half, factor, code_bytes, (0, *ends[:-1].tolist()), int(ends[-1]))

    def write(self, q: QTensor, out: np.ndarray) -> None:
        """Rows into their panels, uint8 [panels, bytes]."""
        shift = self.zero if q.table is None else 0
        codes = np.empty((len(out) * LANES, q.shape[1]), np.uint8)
        np.add(q.codes.view(np.uint8), np.uint8(shift), out=codes[: len(q.codes)])  # modulo 256
        codes[len(q.codes) :] = shift
        stored = q.scales if self.factor == 1.0 else q.scales / np.float32(self.factor)
        scales = [_by_panel(part, self.half) for part in (stored, q.minimums) if part is not None]
        stops = (*self.starts[1:], self.panel_bytes)
        for start, part, stop in zip(self.starts, (_panels(codes, self.kind), *scales), stops, strict=True):
            out[:, start : start + part.shape[1]] = part
            out[:, start + part.shape[1] : stop] = 0


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


def _fit_half(q: QTensor) -> bool:
    with np.errstate(over="ignore"):
        if q.tensor_scale != 1.0:
            factor = np.float32(q.tensor_scale)
            return q.minimums is None and bool(((q.scales / factor).astype(np.float16) * factor == q.scales).all())
        parts = [part for part in (q.scales, q.minimums) if part is not None]
        return all(bool((part.astype(np.float16) == part).all()) for part in parts)


def _by_panel(values: np.ndarray, half: bool) -> np.ndarray:
    """[rows, groups] as the bytes of [panels, groups, 16], fp16 if `half`."""
    padded = _padded(values.astype(np.float16 if half else np.float32, copy=False))
    panels = np.ascontiguousarray(padded.reshape(-1, LANES, values.shape[1]).transpose(0, 2, 1))
    return panels.reshape(len(panels), -1).view(np.uint8)


def _padded(values: np.ndarray) -> np.ndarray:
    missing = -len(values) % LANES
    return values if not missing else np.concatenate([values, np.zeros((missing, *values.shape[1:]), values.dtype)])
