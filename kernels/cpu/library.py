"""The kernels' library, loaded once a process and variant.

    from nanokit.kernels.cpu.library import library
    rms = library().declare("rms_norm_row", None, c_void_p, c_void_p, c_long, c_double, c_void_p)

Each Python module declares the functions of the C file that it wraps; a call checks nothing but types, so the wrappers
check shapes. ctypes gives up the interpreter's lock during a call. cffi and a C extension were rejected: the first is
one more dependency, and both tie the library to a Python version, for calls that take milliseconds.
"""

import ctypes
import shlex
from collections.abc import Callable
from ctypes import c_char_p, c_int64
from functools import lru_cache
from pathlib import Path
from typing import Any

from nanokit.kernels.cpu import build, compiler
from nanokit.kernels.cpu.build import KernelError
from nanokit.kernels.cpu.structs import STRUCTURES

__all__ = ["KernelError", "Library", "library"]


class Library:
    """A loaded library. variant: its name in compiler.VARIANTS; c: the CDLL."""

    def __init__(self, path: Path, variant: str, by: compiler.Compiler, flags: list[str]) -> None:
        self.variant = variant
        self._by, self._flags = by, flags
        try:
            self.c = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelError(
                "the compiled CPU kernels cannot be loaded",
                found=error,
                do="set NANOKIT_HOME to a folder on a disk from which programs may be run (no `noexec`)",
            ) from error
        self._check()

    def declare(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """The function `name` with ctypes types set. Raises KernelError when the library has none of that name."""
        try:
            function = getattr(self.c, name)
        except AttributeError as error:
            raise self._foreign(f"no function {name}") from error
        function.restype, function.argtypes = result, list(arguments)
        return function

    def card(self) -> dict[str, Any]:
        """What a record of a measurement says about the kernels; holds no path of this machine."""
        command = [Path(self._by.command[0]).name, *self._by.command[1:]]
        return {
            "variant": self.variant,
            "compiler": self._by.version,
            "command": shlex.join([*command, *self._flags]),
        }

    def _check(self) -> None:
        size = self.declare("nk_struct_size", c_int64, c_int64)
        for index, structure in enumerate(STRUCTURES):
            if (found := size(index)) != ctypes.sizeof(structure):
                raise self._foreign(f"{structure.__name__} of {found} bytes, in Python {ctypes.sizeof(structure)}")
        said = self.declare("nk_variant", c_char_p)().decode()
        if said.startswith("avx512") != (self.variant == "avx512"):
            raise self._foreign(f"the variant {said} under the name {self.variant}")

    @staticmethod
    def _foreign(found: str) -> KernelError:
        return KernelError(
            "the CPU kernels' library and the Python beside it are not of one version",
            found=found,
            do="install nanokit again",
        )


def library() -> Library:
    """The library of the variant that NANOKIT_CPU_KERNELS names, or of the best; compiled when it is not yet there.

    Raises compiler.NoKernelsError (the reference can stand in), KernelError, ParameterError.
    """
    compiler.requested()
    found = compiler.find_compiler()
    variant = compiler.choose(found)
    return _loaded(found, variant, tuple(compiler.flags(variant)))


@lru_cache
def _loaded(by: compiler.Compiler, variant: compiler.Variant, flags: tuple[str, ...]) -> Library:
    return Library(build.build(by, variant), variant.name, by, list(flags))
