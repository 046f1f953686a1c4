"""ggml's blocks made here: byte for byte the gguf library's, on ordinary blocks and on those where rounding shows."""

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings

from nanokit.errors import ModelFileError, ParameterError
from nanokit.gguf.reader import GGUFFile
from nanokit.quant.formats import FORMATS, dequantize
from nanokit.quant.ggml import GGML_FORMATS, TERNARY_FORMATS, to_blocks
from nanokit.quant.weight_format import weight_format

NAMES = [*GGML_FORMATS, "mxfp4"]
KINDS = ["noise", "sizes", "zeros", "ties", "outlier", "constant", "two peaks", "narrow"]


def theirs(matrix: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return quants.quantize(matrix, GGMLQuantizationType[name.upper()])


def ours(matrix: np.ndarray, name: str) -> np.ndarray:
    return to_blocks(weight_format(name).quantize(matrix))


def matrix(kind: str, seed: int, rows: int = 40, columns: int = 96) -> np.ndarray:
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((rows * columns // 32, 32)).astype(np.float32)
    places = rng.permuted(np.tile(np.arange(32), (len(w), 1)), axis=1)
    if kind == "sizes":  # from below fp16's smallest scale to near its largest
        w *= 10.0 ** rng.uniform(-12, 4, (len(w), 1))
    elif kind == "zeros":
        w[:] = rng.choice([0.0, -0.0], w.shape)
    elif kind == "ties":
        w[:] = np.rint(w * 16) / 2
        w[:, 0] = rng.choice([7, -8, 8, 127, 15.5], len(w))
        w[:, 1], w[:, 2] = np.nextafter(np.float32(0.5), 0), np.nextafter(np.float32(0.5), 1)
    elif kind == "outlier":
        np.put_along_axis(w, places[:, :1], 1e6 * w[:, :1] / np.abs(w[:, :1]), axis=1)
        w *= 0.05
    elif kind == "constant":
        w[:] = w[:, :1]
    elif kind == "two peaks":  # of one size and both signs: the first of them makes the scale
        peak = np.abs(w).max(axis=1, keepdims=True)
        np.put_along_axis(w, places[:, :2], np.concatenate([peak, -peak], axis=1), axis=1)
    elif kind == "narrow":
        w = 3 + w * 1e-4
    return w.reshape(rows, columns).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_the_librarys(name: str, kind: str) -> None:
    """Quotients by an inverse that is itself rounded, ties, the sign of the peak, -0 as a scale."""
    for seed in range(3):
        w = matrix(kind, seed)
        assert np.array_equal(ours(w, name), theirs(w, name))


@pytest.mark.parametrize("name", TERNARY_FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_ternary_blocks_are_the_librarys(name: str, kind: str) -> None:
    """256 weights a block, five or four a byte in three different strides: a wrong one still looks like noise."""
    for seed in range(3):
        w = matrix(kind, seed, columns=512)
        w *= np.float32(1 + 1e3 * (kind == "noise"))
        assert np.array_equal(ours(w, name), theirs(w, name))
        values = dequantize(ours(w, name), name.upper(), w.shape)
        assert np.array_equal(weight_format(name).quantize(w).dequantize(), values)


@given(st.sampled_from(NAMES), st.lists(st.floats(-6e4, 6e4, width=32), min_size=32, max_size=32))
@settings(max_examples=150, deadline=None)
def test_any_block_is_the_librarys(name: str, values: list[float]) -> None:
    """Also those that hypothesis thinks of: subnormal numbers, whole ones, one value beside 31 others."""
    w = np.array([values], np.float32)
    if name == "mxfp4" and np.abs(w).max() < 2.0**-123:
        assert np.isfinite(weight_format(name).quantize(w).dequantize()).all()
        return
    assert np.array_equal(ours(w, name), theirs(w, name))


@pytest.mark.parametrize("name", NAMES)
def test_subnormal_blocks(name: str) -> None:
    """An inverse beyond fp32: the library goes on with infinity, and with whatever the processor takes that for."""
    rng = np.random.default_rng(5)
    w = (rng.standard_normal((200, 32)) * 10.0 ** rng.uniform(-46, -36, (200, 1))).astype(np.float32)
    w[::7] = np.float32(1e-45)
    blocks, values = ours(w, name), weight_format(name).quantize(w).dequantize()
    assert np.isfinite(values).all()
    if name != "mxfp4":  # there the library's exponent wraps around, to as much as 2^127 and to NaN
        assert np.array_equal(blocks, theirs(w, name))
        assert not values.any()
    else:
        assert (np.abs(values - w) <= np.maximum(np.abs(w).max(axis=1, keepdims=True) / 4, 2.0**-127)).all()


def test_the_end_of_fp32_in_mxfp4() -> None:
    """The one type whose scales reach as far as the weights."""
    w = np.full((3, 32), np.finfo(np.float32).max, np.float32)
    w[0, ::2] *= -1
    w[1] *= np.linspace(-1, 1, 32, dtype=np.float32)
    w[2] /= 2
    assert np.array_equal(ours(w, "mxfp4"), theirs(w, "mxfp4"))


@pytest.mark.parametrize("name", [*GGML_FORMATS, *TERNARY_FORMATS])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, -3e38])
def test_what_a_scale_cannot_hold_is_refused(name: str, bad: float) -> None:
    """fp16 ends at 65,504; the library would write an infinite scale, and the weights would be NaN."""
    w = np.ones((2, 256), np.float32)
    w[1, 3] = bad
    with pytest.raises(ModelFileError, match=rf"(?s)blk\.3 holds weights that {name} cannot span"):
        weight_format(name).quantize(w, "blk.3")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_packed_is_read_again(name: str, kind: str) -> None:
    """Canonical codes, scales with their signs, minimums: by the reader of files. And values bit equal to theirs."""
    w = matrix(kind, 9)
    q = weight_format(name).quantize(w)
    raw = to_blocks(q)
    again = FORMATS[name.upper()].decode(raw, w.shape)
    assert (again.group, again.code_range) == (q.group, q.code_range)
    assert np.array_equal(again.codes, q.codes)
    assert np.array_equal(again.scales.view(np.uint32), q.scales.view(np.uint32))
    assert (again.minimums is None) == (q.minimums is None)
    assert q.minimums is None or np.array_equal(again.minimums.view(np.uint32), q.minimums.view(np.uint32))
    values = quants.dequantize(raw, GGMLQuantizationType[name.upper()])
    assert np.array_equal(q.dequantize().view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
def test_quantized_again_the_blocks_are_the_same(name: str) -> None:
    """Where fp16 holds the scale to its eleven bits: a file converted back and forth does not drift."""
    rng = np.random.default_rng(6)
    w = (rng.standard_normal((300, 64)) * 2.0 ** rng.uniform(-6, 6, (300, 1))).astype(np.float32)
    first = weight_format(name).quantize(w)
    again = weight_format(name).quantize(first.dequantize())
    assert np.array_equal(to_blocks(again), to_blocks(first))
    none = weight_format(name).quantize(np.zeros((1, 32), np.float32))  # its scale is -0 in q4_0, and then 0
    assert np.array_equal(weight_format(name).quantize(none.dequantize()).codes, none.codes)


def test_stacks_views_and_slices() -> None:
    """A stack of matrices, a transposed one, and rows that end in the middle of a slice."""
    stack = matrix("sizes", 2, 60, 64).reshape(3, 20, 64)
    for view in (stack, stack[1, :, ::-1], stack[2].T[:32].T):
        assert np.array_equal(ours(view, "q5_1"), theirs(np.ascontiguousarray(view), "q5_1"))
    large = matrix("noise", 3, 1100, 192)
    assert np.array_equal(ours(large, "q4_0"), theirs(large, "q4_0"))


def test_other_formats_have_no_blocks() -> None:
    q = weight_format("int4-sym-g32").quantize(np.ones((2, 64), np.float32))
    with pytest.raises(ParameterError, match=r"(?s)found: int4-sym-g32.*q4_0, q4_1, q5_0, q5_1, q8_0, mxfp4"):
        to_blocks(q)


@pytest.mark.model
@pytest.mark.parametrize("name", NAMES)
def test_weights_of_a_real_model(default_model: Path, name: str) -> None:
    """Two matrices and some rows of the embedding: blocks on a grid of sixteen levels, where every tie there is occurs.
    Q4_1 of what was Q4_1 is the file's own bytes."""
    model = GGUFFile.open(default_model)
    for which in ("blk.0.attn_k.weight", "blk.11.ffn_down.weight", "token_embd.weight"):
        info, raw = model.info(which), np.array(model.raw(which))
        rows = raw.reshape(info.shape[0], -1)[:512]
        w = dequantize(rows, info.type, (len(rows), info.shape[1]))
        assert np.array_equal(ours(w, name), theirs(w, name))
        if info.type.lower() == name:
            assert np.array_equal(ours(w, name), rows)
