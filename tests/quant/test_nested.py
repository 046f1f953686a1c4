"""Scales that are quantized themselves (nf4-dq): against bit patterns, numbers worked out by hand and brute force."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from nanokit import quant
from nanokit.errors import ModelFileError, ParameterError
from nanokit.kernels.fake_quant import fake_quantize, quantize
from nanokit.quant.float4 import NF4_TABLE, NestedNF4, nested_scales
from nanokit.quant.nested import FURTHEST, LEVELS, nest
from nanokit.quant.qtensor import QTensor
from nanokit.quant.rounding import search
from nanokit.quant.storage import Entry, check_entry, entry_of, nominal_bits, parts_of, restore, stored_nbytes

FORMAT = NestedNF4()


def matrix(seed: int, rows: int = 5, columns: int = 64 * 120, spread: float = 1.0) -> np.ndarray:
    """Blocks of 64 of unlike size: more than two nests of 256, the last of them short."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(spread * rng.standard_normal((rows, columns // 64, 1)))
    return (rng.standard_normal((rows, columns // 64, 64)) * sizes).reshape(rows, columns).astype(np.float32)


def test_levels_are_the_dynamic_type() -> None:
    """Read off all bit patterns: a sign, zeros that divide by ten, a one, and a part of .1 … 1. A level that is missing
    or doubled would cost a bit in some decade and show nowhere."""
    values = []
    for pattern in range(1, 128):
        bits = f"{pattern:07b}"
        zeros = bits.index("1")
        rest = bits[zeros + 1 :]
        part = (int(rest, 2) if rest else 0) + 0.5
        values.append((0.1 + 0.9 * part / 2 ** len(rest)) * 0.1**zeros)
    expected = sorted([*values, *(-x for x in values), 0.0, 1.0])
    np.testing.assert_allclose(LEVELS, expected, rtol=2e-7)
    assert (LEVELS[127], LEVELS[255], LEVELS[0]) == (0, 1, np.float32(-0.99296875))


def test_peaks_by_hand() -> None:
    """Of 0, 0 and 3 the mean is 1 and the second 2: 0 is -.5 of it, nearest is -.50078, and what is below zero is 0. Of
    0 and 2 the least is -1, which has no level. Equal peaks are their mean."""
    found = nest(np.float32([[0], [0], [3]]))
    assert (found.mean, found.seconds.tolist(), found.codes.tolist()) == (1, [[2]], [[35], [35], [255]])
    assert LEVELS[35] == np.float32(-(0.1 + 0.9 * 28.5 / 64))
    assert found.peaks().tolist() == [[0], [0], [3]]
    found = nest(np.float32([[0], [2]]))
    assert found.codes.tolist() == [[0], [255]]
    assert found.peaks()[:, 0].tolist() == [pytest.approx(FURTHEST, abs=1e-7), 2]
    tie = LEVELS[128] / 2
    assert nest(np.float32([[-1], [1], [tie], [-tie]])).codes[2:].tolist() == [[127], [126]]
    found = nest(np.full((700, 1), 0.3, np.float32))
    assert (found.codes == 127).all()
    assert (found.seconds == 0).all()
    assert (found.peaks() == np.float32(0.3)).all()


def test_weights_by_hand() -> None:
    """Equal peaks have their own scale, here 1: ties go to the even code. And none that a kernel would take for 0."""
    middles = [-107.5, -77.5, -58.5, -43, -29.5, -17.5, -6, 5, 15, 25.5, 37, 49.5, 63.5, 81.5, 109.5]
    w = np.array([[*middles, *[127.0] * 49, -127.0, *[0.0] * 63]], np.float32)
    q = FORMAT.quantize(w)
    assert q.scales.tolist() == [[1, 1]]
    assert q.codes[0, :15].tolist() == [0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14]
    assert q.codes[0, 64:66].tolist() == [0, 7]
    tiny = FORMAT.quantize(w * np.float32(2.0**-127))
    assert not tiny.scales.any()
    assert (tiny.codes == 7).all()


def test_slices_join_without_a_seam() -> None:
    """Quantizing and training walk over a matrix in slices of their own: peaks must be those of the slice."""
    w = matrix(5, 9, 64 * 256)
    q = FORMAT.quantize(w)
    assert np.array_equal(quantize(torch.from_numpy(w), FORMAT, torch.from_numpy(q.scales)).codes, q.codes)
    assert np.array_equal(fake_quantize(torch.from_numpy(w), FORMAT).numpy(), q.dequantize())


def test_a_nest_is_256_peaks_across_rows_and_the_last_is_short() -> None:
    """One that ended with each row would keep other seconds than its owner, and more of them."""
    w = matrix(0, rows=5, columns=64 * 120)
    peaks = np.abs(w.reshape(-1, 64)).max(axis=1)
    q = FORMAT.quantize(w)
    assert q.nested is not None
    assert q.nested.mean == pytest.approx(peaks.mean(), rel=1e-6)
    off = np.abs(peaks - np.float32(q.nested.mean))
    assert q.nested.seconds.tolist() == [[off[:256].max(), off[256:512].max(), off[512:].max()]]
    assert np.array_equal(q.scales, nested_scales(q.nested))


@given(st.integers(0, 2**32), st.sampled_from([1e-30, 1e-3, 1.0, 1e30]), st.sampled_from([0.0, 0.5, 3.0]))
@settings(max_examples=25, deadline=None)
def test_scales_and_codes_are_the_nearest(seed: int, size: float, spread: float) -> None:
    """Scale codes to the weights' own peaks, weight codes to the scales that are kept (codes for the peaks themselves,
    as for nf4, are another step off in every hundredth weight and more); and as kernels take them under given scales.
    """
    w = matrix(seed, 3, 64 * 100, spread) * np.float32(size)
    q = FORMAT.quantize(w)
    assert q.nested is not None
    peaks = np.abs(w.reshape(-1, 64)).max(axis=1).astype(np.float64)
    seconds = np.repeat(q.nested.seconds[0].astype(np.float64), 256)[: len(peaks)]
    off = np.abs(LEVELS.astype(np.float64) * seconds[:, None] + q.nested.mean - peaks[:, None])
    chosen = np.take_along_axis(off, q.nested.codes.reshape(-1, 1).astype(int), axis=1)[:, 0]
    rounding = 1e-6 * peaks.max()
    assert (chosen <= off.min(axis=1) + rounding).all()
    assert (np.abs(q.scales.reshape(-1) * 127.0 - peaks) <= FURTHEST * seconds + rounding).all()
    values = q.scales.reshape(-1, 1, 1) * NF4_TABLE.astype(np.float64)
    errors = np.abs(values - w.reshape(-1, 64, 1))
    found = np.take_along_axis(errors, q.codes.reshape(-1, 64, 1).astype(int), axis=2)[..., 0]
    assert (found <= errors.min(axis=2) * (1 + 1e-12)).all()
    assert (q.codes.reshape(-1, 64)[q.scales.reshape(-1) == 0] == 7).all()
    given_scales = quantize(torch.from_numpy(w), FORMAT, torch.from_numpy(q.scales))
    assert np.array_equal(given_scales.codes, q.codes)


@given(st.integers(0, 2**32), st.sampled_from([0.2, 1.0, 2.0]))
@settings(max_examples=25, deadline=None)
def test_quantized_again_blocks_that_are_not_small_keep_their_codes(seed: int, spread: float) -> None:
    """Those of a 12th of the matrix' peak and more, as float4.py derives. Scales move there by 9 / 1280 of it."""
    first = FORMAT.quantize(matrix(seed, 4, 64 * 90, spread))
    values = first.dequantize()
    again = FORMAT.quantize(values)
    peaks = np.abs(values.reshape(-1, 64)).max(axis=1)
    large = peaks >= peaks.max() / 12
    assert np.array_equal(again.codes.reshape(-1, 64)[large], first.codes.reshape(-1, 64)[large])
    moved = 127 * np.abs(again.scales - first.scales).reshape(-1)
    assert (moved[large] <= (FURTHEST + 1e-6) * peaks.max()).all()


def test_where_the_codes_are_not_the_same_again() -> None:
    """The limits that float4.py names: scales are others the second time, and a block of a 50th of the matrix' peak has
    other levels. Were it not so, the module would promise too little."""
    w = matrix(1, 2, 64 * 64, 0.0)
    w[:, 64 * 20 :] *= np.float32(0.02)
    first = FORMAT.quantize(w)
    again = FORMAT.quantize(first.dequantize())
    assert not np.array_equal(again.scales, first.scales)
    same = (again.codes == first.codes).reshape(2, 64, 64).all(axis=2)
    assert same[:, :20].all()
    assert not same[:, 20:].all()


def test_peaks_that_are_kept_beyond_fp32_are_refused() -> None:
    """A kept peak may be above the weights' own: of 0 and twice the largest number, 1.0005 times that."""
    w = np.zeros((1, 192), np.float32)
    w[0, 64:] = np.finfo(np.float32).max
    with pytest.raises(ModelFileError, match="blk holds weights that nf4-dq cannot span"):
        FORMAT.quantize(w, "blk")
    assert FORMAT.quantize(w / 2).dequantize()[0, 64] == pytest.approx(w[0, 64] / 2, rel=1e-3)


def same(a: QTensor, b: QTensor) -> bool:
    assert a.nested is not None
    assert b.nested is not None
    pairs = ((a.codes, b.codes), (a.scales, b.scales), (a.nested.codes, b.nested.codes))
    whole = np.array_equal(a.nested.seconds, b.nested.seconds) and a.nested.mean == b.nested.mean
    return whole and a.nested.start == b.nested.start and all(x.tobytes() == y.tobytes() for x, y in pairs)


@pytest.mark.parametrize(("first", "end"), [(0, 5), (0, 1), (2, 4), (3, 5)])
def test_rows_of_a_file_are_rows_of_the_matrix(first: int, end: int) -> None:
    """A backend reads some at a time; their nests began rows before. Rows of a matrix in memory likewise."""
    q = FORMAT.quantize(matrix(3))
    parts = {name: part if name in ("seconds", "mean") else part[first:end] for name, part in parts_of(q).items()}
    found = restore(replace(entry_of(q), shape=(end - first, q.shape[1])), parts, "w", first, 5)
    assert same(found, q.rows(first, end))
    assert np.array_equal(found.dequantize(), q.dequantize()[first:end])
    assert same(q.rows(1, 5).rows(1, 3), q.rows(2, 4))


Q = FORMAT.quantize(matrix(4))
ENTRY, PARTS = entry_of(Q), parts_of(Q)


def test_bits() -> None:
    """A byte a block, four for 256 of them, four for the mean."""
    blocks = 5 * 120
    expected = 4 + (8 * blocks + 32 * 3 + 32) / (64 * blocks)
    assert nominal_bits(FORMAT, (5, 64 * 120)) == expected == 8 * stored_nbytes(Q) / Q.codes.size
    assert nominal_bits(FORMAT, (4096, 4096)) == 4 + 1 / 8 + 32 / (64 * 256) + 32 / 4096**2


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"seconds": PARTS["seconds"][:, :2]}, "seconds of w"),
        ({"seconds": PARTS["seconds"].astype(np.float64)}, "seconds of w"),
        ({"seconds": -PARTS["seconds"]}, "nested scales that no weights have"),
        ({"seconds": np.full_like(PARTS["seconds"], np.inf)}, "nested scales that no weights have"),
        ({"mean": np.full((1, 1), np.nan, np.float32)}, "nested scales that no weights have"),
        ({"mean": np.full((1, 1), 3.4e38, np.float32), "seconds": np.full((1, 3), 3.4e38, np.float32)}, "not a finite"),
        ({"mean": PARTS["mean"][0]}, "mean of w"),
        ({"scales": PARTS["scales"].astype(np.float32)}, "scales of w"),
        ({"minimums": PARTS["scales"]}, "has minimums"),
    ],
)
def test_broken_files_are_refused(parts: dict, says: str) -> None:
    """Damaged arrays would be read as other weights."""
    with pytest.raises(ModelFileError, match=says):
        restore(ENTRY, PARTS | parts, "w")


@pytest.mark.parametrize("part", ["scales", "seconds", "mean"])
def test_missing_arrays_are_refused(part: str) -> None:
    with pytest.raises(ModelFileError, match=f"the {part} of w"):
        restore(ENTRY, {name: found for name, found in PARTS.items() if name != part}, "w")


@pytest.mark.parametrize("entry", [replace(ENTRY, scale_kind="f32"), replace(ENTRY, format="nf4")])
def test_nested_scales_are_of_this_format_alone(entry: Entry) -> None:
    """nf4 with nested scales would be told from nf4 by its bytes only."""
    check_entry(ENTRY, "w")
    with pytest.raises(ModelFileError, match=r"(?s)w is not what nf4.*nested"):
        check_entry(entry, "w")


@pytest.mark.parametrize(
    ("q", "says"),
    [
        (replace(Q, nested=None), "finished ones alone"),
        (replace(Q, scales=Q.scales * np.float32(1.01)), "others than its own"),
        (Q.rows(0, 4), "some rows"),
        (Q.rows(1, 5), "some rows"),
    ],
)
def test_other_scales_are_not_written(q: QTensor, says: str) -> None:
    """A file keeps codes of scales: finished scales that they do not give would be lost without a word."""
    with pytest.raises(ParameterError, match=rf"(?s)scales of nf4-dq cannot be kept.*{says}"):
        parts_of(q)


def test_scales_are_not_searched_for() -> None:
    with pytest.raises(ParameterError, match=r"(?s)scales of nf4-dq cannot be searched for.*quantized together"):
        search(np.ones((2, 64), np.float32), FORMAT)


def test_a_module_trains_on_what_is_kept() -> None:
    """Scales of a matrix depend on each other: a step on one weight moves others, in training as in the format."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 192), torch.nn.ReLU(), torch.nn.Linear(192, 8))
    quant.prepare(model, "nf4-dq")
    x, before = torch.randn(16, 128), model[0].rounded().detach()
    model(x).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad.count_nonzero() > 0
            parameter -= parameter.grad
    trained, weights = model(x), model[0].weight.detach().numpy().copy()
    assert not torch.equal(model[0].rounded(), before)
    quant.convert(model)
    assert torch.equal(model(x), trained)
    assert np.array_equal(model[0].qtensor().dequantize(), FORMAT.quantize(weights).dequantize())
