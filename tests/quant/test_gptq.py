"""GPTQ against a slow version with explicit inverses, and against plain rounding on what a layer computes."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from nanokit.errors import ParameterError
from nanokit.quant.gptq import DAMP, PEAK_BYTES, _inverse_factor, gptq
from nanokit.quant.rounding import search
from nanokit.quant.weight_format import weight_format

FORMATS = ["int4-sym-g32", "int4-asym-g32", "int8-sym-g32", "int4-sym-channel", "int4-asym-tensor", "nvfp4", "mxfp4",
           "nf4", "q4_0", "q4_1", "q5_0", "q8_0"]  # fmt: skip


def inputs(seed: int, tokens: int, columns: int) -> np.ndarray:
    """Correlated columns of very different activity, as layers have them."""
    random = np.random.default_rng(seed)
    mixing = np.eye(columns) + 0.5 * random.standard_normal((columns, columns)) / columns**0.5
    return random.standard_normal((tokens, columns)) @ mixing * np.exp(random.normal(0, 1, columns))


def moments_of(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.T @ x / len(x))


def levels_of(q) -> np.ndarray:
    if q.table is not None:
        return q.table.astype(np.float64)
    return np.arange(q.code_range[0], q.code_range[1] + 1, dtype=np.float64)


def by_explicit_inverses(weights: np.ndarray, moments: np.ndarray, q, damp: float) -> np.ndarray:
    """Values that the definition gives for the scales of q: after each column the inverse of what is left, anew."""
    left = weights.astype(np.float64)
    moments = moments + damp * np.diag(moments).mean() * np.eye(len(moments))
    scales, minimums = (
        np.repeat(np.zeros_like(q.scales) if part is None else part, q.group, axis=1).astype(np.float64)
        for part in (q.scales, q.minimums)
    )
    remaining, levels, out = list(np.argsort(-np.diag(moments), kind="stable")), levels_of(q), np.empty_like(left)
    while remaining:
        column = remaining[0]
        inverse = np.linalg.inv(moments[np.ix_(remaining, remaining)])
        grid = levels * scales[:, column, None] + minimums[:, column, None]
        out[:, column] = np.take_along_axis(grid, np.abs(grid - left[:, column, None]).argmin(1)[:, None], 1)[:, 0]
        error = (left[:, column] - out[:, column]) / inverse[0, 0]
        left[:, remaining[1:]] -= error[:, None] * inverse[0, 1:]
        remaining = remaining[1:]
    return out


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_those_of_the_definition(name: str) -> None:
    """Blocks, their seams, the order and its reversal, the reversed Cholesky factor: any of them wrong gives others."""
    random = np.random.default_rng(0)
    weights = random.standard_normal((6, 192)).astype(np.float32)
    moments = moments_of(inputs(1, 500, 192))
    q = gptq(weights, weight_format(name), moments)
    slow = by_explicit_inverses(weights, moments.numpy(), q, DAMP)
    same = np.isclose(q.dequantize(), slow, atol=1e-5)
    assert same.mean() > 0.995  # a value at half a step may fall either way in fp32, and moves its row's others
    assert same[:, np.argsort(-np.diag(moments))[:64]].all()


@given(st.sampled_from(FORMATS), st.integers(0, 2**32), st.sampled_from([20, 80, 400]))
@settings(max_examples=40, deadline=None)
def test_outputs_are_nearer_than_by_plain_rounding(name: str, seed: int, tokens: int) -> None:
    """Also for fewer inputs than columns. In what was calibrated: || X (W - Q)^T ||."""
    x = inputs(seed, tokens, 64 if name == "nf4" else 96)
    weights = np.random.default_rng(seed).standard_normal((8, x.shape[1])).astype(np.float32)
    fmt = weight_format(name)
    off = {
        kind: np.square(x @ (q.dequantize() - weights).T).sum()
        for kind, q in (("plain", fmt.quantize(weights)), ("gptq", gptq(weights, fmt, moments_of(x))))
    }
    assert off["gptq"] < off["plain"]


def test_independent_inputs_leave_nothing_to_correct() -> None:
    weights = np.random.default_rng(3).standard_normal((5, 128)).astype(np.float32)
    for name in ("int4-sym-g32", "nvfp4"):
        moments = torch.diag(torch.rand(128, generator=torch.Generator().manual_seed(0)) + 0.1)
        q, nearest = (f(weights, weight_format(name), m) for f, m in ((gptq, moments), (search, moments.diagonal())))
        assert np.array_equal(q.dequantize(), nearest.dequantize())


def test_a_dead_column_is_rounded_to_nearest_and_disturbs_nobody() -> None:
    """Its row of H is zero: an inverse would be infinite."""
    x = inputs(4, 300, 64)
    x[:, [3, 40]] = 0
    weights = np.random.default_rng(5).standard_normal((5, 64)).astype(np.float32)
    q = gptq(weights, weight_format("int4-sym-g32"), moments_of(x))
    step = np.repeat(q.scales, 32, axis=1)
    nearest = np.clip(np.rint(weights / step), -7, 7)
    assert np.array_equal(q.codes[:, [3, 40]], nearest[:, [3, 40]])
    assert np.isfinite(q.dequantize()).all()
    nothing = gptq(weights, weight_format("int4-sym-g32"), torch.zeros(64, 64))
    assert np.array_equal(nothing.codes, search(weights, weight_format("int4-sym-g32")).codes)


def test_the_factor_is_that_of_the_inverse() -> None:
    moments = moments_of(inputs(6, 200, 48))
    factor = _inverse_factor(moments.flip(0, 1), 0.01, "it").numpy()
    damped = moments.numpy() + 0.01 * np.diag(moments).mean() * np.eye(48)
    np.testing.assert_allclose(factor.T @ factor @ damped, np.eye(48), atol=1e-9)
    assert np.array_equal(factor, np.triu(factor))


def test_no_more_memory_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """model.calibrate refuses by PEAK_BYTES: whatever is held beyond it is what ends the process."""
    moments = moments_of(inputs(9, 600, 512)).float()
    weights = np.random.default_rng(9).standard_normal((2, 512)).astype(np.float32)
    with torch.profiler.profile(profile_memory=True) as seen:
        gptq(weights, weight_format("int4-sym-g32"), moments)
    held = peak = moments.nbytes
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert peak < 1.1 * PEAK_BYTES * 512**2
    assert peak > 0.9 * PEAK_BYTES * 512**2


def test_moments_that_rounding_errors_made_indefinite_are_damped_more() -> None:
    """fp32 sums over few tokens have eigenvalues a little below zero: 30 % of the mean are more than the damping."""
    moments = moments_of(inputs(7, 10, 64))
    moments -= 0.3 * moments.diagonal().mean() * torch.eye(64)
    moments.diagonal().clamp_(min=1e-6)
    assert np.linalg.eigvalsh(moments.numpy()).min() < -0.1 * float(moments.diagonal().mean())
    weights = np.random.default_rng(8).standard_normal((4, 64)).astype(np.float32)
    assert np.isfinite(gptq(weights, weight_format("int4-sym-g32"), moments).dequantize()).all()


def test_moments_of_nothing_are_refused_by_name() -> None:
    weights, fmt = np.ones((2, 32), np.float32), weight_format("int4-sym-g32")
    bad = torch.eye(32)
    bad[0, 1] = bad[1, 0] = 50.0
    with pytest.raises(ParameterError, match=r"(?s)layer 3's o cannot be rounded by gptq.*no Cholesky factor"):
        gptq(weights, fmt, bad, name="layer 3's o")
    for wrong in (torch.eye(31), torch.full((32, 32), torch.nan), -torch.eye(32)):
        with pytest.raises(ParameterError, match=r"(?s)layer 3's o.*finite numbers \[32, 32\]"):
            gptq(weights, fmt, wrong, name="layer 3's o")
