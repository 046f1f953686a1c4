"""The three kernel backends behind one face: what experiments put side by side.

`sides(weights)` gives those that can run here, in the order of `NAMES`, and says of the others why not. Each keeps the
same matrix in its own way, takes inputs and returns results in ordinary memory, and answers four questions: its
product, its codes of the inputs, the weights as it has them, and a product to time.

Triton runs on the GPU if there is one, and in Triton's interpreter otherwise: the same kernels, one program after the
other in numpy. That is worth its bits and not its time, so `timed` says whether a time means anything. Rejected: bound
models, which give one number at the end and not the step where two backends part.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from nanokit.errors import NanokitError
from nanokit.kernels import activations
from nanokit.kernels.cpu import NoKernelsError, ops
from nanokit.kernels.cpu.library import Library, library
from nanokit.kernels.cpu.pack import Arena
from nanokit.quant.qtensor import QTensor

NAMES = ("reference", "C", "Triton")


class Side(Protocol):
    """One backend's copy of a matrix [outputs, columns]. nbytes: what a product reads; timed: whether its times are
    those of a program that is meant to be fast; mode: one of kernels.activations.MODES; peak: of static."""

    name: str
    nbytes: int
    timed: bool

    def multiply(self, x: Tensor, mode: str, peak: float | None = None) -> Tensor:
        """x fp32 [rows, columns], quantized by `mode`, times the weights: fp32 [rows, outputs]."""
        ...

    def codes(self, x: Tensor, mode: str, peak: float | None = None) -> tuple[Tensor, Tensor]:
        """Codes int32 [rows, columns] and scales fp32 [rows, n] of x, n as the backend keeps them."""
        ...

    def unpack(self, rows: Tensor) -> Tensor:
        """These rows (int64) of the weights, fp32 [len(rows), columns]."""
        ...

    def product(self, x: Tensor, mode: str, peak: float | None = None) -> Callable[[], object]:
        """A product that can be timed: x is where the backend wants it. On a GPU it returns before it is done; see
        `finish`."""
        ...

    def finish(self) -> None:
        """Wait until every product has been computed."""
        ...


class Reference:
    """Plain torch: dequantized weights times dequantized inputs, or times the inputs as they are in mode fp32."""

    name, timed = NAMES[0], True

    def __init__(self, weights: QTensor) -> None:
        self._weights = torch.from_numpy(weights.dequantize())
        self.nbytes = self._weights.nbytes

    def multiply(self, x: Tensor, mode: str, peak: float | None = None) -> Tensor:
        if mode != "fp32":
            x = activations.quantize(x, mode, peak).dequantize()
        return linear(x, self._weights)

    def codes(self, x: Tensor, mode: str, peak: float | None = None) -> tuple[Tensor, Tensor]:
        made = activations.quantize(x, mode, peak)
        return made.codes.to(torch.int32), made.scales

    def unpack(self, rows: Tensor) -> Tensor:
        return self._weights[rows]

    def product(self, x: Tensor, mode: str, peak: float | None = None) -> Callable[[], object]:
        return lambda: self.multiply(x, mode, peak)

    def finish(self) -> None:
        pass


class Compiled:
    """The C kernels. arena: where the matrix is packed, behind what was packed there before. Raises NoKernelsError."""

    name, timed = NAMES[1], True

    def __init__(self, weights: QTensor, arena: Arena | None = None) -> None:
        self._library = _kernels()
        self._linear = ops.Linear(weights, arena=arena, library=self._library)
        self.nbytes = self._linear.packed.nbytes

    def multiply(self, x: Tensor, mode: str, peak: float | None = None) -> Tensor:
        return self._linear(x, mode, peak)

    def codes(self, x: Tensor, mode: str, peak: float | None = None) -> tuple[Tensor, Tensor]:
        if mode == "tensor":
            peak = float(x.abs().max())
        return ops.quantize(x, mode, peak or 0.0, self._library)

    def unpack(self, rows: Tensor) -> Tensor:
        return self._linear.unpack()[rows]

    def product(self, x: Tensor, mode: str, peak: float | None = None) -> Callable[[], object]:
        return lambda: self._linear(x, mode, peak)

    def finish(self) -> None:
        pass


class Triton:
    """The Triton kernels, on the GPU or interpreted. Raises NoGpuError where there is no Triton."""

    name = NAMES[2]

    def __init__(self, weights: QTensor) -> None:
        from nanokit.kernels.gpu import activations as quantizing
        from nanokit.kernels.gpu import pack, runtime
        from nanokit.kernels.gpu import product as products

        self._quantize, self._products = quantizing.quantize, products
        self._where, self.timed = runtime.device(), not runtime.INTERPRETED
        self.packed = pack.pack("the matrix", weights)
        self.nbytes = self.packed.nbytes
        self.ranges: int = products.splits_of(weights.shape[0], self.packed.units)  # whose sums are added in the end

    def multiply(self, x: Tensor, mode: str, peak: float | None = None) -> Tensor:
        made = self.product(x, mode, peak)()
        return made.cpu()

    def codes(self, x: Tensor, mode: str, peak: float | None = None) -> tuple[Tensor, Tensor]:
        made = self._quantize(x.to(self._where).contiguous(), mode, self._peak(peak))
        assert made.codes is not None
        assert made.scales is not None
        codes = made.codes.to(torch.int32)
        return (256 * codes[0] + codes[1] if len(codes) == 2 else codes[0]).cpu(), made.scales.cpu()

    def unpack(self, rows: Tensor) -> Tensor:
        return self._products.rows_of(self.packed, rows.contiguous().to(self._where)).cpu()

    def product(self, x: Tensor, mode: str, peak: float | None = None) -> Callable[[], Tensor]:
        there, largest = x.to(self._where).contiguous(), self._peak(peak)
        return lambda: self._products.multiply(self.packed, self._quantize(there, mode, largest))

    def finish(self) -> None:
        if self._where.type == "cuda":
            torch.cuda.synchronize(self._where)

    def _peak(self, peak: float | None) -> Tensor | None:
        return None if peak is None else torch.tensor([peak], device=self._where)


@lru_cache(maxsize=1)
def _kernels() -> Library:
    """Looked up once: that asks the compiler its version."""
    return library()


def missing() -> dict[str, str]:
    """Backends that cannot run here, and why."""
    found = {}
    try:
        _kernels()
    except NoKernelsError as error:
        found["C"] = error.what
    try:
        import_module("nanokit.kernels.gpu")
    except NanokitError as error:  # NoGpuError, which cannot be imported then either
        found["Triton"] = error.what
    return found


def interpreted() -> bool:
    """Whether Triton's kernels, if they run here at all, run in the interpreter."""
    return "Triton" not in missing() and bool(import_module("nanokit.kernels.gpu.runtime").INTERPRETED)


def sides(weights: QTensor, arena: Arena | None = None) -> list[Side]:
    """The matrix in every backend that can run here; `missing` says what is left out. arena: for C."""
    absent = missing()
    makers: dict[str, Callable[[], Side]] = {
        "reference": lambda: Reference(weights),
        "C": lambda: Compiled(weights, arena),
        "Triton": lambda: Triton(weights),
    }
    return [make() for name, make in makers.items() if name not in absent]


def where() -> str:
    """What the backends run on here, in a sentence each that is missing or not what it would be elsewhere."""
    notes = [f"{name} is missing here ({why})" for name, why in missing().items()]
    if interpreted():
        notes.append("Triton's kernels run in its interpreter: no GPU here")
    return "; ".join(notes) or "all three backends run here"
