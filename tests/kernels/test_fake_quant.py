"""Fake quantization against the formats themselves (numpy), and its gradient against masks written by hand."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from nanokit.errors import ModelFileError, ParameterError
from nanokit.kernels.fake_quant import fake_quantize, ranges
from nanokit.quant.integer import IntegerFormat, integer_format
from nanokit.quant.qtensor import QTensor

KINDS = [f"int{bits}-{kind}" for bits in (4, 8) for kind in ("sym", "asym")]

weights = st.one_of(
    st.floats(-3, 3, width=32),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 2e-43, 2e-38, 0.5, -3.5, 7.0, 15.0, 127.0, 3.4e38, -3.4e38]),
    st.floats(1, 1 + 2**-18, width=32),  # a range so narrow that the minimum's own rounding is many steps
    st.integers(-300, 300).map(lambda i: i / 2),  # with a peak of 7 or 127: ties
)


def matrices(rows: int, columns: int) -> st.SearchStrategy[Tensor]:
    size = rows * columns
    return st.lists(weights, min_size=size, max_size=size).map(lambda x: torch.tensor(x).view(rows, columns))


def same(x: Tensor, expected: Tensor) -> bool:
    """Equal in every bit, zeros' signs included; any NaN is as good as another."""
    where = expected.isnan()
    bits = [t[~where].view(torch.int32) for t in (x, expected)]
    return torch.equal(x.isnan(), where) and torch.equal(*bits)


def quantized(w: Tensor, fmt: IntegerFormat) -> Tensor:
    """By the format itself, group by group; NaN where it refuses a group."""
    groups = w.numpy().reshape(-1, fmt.group or w.shape[1])
    out = np.full_like(groups, np.nan)
    for i in range(len(groups)):
        try:
            q = IntegerFormat(fmt.bits, fmt.symmetric, None).quantize(groups[i : i + 1])
        except ModelFileError:
            continue
        out[i] = q.dequantize()[0]
    return torch.from_numpy(out).view_as(w)


@given(st.sampled_from(KINDS), st.sampled_from([1, 3, 16, 37, None]), st.integers(1, 3), st.data())
@settings(max_examples=200, deadline=None)
def test_the_values_are_the_formats(kind: str, group: int | None, rows: int, data: st.DataObject) -> None:
    """What a model trains against has to be what the packed kernel will hold, in every bit: a code dividing in fp32,
    rounding halves away or leaving a -0.0 fails here."""
    fmt = integer_format(f"{kind}-{f'g{group}' if group else 'channel'}")
    w = data.draw(matrices(rows, (group or 11) * data.draw(st.integers(1, 2))))
    assert same(fake_quantize(w, fmt), quantized(w, fmt))
    scales, minimums = ranges(w, fmt)
    assert same(fake_quantize(w, fmt, scales, None if fmt.symmetric else minimums), quantized(w, fmt))


@pytest.mark.parametrize(
    "name", [f"{kind}-tensor" for kind in KINDS] + ["int8-sym-g8-reduced", "int8-asym-tensor-reduced"]
)
@pytest.mark.parametrize("size", [1.0, 1e-20, 3e-36, 1e-42])
def test_scales_for_a_matrix_and_of_seven_bits(name: str, size: float) -> None:
    """As the format makes them, tiny ones too; a scale that other matrices share has to be given."""
    fmt, w = integer_format(name), torch.randn(5, 24) * size
    expected = torch.from_numpy(fmt.quantize(w.numpy()).dequantize())
    assert same(fake_quantize(w, fmt), expected)
    if fmt.wide:
        scales, minimums = ranges(w, fmt)
        for shared in ("qkv", "global"):
            other = integer_format(name.replace("tensor", shared))
            assert same(fake_quantize(w, other, scales, None if fmt.symmetric else minimums), expected)
            with pytest.raises(ParameterError, match="alone do not tell the scale"):
                fake_quantize(w, other)


@pytest.mark.parametrize("payload", [0x7FC00000, 0x7FFFFFFF, -1])
def test_a_nan_of_any_payload_is_one(payload: int) -> None:
    """Its digits, rounded as a scale's are, would carry over into the sign and leave a tiny number."""
    w = torch.ones(1, 16)
    w[0, 3] = torch.tensor([payload], dtype=torch.int32).view(torch.float32)
    for kind in KINDS:
        assert fake_quantize(w, integer_format(f"{kind}-channel")).isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_codes_beside_ties(kind: str) -> None:
    """Half steps rounded to fp32, which lie a hair off the tie: dividing in fp32 takes many of them for ties."""
    fmt, rng = integer_format(f"{kind}-g16"), np.random.default_rng(5)
    lowest, highest = fmt.code_range
    scale = rng.uniform(0.001, 0.002, (400, 1)).astype(np.float32)
    codes = rng.integers(lowest, highest, (400, 16)) + 0.5
    codes[:, 0], codes[:, 1] = lowest, highest
    w = torch.from_numpy((codes * scale).astype(np.float32))
    assert same(fake_quantize(w, fmt), quantized(w, fmt))


@given(st.sampled_from(KINDS), st.sampled_from([3, 16]), st.data())
@settings(max_examples=200, deadline=None)
def test_given_ranges_clamp_codes_and_block_what_lies_beyond(kind: str, group: int, data: st.DataObject) -> None:
    """Clipped and learned ranges, a scale of 0 among them, in numpy: codes for the values, the unclamped ones for the
    gradient, which is the upstream's own bits or zero even where that is infinite."""
    fmt = integer_format(f"{kind}-g{group}")
    w = data.draw(matrices(2, 2 * group)).requires_grad_()
    scales = torch.tensor(data.draw(st.lists(st.floats(0, 2, width=32), min_size=4, max_size=4))).view(2, 2)
    if not fmt.symmetric:
        minimums = torch.tensor(data.draw(st.lists(st.floats(-9, 9, width=32), min_size=4, max_size=4))).view(2, 2)
    else:
        minimums = None
    value = fake_quantize(w, fmt, scales, minimums)
    upstream = torch.randn_like(w)
    upstream.view(-1)[::5] = torch.inf
    (gradient,) = torch.autograd.grad(value, w, upstream)

    lowest, highest = fmt.code_range
    groups = w.detach().numpy().astype(np.float64).reshape(4, group)
    scale = scales.numpy().astype(np.float64).reshape(4, 1)
    minimum = 0.0 if minimums is None else minimums.numpy().astype(np.float64).reshape(4, 1)
    codes = np.rint(np.divide(groups - minimum, scale, out=np.zeros_like(groups), where=scale > 0))
    q = QTensor(
        format=fmt.name,
        shape=tuple(w.shape),
        codes=np.clip(codes, lowest, highest).astype(np.int8).reshape(w.shape),
        scales=scales.numpy(),
        minimums=None if minimums is None else minimums.numpy(),
        group=group,
        table=None,
        code_range=fmt.code_range,
    )
    assert same(value.detach(), torch.from_numpy(q.dequantize()))
    passes = torch.from_numpy((codes >= lowest) & (codes <= highest)).view_as(w)
    assert same(gradient, torch.where(passes, upstream, torch.zeros(())))


@pytest.mark.parametrize(
    ("kind", "passing", "blocked"),
    [
        ("int4-sym", [0, 3.2, 7, -7, 7.4, -7.4, 6.5], [7.5, -7.5, 8, -8, 100, -100]),
        ("int8-sym", [0, 3.2, 127, -127, 127.4, -127.4], [127.5, -127.5, 128, -128, 1e4, -1e4]),
        ("int4-asym", [0, 3.2, 15, 15.4, -0.4, -0.5], [15.5, 16, -0.6, -1, 100, -100]),
        ("int8-asym", [0, 3.2, 127, 127.4, -128, -128.4, -128.5], [127.5, 128, -128.6, -129, 1e4, -1e4]),
    ],
)
def test_the_gradient_inside_at_and_beyond_the_bounds(kind: str, passing: list[float], blocked: list[float]) -> None:
    """In steps of a scale of 1/4. AT a bound it passes, and so it does for what rounds to the bound; -0.5 rounds to 0
    and 7.5 to 8, the even ones."""
    fmt = integer_format(f"{kind}-channel")
    w = (torch.tensor([passing + blocked]) / 4).requires_grad_()
    minimums = None if fmt.symmetric else torch.zeros(1, 1)
    upstream = torch.arange(1.0, w.numel() + 1)[None]
    fake_quantize(w, fmt, torch.full((1, 1), 0.25), minimums).backward(upstream)
    assert w.grad is not None
    assert w.grad.tolist() == [[*upstream[0, : len(passing)].tolist(), *[0.0] * len(blocked)]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own_range", [True, False])
def test_a_weight_at_the_bound_still_trains(kind: str, own_range: bool) -> None:
    """pytorch/ao#4806: with clamp's derivative taken as 0 at the bound, the largest weights of each group stand still
    for ever, without an error. A weight beyond a given bound does stand still; that is what the bound means."""
    fmt = integer_format(f"{kind}-g16")
    lowest, highest = fmt.code_range
    w = torch.linspace(lowest, highest, 16).repeat(3, 2).mul_(0.125)
    scales = minimums = None
    if not own_range:
        scales, minimums = torch.full((3, 2), 0.125), None if fmt.symmetric else torch.zeros(3, 2)
        w[0, 15] = highest  # eight times the bound
    w.requires_grad_()
    before = w.detach().clone()
    optimizer = torch.optim.SGD([w], lr=0.25)
    for _ in range(4):
        optimizer.zero_grad()
        fake_quantize(w, fmt, scales, minimums).square().sum().backward()
        optimizer.step()
    moved = w.detach() != before
    assert moved[before.abs() == before[1:].abs().max()].all()
    assert bool(moved[0, 15]) is own_range
    assert w.detach()[1:].abs().max() < 0.25 * before[1:].abs().max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_comes_out_as_nan(kind: str, bad: float) -> None:
    """One such weight spoils its own group, whose scale is made of it, and no other; with given scales, itself.
    Infinity clamped to a bound would train on as if nothing had happened."""
    fmt = integer_format(f"{kind}-g4")
    w = torch.arange(16.0).view(2, 8) - 5
    good = fake_quantize(w, fmt)
    w[0, 5] = bad
    value = fake_quantize(w.requires_grad_(), fmt)
    assert value.isnan().nonzero().tolist() == [[0, 4], [0, 5], [0, 6], [0, 7]]
    assert torch.equal(value[~value.isnan()], good[~value.isnan()])
    (gradient,) = torch.autograd.grad(value, w, torch.ones_like(w))
    assert gradient.eq(1).all()
    minimums = None if fmt.symmetric else torch.zeros(2, 2)
    scales = torch.ones(2, 2)
    assert fake_quantize(w, fmt, scales, minimums).isnan().nonzero().tolist() == [[0, 5]]
    scales[0, 1] = bad
    assert fake_quantize(w, fmt, scales, minimums).isnan().nonzero()[:, 1].tolist() == [4, 5, 6, 7]
    scales[0, 1] = -1
    assert fake_quantize(w, fmt, scales, minimums).isnan().nonzero()[:, 1].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("scale", "minimum", "spans"), [(1e37, 3.3e38, False), (3e37, -3e38, False), (1e37, 1e38, True)]
)
def test_ranges_that_reach_beyond_fp32(scale: float, minimum: float, spans: bool) -> None:
    """The highest code's value, or the product before the minimum is added, would be infinite; codes that stay below
    would be fine, and the group a mixture."""
    w = torch.full((1, 4), minimum)
    value = fake_quantize(w, integer_format("int4-asym-g4"), torch.tensor([[scale]]), torch.tensor([[minimum]]))
    assert same(value, w if spans else torch.full_like(w, torch.nan))


def test_views_and_gradients_of_any_layout() -> None:
    """A transposed weight and an upstream gradient that is one number, expanded."""
    fmt = integer_format("int4-asym-g4")
    w = torch.randn(8, 6)
    turned = w.t().requires_grad_()
    value = fake_quantize(turned, fmt)
    assert torch.equal(value, fake_quantize(w.t().contiguous(), fmt))
    value.sum().backward()
    assert turned.grad is not None
    assert turned.grad.eq(1).all()


def test_a_minimum_of_zero_has_one_sign() -> None:
    """As the format has it: which of two zeros is the smallest is chance, and files are compared by their bytes."""
    _, minimums = ranges(torch.full((1, 4), -0.0), integer_format("int4-asym-g4"))
    assert not minimums.signbit().any()


def test_no_second_derivatives() -> None:
    """They would be wrong without a word: the mask does not depend on the weights as far as autograd knows."""
    w = torch.randn(2, 8, requires_grad=True)
    value = fake_quantize(w, integer_format("int4-sym-g8")).square().sum()
    (gradient,) = torch.autograd.grad(value, w, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_what_does_not_fit_is_refused() -> None:
    """By what was found and what would do, before anything is computed."""
    sym, asym, w = integer_format("int4-sym-g64"), integer_format("int4-asym-g64"), torch.zeros(2, 128)
    scales = torch.ones(2, 2)
    for wrong in (w.double(), w.int(), w[0], w[:0], w[None]):
        with pytest.raises(ParameterError, match=r"needed: torch\.float32, bfloat16 or float16 \[rows, columns\]"):
            fake_quantize(wrong, sym)
    with pytest.raises(ParameterError, match=r"found: 128 columns\n.*g16, g32, g64, g128, channel"):
        fake_quantize(w, integer_format("int4-sym-g96"))
    with pytest.raises(ParameterError, match="needed: scales alone"):
        fake_quantize(w, sym, scales, scales)
    for given_scales, given_minimums in ((scales, None), (None, scales)):
        with pytest.raises(ParameterError, match="needed: scales and minimums, or neither"):
            fake_quantize(w, asym, given_scales, given_minimums)
    for wrong in (scales.double(), scales[:1], scales[:, :1], torch.ones(4)):
        with pytest.raises(ParameterError, match="given scales do not fit"):
            fake_quantize(w, sym, wrong)
    with pytest.raises(ParameterError, match="given minimums do not fit"):
        fake_quantize(w, asym, scales, scales[:1])
    with pytest.raises(ParameterError, match="no gradient is computed for minimums"):
        fake_quantize(w, asym, scales, scales.clone().requires_grad_())
