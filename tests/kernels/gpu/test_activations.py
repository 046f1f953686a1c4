"""Quantized activations of the GPU backend: every bit of codes and scales is that of kernels/activations.py."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from nanokit.errors import ParameterError
from nanokit.kernels import activations
from nanokit.kernels.gpu import activations as gpu
from nanokit.kernels.gpu.runtime import device

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's numpy: inf * 0
WHOLE = [mode for mode in activations.MODES if mode != "fp32"]

numbers = st.one_of(
    st.floats(-100, 100, width=32),
    st.integers(-254, 254).map(lambda i: i / 2),  # ties, where 127 is the peak
    st.sampled_from([0.0, -0.0, 127.0, 32512.5, 1e-45, 1e-38, -1e-30, 2.0**-100, 2.0**-101, 3e38, -3e38]),
    st.sampled_from([np.inf, -np.inf, np.nan]),
)


def check(x: torch.Tensor, mode: str, peak: float | None = None) -> None:
    wanted = activations.quantize(x, mode, peak)
    on_device = None if peak is None else torch.tensor([peak], device=device())
    got = gpu.quantize(x.to(device()), mode, on_device)
    assert got.mode == mode
    assert got.group == wanted.group
    assert got.x is None
    codes, scales, sums = got.codes.cpu(), got.scales.cpu(), got.sums.cpu()
    assert codes.dtype == torch.int8
    high, low = activations.planes(wanted.codes) if mode == "a16" else (None, wanted.codes)
    assert torch.equal(codes, low[None] if high is None else torch.stack((high, low)))
    assert scales.dtype == torch.float32
    assert scales.shape == wanted.scales.shape
    assert np.array_equal(scales.numpy(), wanted.scales.numpy(), equal_nan=True)
    assert torch.equal(sums.double(), wanted.codes.double().unflatten(1, (-1, 16)).sum(-1))
    assert np.array_equal(got.dequantize().cpu().numpy(), wanted.dequantize().numpy(), equal_nan=True)


@given(st.sampled_from(WHOLE), st.data())
@settings(max_examples=120, deadline=None)
def test_codes_scales_and_sums_are_the_contracts(mode: str, data: st.DataObject) -> None:
    """A division that rounds twice, a tie rounded up, a NaN that max dropped, a mask that lets another row's columns
    in, planes swapped: each changes a bit."""
    shape = data.draw(st.integers(1, 3)), 32 * data.draw(st.integers(1, 4))
    x = data.draw(arrays(np.float32, shape, elements=numbers, fill=numbers))
    peaks = [0.0, 1e-31, 2.0**-100, 0.5, 127.0, 3e38, np.inf, np.nan]
    check(torch.from_numpy(x), mode, data.draw(st.sampled_from(peaks)) if mode == "static" else None)


@pytest.mark.parametrize("mode", WHOLE)
@pytest.mark.parametrize("columns", [1056, 4128])
def test_rows_longer_than_a_program_holds(mode: str, columns: int) -> None:
    """The peak of a later chunk, and the columns beside the last one, which a power of two does not divide."""
    x = torch.randn(2, columns, generator=torch.Generator().manual_seed(0))
    x[0, -1], x[1, 17] = 9.0, -11.0
    check(x, mode, 3.0 if mode == "static" else None)


@pytest.mark.parametrize("mode", WHOLE)
def test_every_code_is_reached_and_every_tie_goes_to_even(mode: str) -> None:
    """The clamp, the planes at their ends, and rounding by an added number where torch rounds by name."""
    limit = 32512 if mode == "a16" else 127
    x = torch.arange(-2 * limit, 2 * limit + 1)[:: 97 if mode == "a16" else 1].float() / 2
    group = activations.GROUPS.get(mode, 32)
    x = torch.nn.functional.pad(x, (0, -len(x) % (group - 1))).view(-1, group - 1)
    x = torch.nn.functional.pad(x, (0, 1), value=limit).view(1, -1)  # each group's peak is the limit
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % 32))
    check(x, mode, float(limit) if mode == "static" else None)
    if mode == "static":
        check(x * 1e30, mode, 63.0)  # beyond the peak, and beyond what whole numbers hold


@pytest.mark.parametrize("mode", WHOLE)
def test_ties_show_every_bit_of_the_inverse(mode: str) -> None:
    """(k + 1/2) * scale rounds up or down by the inverse's last bit: `limit * (1 / peak)` would not do."""
    generator = torch.Generator().manual_seed(1)
    limit, group = 32512 if mode == "a16" else 127, activations.GROUPS.get(mode, 32)
    peaks = torch.rand(3, 128 // group, 1, generator=generator) + 0.5
    steps = torch.randint(-limit, limit, (3, 128 // group, group), generator=generator) + 0.5
    if mode not in activations.GROUPS:
        peaks = peaks[:, :1] if mode == "token" else peaks[:1, :1]
    x = steps * (peaks / limit)
    x[:, :, 0] = peaks[:, :, 0]
    check(x.flatten(1), mode, float(peaks[0, 0]) if mode == "static" else None)


@pytest.mark.parametrize("mode", WHOLE)
def test_a_vanishing_peak_is_zero(mode: str) -> None:
    for peak in (1e-45, 1e-37, 2.0**-101, 2.0**-100):
        x = torch.zeros(2, 64)
        x[:, ::16] = peak
        check(x, mode, peak if mode == "static" else None)


def test_fp32_keeps_its_input() -> None:
    x = torch.randn(2, 64).to(device())
    kept = gpu.quantize(x, "fp32")
    assert kept.x is x
    assert kept.dequantize() is x
    assert kept.codes is kept.scales is kept.sums is None


def test_what_kernels_cannot_take_is_refused() -> None:
    x = torch.ones(2, 64, device=device())
    with pytest.raises(ParameterError, match=r"(?s)a4.*one of fp32, a16"):
        gpu.quantize(x, "a4")
    with pytest.raises(ParameterError, match=r"(?s)48 columns.*multiple of 32"):
        gpu.quantize(torch.ones(2, 48, device=device()), "a8g16")
    with pytest.raises(ParameterError, match=r"(?s)float16.*float32"):
        gpu.quantize(x.half(), "token")
    with pytest.raises(ParameterError, match="peak"):
        gpu.quantize(x, "static", torch.ones(2, device=device()))
    with pytest.raises(ValueError, match="peak"):
        gpu.quantize(x, "static")
