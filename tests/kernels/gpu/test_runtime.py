"""Launches on GPUs that are not there: only what is asked of them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from nanokit.kernels.gpu import runtime


class Kernel:
    """Notes what it is launched with."""

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launched.append((grid, args, options))


def test_a_launch_goes_to_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel computes in a thread of its own, which begins with GPU 0: a model that was loaded onto another one would
    be launched there, over addresses that are not its own."""
    entered: list[Any] = []

    def on(device: torch.device) -> AbstractContextManager[None]:
        entered.append(device)
        return nullcontext()

    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "device", on)
    kernel, tensor = Kernel(), torch.empty(3, device="meta")
    runtime.launch(kernel, [3, 1], tensor, 7, warps=2)
    assert entered == [tensor.device]
    [(grid, args, options)] = kernel.launched
    assert (grid, args[1:]) == ((3, 1), (7,))
    assert options == {"num_warps": 2, "num_stages": 3, "enable_fp_fusion": False}
