"""Fake quantization in Triton: kernels/fake_quant.py, which says what is computed, bit for bit, forward and backward.

One launch each way. The forward writes, beside the values, one bit a weight: whether its gradient passes. Backward then
reads that and the upstream gradient, 8.1 bytes a weight with the one it writes.

Rejected: deciding again in the backward kernel, from the weights. It reads four bytes in place of an eighth, does the
fp64 divisions twice (consumer GPUs have one fp64 unit for 64 others), and an optimizer that had moved the weights
meanwhile would change the answer. A byte a weight, as torch keeps a mask: a quarter of the weights again, held through
the whole step. Passing everything where the scale comes from the weights: a rounded minimum puts weights of a
narrow range beyond the bounds of their own group.

The group has to be a multiple of 16 here, a whole row as well: bits of two groups do not share a byte, and loads are
wide. Groups whose length is no power of two run with idle lanes, a quarter of them for 96 and 192.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanokit.errors import ParameterError
from nanokit.kernels.fake_quant import check, ranges
from nanokit.kernels.gpu.device import fake_quant as device
from nanokit.kernels.gpu.runtime import ALIGNMENT, checked, launch
from nanokit.quant.integer import IntegerFormat

TILE = 1024  # weights that a program holds at a time
BYTES = 128  # of bits that a program of the backward kernel reads


def fake_quantize(
    w: Tensor, fmt: IntegerFormat, scales: Tensor | None = None, minimums: Tensor | None = None
) -> Tensor:
    """As kernels.fake_quant.fake_quantize. Raises ParameterError where that does, for a format that is not an integer
    one, for a group that is not a multiple of 16, and for tensors that are not contiguous or begin off a multiple of 16
    bytes."""
    group = check(w, fmt, scales, minimums)
    if not isinstance(fmt, IntegerFormat):
        raise ParameterError(
            "the Triton kernel does not round to this format", found=fmt.name, needed="an integer format",
            do="use nanokit.kernels.fake_quant, which takes tensors of any device",
        )  # fmt: skip
    if group % 16:
        raise ParameterError(
            f"the Triton kernel does not take the groups of {fmt.name}", found=group, needed="a multiple of 16"
        )
    checked("weights", w, torch.float32, (-1, -1))
    for name, given in (("scales", scales), ("minimums", minimums)):
        if given is not None:
            checked(name, given, torch.float32, (-1, -1))
    if scales is None and fmt.wide:
        scales, minimums = ranges(w, fmt)
        minimums = None if fmt.symmetric else minimums
    training = torch.is_grad_enabled() and w.requires_grad
    return _StraightThrough.apply(w, fmt, scales, minimums, group, training)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        w: Tensor,
        fmt: IntegerFormat,
        scales: Tensor | None,
        minimums: Tensor | None,
        group: int,
        training: bool,
    ) -> Tensor:
        out = torch.empty_like(w)
        bits = torch.empty(w.numel() // 8 if training else 0, dtype=torch.uint8, device=w.device)
        groups = w.numel() // group
        block = min(triton.next_power_of_2(group), TILE)
        launch(
            device.quantize,
            (triton.cdiv(groups, TILE // block),),
            w,
            w if scales is None else scales,
            w if minimums is None else minimums,
            out,
            bits if training else out,
            groups,
            group,
            *fmt.code_range,
            fmt.symmetric,
            scales is not None,
            training,
            TILE // block,
            block,
        )
        ctx.save_for_backward(bits)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        upstream = upstream.contiguous()
        if upstream.data_ptr() % ALIGNMENT:
            upstream = upstream.clone()
        checked("the gradient", upstream, torch.float32, (-1, -1))
        out = torch.empty_like(upstream)
        launch(device.pass_through, (triton.cdiv(len(bits), BYTES),), upstream, bits, out, out.numel(), BYTES)
        return out, None, None, None, None, None
