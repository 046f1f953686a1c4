"""C activations against kernels/activations.py bit by bit; norm and gate against fp64."""

import ctypes

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis.extra.numpy import arrays
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels import activations
from nanokit.kernels.cpu.bound import MODES
from nanokit.kernels.cpu.library import Library
from nanokit.kernels.cpu.ops import quantize

OWN = [mode for mode in MODES if mode not in ("tensor", "static")]  # find their own peak
properties = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

numbers = st.one_of(
    st.floats(-100, 100, width=32),
    st.integers(-254, 254).map(lambda i: i / 2),  # ties, where 127 is the peak
    st.integers(-65024, 65024).map(lambda i: i / 2),  # and where 32512 is
    st.sampled_from([0.0, -0.0, 127.0, 32512.0, 1e-45, 1e-38, -1e-30, 2.0**-100, 2.0**-101, 1e-25, 3e38, -3e38]),
)
rows = st.tuples(st.integers(1, 4), st.integers(1, 5).map(lambda i: 32 * i)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=numbers, fill=st.sampled_from([0.0, 1.5, -127.0]))
)


def assert_same_bits(x: Tensor, mode: str, peak: float, library: Library) -> None:
    codes, scales = quantize(x, mode, peak, library)
    wanted = activations.quantize(x, mode, peak)
    assert torch.equal(codes, wanted.codes.int())
    spread = wanted.scales.repeat_interleave(scales.shape[1] // wanted.scales.shape[1], 1)
    assert torch.equal(scales.view(torch.int32), spread.contiguous().view(torch.int32))


@given(x=rows, mode=st.sampled_from(OWN))
@example(x=np.zeros((2, 64), np.float32), mode="a16")
@properties
def test_codes_and_scales_have_the_contracts_bits(kernels: Library, x: np.ndarray, mode: str) -> None:
    """A division in another order, a rounding away from zero at ties, a denormal that one side flushes: the model
    would still answer, and no longer be what the reference says of it."""
    assert_same_bits(torch.from_numpy(x), mode, 0.0, kernels)


def test_what_does_not_fill_groups_is_refused() -> None:
    """Half a group at a row's end is read from the next row, or from beyond the last."""
    for x in (torch.zeros(2, 48), torch.zeros(64)):
        with pytest.raises(ParameterError, match="whole groups"):
            quantize(x, "a8g32")
    with pytest.raises(ParameterError, match="fp32"):
        quantize(torch.zeros(2, 64), "fp32")


@given(x=rows, peak=st.sampled_from([0.0, 1e-40, 1e-20, 0.5, 63.0, 127.0, 3e38]))
@properties
def test_a_given_peak_clips(kernels: Library, x: np.ndarray, peak: float) -> None:
    """What is beyond a calibrated peak takes its code; a product that overflows on the way does not wrap."""
    assert_same_bits(torch.from_numpy(x), "static", peak, kernels)
    assert_same_bits(torch.from_numpy(x), "tensor", float(np.abs(x).max()), kernels)


@pytest.mark.parametrize("mode", OWN)
def test_every_tie_goes_to_even(kernels: Library, mode: str) -> None:
    limit = 32512 if mode == "a16" else 127
    halves = torch.arange(-2 * limit, 2 * limit + 1) / 2
    x = torch.full((-(-len(halves) // 15), 16), float(limit))  # the limit is in every group, so scales are one
    x[:, :15] = torch.nn.functional.pad(halves, (0, -len(halves) % 15)).view(-1, 15)
    x = torch.nn.functional.pad(x, (0, 0, 0, len(x) % 2)).reshape(-1, 32).contiguous()
    x[-1, -1] = limit
    assert_same_bits(x, mode, 0.0, kernels)
    codes, _ = quantize(x, mode, 0.0, kernels)
    assert torch.equal(codes, x.round().int())


@pytest.mark.parametrize("mode", OWN)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 15, 16, 40])
def test_a_number_that_is_not_finite_is_in_its_scale(kernels: Library, mode: str, bad: float, at: int) -> None:
    """Maximum instructions drop a NaN on one side: it must be found wherever it stands, and its neighbours' rows and
    groups stay as they were."""
    x = torch.linspace(-3, 3, 192).view(3, 64)
    clean = quantize(x, mode, 0.0, kernels)
    x[1, at] = bad
    codes, scales = quantize(x, mode, 0.0, kernels)
    group = 64 // scales.shape[1]
    hit = torch.zeros(3, scales.shape[1], dtype=torch.bool)
    hit[1, slice(None) if mode == "token" else at // group] = True
    assert not scales[hit].isfinite().any()
    assert torch.equal(scales[~hit], clean[1][~hit])
    apart = ~hit.repeat_interleave(group, 1)
    assert torch.equal(codes[apart], clean[0][apart])


def _pointer(x: Tensor) -> int:
    return x.data_ptr()


@pytest.mark.parametrize("n", [16, 64, 576, 4096])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_rms_norm_against_fp64(kernels: Library, n: int, size: float) -> None:
    """Sixteen partial sums of n / 16 squares and a tree of four: (n / 16 + 4) u of the mean, half of it after the root,
    and a few roundings more."""
    norm = kernels.declare(
        "rms_norm_row", None, *[ctypes.c_void_p] * 2, ctypes.c_long, ctypes.c_double, ctypes.c_void_p
    )
    noise = torch.Generator().manual_seed(n)
    x, weight, out = torch.randn(n, generator=noise) * size, torch.randn(n, generator=noise), torch.empty(n)
    norm(_pointer(x), _pointer(weight), n, 1e-5, _pointer(out))
    wide = x.double()
    expected = wide / (wide.square().mean() + 1e-5).sqrt() * weight.double()
    assert ((out - expected).abs() <= (n / 32 + 8) * 2.0**-24 * expected.abs() + 1e-38).all()


def test_gate_against_fp64(kernels: Library) -> None:
    """Over the whole range: e^x is clamped at both ends, where silu is the number itself or next to nothing; NaN and
    infinities come out."""
    gated = kernels.declare("silu_gate_row", None, *[ctypes.c_void_p] * 2, ctypes.c_long, ctypes.c_void_p)
    gate = torch.cat([torch.linspace(-120, 120, 9600), torch.randn(6400), torch.tensor([0.0, -0.0] * 8)])
    up = torch.linspace(-2, 3, len(gate))
    out = torch.empty(len(gate))
    gated(_pointer(gate), _pointer(up), len(gate), _pointer(out))
    wide = gate.double()
    expected = wide * torch.sigmoid(wide) * up
    # the clamp leaves e^-88 where less is meant
    assert ((out - expected).abs() <= 8 * 2.0**-24 * expected.abs() + 1e-35).all()
    gate[:3], up[:3] = torch.tensor([torch.nan, torch.inf, 1.0]), torch.tensor([1.0, 1.0, torch.nan])
    gated(_pointer(gate), _pointer(up), len(gate), _pointer(out))
    assert out[0].isnan()
    assert out[1] == torch.inf
    assert out[2].isnan()
