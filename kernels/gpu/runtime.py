"""Where the Triton kernels run: compiled on a GPU, or one program after the other in Triton's interpreter.

A process does one of the two. `TRITON_INTERPRET` decides if it is set (1: interpreter, 0: compiled), else whether torch
sees a GPU: kernels are made when their modules are imported, and the variable stays set for what Triton asks later. In
the interpreter tensors lie in ordinary memory and every operation is numpy's, so that all code around the kernels, and
their indexing, masks and order, run where there is no GPU. It does not show what only a compiler finds out (ahead.py
does), nor how fast anything is. Products of floats are summed here, one column after the other: in numpy's library the
order depends on the processor, on the shape of a tile and on a row's place in it, and rows that must have the same bits
in any company would not have them.

Rejected: choosing at each launch. Functions that kernels call are bound when they are made, Triton's own as well.
"""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanokit.errors import NanokitError, ParameterError

ALIGNMENT = 16  # bytes: the widest load of one thread


class NoGpuError(NanokitError):
    """The Triton kernels cannot run here: no Triton, no GPU, or the process was started for the other way."""


def _interpreted() -> bool:
    asked = os.environ.get("TRITON_INTERPRET")
    if asked is None:
        return not torch.cuda.is_available()
    return asked.lower() in ("1", "true", "on", "yes", "y")  # as Triton reads it


INTERPRETED = _interpreted()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

try:
    import triton.language as tl
    from triton.language import random, standard
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
    from triton.runtime.jit import JITFunction
except ImportError as error:
    raise NoGpuError(
        "the GPU kernels need Triton", found=str(error), do="pip install triton (on Linux; there is none elsewhere)"
    ) from error

if INTERPRETED and isinstance(tl.sum, JITFunction):
    # Somebody, transformers for one, imported Triton before the variable was set. Its own functions are made again, the
    # same one wherever it stands; without a GPU nobody can have a use for the compiled ones.
    made: dict[int, InterpretedFunction] = {}
    for module in (standard, random, tl):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, made.setdefault(id(value), InterpretedFunction(value.fn)))
elif not INTERPRETED and isinstance(tl.sum, InterpretedFunction):
    raise NoGpuError(
        "Triton was imported before nanokit.kernels.gpu, to interpret kernels",
        needed="compiled ones", do="set TRITON_INTERPRET=0 before Python starts",
    )  # fmt: skip

_any_dot = InterpreterBuilder.create_dot


def _dot(self: Any, a: Any, b: Any, start: Any, *how: Any) -> Any:
    """a [M, K] times b [K, N], fp32, in the order of K and then to start; the interpreter's own for other types."""
    if any(x.data.dtype != np.float32 or x.data.ndim != 2 for x in (a, b, start)):
        return _any_dot(self, a, b, start, *how)
    terms = np.multiply(a.data.T[:, :, None], b.data[:, None, :], order="C")
    return TensorHandle(np.add.reduce(terms, axis=0) + start.data, start.dtype.scalar)


if INTERPRETED:
    InterpreterBuilder.create_dot = _dot

# Set by ahead.py: called with kernel, grid, arguments and options, compiles on a machine without a GPU.
instead_of_running: Callable[[Any, Sequence[int], Sequence[Any], dict[str, Any]], None] | None = None

_one_at_a_time = threading.Lock()  # the interpreter replaces functions of triton.language while a kernel runs


def device() -> torch.device:
    """Where tensors of kernels have to lie: the current GPU, or ordinary memory where they are interpreted, or only
    compiled."""
    if INTERPRETED or instead_of_running is not None:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def launch(kernel: Any, grid: Sequence[int], *args: Any, warps: int = 4, stages: int = 3) -> None:
    """Run a kernel on the current stream of the GPU where its first argument, a tensor, lies: a thread begins with GPU
    0, wherever others have loaded a model. grid: programs, of up to three dimensions, none of them 0; args: in the
    order of the kernel's parameters, constants included. Multiplication and addition are never fused unasked."""
    if INTERPRETED:
        with _one_at_a_time:
            kernel[tuple(grid)](*args)
        return
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    if instead_of_running is not None:
        instead_of_running(kernel, grid, args, options)
    else:
        with torch.cuda.device(args[0].device):
            kernel[tuple(grid)](*args, **options)


def checked(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor, if a kernel may trust it. shape: -1 takes any length. Raises ParameterError for another type, shape,
    device, for gaps between elements, and for a first byte that is not on 16."""
    fits = len(shape) == tensor.ndim and all(n in (-1, m) for n, m in zip(shape, tensor.shape, strict=True))
    if not fits or tensor.dtype is not dtype or not tensor.is_contiguous() or tensor.device.type != device().type:
        raise ParameterError(
            f"{name} does not fit the kernel",
            found=f"{tensor.dtype} {list(tensor.shape)}, strides {list(tensor.stride())}, on {tensor.device}",
            needed=f"{dtype} {list(shape)}, contiguous, on {device()}",
        )
    if tensor.data_ptr() % ALIGNMENT and tensor.numel():
        raise ParameterError(
            f"{name} begins at an address that wide loads cannot take",
            found=f"{tensor.data_ptr() % ALIGNMENT} bytes beyond a multiple of {ALIGNMENT}",
            needed=f"a multiple of {ALIGNMENT}",
            do="copy it with clone()",
        )
    return tensor
