"""The GPU backend's norm and gate: against fp64, and their codes against those of the numbers that they compute."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels import activations, reference
from nanokit.kernels.gpu import rows
from nanokit.kernels.gpu.activations import Activations
from nanokit.kernels.gpu.rows import rms_norm, silu_gate
from nanokit.kernels.gpu.runtime import device

U = 2.0**-24
OVERFLOW = 3e-37  # |gate| / exp(|gate|) where exp, in fp32, becomes infinite
WHOLE = [mode for mode in activations.MODES if mode != "fp32"]
shapes = st.tuples(st.integers(1, 3), st.integers(1, 5).map(lambda i: 32 * i))
PEAK = torch.tensor([1.5], device=device())
# the interpreter's numpy, where fp32 has infinities
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")


def noise(shape: tuple[int, ...], seed: int, spread: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread).to(device())


def check_codes(got: Activations, x: Tensor, mode: str) -> None:
    """got holds the codes of x by the contract."""
    wanted = activations.quantize(x.cpu(), mode, float(PEAK) if mode == "static" else None)
    assert got.mode == mode
    assert np.array_equal(got.scales.cpu().numpy(), wanted.scales.numpy(), equal_nan=True)
    codes = got.codes.cpu().int()
    assert torch.equal(256 * codes[0] + codes[1] if mode == "a16" else codes[0], wanted.codes.int())
    assert torch.equal(got.sums.cpu(), wanted.codes.float().unflatten(1, (-1, 16)).sum(-1))


def within(got: Tensor, wanted: Tensor, units: Tensor | float, floor: Tensor | float = 0.0) -> bool:
    """Each number is as near to the exact one as that many half units in the last place."""
    return bool(((got.double() - wanted).abs() <= units * U * wanted.abs() + floor).all())


# -- the norm ---------------------------------------------------------------------------------------------------------


@given(
    shapes, st.booleans(), st.sampled_from([1e-12, 1e-5, 1.0, 1e5]), st.sampled_from([1e-6, 1e-5]), st.integers(0, 99)
)
@settings(max_examples=60, deadline=None)
def test_the_norm_is_that_of_fp64(shape: tuple[int, int], add: bool, spread: float, eps: float, seed: int) -> None:
    """Padding counted in the mean, another row's columns, eps outside of the root, a residual added to a copy."""
    hidden, weight = noise(shape, seed, spread), noise(shape[1:], seed + 1)
    delta = noise(shape, seed + 2, spread) if add else None
    summed = hidden + delta if delta is not None else hidden.clone()
    got = rms_norm(hidden, weight, eps, "fp32", delta=delta).dequantize()
    assert torch.equal(hidden, summed)
    exact = summed.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    assert within(got, exact, 24)


@given(shapes, st.sampled_from(WHOLE), st.booleans(), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_the_norms_codes_are_those_of_what_it_computes(shape: tuple[int, int], mode: str, add: bool, seed: int) -> None:
    hidden, weight, delta = noise(shape, seed), noise(shape[1:], seed + 1), noise(shape, seed + 2) if add else None
    again = hidden.clone()
    x = rms_norm(hidden, weight, 1e-5, "fp32", delta=delta).dequantize()
    check_codes(rms_norm(again, weight, 1e-5, mode, PEAK, delta), x, mode)
    assert torch.equal(again, hidden)


@pytest.mark.parametrize("columns", [1056, 3104])
def test_the_norm_of_long_rows(columns: int) -> None:
    hidden, weight = noise((2, columns), 0), noise((columns,), 1)
    exact = hidden.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    x = rms_norm(hidden, weight, 1e-5, "fp32").dequantize()
    assert within(x, exact, 24)
    check_codes(rms_norm(hidden, weight, 1e-5, "a16"), x, "a16")


@pytest.mark.parametrize("columns", [32, 64, 96, 576, 5120])
def test_the_norm_has_no_more_threads_than_columns(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton hands columns out again to threads left over. A warp of those that comes late reads hidden states to which
    the first has added delta already, and adds it once more; one program after the other never shows it."""
    asked: list[int] = []
    monkeypatch.setattr(rows, "launch", lambda *_, warps: asked.append(warps))
    hidden = torch.ones(1, columns, device=device())
    rms_norm(hidden, hidden[0], 1e-5, "fp32", delta=hidden)
    [warps] = asked
    assert 32 * warps <= 1 << (columns - 1).bit_length()  # what a row is padded to
    assert warps in (1, 2, 4, 8, 16)


# -- the gate ---------------------------------------------------------------------------------------------------------

gates = st.sampled_from([0.01, 1.0, 10.0, 80.0, 1000.0])


@given(shapes, gates, st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_the_gate_is_that_of_fp64(shape: tuple[int, int], spread: float, seed: int) -> None:
    """The sigmoid of the other input, a sign lost, exp of something large: infinity over infinity."""
    gate, up = noise(shape, seed, spread), noise(shape, seed + 1)
    exact = gate.double() * torch.sigmoid(gate.double()) * up.double()
    got = silu_gate(gate, up, "fp32").dequantize()
    assert within(got, exact, 8 + 2 * gate.abs().double(), OVERFLOW * (1 + up.abs()))
    torch.testing.assert_close(got, reference.silu_gate(gate, up), rtol=1e-4 if spread > 1 else 1e-6, atol=1e-35)


@given(shapes, st.sampled_from(WHOLE), gates, st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_the_gates_codes_are_those_of_what_it_computes(
    shape: tuple[int, int], mode: str, spread: float, seed: int
) -> None:
    gate, up = noise(shape, seed, spread), noise(shape, seed + 1)
    check_codes(silu_gate(gate, up, mode, PEAK), silu_gate(gate, up, "fp32").dequantize(), mode)


@pytest.mark.parametrize("mode", ["fp32", "a8g32", "a8g16"])
def test_the_gate_of_rows_longer_than_a_program(mode: str) -> None:
    gate, up = noise((2, 1056), 0), noise((2, 1056), 1)
    x = silu_gate(gate, up, "fp32").dequantize()
    torch.testing.assert_close(x, reference.silu_gate(gate, up), rtol=1e-5, atol=1e-35)
    if mode != "fp32":
        check_codes(silu_gate(gate, up, mode), x, mode)


# -- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", activations.MODES)
def test_only_tensor_mode_looks_at_batch_mates(mode: str) -> None:
    """A row's bits must not depend on its neighbours; `tensor` does by its nature, and says so."""
    x, y, weight = noise((4, 96), 0), noise((4, 96), 1), noise((96,), 2)
    x[2] *= 30.0
    together = rms_norm(x, weight, 1e-5, mode, PEAK).dequantize(), silu_gate(x, y, mode, PEAK).dequantize()
    rows = [(x[i : i + 1].clone(), y[i : i + 1].clone()) for i in range(4)]
    norms = torch.cat([rms_norm(a, weight, 1e-5, mode, PEAK).dequantize() for a, _ in rows])
    gates = torch.cat([silu_gate(a, b, mode, PEAK).dequantize() for a, b in rows])
    assert (torch.equal(norms, together[0]) and torch.equal(gates, together[1])) == (mode != "tensor")


@pytest.mark.parametrize("mode", ["fp32", *activations.GROUPS, "token"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_number_that_is_not_finite_is_not_hidden(mode: str, bad: float) -> None:
    """Were it dropped by a maximum, a diverged row would become a plausible one; and it may not touch another row."""
    x = noise((2, 96), 0)
    x[1, 5] = bad
    ones = torch.ones(96, device=device())
    normed, gated = rms_norm(x, ones, 1e-5, mode).dequantize(), silu_gate(x, x, mode).dequantize()
    wanted = reference.rms_norm(x.cpu(), ones.cpu(), 1e-5)
    for got, plain in ((normed, wanted), (gated, reference.silu_gate(x, x))):
        assert got[0].isfinite().all()
        assert not got[1, 5].isfinite()
        if mode == "fp32":
            assert torch.equal(got.cpu().isfinite(), plain.cpu().isfinite())


def test_a_row_of_zeros_stays_zero() -> None:
    zeros, ones = torch.zeros(2, 64, device=device()), torch.ones(64, device=device())
    for mode in activations.MODES:
        assert not rms_norm(zeros, ones, 1e-5, mode, PEAK).dequantize().any()
        assert not silu_gate(zeros, zeros, mode, PEAK).dequantize().any()


def test_what_kernels_cannot_take_is_refused() -> None:
    x, weight = torch.ones(2, 64, device=device()), torch.ones(64, device=device())
    with pytest.raises(ParameterError, match=r"(?s)norm's weight.*\[64\]"):
        rms_norm(x, weight[:48], 1e-5, "fp32")
    with pytest.raises(ParameterError, match=r"(?s)added.*\[1, 64\].*\[2, 64\]"):
        rms_norm(x, weight, 1e-5, "fp32", delta=x[:1])
    with pytest.raises(ParameterError, match=r"(?s)hidden.*contiguous"):
        rms_norm(torch.ones(64, 2, device=device()).T, weight, 1e-5, "fp32")
    with pytest.raises(ParameterError, match=r"(?s)lets through.*float16"):
        silu_gate(x, x.half(), "fp32")
    with pytest.raises(ParameterError, match="a4"):
        rms_norm(x, weight, 1e-5, "a4")
    with pytest.raises(ParameterError, match="a4"):
        silu_gate(x, x, "a4")
    with pytest.raises(ValueError, match="peak"):
        silu_gate(x, x, "static")
    with pytest.raises(ParameterError, match=r"(?s)48 columns.*32"):
        silu_gate(x[:, :48].contiguous(), x[:, :48].contiguous(), "a8g16")
