"""Weight formats against the gguf library, bit for bit."""

import tracemalloc

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from nanokit.errors import ModelFileError
from nanokit.quant.formats import _SLICE, FORMATS, dequantize

CODED = [name for name, f in FORMATS.items() if f.has_codes]
QUANTIZABLE = ["BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]


def random_rows(name: str, rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random bytes as rows of a format, and the library's values; blocks of finite scales only."""
    f = FORMATS[name]
    needed = rows * columns // f.block_size
    raw = np.random.default_rng(seed).integers(0, 256, (2 * needed + 40, f.block_bytes), dtype=np.uint8)
    if name == "MXFP4":
        raw[:, 0] %= 255
    with np.errstate(all="ignore"):
        values = quants.dequantize(raw, GGMLQuantizationType[name])
    sound = np.isfinite(values).all(axis=1)
    assert sound.sum() >= needed
    return raw[sound][:needed].reshape(rows, -1), values[sound][:needed].reshape(rows, columns)


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == theirs.dtype == np.float32
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
def test_random_blocks_have_the_librarys_bits(name: str) -> None:
    """Every code, sub-scale and sign position of every type; negative zeros included."""
    columns = max(FORMATS[name].block_size * 2, 64)
    raw, expected = random_rows(name, 24, columns)
    assert_same_bits(dequantize(raw, name, (24, columns)), expected)
    assert_same_bits(dequantize(raw.reshape(-1), name, (2, 3, 4, columns)).reshape(24, columns), expected)


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_quantized_weights_have_the_librarys_bits(name: str) -> None:
    """What the library packs from real-looking rows, one of them all zeros, one of one value."""
    weights = np.random.default_rng(3).standard_normal((8, 512)).astype(np.float32) * 0.2
    weights[2], weights[5] = 0.0, -0.125
    with np.errstate(divide="ignore"):
        packed = quants.quantize(weights, GGMLQuantizationType[name])
    values = dequantize(packed, name, weights.shape)
    assert_same_bits(values, quants.dequantize(packed, GGMLQuantizationType[name]))
    assert not values[2].any()
    assert np.abs(values - weights).max() < 0.5  # ternary is the coarsest


@pytest.mark.parametrize("name", CODED)
def test_canonical_codes_carry_the_whole_value(name: str) -> None:
    """The form that kernels pack: shapes, types, ranges, and the values rebuilt from it in float64."""
    f = FORMATS[name]
    raw, expected = random_rows(name, 6, 512)
    q = f.decode(raw, (2, 3, 512))
    assert (q.format, q.shape, q.group) == (name, (2, 3, 512), f.group)
    assert (q.codes.dtype, q.codes.shape, q.codes.flags.c_contiguous) == (np.int8, (2, 3, 512), True)
    assert (q.scales.dtype, q.scales.shape) == (np.float32, (2, 3, 512 // f.group))
    assert_same_bits(q.dequantize().reshape(6, 512), expected)
    values = q.codes.astype(np.float64) if q.table is None else q.table[q.codes].astype(np.float64)
    rebuilt = values * np.repeat(q.scales.astype(np.float64), q.group, axis=-1)
    size = np.abs(rebuilt)
    if q.minimums is not None:
        assert (q.minimums.dtype, q.minimums.shape) == (np.float32, q.scales.shape)
        minimums = np.repeat(q.minimums.astype(np.float64), q.group, axis=-1)
        rebuilt, size = rebuilt + minimums, size + np.abs(minimums)
    assert (np.abs(rebuilt.reshape(6, 512) - expected) <= 2e-7 * size.reshape(6, 512)).all()
    if q.table is not None:
        assert (q.table.dtype, q.table.shape) == (np.int8, (16,))
    # Both ends are reached by random bytes: a packer may rely on the range, and none is wider than it need be.
    assert (int(q.codes.min()), int(q.codes.max())) == q.code_range


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    rows=st.integers(1, 5),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_any_shape_has_the_librarys_bits(name: str, rows: int, blocks: int, seed: int) -> None:
    columns = FORMATS[name].block_size * blocks
    raw, expected = random_rows(name, rows, columns, seed)
    assert_same_bits(dequantize(raw, name, (rows, columns)), expected)


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "MXFP4", "BF16", "IQ2_XS"])
def test_slices_join_without_a_seam(name: str) -> None:
    """A tensor of two slices and a bit: no block lost, doubled or misplaced where they meet."""
    raw, expected = random_rows(name, 64, 512)
    copies = 2 * _SLICE // expected.size + 1
    values = dequantize(np.tile(raw, (copies, 1)), name, (64 * copies, 512))
    assert values.size > 2 * _SLICE
    assert_same_bits(values, np.tile(expected, (copies, 1)))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_K"])
def test_bytes_at_an_odd_address(name: str) -> None:
    """A file with alignment 1 puts a tensor anywhere."""
    raw, expected = random_rows(name, 4, 256)
    odd = np.concatenate([np.zeros(1, np.uint8), raw.reshape(-1)])[1:]
    odd.flags.writeable = False
    assert_same_bits(dequantize(odd, name, (4, 256)), expected)


def test_only_the_result_is_large() -> None:
    """Temporaries the size of the tensor would double what loading a model needs."""
    shape = (16384, 512)
    raw = np.zeros(FORMATS["Q4_1"].nbytes(shape), np.uint8)
    tracemalloc.start()
    try:
        values = dequantize(raw, "Q4_1", shape, check_finite=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert values.nbytes == 32 << 20
    assert peak - values.nbytes < 4 << 20


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_that_do_not_match_the_shape_are_refused(name: str) -> None:
    f = FORMATS[name]
    raw = np.zeros(f.block_bytes * 4, np.uint8)
    for shape in [(3, f.block_size), (5, f.block_size)]:
        with pytest.raises(ModelFileError, match="wrong size"):
            dequantize(raw, name, shape)
    if f.block_size > 1:
        with pytest.raises(ModelFileError, match=f"multiple of {f.block_size}"):
            dequantize(raw, name, (4, f.block_size - 1))


def test_a_type_without_weights_is_refused() -> None:
    with pytest.raises(ModelFileError, match=r"(?s)blk.0.*I32.*Q4_1"):
        dequantize(np.zeros(16, np.uint8), "I32", (4,), name="blk.0")


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4_K", "IQ4_NL", "IQ2_S"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_refused_with_its_place(name: str, bad: float) -> None:
    """One damaged scale, or weight of a plain type, far into the tensor."""
    f = FORMATS[name]
    shape = (8, f.block_size * 2)
    raw = np.zeros(f.nbytes(shape), np.uint8)
    block = raw.reshape(-1, f.block_bytes)[11]
    one = np.array([bad], np.float32)
    first = one.view(np.uint8)[2:] if name == "BF16" else one.astype("<f4" if name == "F32" else "<f2").view(np.uint8)
    block[: len(first)] = first
    if f.block_size > 1:
        block[len(first) :] = 1  # infinity times code zero is NaN: any code does
    with pytest.raises(ModelFileError, match=r"(?s)layer 7.*\[5, \d+\]"):
        dequantize(raw, name, shape, name="layer 7", check_finite=True)
    assert not np.isfinite(dequantize(raw, name, shape)).all()


def test_the_mxfp4_exponent_that_means_nan_is_refused() -> None:
    """Taken as 2^127 it gives finite weights when the codes are small, and the damage goes unseen."""
    raw = np.zeros((2, 17), np.uint8)
    raw[1, 0] = 255
    with pytest.raises(ModelFileError, match=r"nan at \[1, 0\]"):
        dequantize(raw, "MXFP4", (2, 32), check_finite=True)


def test_bits_per_weight() -> None:
    """The figure that the roofline is drawn with, from the layouts as published."""
    published = {"Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5, "Q4_K": 4.5, "Q6_K": 6.5625}
    published |= {"MXFP4": 4.25, "NVFP4": 4.5, "F32": 32, "BF16": 16}
    assert {name: FORMATS[name].bits_per_weight for name in published} == published


def test_formats_without_codes_say_so() -> None:
    """A caller that would pack them must ask first."""
    for name in set(FORMATS) - set(CODED):
        with pytest.raises(ValueError, match="no canonical codes"):
            FORMATS[name].decode(np.zeros(FORMATS[name].block_bytes, np.uint8), (1, FORMATS[name].block_size))
