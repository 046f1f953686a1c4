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


def expected(group: np.ndarray, name: str) -> tuple[list[int], np.float32, np.float32]:
    """Codes, scale and minimum of one group by the module's table: differences in fp64, quotients exact."""
    symmetric, bits = "asym" not in name, int(name[3])
    values = [Fraction(float(w)) for w in group]
    if symmetric:
        limit = 2 ** (bits - 1) - 1
        ends, minimum = (-limit, limit), np.float32(0)
        scale = np.float32(float(max(map(abs, values)) / limit))
    else:
        ends = (0, 15) if bits == 4 else (-128, 127)
        scale = np.float32(float(Fraction(float(max(values) - min(values))) / (2**bits - 1)))
        minimum = np.float32(float(min(values) - ends[0] * Fraction(float(scale))))
    if scale == 0:
        return [0] * len(values), scale, minimum
    steps = [round(Fraction(float(w) - float(minimum)) / Fraction(float(scale))) for w in values]  # halves to even
    return [min(max(step, ends[0]), ends[1]) for step in steps], scale, minimum


weights = st.one_of(
    st.floats(-3, 3, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 2e-38, 0.5, -3.5, 7.0, 15.0, 127.0, 1e37, -1e37]),
    st.integers(-300, 300).map(lambda i: i / 2),  # with a peak of 7 or 127: ties
)


@given(st.sampled_from(KINDS), st.integers(1, 3), st.sampled_from([1, 3, 16, 32, 37]), st.data())
@settings(max_examples=150, deadline=None)
def test_groups_follow_the_table(kind: str, groups: int, group: int, data: st.DataObject) -> None:
    """Ties, zeros of both signs, one value alone, denormals and huge magnitudes beside small ones."""
    rows = data.draw(st.integers(1, 2))
    size = rows * groups * group
    matrix = np.array(data.draw(st.lists(weights, min_size=size, max_size=size)), np.float32).reshape(rows, -1)
    q = integer_format(f"{kind}-g{group}").quantize(matrix)
    assert (q.codes.dtype, q.codes.shape, q.scales.shape) == (np.int8, matrix.shape, (rows, groups))
    assert (q.minimums is None) == ("asym" not in kind)
    for row in range(rows):
        for i in range(groups):
            part = slice(i * group, (i + 1) * group)
            codes, scale, minimum = expected(matrix[row, part], kind)
            assert q.codes[row, part].tolist() == codes
            assert q.scales[row, i] == scale
            if q.minimums is not None:
                assert q.minimums[row, i] == minimum
                assert not np.signbit(minimum) or minimum < 0
    assert q.code_range[0] <= q.codes.min() <= q.codes.max() <= q.code_range[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_half_a_step(kind: str) -> None:
    """The promise that a group makes, with room for fp32's rounding of the weights themselves."""
    matrix = np.random.default_rng(0).standard_normal((50, 192)).astype(np.float32)
    q = integer_format(f"{kind}-g64").quantize(matrix)
    step = np.repeat(q.scales, 64, axis=1)
    assert (np.abs(q.dequantize() - matrix) <= 0.5 * step + 1e-6).all()


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
    np.testing.assert_allclose(values, matrix, rtol=1e-6)
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


@pytest.mark.parametrize("name", [f"{kind}-{group}" for kind in KINDS for group in ("g32", "g64", "channel")])
def test_names_lead_back_to_themselves(name: str) -> None:
    assert integer_format(name).name == name
    assert integer_format(name).quantize(np.ones((2, 64), np.float32)).format == name


@pytest.mark.parametrize(
    "name", ["int4", "int5-sym-g32", "int4-sym-g0", "int4-sym-32", "INT4-sym-g32", "int8-sym-g32 "]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ParameterError, match=r"(?s)unknown integer format.*int4-sym-g64"):
        integer_format(name)
