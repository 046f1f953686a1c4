"""The GPU backend: Triton kernels with the contract of kernels/reference.py, compiled on a GPU or interpreted without.

Importing this package decides which of the two the process does, see runtime.py. Raises `NoGpuError` where there is no
Triton, and from `check` for a model that the kernels cannot take: nothing stands in for a GPU that was asked for.
"""

from typing import TYPE_CHECKING

import torch

from nanokit.kernels.gpu.runtime import INTERPRETED, NoGpuError
from nanokit.kernels.packable import OLDEST_GPU, obstacle

if TYPE_CHECKING:
    from nanokit.kernels.gpu.bound import Bound
    from nanokit.model.config import ModelConfig
    from nanokit.model.weights import Weights

__all__ = ["NoGpuError", "bind", "check", "require"]


def require(device: str) -> None:
    """Raise NoGpuError unless this process runs Triton's kernels on this device: "cuda" or "interpreter"."""
    if device == "cuda" and not torch.cuda.is_available():
        raise NoGpuError(
            "there is no GPU that torch can use",
            needed="an NVIDIA GPU, its driver and a CUDA build of torch",
            do='use device="cpu"; nanokit doctor says what it sees',
        )
    if device == "cuda" and torch.cuda.get_device_capability() < OLDEST_GPU:
        raise NoGpuError(
            f"{torch.cuda.get_device_name()} is too old for the kernels",
            found="compute capability {}.{}".format(*torch.cuda.get_device_capability()),
            needed="8.0 or later: tensor cores for int8 and tf32 (Ampere, 2020)",
            do='use device="cpu"',
        )
    if (device == "interpreter") != INTERPRETED:
        raise NoGpuError(
            f"this process {'interprets' if INTERPRETED else 'compiles'} Triton's kernels",
            found=f"device={device!r}",
            do=f"set TRITON_INTERPRET={int(not INTERPRETED)} before Python starts",
        )


def bind(config: "ModelConfig", weights: "Weights", *, activations: str = "a8g32") -> "Bound":
    """Pack a model's weights onto the device and bind them. Raises NoGpuError, see `check`; ModelFileError for a weight
    that is not a number."""
    from nanokit.kernels.gpu.bound import Bound

    check(config, weights)
    return Bound(config, weights, activations)


def check(config: "ModelConfig", weights: "Weights") -> None:
    """Raise NoGpuError unless `bind` can take the model; only the file's header is looked at."""
    found = obstacle(config, weights)
    if found:
        what, _ = found
        raise NoGpuError(
            f"the GPU kernels cannot take {what}",
            needed="4- and 8-bit codes in columns of whole 32, and heads of whole 16",
            do='use a file in Q4_0, Q4_1, Q8_0 or a K type, or device="cpu"',
        )
