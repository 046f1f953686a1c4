"""INT4 and INT8 weights against the formulas in exact arithmetic, and against the gguf library's Q8_0."""

from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings

from nanokit.errors import ModelFileError, ParameterError
from nanokit.quant.formats import FORMATS
from nanokit.quant.integer import _SLICE, IntegerFormat, fitting_groups, integer_format

KINDS = [f"int{bits}-{kind}" for bits in (4, 8) for kind in ("sym", "asym")]
ENDINGS = {**{kind: [""] for kind in KINDS}, **{kind: ["", "-reduced"] for kind in KINDS if "int8" in kind}}


def eleven_bits(exact: Fraction) -> np.float32:
    """The nearest number of eleven significant bits, ties to even; below 2^-116 zero."""
    if exact == 0:
        return np.float32(0)
    value, exponent = abs(exact), 0
    while value >= 2**11:
        value, exponent = value / 2, exponent + 1
    while value < 2**10:
        value, exponent = value * 2, exponent - 1
    rounded = round(value) * Fraction(2) ** exponent
    return np.float32(0) if rounded < Fraction(1, 2**116) else np.float32(float(rounded if exact > 0 else -rounded))


def expected(group: np.ndarray, name: str) -> tuple[list[int], np.float32, np.float32]:
    """Codes, scale and minimum of one group by the module's table, each rounded to fp64 before its eleven bits."""
    values = [Fraction(float(w)) for w in group]
    half = (64 if "reduced" in name else 128) if name.startswith("int8") else 8
    if "asym" not in name:
        ends, minimum = (1 - half, half - 1), np.float32(0)
        scale = eleven_bits(Fraction(float(max(map(abs, values)) / (half - 1))))
    else:
        ends = (0, 15) if half == 8 else (-half, half - 1)
        scale = eleven_bits(Fraction(float(Fraction(float(max(values) - min(values))) / (2 * half - 1))))
        minimum = eleven_bits(Fraction(float(min(values) - ends[0] * Fraction(float(scale)))))
    if scale == 0:
        return [0] * len(values), scale, minimum
    steps = [round(Fraction(float(w) - float(minimum)) / Fraction(float(scale))) for w in values]  # halves to even
    return [min(max(step, ends[0]), ends[1]) for step in steps], scale, minimum


weights = st.one_of(
    st.floats(-3, 3, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 2e-38, 0.5, -3.5, 7.0, 15.0, 127.0, 1e37, -1e37]),
    st.integers(-300, 300).map(lambda i: i / 2),  # with a peak of 7 or 127: ties
)


numbers = st.one_of(
    weights, st.floats(2.0**-119, 2.0**-113, width=32), st.floats(width=32, allow_nan=False, allow_infinity=False)
)


@given(st.sampled_from(KINDS), st.lists(numbers, min_size=2, max_size=9))
@settings(max_examples=150, deadline=None)
def test_scales_and_minimums_have_eleven_bits(kind: str, values: list[float]) -> None:
    """What a file keeps in two bytes, and a kernel reads as two, has to be the number that codes were made for; and no
    scale is a number that kernels flush to zero."""
    try:
        q = integer_format(f"{kind}-channel").quantize(np.array([values], np.float32))
    except ModelFileError:
        return
    for part in (q.scales, q.minimums):
        if part is not None:
            fraction, _ = np.frexp(part.astype(np.float64))
            assert (fraction * 2**11 == np.rint(fraction * 2**11)).all()
            assert ((part == 0) | (np.abs(part) >= 2.0**-116)).all()


@given(st.sampled_from(KINDS), st.integers(1, 3), st.sampled_from([1, 3, 16, 32, 37]), st.data())
@settings(max_examples=150, deadline=None)
def test_groups_follow_the_table(kind: str, groups: int, group: int, data: st.DataObject) -> None:
    """Ties, zeros of both signs, one value alone, denormals and huge magnitudes beside small ones."""
    rows, ending = data.draw(st.integers(1, 2)), data.draw(st.sampled_from(ENDINGS[kind]))
    size = rows * groups * group
    matrix = np.array(data.draw(st.lists(weights, min_size=size, max_size=size)), np.float32).reshape(rows, -1)
    q = integer_format(f"{kind}-g{group}{ending}").quantize(matrix)
    assert (q.codes.dtype, q.codes.shape, q.scales.shape) == (np.int8, matrix.shape, (rows, groups))
    assert (q.minimums is None) == ("asym" not in kind)
    for row in range(rows):
        for i in range(groups):
            part = slice(i * group, (i + 1) * group)
            codes, scale, minimum = expected(matrix[row, part], kind + ending)
            assert q.codes[row, part].tolist() == codes
            assert q.scales[row, i] == scale
            if q.minimums is not None:
                assert q.minimums[row, i] == minimum
                assert not np.signbit(minimum) or minimum < 0
    assert q.code_range[0] <= q.codes.min() <= q.codes.max() <= q.code_range[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("std", [1.0, 1e-6, 1e-30, 1e30])
def test_the_error_is_half_a_step(kind: str, std: float) -> None:
    """The promise that a group makes, whatever the size of its weights: where fp16 would have no more exponent too. At
    the ends, what a scale and a minimum of eleven bits are too small by is added: 2^-11 of their size."""
    matrix = (std * np.random.default_rng(0).standard_normal((50, 192))).astype(np.float32)
    q = integer_format(f"{kind}-g64").quantize(matrix)
    step = np.repeat(q.scales, 64, axis=1).astype(np.float64)
    slack = 2.0**-11 * np.abs(matrix).max() * 2
    assert (np.abs(q.dequantize() - matrix.astype(np.float64)) <= 0.5 * step + slack).all()


def test_ties_go_to_the_even_code() -> None:
    """Rounding half away from zero would push every tie outwards, and with it the mean magnitude up."""
    matrix = np.array([[7, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 6.5]], np.float32)
    assert integer_format("int4-sym-channel").quantize(matrix).codes.tolist() == [[7, 0, 2, 2, 0, -2, -2, 6]]


def test_int8_in_32_groups_is_the_librarys_q8_0_where_its_scale_is_a_half() -> None:
    """The one format that both make, where a group's peak is 127 times a power of two. The library rounds ties away
    from zero, so there are none here."""
    random = np.random.default_rng(1)
    matrix = random.integers(-127, 128, (40, 64)) + random.uniform(-0.49, 0.49, (40, 64))
    matrix[:, [5, 40]] = [127, -127]
    matrix = (matrix.clip(-127, 127) * 2.0 ** random.integers(-8, 3, (40, 1))).astype(np.float32)
    theirs = FORMATS["Q8_0"].decode(quants.quantize(matrix, GGMLQuantizationType.Q8_0), matrix.shape)
    ours = integer_format("int8-sym-g32").quantize(matrix)
    assert np.array_equal(ours.codes, theirs.codes)
    assert np.array_equal(ours.scales, theirs.scales)


def test_slices_join_without_a_seam() -> None:
    matrix = np.random.default_rng(2).standard_normal((_SLICE // 48 + 5, 96)).astype(np.float32)
    whole = integer_format("int4-asym-g32").quantize(matrix)
    for row in (0, len(matrix) // 2, len(matrix) - 1):
        alone = integer_format("int4-asym-g32").quantize(matrix[row : row + 1])
        assert np.array_equal(whole.codes[row], alone.codes[0])
        assert np.array_equal(whole.scales[row], alone.scales[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_group(kind: str) -> None:
    """Its range is zero: a division by it, and codes from NaN, unless it is looked for."""
    matrix = np.array([[0.0] * 16, [-0.0] * 16, [0.3] * 16, [-0.3] * 16], np.float32)
    values = integer_format(f"{kind}-g16").quantize(matrix).dequantize()
    np.testing.assert_allclose(values, matrix, rtol=2.0**-11)
    assert not np.signbit(values[:2]).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(kind: str, bad: float) -> None:
    matrix = np.ones((2, 32), np.float32)
    matrix[1, 3] = bad
    with pytest.raises(ModelFileError, match=f"blk.3 holds weights that {kind}-g16 cannot span"):
        integer_format(f"{kind}-g16").quantize(matrix, "blk.3")


def test_a_range_beyond_float32_is_refused() -> None:
    """Each weight is finite, their difference is not: the scale times 15 would give an infinite weight."""
    matrix = np.array([[3e38, -3e38] * 8], np.float32)
    with pytest.raises(ModelFileError, match="cannot span"):
        integer_format("int4-asym-channel").quantize(matrix)
    assert np.isfinite(integer_format("int4-sym-channel").quantize(matrix).dequantize()).all()


@given(st.integers(1, 700), st.integers(1, 300))
@settings(deadline=None)
def test_groups_that_do_not_divide_are_refused_with_those_that_would(columns: int, group: int) -> None:
    format_ = IntegerFormat(4, True, group)
    matrix = np.ones((1, columns), np.float32)
    if columns % group == 0:
        assert format_.quantize(matrix).group == group
        return
    with pytest.raises(ParameterError, match=f"(?s)ffn_down.*int4-sym-g{group}.*{columns} columns.*channel") as caught:
        format_.quantize(matrix, "ffn_down")
    for name in fitting_groups(columns):
        assert name in str(caught.value)
        assert columns % integer_format(f"int4-sym-{name}").quantize(matrix).group == 0


SCOPES = {"g32": "group", "g64": "group", "channel": "channel", "tensor": "tensor", "qkv": "qkv", "global": "global"}


@pytest.mark.parametrize(
    "name", [f"{kind}-{reach}{end}" for kind in KINDS for reach in SCOPES for end in ENDINGS[kind]]
)
def test_names_lead_back_to_themselves(name: str) -> None:
    fmt, scope = integer_format(name), SCOPES[name.split("-")[2]]
    assert (fmt.name, fmt.scope, fmt.table) == (name, scope, None)
    q = fmt.quantize(np.ones((2, 64), np.float32), span=(-1, 1) if scope in ("qkv", "global") else None)
    assert (q.format, q.code_range, q.group) == (name, fmt.code_range, fmt.group_of(64))
    assert q.scales.shape == (2, 64 // q.group)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_for_the_matrix(kind: str) -> None:
    """It is that of one long row of all its weights; a span of others moves it, and cuts off what lies beyond."""
    matrix = np.random.default_rng(3).standard_normal((40, 64)).astype(np.float32)
    matrix[7, 9], matrix[30, 2] = 6.25, -5.5
    q, row = integer_format(f"{kind}-tensor").quantize(matrix), integer_format(f"{kind}-channel")
    whole = row.quantize(matrix.reshape(1, -1))
    assert q.group == 64
    assert (q.scales == whole.scales).all()
    assert np.array_equal(q.dequantize().reshape(1, -1), whole.dequantize())
    for reach in ("tensor", "qkv", "global"):
        wide = integer_format(f"{kind}-{reach}").quantize(matrix, span=(-8.0, 4.0))
        ends = row.quantize(np.array([[-8, 4]], np.float32))
        assert (wide.scales == ends.scales).all()
        assert wide.minimums is None or (wide.minimums == ends.minimums).all()
        assert wide.codes[7, 9] == (ends.codes[0, 1] if "asym" in kind else np.rint(6.25 / wide.scales[0, 0]))
    small = integer_format(f"{kind}-global").quantize(matrix, span=(-0.5, 0.5))
    assert (small.codes.min(), small.codes.max()) == small.code_range


@pytest.mark.parametrize("kind", KINDS)
def test_a_span_is_asked_for_where_it_is_needed_and_nowhere_else(kind: str) -> None:
    """One scale of several matrices made from one of them would differ from matrix to matrix, under the same name."""
    matrix = np.ones((2, 32), np.float32)
    for reach in ("qkv", "global"):
        with pytest.raises(ParameterError, match=rf"(?s)blk\.3 alone .* {kind}-{reach}.*needed: a span"):
            integer_format(f"{kind}-{reach}").quantize(matrix, "blk.3")
    for reach in ("g16", "channel"):
        with pytest.raises(ParameterError, match="takes its scales from the weights"):
            integer_format(f"{kind}-{reach}").quantize(matrix, span=(-1, 1))
    matrix[1, 3] = np.nan
    with pytest.raises(ModelFileError, match=r"blk\.3 holds weights"):
        integer_format(f"{kind}-global").quantize(matrix, "blk.3", span=(-1, 1))
    with pytest.raises(ModelFileError, match="cannot span"):
        integer_format(f"{kind}-global").quantize(np.ones((2, 32), np.float32), span=(-1, np.inf))


@st.composite
def ordinary(draw: st.DrawFn) -> np.ndarray:
    """Rows of any size, some with an outlier a million times the rest, some constant, some denormal, of fp32, bf16 or
    fp16 numbers; every row reaches zero or both sides of it, or is constant."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = rng.standard_normal((draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 16, 48])))).astype(np.float32)
    rows[:, 0] *= -np.sign(rows[:, -1]) * np.sign(rows[:, 0])
    for row in rows:
        row *= np.float32(10.0 ** draw(st.sampled_from([0, 0, 0, -3, -7, -20, -34, -38, -44, 30])))
        kind = draw(st.sampled_from(["noise", "outlier", "constant", "half", "bf16", "coarse"]))
        if kind == "outlier" and np.abs(row).max() < 1e30:
            row[-1] *= 1e6
        elif kind == "constant":
            row[:] = row[0]
        elif kind == "half":
            row[:] = row.astype(np.float16) if np.abs(row).max() < 6e4 else row
        elif kind == "bf16":
            row[:] = (row.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        elif kind == "coarse":
            row[:] = np.rint(row / (np.abs(row).max() / 3 + np.float32(1e-45)))
    return rows


@given(st.sampled_from(KINDS), st.sampled_from(["channel", "tensor", "channel-reduced"]), ordinary())
@settings(max_examples=200, deadline=None)
def test_quantized_again_the_codes_are_the_same(kind: str, reach: str, matrix: np.ndarray) -> None:
    """Else a model that was saved dequantized and quantized once more would drift. Scales as well where there is no
    minimum."""
    fmt = integer_format(f"{kind}-{reach if 'int8' in kind else reach.removesuffix('-reduced')}")
    if fmt.wide and "asym" in kind and (matrix.min() > 0 or matrix.max() < 0):
        matrix = matrix - matrix.mean(dtype=np.float64).astype(np.float32)
    first = fmt.quantize(matrix)
    values = first.dequantize()
    assert np.isfinite(values).all()
    again = fmt.quantize(values)
    assert np.array_equal(again.codes, first.codes)
    if "asym" not in kind:
        assert np.array_equal(again.scales, first.scales)
        assert np.array_equal(again.dequantize(), values)


def test_where_codes_are_not_the_same_again() -> None:
    """The limit that the module names: a range far narrower than its distance from zero."""
    fmt = integer_format("int4-asym-channel")
    first = fmt.quantize(np.linspace(1.0003, 1.001, 16, dtype=np.float32)[None])
    assert first.scales[0, 0] < 2.0**-9 * first.minimums[0, 0]
    assert not np.array_equal(fmt.quantize(first.dequantize()).codes, first.codes)


@pytest.mark.parametrize("kind", KINDS)
def test_views_of_any_layout(kind: str) -> None:
    """A transposed matrix, every second column, a stack of matrices."""
    stack = np.random.default_rng(4).standard_normal((3, 32, 64)).astype(np.float32)
    for view in (stack[0].T, stack[0, :, ::2], stack[:, 5:7], stack[1, ::-1]):
        for reach in ("g16", "channel", "tensor"):
            fmt = integer_format(f"{kind}-{reach}")
            ours, theirs = fmt.quantize(view), fmt.quantize(np.ascontiguousarray(view))
            assert ours.shape == view.shape
            assert np.array_equal(ours.codes, theirs.codes)
            assert np.array_equal(ours.scales, theirs.scales)


@pytest.mark.parametrize(
    "name",
    ["int4", "int5-sym-g32", "int4-sym-g0", "int4-sym-32", "INT4-sym-g32", "int8-sym-g32 ", "int4-sym-g32-reduced"],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ParameterError, match=r"(?s)unknown integer format.*int4-sym-g64"):
        integer_format(name)
