"""Fake quantization: weights rounded to a format's grid while they train, the contract that every backend follows.

    scale, minimum   from the group's own weights (nanokit.quant), or given: learned, searched, clipped
    code  = rint((w - minimum) / scale)          of real numbers, to even; 0 where the scale is 0
    value = clamp(code) * scale + minimum        fp32, each operation rounded once
    dw    = dvalue where lowest <= code <= highest, 0 beyond

so for integers; the formats of fixed blocks have their owners' codes in place of `rint`, or the nearest of a table.

Forward: bit for bit what weight_format(name).quantize(w).dequantize() gives, hence what a packed kernel multiplies by,
in fp32 whatever the type of w. A model that trains against anything else learns to fit a grid that it will not be put
on.

Backward: the straight-through estimator (Bengio et al. 2013), in an autograd function of its own. `code` is the
rounded code before it is clamped. A weight AT a bound lets the gradient pass: every group whose scale comes from its
own weights has one there, and it would never move again. That is why clamp's own derivative is not used: which value
it takes at the bound is torch's to choose, and has been chosen both ways. Scales and minimums get no gradient: those
from w count as constants, and given ones must not ask for one. No second derivatives.

What is beyond, in a format of fixed blocks? With given scales what the grid, continued by its outermost step, would
give a code that is not there. With scales of their own: nothing. There a weight ends beyond its grid only because its
scale was rounded (mxfp4's to a power of two) or has a sign (q4_0's last code is 7 on one side), never because anyone
asked for it to be clipped; the largest weights of such groups would stand still for ever.

What is not finite: a training step cannot stop to look, for that would wait for the GPU. So nothing is refused by
value; it comes out as NaN, and the loss says so. NaN are: a whole group that holds such a weight or whose range is
beyond fp32, where the scale comes from it (nvfp4, nf4-dq: the whole matrix, whose peak or mean peak is in every scale);
with given scales a weight that is not finite, and a group whose scale is not finite or reaches beyond fp32, or negative
in an integer format. The gradient passes wherever the code is not a number.

Rejected: clamp before rint (a weight at 7.4 steps would count as beyond a bound of 7, and rounds to it), and dividing
in fp32 where it is not proven to give the same codes (kernels/rounding.py says where it is).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanokit.errors import ParameterError
from nanokit.kernels import rounding
from nanokit.kernels.rounding import RoundedTo
from nanokit.quant.integer import IntegerFormat
from nanokit.quant.qtensor import QTensor
from nanokit.quant.weight_format import WeightFormat

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def fake_quantize(w: Tensor, fmt: WeightFormat, scales: Tensor | None = None, minimums: Tensor | None = None) -> Tensor:
    """The weights on the format's grid: fp32 [rows, columns], differentiable in w.

    w: fp32, bf16 or fp16 [rows, columns]. scales, and minimums where the format has them: fp32 [rows, columns / group],
    in place of those that the weights give. Raises ParameterError for other types and shapes, columns that the group
    does not divide, and scales or minimums that ask for a gradient.
    """
    group = check(w, fmt, scales, minimums)
    return _StraightThrough.apply(w, fmt, group, scales, minimums)


def quantize(
    w: Tensor,
    fmt: WeightFormat,
    scales: Tensor | None = None,
    minimums: Tensor | None = None,
    *,
    name: str = "a matrix",
    tensor_scale: float = 1.0,
) -> QTensor:
    """The same weights as codes and scales: `.dequantize()` has the bits of `fake_quantize`, of the same arguments.

    name: what messages call the weights. tensor_scale: the factor that given scales have in common. Raises
    ParameterError as `fake_quantize` does, and ModelFileError for weights that are not finite.
    """
    group = check(w, fmt, scales, minimums)
    weights = w.detach().float().cpu()
    if scales is None or not bool(weights.isfinite().all()):
        return fmt.quantize(weights.numpy(), name)
    scales, minimums = scales.cpu() + 0.0, None if minimums is None else minimums.cpu()
    columns = scales.reshape(-1, 1), None if minimums is None else minimums.reshape(-1, 1)
    codes = rounding.given_codes(weights.reshape(-1, group), _known(fmt), *columns)
    return QTensor(
        format=fmt.name,
        shape=tuple(w.shape),
        codes=codes.view(w.shape).numpy(),
        scales=scales.numpy(),
        minimums=None if minimums is None else minimums.numpy().copy(),
        group=group,
        table=fmt.table,
        code_range=fmt.code_range,
        tensor_scale=tensor_scale,
    )


def ranges(w: Tensor, fmt: IntegerFormat) -> tuple[Tensor, Tensor]:
    """Scales and minimums that the weights give, fp32 [rows, columns / group], of eleven bits; minimums are zeros where
    the format is symmetric, scales NaN or infinite where it cannot span the group. Of qkv and global formats those for
    this matrix alone: put the matrices that share a scale one after the other."""
    groups = w.detach().float().unflatten(1, (-1, fmt.group or w.shape[1]))
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    if fmt.wide:
        low, high = low.amin().expand_as(low), high.amax().expand_as(high)
    return rounding.ranges(low, high, fmt)


def check(w: Tensor, fmt: WeightFormat, scales: Tensor | None, minimums: Tensor | None) -> int:
    """The group of these weights, if they can be fake quantized so. Raises as fake_quantize does."""
    if w.dtype not in FLOATS or w.ndim != 2 or not w.numel():
        raise ParameterError(
            "these weights cannot be fake quantized",
            found=f"{w.dtype} {list(w.shape)}",
            needed="torch.float32, bfloat16 or float16 [rows, columns], none of them 0",
        )
    rows, columns = w.shape
    group = fmt.group_of(columns)
    if scales is None and fmt.scope in ("qkv", "global"):
        raise ParameterError(
            f"these weights alone do not tell the scale of {fmt.name}", needed="the scale of all that share it"
        )
    has_minimum = rounding.has_minimum(_known(fmt))
    if (minimums is not None) != (scales is not None and has_minimum):
        raise ParameterError(
            f"given ranges do not fit {fmt.name}",
            found=f"scales {'given' if scales is not None else 'none'}, minimums "
            f"{'given' if minimums is not None else 'none'}",
            needed="scales and minimums, or neither" if has_minimum else "scales alone",
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


def _known(fmt: WeightFormat) -> RoundedTo:
    if not isinstance(fmt, RoundedTo):
        raise ParameterError("fake quantization does not know this kind of format", found=fmt.name)
    return fmt


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, w: Tensor, fmt: WeightFormat, group: int, scales: Tensor | None, minimums: Tensor | None
    ) -> Tensor:
        found = rounding.rounded(w.reshape(-1, group), _known(fmt), scales, minimums)
        ctx.save_for_backward(*([] if found.passes is None else [found.passes.view_as(w)]))
        return found.values.view(w.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        for passes in ctx.saved_tensors:
            upstream = torch.where(passes, upstream, 0.0)
        return upstream, None, None, None, None
