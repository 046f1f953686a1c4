"""Launches on GPUs that are not there: only what is asked of them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from nanokit.kernels.gpu import runtime

# isort: split
import triton
import triton.language as tl


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


@triton.jit
def times(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N), tl.arange(0, K)
    a, b = tl.load(a_ptr + m * K + k[None, :]), tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(out_ptr + m * N + n[None, :], tl.dot(a, b, input_precision="ieee"))


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(a), b.shape[1], device=runtime.device())
    runtime.launch(times, (1,), a.contiguous(), b.contiguous(), out, *out.shape, len(b))
    return out


def test_a_row_of_a_product_has_its_bits_in_any_place_and_any_tile() -> None:
    """Numpy's library adds in an order of its own: on some processors by the place of a row, on others by the number of
    rows. Every test that a row's bits do not depend on its batch mates would be a matter of the machine it runs on."""
    noise = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 32, generator=noise).to(runtime.device()) for n in (64, 32))
    whole = product(a, b.T)
    order, half = torch.randperm(64, generator=noise).to(a.device), torch.arange(16, device=a.device) + 7
    assert torch.equal(product(a[order], b.T), whole[order])
    assert torch.equal(product(a[half], b[:16].T), whole[half, :16])
    torch.testing.assert_close(whole.double(), a.double() @ b.double().T, rtol=0, atol=1e-4)
