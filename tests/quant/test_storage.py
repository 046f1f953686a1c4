"""Quantized weights as files keep them."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored import CODED, MADE, columns_of, random_weights

from nanokit.errors import ModelFileError
from nanokit.quant.qtensor import QTensor
from nanokit.quant.storage import Entry, entry_of, nominal_bits, parts_of, restore, stored_nbytes
from nanokit.quant.weight_format import is_format, weight_format

GGML = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]
EVERY = [*MADE, *GGML, "int4-sym-tensor", "int8-sym-tensor-reduced", *CODED]


def same(a: QTensor, b: QTensor) -> bool:
    pairs = ((a.codes, b.codes), (a.scales, b.scales), (a.minimums, b.minimums), (a.table, b.table))
    bits = [(None if x is None else x.tobytes()) == (None if y is None else y.tobytes()) for x, y in pairs]
    return all(bits) and facts(a) == facts(b)


def facts(q: QTensor) -> tuple:
    return q.format, q.shape, q.group, q.code_range, q.tensor_scale


@pytest.mark.parametrize("name", EVERY)
def test_every_format_comes_back_bit_for_bit(name: str) -> None:
    """A nibble in the wrong half, a scale in fp16 that needs fp32, a lost factor: another model, in silence."""
    q = random_weights(name, 5, 2 * columns_of(name) if name not in CODED else columns_of(name), seed=3)
    parts = parts_of(q)
    assert same(restore(entry_of(q), parts, name), q)


WHOLE_ROWS = [name for name in MADE if "channel" in name or "tensor" in name]


@given(st.sampled_from(WHOLE_ROWS), st.integers(1, 4), st.integers(1, 9))
def test_odd_shapes(name: str, rows: int, columns: int) -> None:
    """An odd column fills half a byte: its neighbour belongs to nobody."""
    q = weight_format(name).quantize(np.random.default_rng(columns).standard_normal((rows, columns)).astype(np.float32))
    assert same(restore(entry_of(q), parts_of(q), name), q)


@pytest.mark.parametrize("name", [n for n in EVERY if is_format(n)])
def test_bits_are_those_of_the_arrays(name: str) -> None:
    """A budget that forgets scales or a factor allots bits that nobody has."""
    shape = (16, 4 * columns_of(name))
    q = weight_format(name).quantize(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    assert nominal_bits(weight_format(name), shape) == 8 * stored_nbytes(q) / math.prod(shape)


def test_bits_of_the_usual_formats() -> None:
    """4.25 is what everybody calls groups of 64 with two-byte scales."""
    expected = {"int4-sym-g64": 4.25, "int4-asym-g32": 5.0, "int8-sym-g32": 8.5, "mxfp4": 4.25, "q4_0": 4.5,
                "q4_1": 5.0, "q5_0": 5.5, "q8_0": 8.5, "nf4": 4.5}  # fmt: skip
    assert {name: nominal_bits(weight_format(name), (64, 576)) for name in expected} == expected
    assert nominal_bits(weight_format("nvfp4"), (64, 576)) == 4.5 + 32 / (64 * 576)


def test_scales_beyond_fp16_are_kept_in_four_bytes() -> None:
    """Weights of tiny std have scales that fp16 would flush to zero."""
    q = weight_format("int4-sym-g32").quantize(np.full((2, 32), 1e-9, np.float32))
    assert entry_of(q).scale_kind == "f32"
    assert same(restore(entry_of(q), parts_of(q), "w"), q)


Q = random_weights("int4-sym-g32", 4, 64)
ENTRY, PARTS = entry_of(Q), parts_of(Q)


@pytest.mark.parametrize(
    ("entry", "parts", "says"),
    [
        (ENTRY, {"scales": PARTS["scales"]}, "codes of w"),
        (ENTRY, PARTS | {"codes": PARTS["codes"][:-1]}, "codes of w"),
        (ENTRY, PARTS | {"scales": PARTS["scales"].astype(np.float32)}, "scales of w"),
        (ENTRY, PARTS | {"scales": np.full_like(PARTS["scales"], np.nan)}, "not a finite number"),
        (ENTRY, PARTS | {"codes": np.full_like(PARTS["codes"], 0x88)}, "codes that int4-sym-g32 does not have"),
        (
            replace(ENTRY, scale_kind="f32"),
            PARTS | {"scales": np.full((4, 2), 3e38, np.float32)},
            "not a finite number",
        ),
    ],
)
def test_what_contradicts_the_entry_is_refused(entry: Entry, parts: dict, says: str) -> None:
    """Damaged arrays would be read as other weights."""
    with pytest.raises(ModelFileError, match=says):
        restore(entry, parts, "w")
