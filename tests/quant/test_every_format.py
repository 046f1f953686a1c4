"""What every weight format owes, by its name: the noise it makes on normal weights, and sense in what is not normal."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from nanokit.errors import ModelFileError, ParameterError
from nanokit.quant.ggml import GGML_FORMATS
from nanokit.quant.weight_format import weight_format

# Signal to noise in dB on the 1024 x 1152 normal numbers of `normal`: what the project asks of its formats.
GOLDEN = {
    "int4-sym-tensor": 14.1, "int4-sym-channel": 16.8, "int4-sym-g128": 18.6, "int4-sym-g64": 19.35,
    "int4-sym-g32": 20.3, "int4-asym-g64": 20.95, "int4-asym-g32": 22.1, "int8-sym-tensor": 39.3,
    "int8-sym-channel": 42.0, "int8-sym-g32": 45.4, "nvfp4": 20.4, "mxfp4": 18.8, "q4_0": 21.3, "q4_1": 22.1,
    "q5_0": 27.4, "q5_1": 28.4, "q8_0": 45.4,
}  # fmt: skip
OTHERS = [
    "nf4",
    "nf4-dq",
    "int8-asym-channel",
    "int8-sym-channel-reduced",
    "int8-asym-tensor-reduced",
    "int4-sym-g192",
    "int4-sym-g16",
]
NAMES = [*GOLDEN, *OTHERS]
WIDE = ["int4-sym-qkv", "int8-asym-global"]


def sqnr(weights: np.ndarray, values: np.ndarray) -> float:
    exact = weights.astype(np.float64)
    return float(10 * np.log10((exact**2).sum() / ((exact - values) ** 2).sum()))


@pytest.fixture(scope="module")
def normal() -> np.ndarray:
    return torch.randn(1024, 1152, generator=torch.Generator().manual_seed(0)).numpy()


@pytest.mark.parametrize(("name", "expected"), GOLDEN.items())
def test_noise_on_normal_weights(normal: np.ndarray, name: str, expected: float) -> None:
    """Codes that are not the nearest, a scale a code too wide, a code that is never used: each costs .3 dB or more."""
    assert abs(sqnr(normal, weight_format(name).quantize(normal).dequantize()) - expected) <= 0.2


def test_nf4_beats_whole_numbers_on_normal_weights(normal: np.ndarray) -> None:
    """Its levels are made for them. At the same bits per weight, and with its levels in whole numbers."""
    found = {name: sqnr(normal, weight_format(name).quantize(normal).dequantize()) for name in ("nf4", "int4-sym-g64")}
    assert found["nf4"] > found["int4-sym-g64"] + 1


def test_nested_scales_cost_little(normal: np.ndarray) -> None:
    """A third of a bit a weight is saved: a mean left out, or levels that do not fit the peaks, would cost decibels."""
    plain, nested = (sqnr(normal, weight_format(name).quantize(normal).dequantize()) for name in ("nf4", "nf4-dq"))
    assert plain - 0.2 < nested < plain + 0.05
    assert nested > 20.5


@pytest.mark.parametrize("name", ["int8-sym-channel", "int8-asym-tensor"])
def test_seven_bits_lose_one(normal: np.ndarray, name: str) -> None:
    """reduced: half of the codes, 6 dB."""
    full, less = (sqnr(normal, weight_format(name + end).quantize(normal).dequantize()) for end in ("", "-reduced"))
    assert 5.9 < full - less < 6.2


def unusual(kind: str, rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    w = rng.standard_normal((rows, columns))
    if kind == "zero":
        w[:] = rng.choice([0.0, -0.0], w.shape)
    elif kind == "near zero":
        w *= 10.0 ** rng.uniform(-38, -8, (rows, 1))
    elif kind == "denormal":
        w *= 10.0 ** rng.uniform(-46, -38, (rows, 1))
    elif kind == "outlier":
        w *= 1e-3
        w[np.arange(rows), rng.integers(0, columns, rows)] = 1e3
    elif kind == "bf16":
        w = torch.from_numpy(w * 1e-5).bfloat16().float().numpy()
    elif kind == "zero rows":
        w[::2] = 0
    elif kind == "constant":
        w[:] = w[:, :1]
    elif kind == "one sided":
        w = 0.02 * (3 + np.abs(w))
    return w.astype(np.float32)


UNUSUAL = ["zero", "near zero", "denormal", "outlier", "bf16", "zero rows", "constant", "one sided"]


@given(st.sampled_from(NAMES), st.sampled_from(UNUSUAL), st.integers(1, 3), st.integers(0, 2**32))
@settings(max_examples=400, deadline=None)
def test_unusual_weights_come_out_finite_and_near(name: str, kind: str, rows: int, seed: int) -> None:
    """Nothing over- or underflows on the way, and no weight is farther off than a part of its group's peak: with eight
    bits (seven in the narrowest) half a step; with four a fifth, that is half of FP4's widest, and a quarter where a
    power of two has to do as scale. ggml's fp16 scales end in steps of 2^-24, wherever the peak is, NVFP4's at 2^-9 of
    what the matrix' own peak gives; a nested scale is off by 9 / 1280 of that peak, its weights by a little more."""
    fmt = weight_format(name)
    w = unusual(kind, np.random.default_rng(seed), rows, 384)
    q = fmt.quantize(w)
    values = q.dequantize()
    assert np.isfinite(values).all()
    assert fmt.code_range[0] <= q.codes.min() <= q.codes.max() <= fmt.code_range[1]
    group = w.size if fmt.scope == "tensor" else fmt.group_of(384)
    peaks = np.abs(w.reshape(-1, group)).max(axis=1, keepdims=True).astype(np.float64)
    errors = np.abs(values.astype(np.float64) - w).reshape(-1, group)
    part = 1 / 120 if name.startswith(("int8", "q8")) else 1 / 4 if name == "mxfp4" else 1 / 5
    end = 2.0**-18 if name in GGML_FORMATS else {"nvfp4": 2.0**-18, "nf4-dq": 0.009}.get(name, 0.0) * peaks.max()
    assert (errors <= part * peaks + end + 2.0**-108).all()


@pytest.mark.parametrize("name", NAMES)
def test_views_give_what_their_copies_give(name: str) -> None:
    """Transposed, reversed, every second column of a larger matrix; and nobody's weights are written to."""
    base = np.random.default_rng(1).standard_normal((768, 768)).astype(np.float32)
    before = base.copy()
    for view in (base[:384].T, base[5, ::-1].reshape(1, -1), base[3:9, ::2], base[:, 384:][7:8]):
        ours, theirs = weight_format(name).quantize(view), weight_format(name).quantize(np.ascontiguousarray(view))
        assert ours.shape == view.shape
        assert np.array_equal(ours.codes, theirs.codes)
        assert np.array_equal(ours.dequantize(), theirs.dequantize())
    assert np.array_equal(base, before)


@pytest.mark.parametrize("name", [*NAMES, *WIDE])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(name: str, bad: float) -> None:
    """Wherever they stand, in the last slice too; nothing that was rounded before is lost on a reader."""
    w = np.ones((700, 384), np.float32)
    w[-1, 200] = bad
    span = (-1.0, 1.0) if name in WIDE else None
    with pytest.raises(ModelFileError, match=rf"blk\.7\.ffn_up holds weights that {name} cannot span"):
        weight_format(name).quantize(w, "blk.7.ffn_up", span)


@pytest.mark.parametrize("name", [*NAMES, *WIDE])
def test_columns_that_do_not_divide_are_refused_with_what_would_fit(name: str) -> None:
    """576 columns do not take 128; one column takes no block. A row of any length takes a scale of its own."""
    fmt = weight_format(name)
    for columns in (1, 17, 576, 0):
        w = np.ones((3, columns), np.float32)
        block = fmt.group_of(384) if fmt.scope == "group" else 1
        if columns and columns % block == 0:
            span = (-1.0, 1.0) if name in WIDE else None
            assert fmt.quantize(w, span=span).dequantize().shape == w.shape
            continue
        with pytest.raises(ParameterError, match=rf"(?s)found: {columns} columns.*(multiple of {block}|channel)"):
            fmt.group_of(columns)
        with pytest.raises(ParameterError, match=rf"(?s)blk\.7\.ffn_up .*{name}.*found: {columns} columns"):
            fmt.quantize(w, "blk.7.ffn_up")


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "nf4", "nf4-dq", "q4_0", "q4_1", "q8_0"])
def test_blocks_take_no_span(name: str) -> None:
    """Ignored, it would be believed."""
    with pytest.raises(ParameterError, match="a scale for each of its blocks"):
        weight_format(name).quantize(np.ones((2, 64), np.float32), span=(-1.0, 1.0))
