"""NVFP4, MXFP4 and NF4 against numbers worked out by hand, and against definitions that share no code with them."""

from statistics import NormalDist

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from nanokit.quant.float4 import MXFP4, NF4, NF4_LEVELS, NVFP4

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def row(*parts: list[float], width: int) -> np.ndarray:
    """One row of blocks, each filled up with zeros."""
    return np.array([[*part, *[0.0] * (width - len(part))] for part in parts], np.float32).reshape(1, -1)


# Weight in units of the block's scale, and the code of it. Ties go to the even code.
TIES = [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)]
NVFP4_CODES = [*TIES, *((-w, code + 8) for w, code in TIES)]
NVFP4_NEAR = [(0.26, 1), (0.74, 1), (1.24, 2), (1.26, 3), (2.49, 4), (2.51, 5), (4.99, 6), (5.01, 7), (6.0, 7),
              (-0.0, 0), (-0.1, 8), (-0.3, 9), (0.1, 0)]  # fmt: skip


def test_nvfp4_by_hand() -> None:
    """A factor of 1 (the matrix's peak is 6 * 448), then block scales 448, 1, 1.125 (from 1.07, and the step of e4m3 is
    an eighth there), the smallest, for a block far below it, and the smallest for zeros."""
    w = row(
        [448 * x for x, _ in NVFP4_CODES] + [2688.0],
        [x for x, _ in NVFP4_NEAR],
        [6 * 1.07, 1.125 * 1.5, 1.125 * 1.7, -1.125 * 2.6],
        [2.0**-10, 2.0**-12, -(2.0**-10)],
        [],
        width=16,
    )
    q = NVFP4().quantize(w)
    assert q.scales.tolist() == [[448 / 2, 1 / 2, 1.125 / 2, 2.0**-10, 2.0**-10]]
    assert q.tensor_scale == 0.5
    assert q.codes[0, :15].tolist() == [*(code for _, code in NVFP4_CODES), 7]
    assert q.codes[0, 16:29].tolist() == [code for _, code in NVFP4_NEAR]
    assert q.codes[0, 32:36].tolist() == [7, 3, 3, 8 + 5]
    assert q.codes[0, 48:51].tolist() == [1, 0, 8 + 1]
    assert not q.codes[0, 64:].any()
    values = q.dequantize()[0]
    assert values[:15].tolist() == [448 * x for x in (0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, 6)]
    assert values[32:36].tolist() == [6.75, 1.125 * 1.5, 1.125 * 1.5, -1.125 * 3]
    assert values[48:51].tolist() == [2.0**-10, 0, -(2.0**-10)]


def test_nvfp4_block_scales_are_never_beyond_e4m3() -> None:
    """448 is the largest; a peak that rounding puts above it would be NaN in e4m3 on some processors, and did so in
    others' exporters. Random matrices, scales by torch's own e4m3."""
    for seed in range(20):
        w = (np.random.default_rng(seed).standard_normal((3, 160)) * 10.0 ** (seed - 10)).astype(np.float32)
        q = NVFP4().quantize(w)
        factor = np.float32(np.abs(w).max() / np.float32(6 * 448))
        wanted = torch.from_numpy(np.abs(w.reshape(3, -1, 16)).max(axis=2) / (np.float32(6) * factor))
        blocks = wanted.clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float().numpy()
        assert blocks.max() == 448
        assert q.tensor_scale == factor / 2
        assert np.array_equal(q.scales, blocks * factor / np.float32(2))


blocks = st.tuples(st.integers(0, 2**32), st.sampled_from([-30, -6, 0, 0, 4, 30]))


@given(blocks)
@settings(max_examples=60, deadline=None)
def test_nvfp4_codes_are_the_nearest(drawn: tuple[int, int]) -> None:
    """Of the sixteen, to the scale that is kept, by trying all of them; the sign is the weight's own, where it
    rounds to zero too."""
    rng = np.random.default_rng(drawn[0])
    w = (rng.standard_normal((2, 64)) * 10.0 ** drawn[1] * rng.choice([1, 1e-3], (2, 64))).astype(np.float32)
    q = NVFP4().quantize(w)
    scales = np.repeat(q.scales, 16, axis=1).astype(np.float64)
    errors = np.abs(np.abs(w.astype(np.float64))[..., None] - 2 * scales[..., None] * np.array(E2M1))
    chosen = np.take_along_axis(errors, (q.codes & 7)[..., None].astype(int), axis=2)[..., 0]
    assert np.array_equal(chosen, errors.min(axis=2))
    assert np.array_equal(q.codes >= 8, w < 0)


def test_mxfp4_by_hand() -> None:
    """Exponents: of 5 to 7.9 the scale 1; of .3 (2^-2 and more) 1/16; of 2^-126 the smallest normal one, halved. Ties
    go to the smaller level, and what rounds to zero loses its sign."""
    halfway = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    w = row(
        [*halfway, *(-x for x in halfway), -0.0, -0.2, 0.26, 7.9],
        [0.3, -0.15, 0.0468],
        [2.0**-126, 2.0**-127, -(2.0**-126) * 2.5],
        [],
        width=32,
    )
    q = MXFP4().quantize(w)
    assert q.scales.tolist() == [[1 / 2, 1 / 32, 2.0**-126, 2.0**-128]]
    assert q.codes[0, :18].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 9, 10, 11, 12, 13, 14, 0, 0, 1, 7]
    assert q.codes[0, 32:35].tolist() == [6, 8 + 4, 1]  # 4.8, 2.4 and .749 sixteenths
    assert q.codes[0, 64:67].tolist() == [1, 0, 8 + 2]
    assert not q.codes[0, 96:].any()
    assert q.dequantize()[0, 32:35].tolist() == [4 / 16, -2 / 16, 0.5 / 16]


def test_mxfp4_is_finite_up_to_the_end_of_fp32() -> None:
    """There ggml's rounded logarithm gives an exponent whose two highest levels are beyond fp32."""
    w = np.full((1, 32), np.finfo(np.float32).max, np.float32)
    w[0, 1:] = np.linspace(-3.4e38, 3.4e38, 31)
    values = MXFP4().quantize(w).dequantize()
    assert np.isfinite(values).all()
    assert (np.abs(values - w.astype(np.float64)) <= 0.26 * w.max()).all()


def test_nf4_levels_are_those_of_the_paper() -> None:
    """Dettmers et al. 2023: quantiles of a normal distribution at equal distances, eight on one side and seven on the
    other, 0 between them, scaled to 1. A digit in the wrong place of the table would cost quality and show nowhere."""
    offset, quantile = 0.9677083, NormalDist().inv_cdf
    right = [quantile(offset + (0.5 - offset) * i / 8) for i in range(8)]
    left = [-quantile(offset + (0.5 - offset) * i / 7) for i in range(7)]
    levels = np.array(sorted([*left, 0, *right])) / quantile(offset)
    np.testing.assert_allclose(NF4_LEVELS, levels, atol=1e-6)
    assert NF4().table.tolist() == [-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127]


def test_nf4_by_hand() -> None:
    """Each level, what lies a little to either side of half way, and a peak that is negative."""
    halfway = (NF4_LEVELS[1:].astype(np.float64) + NF4_LEVELS[:-1]) / 2
    w = row(
        [*(2 * NF4_LEVELS), *(2 * (halfway + 1e-5)), *(2 * (halfway - 1e-5))],
        [-0.127, 0.127 * 0.2, 1e-9],
        [],
        width=64,
    )
    q = NF4().quantize(w)
    assert q.codes[0, :16].tolist() == list(range(16))
    assert q.codes[0, 16:31].tolist() == list(range(1, 16))
    assert q.codes[0, 31:46].tolist() == list(range(15))
    assert q.codes[0, 64:68].tolist() == [0, 9, 7, 7]
    assert (q.codes[0, 128:] == 7).all()
    np.testing.assert_array_equal(q.scales, np.float32([[2, 0.127, 0]]) / np.float32(127))


@given(st.integers(0, 2**32), st.sampled_from([1e-30, 1e-6, 1.0, 1e30]))
@settings(max_examples=40, deadline=None)
def test_nf4_codes_are_those_of_the_fp32_levels(seed: int, size: float) -> None:
    """bitsandbytes' codes, by trying all levels; the whole numbers that stand for them are off by half of 1/127 of the
    peak at most, and no code moves for it."""
    w = (np.random.default_rng(seed).standard_normal((2, 128)) * size).astype(np.float32)
    q = NF4().quantize(w)
    peaks = np.abs(w.reshape(2, 2, 64)).max(axis=2)
    shares = w.astype(np.float64) / np.repeat(peaks, 64, axis=1)
    errors = np.abs(shares[..., None] - NF4_LEVELS.astype(np.float64))
    chosen = np.take_along_axis(errors, q.codes[..., None].astype(int), axis=2)[..., 0]
    assert (chosen <= errors.min(axis=2) + 1e-6).all()
    theirs = NF4_LEVELS[q.codes] * np.repeat(peaks, 64, axis=1)
    assert (np.abs(q.dequantize() - theirs) <= 0.5001 / 127 * np.repeat(peaks, 64, axis=1)).all()
    assert np.abs(q.dequantize() - theirs).max() > 0


@pytest.mark.parametrize("fmt", [NVFP4(), MXFP4(), NF4()], ids=lambda fmt: fmt.name)
@given(blocks)
@settings(max_examples=40, deadline=None)
def test_quantized_again_the_codes_are_the_same(fmt: NVFP4 | MXFP4 | NF4, drawn: tuple[int, int]) -> None:
    """But for the -0 of NVFP4, which a dequantized zero has lost. Blocks of unlike size, within what e4m3 holds to four
    bits."""
    rng = np.random.default_rng(drawn[0])
    size = np.repeat(10.0 ** rng.uniform(-3, 0, (3, 4)), 64, axis=1) * 10.0 ** drawn[1]
    w = (rng.standard_normal((3, 256)) * size).astype(np.float32)
    w[1, :64] = 0
    first = fmt.quantize(w)
    again = fmt.quantize(first.dequantize())
    kept = np.where(first.codes == 8, 0, first.codes) if fmt.name == "nvfp4" else first.codes
    assert np.array_equal(again.codes, kept)
    np.testing.assert_allclose(again.scales, first.scales, rtol=3e-7)


def test_where_nvfp4_is_not_the_same_again() -> None:
    """The limit that the module names: a block so small that its scale has a bit or two. 4.5 of its 6 levels are
    reached, the second time another scale is nearer, and its levels are others."""
    w = row([2688.0], [4.5 * 2**-8], [], width=16)
    first = NVFP4().quantize(w)
    assert not np.array_equal(NVFP4().quantize(first.dequantize()).codes, first.codes)
