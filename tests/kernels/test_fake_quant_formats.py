"""Fake quantization of the formats with fixed blocks, of 16-bit weights, and of codes: against the formats themselves
and masks written by hand. tests/kernels/test_fake_quant.py has the integer formats."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from nanokit.errors import ModelFileError, ParameterError
from nanokit.kernels.fake_quant import fake_quantize, quantize
from nanokit.quant.weight_format import weight_format

BLOCKS = ("nvfp4", "mxfp4", "nf4", "nf4-dq", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
INTEGERS = ("int4-sym-g64", "int4-asym-g32", "int8-sym-channel", "int8-asym-tensor", "int8-sym-tensor-reduced")
FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def bits(x: Tensor) -> list[int]:
    """Of every number, signs of zero included."""
    return x.detach().contiguous().view(torch.int32).flatten().tolist()


def random(rows: int, columns: int, seed: int, spread: float = 0.0) -> Tensor:
    """Normal weights; spread: groups of 16 differ in size by powers of two."""
    numbers = np.random.default_rng(seed)
    w = numbers.standard_normal((rows, columns // 16, 16)) * 2.0 ** (spread * numbers.standard_normal((rows, 1, 1)))
    return torch.from_numpy(w.reshape(rows, columns).astype(np.float32))


@pytest.mark.parametrize("name", BLOCKS + INTEGERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 1e-3, 30.0]), st.sampled_from([64, 192, 576]))
@settings(max_examples=8, deadline=None)
def test_every_format_and_type(name: str, dtype: torch.dtype, seed: int, size: float, columns: int) -> None:
    """The values are the format's own in every bit, zero blocks and one outlier among them, and so are the codes that
    are kept; the gradient has the weights' type. A value rounded to bf16 on the way would miss the packed one."""
    fmt, w = weight_format(name), random(3, columns, seed, 2.0) * size
    w[1, :64] = 0
    w[2, 5] *= 50
    w = w.clamp(-60_000, 60_000).to(dtype).requires_grad_()
    expected = fmt.quantize(w.detach().float().numpy())
    value = fake_quantize(w, fmt)
    assert value.dtype is torch.float32
    assert bits(value) == bits(torch.from_numpy(expected.dequantize()))
    kept = quantize(w, fmt)
    assert np.array_equal(kept.codes, expected.codes)
    assert np.array_equal(kept.scales, expected.scales)
    (gradient,) = torch.autograd.grad(value, w, torch.full_like(value, 0.5))
    assert gradient.dtype is dtype
    if "asym" not in name:  # a minimum of eleven bits may leave weights of a narrow group beyond it
        assert gradient.eq(0.5).all()


@pytest.mark.parametrize("name", BLOCKS + INTEGERS)
def test_rounded_again_with_its_own_scales_it_stays(name: str) -> None:
    """What was searched for or learned is given as scales: a grid whose points do not keep still would move a model
    that nobody trained. And codes under given scales are those of the values."""
    fmt = weight_format(name)
    own = fmt.quantize(random(4, 192, 7).numpy())
    on_grid = torch.from_numpy(own.dequantize())
    scales = torch.from_numpy(own.scales)
    minimums = None if own.minimums is None else torch.from_numpy(own.minimums)
    assert torch.equal(fake_quantize(on_grid, fmt, scales, minimums), on_grid)
    moved = on_grid + 0.2 * random(4, 192, 8)
    value = fake_quantize(moved, fmt, scales, minimums)
    kept = quantize(moved, fmt, scales, minimums, tensor_scale=own.tensor_scale)
    assert kept.tensor_scale == own.tensor_scale
    assert bits(torch.from_numpy(kept.dequantize())) == bits(value)
    levels = np.arange(fmt.code_range[0], fmt.code_range[1] + 1) if own.table is None else own.table
    steps = moved.double().numpy().reshape(-1, own.group)
    steps = steps - (0 if own.minimums is None else own.minimums.astype(np.float64).reshape(-1, 1))
    scale = own.scales.astype(np.float64).reshape(-1, 1)
    nearest = np.abs(steps[..., None] - levels * scale[..., None]).min(axis=-1)
    taken = np.abs(value.double().numpy().reshape(steps.shape) - moved.double().numpy().reshape(steps.shape))
    assert np.allclose(taken, nearest, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "passing", "blocked"),
    [
        # of nvfp4 and mxfp4 in their owners' levels: the grid would go on with 8, the bound is 7, a tie the even code
        ("nvfp4", [0, 0.2, 5, 6, 6.5, 6.99, -6, -6.99], [7, 7.01, 8, -7, -8, 100, -100]),
        ("mxfp4", [0, 0.2, 5, 6, 6.5, 6.99, -6, -6.99], [7, 7.01, 8, -7, -8, 100, -100]),
        # of nf4 in 127ths: 92, 127 and then 162; -127, -88 and before them -166
        ("nf4", [0, 50, 127, 144, -127, -146, -146.5], [144.6, 145, 200, -147, -200, 144.5]),
        ("nf4-dq", [0, 50, 127, 144, -127, -146, -146.5], [144.6, 145, 200, -147, -200, 144.5]),
        ("q4_0", [0, 3.2, 7, 7.4, -8, -8.4, -8.5], [7.5, 8, 100, -8.6, -9, -100]),
        ("q4_1", [0, 3.2, 15, 15.4, -0.4, -0.5], [15.5, 16, -0.6, -1, 100, -100]),
        ("q5_0", [0, 15, 15.4, -16, -16.5], [15.5, 16, -16.6, -17]),
        ("q5_1", [0, 31, 31.4, -0.5], [31.5, 32, -0.6]),
        ("q8_0", [0, 127, 127.4, -128, -128.5], [127.5, 128, -128.6, -129]),
    ],
)
def test_the_gradient_inside_at_and_beyond_the_bounds(name: str, passing: list[float], blocked: list[float]) -> None:
    """Under given scales, in steps of 1/4."""
    fmt = weight_format(name)
    group = fmt.group_of(64)
    doubled = 2 if name in ("nvfp4", "mxfp4") else 1  # their levels are kept doubled
    row = torch.zeros(1, 64)
    row[0, : len(passing + blocked)] = torch.tensor(passing + blocked) / 4 * doubled
    w = row.requires_grad_()
    scales = torch.full((1, 64 // group), 0.25)
    minimums = torch.zeros_like(scales) if name in ("q4_1", "q5_1") else None
    upstream = torch.arange(1.0, 65.0)[None]
    fake_quantize(w, fmt, scales, minimums).backward(upstream)
    assert w.grad is not None
    expected = upstream.clone()
    expected[0, len(passing) : len(passing + blocked)] = 0
    assert w.grad.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["int4-sym-g64", "int8-sym-g64"])
def test_ties_and_the_numbers_beside_them(name: str) -> None:
    """Scales of eleven bits make exact ties: those go to the even code, the next fp32 number on either side to its own.
    A product with the reciprocal instead of a division takes some of each for the other."""
    fmt = weight_format(name)
    highest = fmt.code_range[1]
    scale = (np.arange(1024, 2048, dtype=np.float32) / 2**14)[:, None]
    ties = (np.resize(np.arange(-highest, highest), 62) + np.float32(0.5)) * scale
    for side in (-np.inf, 0, np.inf):
        beside = ties.astype(np.float32) if side == 0 else np.nextafter(ties.astype(np.float32), np.float32(side))
        w = np.concatenate([beside, highest * scale, -highest * scale], axis=1).astype(np.float32)
        q = fmt.quantize(w)
        assert np.array_equal(q.scales, scale)
        assert bits(fake_quantize(torch.from_numpy(w), fmt)) == bits(torch.from_numpy(q.dequantize()))


@pytest.mark.parametrize("name", BLOCKS)
def test_the_largest_weights_still_train(name: str) -> None:
    """pytorch/ao#4806 for scales that are the weights' own: mxfp4's floor leaves the peak as much as a third beyond the
    last level, q4_0's last code on one side is 7 of 8. None may stand still."""
    fmt = weight_format(name)
    row = torch.linspace(-1, 1, 64).mul(1.9)
    w = torch.stack([row, -row, row * 0.7]).requires_grad_()
    before = w.detach().clone()
    optimizer = torch.optim.SGD([w], lr=0.25)
    for _ in range(4):
        optimizer.zero_grad()
        fake_quantize(w, fmt).square().sum().backward()
        optimizer.step()
    moved = w.detach() != before
    assert moved[:, [0, -1]].all()
    assert w.detach().abs().max() < 0.25


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_comes_out_as_nan(name: str, bad: float) -> None:
    """A weight spoils its own block, of nvfp4 and nf4-dq the matrix, and with given scales itself. Codes are refused by
    name."""
    fmt, w = weight_format(name), random(2, 128, 3)
    group = fmt.group_of(128)
    good = fake_quantize(w, fmt)
    own = fmt.quantize(w.numpy())
    w[0, 70] = bad
    value = fake_quantize(w, fmt)
    spoilt = torch.zeros_like(w, dtype=torch.bool)
    spoilt[0, 70 // group * group : (70 // group + 1) * group] = True
    assert torch.equal(value.isnan(), torch.ones_like(spoilt) if name in ("nvfp4", "nf4-dq") else spoilt)
    if name not in ("nvfp4", "nf4-dq"):
        assert torch.equal(value[~spoilt], good[~spoilt])
    scales = torch.from_numpy(own.scales.copy())
    minimums = None if own.minimums is None else torch.from_numpy(own.minimums)
    assert fake_quantize(w, fmt, scales, minimums).isnan().nonzero().tolist() == [[0, 70]]
    with pytest.raises(ModelFileError, match="blk"):
        quantize(w, fmt, scales, minimums, name="blk")
    scales[1, 0] = bad
    spoilt = fake_quantize(w, fmt, scales, minimums).isnan()
    assert spoilt[1].nonzero().flatten().tolist() == list(range(group))


def test_levels_of_e2m1_by_hand() -> None:
    """Under a given scale of 1/2 (levels are kept doubled): every level, both signs, and the ties between them."""
    fmt = weight_format("nvfp4")
    w = torch.tensor([[*FP4, *(-x for x in FP4)]])
    scale = torch.full((1, 1), 0.5)
    assert torch.equal(fake_quantize(w, fmt, scale), w)
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -7]])
    even = [0, 1, 1, 2, 2, 4, 4, 6]
    assert fake_quantize(ties, fmt, scale).tolist() == [[*even, *(-x for x in even)]]


def test_a_scale_of_zero_leaves_zeros() -> None:
    """Searched scales of an all-zero block are 0; a division by it would be NaN for the whole layer."""
    for name in BLOCKS:
        fmt = weight_format(name)
        scales = torch.zeros(1, 64 // fmt.group_of(64))
        minimums = torch.zeros_like(scales) if name in ("q4_1", "q5_1") else None
        assert fake_quantize(random(1, 64, 1), fmt, scales, minimums).eq(0).all()
        assert np.array_equal(quantize(random(1, 64, 1), fmt, scales, minimums).dequantize(), np.zeros((1, 64)))


def test_columns_and_ranges_that_do_not_fit() -> None:
    scales = torch.ones(2, 2)
    with pytest.raises(ParameterError, match="a multiple of 64 columns"):
        fake_quantize(torch.zeros(2, 96), weight_format("nf4"))
    with pytest.raises(ParameterError, match="needed: scales alone"):
        fake_quantize(torch.zeros(2, 64), weight_format("q4_0"), scales, scales)
    with pytest.raises(ParameterError, match="needed: scales and minimums"):
        fake_quantize(torch.zeros(2, 64), weight_format("q4_1"), scales)
