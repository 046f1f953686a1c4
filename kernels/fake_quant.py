"""Fake quantization: weights rounded to a format's grid while they train, the contract that every backend follows.

    scale, minimum   from the group's own weights (nanokit.quant.integer), or given: learned, or clipped
    code  = rint((w - minimum) / scale)          fp64, rint to even; 0 where the scale is 0
    value = clamp(code) * scale + minimum        fp32, each operation rounded once
    dw    = dvalue where lowest <= code <= highest, 0 beyond

Forward: bit for bit what integer_format(name).quantize(w).dequantize() gives, hence what a packed kernel multiplies
by. A model that trains against anything else learns to fit a grid that it will not be put on.

Backward: the straight-through estimator (Bengio et al. 2013), in an autograd function of its own. `code` is the
rounded code before it is clamped. A weight AT a bound lets the gradient pass: every group whose scale comes from its
own weights has one there, and it would never move again. That is why clamp's own derivative is not used: which value
it takes at the bound is torch's to choose, and has been chosen both ways. Scales and minimums get no gradient: those
from w count as constants, and given ones must not ask for one. No second derivatives.

What is not finite: a training step cannot stop to look, for that would wait for the GPU. So nothing is refused by
value; it comes out as NaN, and the loss says so. NaN are: a whole group that holds such a weight or whose range is
beyond fp32, where the scale comes from it; with given scales a weight that is not finite, and a group whose scale is
negative or not finite or reaches beyond fp32. The gradient passes wherever the code is not a number.

Rejected: clamp before rint (a weight at 7.4 steps would count as beyond a bound of 7, and rounds to it), and dividing
in fp32 (codes beside a tie would then differ from the packed ones).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanokit.errors import ParameterError
from nanokit.quant.integer import BITS, SMALLEST, IntegerFormat, fitting_groups

LARGEST = torch.finfo(torch.float32).max
HALF = 1 << 53 - BITS - 1  # of the last bit that a scale keeps, in the digits of fp64


def fake_quantize(
    w: Tensor, fmt: IntegerFormat, scales: Tensor | None = None, minimums: Tensor | None = None
) -> Tensor:
    """The weights on the format's grid: fp32 [rows, columns], differentiable in w.

    w: fp32 [rows, columns]. scales, and minimums where the format is asymmetric: fp32 [rows, columns / group], in place
    of those that the weights give. Raises ParameterError for other types and shapes, columns that the group does not
    divide, and scales or minimums that ask for a gradient.
    """
    check(w, fmt, scales, minimums)
    return _StraightThrough.apply(w, fmt, scales, minimums)


def ranges(w: Tensor, fmt: IntegerFormat) -> tuple[Tensor, Tensor]:
    """Scales and minimums that the weights give, fp32 [rows, columns / group], of eleven bits; minimums are zeros where
    the format is symmetric, scales NaN or infinite where it cannot span the group. Of qkv and global formats those for
    this matrix alone: put the matrices that share a scale one after the other."""
    groups = w.detach().unflatten(1, (-1, fmt.group or w.shape[1])).double()
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    if fmt.wide:
        low, high = low.amin().expand_as(low), high.amax().expand_as(high)
    lowest, highest = fmt.code_range
    if fmt.symmetric:
        scales = _eleven_bits(torch.maximum(low.abs(), high.abs()) / highest)
        minimums = torch.zeros_like(scales)
    else:
        scales = _eleven_bits((high - low) / (highest - lowest))
        minimums = _eleven_bits(low - lowest * scales)
    return scales.float(), minimums.float()


def _eleven_bits(x: Tensor) -> Tensor:
    """fp64, rounded as integer.py rounds scales: ties to even, 0 below the smallest; NaN and infinity as they are."""
    bits = x.contiguous().view(torch.int64)
    rounded = ((bits + (HALF - 1) + (bits >> 53 - BITS & 1)) & -2 * HALF).view(torch.float64)
    return torch.where(x.isfinite(), torch.where(rounded.abs() < SMALLEST, 0.0, rounded), x)


def check(w: Tensor, fmt: IntegerFormat, scales: Tensor | None, minimums: Tensor | None) -> int:
    """The group of these weights, if they can be fake quantized so. Raises as fake_quantize does."""
    if w.dtype is not torch.float32 or w.ndim != 2 or not w.numel():
        raise ParameterError(
            "these weights cannot be fake quantized",
            found=f"{w.dtype} {list(w.shape)}",
            needed="torch.float32 [rows, columns], none of them 0",
            do="keep the weights that train in float32, and round what the layer computes with",
        )
    rows, columns = w.shape
    group = fmt.group or columns
    if columns % group:
        raise ParameterError(
            f"these weights cannot be fake quantized to {fmt.name}",
            found=f"{columns} columns",
            needed=f"a group that divides them: {', '.join(fitting_groups(columns))}",
        )
    if scales is None and fmt.wide in ("qkv", "global"):
        raise ParameterError(
            f"these weights alone do not tell the scale of {fmt.name}", needed="the scale of all that share it"
        )
    if (minimums is not None) != (scales is not None and not fmt.symmetric):
        raise ParameterError(
            f"given ranges do not fit {fmt.name}",
            found=f"scales {'given' if scales is not None else 'none'}, minimums "
            f"{'given' if minimums is not None else 'none'}",
            needed="scales alone" if fmt.symmetric else "scales and minimums, or neither",
        )
    for name, given in (("scales", scales), ("minimums", minimums)):
        if given is None:
            continue
        if given.dtype is not torch.float32 or given.shape != (rows, columns // group) or given.device != w.device:
            raise ParameterError(
                f"the given {name} do not fit the weights",
                found=f"{given.dtype} {list(given.shape)} on {given.device}",
                needed=f"torch.float32 {[rows, columns // group]} on {w.device}",
            )
        if given.requires_grad:
            raise ParameterError(f"no gradient is computed for {name}", found="requires_grad", do="pass detach() of it")
    return group


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, fmt: IntegerFormat, scales: Tensor | None, minimums: Tensor | None) -> Tensor:
        if scales is None:
            scales, minimums = ranges(w, fmt)
        value, passes = _round(w, fmt, scales, torch.zeros_like(scales) if minimums is None else minimums)
        ctx.save_for_backward(passes)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (passes,) = ctx.saved_tensors
        return torch.where(passes, upstream, 0.0), None, None, None


def _round(w: Tensor, fmt: IntegerFormat, scales: Tensor, minimums: Tensor) -> tuple[Tensor, Tensor]:
    """Values, and where the gradient passes: both of w's shape."""
    lowest, highest = fmt.code_range
    ends = torch.tensor([[lowest], [highest]], dtype=torch.float64, device=w.device)
    reach = ends * scales.double().flatten()
    spanned = torch.cat((reach, reach + minimums.double().flatten())).abs().le(LARGEST).all(dim=0)
    scale = torch.where(spanned & (scales.flatten() >= 0), scales.flatten(), torch.nan)[:, None]
    minimum = minimums.flatten()[:, None]

    groups = w.reshape(len(scale), -1)
    steps = torch.where(scale == 0, 0.0, (groups.double() - minimum.double()) / scale.double())
    code = steps.round() + 0.0  # no -0.0: codes are whole numbers, which have one zero
    passes = ~((code < lowest) | (code > highest))
    value = code.clamp(lowest, highest).float() * scale + minimum
    return torch.where(groups.isfinite(), value, torch.nan).view_as(w), passes.view_as(w)
