"""SmoothQuant's factors, on matrices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanokit import quant
from nanokit.errors import ParameterError
from nanokit.quant.smooth import migration

seeds = st.integers(0, 2**31 - 1)


def drawn(seed: int, columns: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Inputs and two matrices that read them, columns of very different size."""
    generator = torch.Generator().manual_seed(seed)
    x, *weights = (torch.randn(rows, columns, generator=generator) for rows in (20, 7, 12))
    return x * torch.randn(columns, generator=generator).clamp(-1, 1).exp(), weights


@given(seeds, st.integers(2, 40), st.floats(10, 100))
def test_an_outlier_among_the_inputs_shrinks(seed: int, columns: int, times: float) -> None:
    """And both sides get the geometric mean of their peaks, the weights of all matrices together: factors of one matrix
    alone, or the wrong way round, leave a side as uneven as it was."""
    x, weights = drawn(seed, columns)
    x[3, 0] = times * x.abs().max()
    peaks = x.abs().amax(dim=0)
    factors = migration(weights, peaks)
    inputs, matrices = peaks / factors, (torch.cat(weights) * factors).abs().amax(dim=0)
    torch.testing.assert_close(inputs, matrices)
    assert inputs[0] / inputs[1:].max() < peaks[0] / peaks[1:].max()
    products = (x / factors).double() @ (weights[1] * factors).double().T
    expected = x.double() @ weights[1].double().T
    assert (products - expected).abs().max() < 1e-5 * expected.abs().max()


@given(seeds, st.floats(0, 1))
def test_alpha_is_the_share_of_the_inputs(seed: int, alpha: float) -> None:
    """The formula of the paper, in its own words."""
    x, weights = drawn(seed, 9)
    x, largest = x.abs().amax(dim=0), torch.cat(weights).abs().amax(dim=0)
    torch.testing.assert_close(migration(weights, x, alpha), x**alpha / largest ** (1 - alpha), rtol=1e-4, atol=0)


@pytest.mark.parametrize("silent", ["inputs", "weights", "both", "everything"])
def test_columns_of_zeros_stay_finite(silent: str) -> None:
    """An input that calibration never saw move would be divided by nothing, and the norm that makes it with it."""
    x, weights = drawn(0, 6)
    peaks = x.abs().amax(dim=0)
    if silent == "everything":
        peaks, weights = torch.zeros(6), [torch.zeros(3, 6)]
    if silent in ("inputs", "both"):
        peaks[2] = 0
    if silent in ("weights", "both"):
        for each in weights:
            each[:, 2] = 0
    factors = migration(weights, peaks)
    assert factors.isfinite().all()
    assert (1 / factors).isfinite().all()
    assert factors.min() > 0


def test_a_module_has_no_text_to_migrate_by() -> None:
    """Rounded to nearest in silence, it would be called what it is not."""
    with pytest.raises(ParameterError, match=r"(?s)calibration text.*\+smooth.*nanokit quantize"):
        quant.apply(torch.nn.Sequential(torch.nn.Linear(32, 8)), "int8-sym-channel+smooth")
