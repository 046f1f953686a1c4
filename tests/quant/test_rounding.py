"""Searched scales: against plain rounding, a brute-force search, and what files can keep."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from nanokit.errors import ModelFileError, ParameterError
from nanokit.quant.rounding import search
from nanokit.quant.storage import entry_of, parts_of, restore
from nanokit.quant.weight_format import weight_format

FORMATS = [
    "int4-sym-g32", "int4-asym-g32", "int4-sym-channel", "int4-asym-tensor", "int8-sym-g32", "int8-asym-channel",
    "int8-sym-tensor-reduced", "nvfp4", "mxfp4", "nf4", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0",
]  # fmt: skip


def squares(q, weights: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """Weighted squared error of each group in fp64, or of everything where one scale serves it."""
    off = np.square(q.dequantize().astype(np.float64) - weights)
    off *= 1 if importance is None else importance
    if q.format.endswith(("tensor", "reduced")):
        return off.sum(keepdims=True)
    return off.reshape(-1, q.group).sum(axis=1)


def some_weights(seed: int, rows: int, columns: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    weights = random.standard_normal((rows, columns)) * 10.0 ** random.integers(-4, 3, (rows, 1))
    weights[random.random(weights.shape) < 0.02] *= 30
    weights[0] += random.integers(-1, 2) * 5
    weights[:, : random.integers(0, 40)] *= random.integers(0, 2)
    return weights.astype(np.float32)


@given(st.sampled_from(FORMATS), st.integers(0, 2**32), st.sampled_from([None, "even", "spread", "holes"]))
@settings(max_examples=60, deadline=None)
def test_no_group_is_worse_than_plain(name: str, seed: int, kind: str | None) -> None:
    """In the measure that was asked for; and what is kept is what a file keeps, bit for bit."""
    weights = some_weights(seed, 3, 128)
    random = np.random.default_rng(seed)
    importance = None if kind is None else np.exp(random.normal(0, 0 if kind == "even" else 3, 128))
    if importance is not None and kind == "holes":
        importance[random.random(128) < 0.5] = 0
    fmt = weight_format(name)
    q = search(weights, fmt, None if importance is None else torch.from_numpy(importance))
    plain = fmt.quantize(weights)
    # fp32 values of the result against fp64 arithmetic inside
    assert (squares(q, weights, importance) <= squares(plain, weights, importance) * (1 + 1e-5)).all()
    assert (q.format, q.group, q.shape) == (plain.format, plain.group, plain.shape)
    again = restore(entry_of(q), parts_of(q), "it")
    assert np.array_equal(again.dequantize(), q.dequantize())


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_the_nearest_for_the_kept_scales(name: str) -> None:
    """A scale rounded after its codes were chosen leaves some of them a step off."""
    fmt = weight_format(name)
    weights = np.random.default_rng(0).standard_normal((8, 192)).astype(np.float32)
    q = search(weights, fmt)
    scales, minimums = (
        np.repeat(np.zeros_like(q.scales) if part is None else part, q.group, axis=1).astype(np.float64)
        for part in (q.scales, q.minimums)
    )
    levels = np.arange(q.code_range[0], q.code_range[1] + 1) if q.table is None else q.table.astype(np.float64)
    best = np.abs(levels * scales[..., None] + minimums[..., None] - weights[..., None].astype(np.float64)).min(axis=2)
    found = np.abs(q.dequantize().astype(np.float64) - weights)
    assert name == "mxfp4" or (q.codes != fmt.quantize(weights).codes).any()
    if name not in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "nf4"):  # whose plain codes are their owners', not nearest
        np.testing.assert_allclose(found, best, atol=2e-6)


@pytest.mark.parametrize(("name", "levels"), [("int4-sym-g64", 7), ("int8-sym-g64", 127)])
@pytest.mark.parametrize("weighted", [False, True])
def test_close_to_the_best_of_two_thousand_ratios(name: str, levels: int, weighted: bool) -> None:
    random = np.random.default_rng(1)
    weights = random.standard_normal((40, 128)).astype(np.float32)
    importance = np.exp(random.normal(0, 2, 128)) if weighted else np.ones(128)
    groups, counts = weights.reshape(-1, 64).astype(np.float64), np.tile(importance.reshape(2, 64), (40, 1))
    best = np.full(len(groups), np.inf)
    for ratio in np.linspace(0.3, 1.1, 2000):
        scale = ratio * np.abs(groups).max(axis=1, keepdims=True) / levels
        off = np.clip(np.rint(groups / scale), -levels, levels) * scale - groups
        best = np.minimum(best, (counts * off**2).sum(axis=1))
    q = search(weights, weight_format(name), torch.from_numpy(importance) if weighted else None)
    found = squares(q, weights, importance).sum()
    plain = squares(weight_format(name).quantize(weights), weights, importance).sum()
    assert found < plain * (0.9 if levels == 7 else 0.97)
    assert found < best.sum() * (1.03 if levels == 7 else 1.2)


def test_a_column_that_counts_is_served() -> None:
    """All importance on one small weight beside a large one: it gets a grid that holds it."""
    weights = np.full((1, 64), 0.01, np.float32)
    weights[0, 5], weights[0, 9] = 1.0, 0.1
    importance = torch.zeros(64)
    importance[9] = 3.0
    q = search(weights, weight_format("int4-sym-g64"), importance)
    plain = weight_format("int4-sym-g64").quantize(weights)
    assert abs(q.dequantize()[0, 9] - 0.1) < abs(plain.dequantize()[0, 9] - 0.1)


@pytest.mark.parametrize("name", ["int4-sym-g64", "int4-asym-g64", "nf4"])
def test_the_size_of_weights_does_not_matter(name: str) -> None:
    """Squares of weights of 1e-25 are zero in fp32."""
    weights = np.random.default_rng(2).standard_normal((4, 128)).astype(np.float32)
    usual, tiny = (search(weights * np.float32(size), weight_format(name)) for size in (1.0, 2.0**-83))
    assert np.array_equal(usual.codes, tiny.codes)
    assert np.array_equal(usual.scales * np.float32(2.0**-83), tiny.scales)


def test_slices_join_without_a_seam() -> None:
    weights = np.random.default_rng(3).standard_normal((2100, 64)).astype(np.float32)
    fmt = weight_format("int4-sym-g64")
    whole = search(weights, fmt)
    for row in (0, 2047, 2048, 2099):
        assert np.array_equal(whole.dequantize()[row], search(weights[row : row + 1], fmt).dequantize()[0])


def test_what_cannot_be_searched_is_refused() -> None:
    weights = np.ones((2, 64), np.float32)
    for name in ("int4-sym-qkv", "int8-asym-global"):
        with pytest.raises(ParameterError, match=f"(?s)scale of {name} cannot be searched.*several matrices"):
            search(weights, weight_format(name))
    weights[1, 3] = np.nan
    with pytest.raises(ModelFileError, match="of_blk"):
        search(weights, weight_format("int4-sym-g64"), name="of_blk")
    with pytest.raises(ValueError, match="importance"):
        search(np.ones((2, 64), np.float32), weight_format("int4-sym-g64"), -torch.ones(64))
