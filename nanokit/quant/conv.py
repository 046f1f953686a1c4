"""Conv2d layers of quantized weights: the matrix of a convolution is [out channels, in channels / groups · kh · kw].

A row is all that one output channel is made of, in the order in which the weights lie: a group of columns goes through
the places of the kernel first, then on to the next input channel, and may begin in the middle of a kernel. So a 3 x 3
convolution of 16 channels has 144 columns and takes g16, g48 or channel; the first one, of a grey picture, has nine of
them, and so has a depthwise one: channel, tensor, or g9, which is channel by another name.

Padding and the rest stay what torch makes of them; this is no kernel of its own.
"""

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.nn.functional import conv2d, pad

from nanokit.quant.layers import FakeQuantized, Quantized
from nanokit.quant.qtensor import QTensor
from nanokit.quant.weight_format import WeightFormat

Pair = tuple[int, int]


@dataclass(frozen=True)
class Convolution:
    """What a Conv2d does beside its numbers. shape: of the weights, [out, in / groups, kh, kw]; padding: rows and
    columns on either side, or "same" or "valid"; mode: what is padded with, in torch's words."""

    shape: tuple[int, ...]
    stride: Pair
    padding: str | Pair
    dilation: Pair
    groups: int
    mode: str

    @staticmethod
    def of(layer: nn.Conv2d) -> "Convolution":
        """That of a layer."""
        padding = layer.padding if isinstance(layer.padding, str) else cast(Pair, layer.padding)
        stride, dilation = cast(Pair, layer.stride), cast(Pair, layer.dilation)
        return Convolution(tuple(layer.weight.shape), stride, padding, dilation, layer.groups, layer.padding_mode)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, in, h, w] or [in, h, w] to [(n,) out, h', w']."""
        if self.mode == "zeros":
            return conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        x = pad(x, self._edges(), mode=self.mode)
        return conv2d(x, weight, bias, self.stride, 0, self.dilation, self.groups)

    def _edges(self) -> list[int]:
        """Left, right, top and bottom, as torch counts them: of "same" the larger half is on the right."""
        edges: list[int] = []
        for side in (1, 0):
            if isinstance(self.padding, str):
                both = self.dilation[side] * (self.shape[2 + side] - 1) if self.padding == "same" else 0
                edges += [both // 2, both - both // 2]
            else:
                edges += [self.padding[side]] * 2
        return edges

    def __str__(self) -> str:
        facts = f"{self.shape[1] * self.groups}, {self.shape[0]}, kernel_size={self.shape[2:]}, stride={self.stride}"
        return f"{facts}, padding={self.padding}, dilation={self.dilation}, groups={self.groups}, {self.mode}"


class QuantConv2d(Quantized):
    """A Conv2d of quantized weights."""

    def __init__(self, q: QTensor, bias: Tensor | None, convolution: Convolution) -> None:
        super().__init__(q, bias)
        self.convolution = convolution

    @property
    def weight(self) -> Tensor:
        """fp32 [out, in / groups, kh, kw], made anew."""
        return self.matrix.view(self.convolution.shape)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.convolution(x, weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.convolution}, bias={self.bias is not None}, {self.format_name}"


class FakeQuantConv2d(FakeQuantized):
    """A Conv2d whose weights train on a grid."""

    def __init__(self, layer: nn.Conv2d, form: WeightFormat, ranges: QTensor | None = None) -> None:
        super().__init__(layer, form, ranges)
        self.convolution = Convolution.of(layer)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.convolution(x, weight, self.bias)

    def _kept(self, q: QTensor) -> QuantConv2d:
        return QuantConv2d(q, self.bias, self.convolution)

    def extra_repr(self) -> str:
        return f"{self.convolution}, bias={self.bias is not None}, {self.grid_name}"
