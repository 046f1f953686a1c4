"""The CPU backend: C kernels, compiled by the machine's own compiler at first use and called through ctypes.

Raises `NoKernelsError` where the reference has to stand in: no compiler, weights without codes (floats, the grid
formats of GGUF), a shape that does not fill the vector lanes, or layers that are to stay in their file.
"""

from typing import TYPE_CHECKING

from nanokit.kernels.cpu import library
from nanokit.kernels.cpu.bound import Bound
from nanokit.kernels.cpu.compiler import NoKernelsError, find_compiler, requested
from nanokit.kernels.packable import obstacle

if TYPE_CHECKING:
    from nanokit.model.config import ModelConfig
    from nanokit.model.weights import Weights

__all__ = ["Bound", "NoKernelsError", "bind", "check"]


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
    found = obstacle(config, weights)
    if found:
        what, advice = found
        raise NoKernelsError(what, do=advice)
