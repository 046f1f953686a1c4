"""The CPU backend: C kernels, compiled by the machine's own compiler at first use and called through ctypes.

Raises `NoKernelsError` where the reference has to stand in: no compiler, weights without codes (floats, the grid
formats of GGUF), a shape that does not fill the vector lanes, or layers that are to stay in their file.
"""

from typing import TYPE_CHECKING

from nanokit.kernels.cpu import library
from nanokit.kernels.cpu.bound import Bound
from nanokit.kernels.cpu.compiler import NoKernelsError, find_compiler, requested
from nanokit.kernels.cpu.pack import LANES, fits_four_bits
from nanokit.quant.formats import FORMATS

if TYPE_CHECKING:
    from nanokit.model.config import ModelConfig
    from nanokit.model.weights import Matrix, Weights

__all__ = ["Bound", "NoKernelsError", "bind", "check", "packed_bytes"]


def bind(config: "ModelConfig", weights: "Weights", resident: bool = True, *, activations: str = "a8g32") -> Bound:
    """Pack a model's weights and bind them. Compiles the kernels when they are not there yet.

    Raises NoKernelsError, see `check`; KernelError when the compiler fails; ModelFileError for a weight that is not
    a number.
    """
    check(config, weights, resident)
    return Bound(config, weights, activations, library.library())


def check(config: "ModelConfig", weights: "Weights", resident: bool = True) -> None:
    """Raise NoKernelsError unless `bind` can take the model; only the file's header is looked at."""
    requested()
    find_compiler()
    if not resident:
        raise NoKernelsError("layers that stay in their file", do="free memory, or use a smaller model")
    for matrix in matrices(weights):
        if matrix.type not in FORMATS or not FORMATS[matrix.type].has_codes:
            raise NoKernelsError(
                f"weights of the type {matrix.type} ({matrix.name})",
                do="use a file in Q4_0, Q4_1, Q8_0 or a K type for the fast path",
            )
        if matrix.shape[1] % 32:
            raise NoKernelsError(f"{matrix.shape[1]} columns ({matrix.name}), which are no multiple of 32")
    if config.head_dim % 16:
        raise NoKernelsError(f"heads of {config.head_dim} dimensions, which are no multiple of 16")


def matrices(weights: "Weights") -> list["Matrix"]:
    """Every matrix of a model, the embedding included."""
    layers = [x.weight for w in weights.layers for x in (w.q, w.k, w.v, w.o, w.gate, w.up, w.down)]
    return [*layers, weights.embedding, *([weights.head.weight] if weights.head else [])]


def packed_bytes(weights: "Weights") -> int:
    """What the packed weights will take at most, in bytes: with scales and minimums in fp32."""
    total = 0.0
    for matrix in matrices(weights):
        kind = FORMATS[matrix.type]
        code = 0.5 if kind.table is not None or fits_four_bits(kind.code_range) else 1
        total += (matrix.shape[0] + LANES - 1) * matrix.shape[1] * (code + 8 / kind.group)
    return int(total)
