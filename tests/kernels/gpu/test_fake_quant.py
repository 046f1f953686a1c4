"""Fake quantization of the GPU backend: every bit of values and gradients is that of kernels/fake_quant.py."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels import fake_quant
from nanokit.kernels.gpu import fake_quant as gpu
from nanokit.kernels.gpu.runtime import device
from nanokit.quant.integer import IntegerFormat, integer_format
from nanokit.quant.weight_format import weight_format

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # the interpreter's numpy
KINDS = [f"int{bits}-{kind}" for bits in (4, 8) for kind in ("sym", "asym")]
EXTREMES = [0.0, -0.0, 1e-45, -2e-43, 2e-38, 3.4e38, -3.4e38, np.nan, np.inf, -np.inf]


def same(x: Tensor, expected: Tensor) -> bool:
    """Equal in every bit, zeros' signs included; any NaN is as good as another."""
    x, where = x.detach().cpu(), expected.isnan()
    bits = [t[~where].view(torch.int32) for t in (x, expected.detach())]
    return torch.equal(x.isnan(), where) and torch.equal(*bits)


def check(w: Tensor, fmt: IntegerFormat, scales: Tensor | None = None, minimums: Tensor | None = None) -> None:
    """Values and gradients of both, the upstream gradient infinite here and there."""
    upstream = torch.randn_like(w)
    upstream.view(-1)[::9] = torch.inf
    ours = w.clone().to(device()).requires_grad_()
    reference = w.clone().requires_grad_()
    expected = fake_quant.fake_quantize(reference, fmt, scales, minimums)
    expected.backward(upstream)
    there = [None if t is None else t.to(device()) for t in (scales, minimums)]
    value = gpu.fake_quantize(ours, fmt, *there)
    value.backward(upstream.to(device()))
    assert ours.grad is not None
    assert reference.grad is not None
    assert same(value, expected)
    assert same(ours.grad, reference.grad)
    with torch.no_grad():
        assert same(gpu.fake_quantize(ours, fmt, *there), expected)


@pytest.mark.parametrize("name", ["int4-sym-g48", "int8-asym-g192", "int4-asym-channel"])
def test_nothing_is_written_beyond_the_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last program has groups to spare and each group columns: what it wrote there would be another's weights."""
    guarded: list[tuple[Tensor, int]] = []

    def allocate(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        whole = torch.full((size + 8192,), 77, dtype=dtype, device=device)
        guarded.append((whole, size))
        return whole[:size]

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch, "empty_like", lambda x: allocate(x.numel(), x.dtype, x.device).view_as(x))
    w = torch.randn(3, 576 if name != "int4-asym-channel" else 1040).to(device()).requires_grad_()
    gpu.fake_quantize(w, integer_format(name)).square().sum().backward()
    assert [(whole.dtype, size) for whole, size in guarded] == [
        (torch.float32, w.numel()),
        (torch.uint8, w.numel() // 8),
        (torch.float32, w.numel()),
    ]
    assert all(whole[size:].eq(77).all() for whole, size in guarded)
    guarded.clear()
    with torch.no_grad():
        gpu.fake_quantize(w, integer_format(name))
    assert [size for _, size in guarded] == [w.numel(), 0]  # no bits where nothing is to be differentiated


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, IntegerFormat, Tensor | None, Tensor | None]:
    """Rows of several kinds: noise, ties, a range so narrow that the minimum's own rounding is many steps, extremes;
    and ranges given or not."""
    group = draw(st.sampled_from([16, 48, 64, 96, 192, None]))
    fmt = integer_format(f"{draw(st.sampled_from(KINDS))}-{f'g{group}' if group else 'channel'}")
    rows, columns = draw(st.integers(1, 5)), (group or 80) * draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    w = rng.standard_normal((rows, columns)).astype(np.float32)
    for row in w:
        kind = draw(st.sampled_from(["noise", "ties", "narrow", "tiny", "extremes"]))
        if kind == "ties":
            row[:] = np.rint(row * 80) / 2
        elif kind == "narrow":
            row[:] = 1 + row * 2.0**-18
        elif kind == "tiny":
            row *= 1e-43
        elif kind == "extremes":
            row[rng.integers(0, columns, 2)] = rng.choice(EXTREMES, 2)
    weights = torch.from_numpy(w)
    if draw(st.booleans()):
        return weights, fmt, None, None
    scales, minimums = fake_quant.ranges(weights, fmt)
    scales = scales * torch.from_numpy(rng.choice(np.float32([0.5, 0.8, 1, 0, -1, np.nan]), scales.shape))
    return weights, fmt, scales, None if fmt.symmetric else minimums * 0.75


@given(cases())
@settings(max_examples=80, deadline=None)
def test_values_and_gradients_are_the_contracts(
    case: tuple[Tensor, IntegerFormat, Tensor | None, Tensor | None],
) -> None:
    """Groups that fill a block and those that do not, a last program with groups to spare, whole rows."""
    check(*case)


@pytest.mark.parametrize(
    "name", ["int4-sym-tensor", "int8-asym-tensor", "int8-sym-g16-reduced", "int8-asym-g48-reduced"]
)
def test_scales_for_a_matrix_and_of_seven_bits(name: str) -> None:
    """The one scale of all rows, and codes that use half of their range."""
    check(torch.randn(5, 96), integer_format(name))
    check(torch.randn(5, 96) * 1e-35, integer_format(name))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1024, 1040, 2064])
def test_rows_longer_than_a_block(kind: str, columns: int) -> None:
    """The range is that of all pieces of the row: its ends lie in the last one here, and in the next row a NaN."""
    w = torch.randn(3, columns)
    w[0, -3:] = torch.tensor([9.0, -7.0, 8.9])
    w[1, -2] = torch.nan
    fmt = integer_format(f"{kind}-channel")
    check(w, fmt)
    check(w, fmt, torch.full((3, 1), 0.02), None if fmt.symmetric else torch.full((3, 1), -0.1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [48, 80, 96, 192])
def test_idle_lanes_are_no_weights(kind: str, group: int) -> None:
    """Groups on one side of zero: a zero of the lanes beside them would be their lowest, or their highest, weight."""
    w = torch.stack((torch.rand(2 * group) + 1, -1 - torch.rand(2 * group)))
    check(w, integer_format(f"{kind}-g{group}"))


@pytest.mark.parametrize(("scale", "minimum"), [(1e37, 3.3e38), (3e37, -3e38), (1e37, 1e38)])
def test_ranges_that_reach_beyond_fp32(scale: float, minimum: float) -> None:
    """Both ways of the contract's test, and one that does not; the symmetric one beside."""
    w = torch.full((1, 16), minimum)
    check(w, integer_format("int4-asym-g16"), torch.tensor([[scale]]), torch.tensor([[minimum]]))
    check(w, integer_format("int8-sym-g16"), torch.tensor([[scale]]))
    check(w, integer_format("int8-sym-g16"), torch.tensor([[scale / 10]]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_at_the_bound_still_trains(kind: str) -> None:
    """pytorch/ao#4806, as in the contract's test: the largest weights of a group move, and the others with them."""
    w = torch.linspace(*integer_format(f"{kind}-g16").code_range, 16).repeat(2, 1).to(device()).requires_grad_()
    before = w.detach().clone()
    optimizer = torch.optim.SGD([w], lr=0.25)
    for _ in range(2):
        optimizer.zero_grad()
        gpu.fake_quantize(w, integer_format(f"{kind}-g16")).square().sum().backward()
        optimizer.step()
    assert ((w.detach() != before) | (before == 0)).all()
    assert w.detach().abs().max() < 0.5 * before.abs().max()


def test_upstream_gradients_of_any_layout() -> None:
    """A number that was expanded, a transposed one, and one that begins between two wide loads."""
    fmt = integer_format("int4-asym-g16")
    for gradient in (torch.ones(()).expand(4, 32), torch.randn(32, 4).t(), torch.randn(129)[1:].view(4, 32)):
        w = torch.randn(4, 32, device=device(), requires_grad=True)
        gpu.fake_quantize(w, fmt).backward(gradient.to(device()))
        assert w.grad is not None
        assert torch.equal(w.grad.cpu(), gradient)


def test_no_second_derivatives() -> None:
    """As the contract: they would be zero without a word."""
    w = torch.randn(2, 16, device=device(), requires_grad=True)
    value = gpu.fake_quantize(w, integer_format("int4-sym-g16")).square().sum()
    (gradient,) = torch.autograd.grad(value, w, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_what_the_kernel_does_not_take_is_refused() -> None:
    """Before it is launched: wide loads would read what lies beside."""
    fmt, w = integer_format("int4-sym-g16"), torch.zeros(4, 32, device=device())
    with pytest.raises(ParameterError, match=r"found: torch\.bfloat16"):
        gpu.fake_quantize(w.bfloat16(), fmt)
    with pytest.raises(ParameterError, match=r"does not round to this format\n  found: nvfp4"):
        gpu.fake_quantize(w, weight_format("nvfp4"))
    with pytest.raises(ParameterError, match=r"int4-sym-g8\n  found: 8\n  needed: a multiple of 16"):
        gpu.fake_quantize(w, integer_format("int4-sym-g8"))
    with pytest.raises(ParameterError, match="channel\n  found: 40"):
        gpu.fake_quantize(torch.zeros(2, 40, device=device()), integer_format("int4-sym-channel"))
    for wrong in (torch.zeros(32, 4, device=device()).t(), torch.zeros(4, 64, device=device())[:, ::2]):
        with pytest.raises(ParameterError, match="weights does not fit"):
            gpu.fake_quantize(wrong, fmt)
    with pytest.raises(ParameterError, match="weights begins"):
        gpu.fake_quantize(torch.zeros(129, device=device())[1:].view(4, 32), fmt)
    with pytest.raises(ParameterError, match="scales begins"):
        gpu.fake_quantize(w, fmt, torch.zeros(9, device=device())[1:].view(4, 2))
    with pytest.raises(ParameterError, match="no gradient is computed for scales"):
        gpu.fake_quantize(w, fmt, torch.ones(4, 2, device=device(), requires_grad=True))
