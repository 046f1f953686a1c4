"""Inputs on one calibrated grid with a zero point, beside ONNX's formula in fp64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nanokit import quant
from nanokit.errors import ParameterError
from nanokit.quant.affine import AffineRanges

ends = st.floats(-1e4, 1e4, width=32)


@given(ends, ends, st.integers(0, 2**32 - 1))
def test_codes_are_those_of_quantize_linear(one: float, other: float, seed: int) -> None:
    """A zero point off by one, a range that does not hold zero, and clipping at the wrong end each move a value by a
    step or more; at most half a step and rounding may lie between."""
    ranges = AffineRanges()
    ranges.observe("x", torch.tensor([one, other]))
    low, high = min(0.0, one, other), max(0.0, one, other)
    step = (high - low) / 255
    x = np.random.default_rng(seed).uniform(1.5 * low - 1, 1.5 * high + 1, 64).astype(np.float32)
    if step < 1e-30:
        return
    zero = np.rint(-low / step)
    expected = (np.clip(np.rint(x.astype(np.float64) / step) + zero, 0, 255) - zero) * step
    found = ranges.rounded("x", torch.from_numpy(x)).numpy()
    near_tie = np.abs(np.abs(x / step - np.rint(x / step)) - 0.5) < 1e-3
    assert (np.abs(found - expected) <= 1e-5 * (abs(low) + abs(high)) + near_tie * 1.01 * step).all()
    assert ranges.rounded("x", torch.zeros(1)).item() == 0


def test_only_zeros_give_a_grid() -> None:
    """0 / 0 would make every later input NaN."""
    ranges = AffineRanges()
    ranges.observe("x", torch.zeros(3))
    assert ranges.grid("x") == (1.0, 0)


def test_inputs_of_linear_layers_are_rounded_inside_only() -> None:
    """By hand in two layers; calibration sees what is not rounded yet, and hooks do not stay."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).requires_grad_(False)
    text, x = torch.randn(16, 8), 2 * torch.randn(4, 8)
    ranges = AffineRanges()
    with ranges.observing(module):
        assert torch.equal(module(text), nn.Sequential(*module)(text))
    middle = module[0](text).relu()
    assert ranges.grid("2") == (pytest.approx(float(middle.max()) / 255), 0)
    with ranges.applied(module):
        found = module(x)
    by_hand = module[2](ranges.rounded("2", module[0](ranges.rounded("0", x)).relu()))
    assert torch.equal(found, by_hand)
    assert not torch.equal(found, module(x))


@pytest.mark.parametrize("seen", [float("inf"), float("nan")])
def test_what_is_not_a_number_is_refused_by_name(seen: float) -> None:
    """min(0, NaN) is 0: a range would say nothing of it, and every output would be NaN."""
    with pytest.raises(ParameterError, match=r"layers\.0\.q_proj"):
        AffineRanges().observe("layers.0.q_proj", torch.tensor([1.0, seen]))


def test_a_place_without_a_range_is_refused_by_name() -> None:
    with pytest.raises(ParameterError, match=r"layers\.0\.q_proj has no range"):
        AffineRanges().rounded("layers.0.q_proj", torch.ones(1))


def test_quantized_layers_are_seen_too_and_none_is_refused() -> None:
    """A module whose layers were quantized first would be measured without any rounding of its inputs."""
    torch.manual_seed(0)
    module = quant.apply(nn.Sequential(nn.Linear(32, 8)), "int8-sym-channel")
    ranges = AffineRanges()
    with ranges.observing(module):
        module(torch.randn(4, 32))
    assert ranges.grid("0")[0] > 0
    with pytest.raises(ParameterError, match="no layer"), ranges.applied(nn.ReLU()):
        pass
