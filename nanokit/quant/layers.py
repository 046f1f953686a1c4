"""Layers of quantized weights: `QuantLinear` keeps codes, `FakeQuantLinear` trains the weights they are made of.

What they share with layers of other products (quant/conv.py) is in their bases, `Quantized` and `FakeQuantized`: the
weights are a matrix [rows, columns] there, whatever their shape.

Both compute with the same numbers, bit for bit: codes times scales in fp32, turned into the type of the inputs. So a
layer that was trained (prepared), the one that is kept (converted) and what a kernel packs are one layer, and a
difference between them is a fault.

Scales stay fp32 whatever the module is cast to: `model.bfloat16()` rounds parameters, and a rounded scale would move
every weight of its group. Codes take a byte each here; quant/storage.py packs them for files and backends for products.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils import parametrize

from nanokit.errors import ModelFileError, ParameterError
from nanokit.kernels.fake_quant import fake_quantize, quantize
from nanokit.quant.pruning import parameter_of, zeros_of
from nanokit.quant.qtensor import QTensor
from nanokit.quant.weight_format import WeightFormat, weight_format

KEPT_FP32 = ("scales", "minimums")


class _Fp32Ranges(nn.Module):
    """A layer whose scales and minimums keep their bits when it is cast, and move when it is moved."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: self._buffers.get(name) for name in KEPT_FP32}
        super()._apply(fn, recurse)
        for name, kept in before.items():
            now = self._buffers.get(name)
            if kept is not None and now is not None and now.dtype != kept.dtype:
                self._buffers[name] = kept.to(now.device)
        return self


class Quantized(_Fp32Ranges):
    """Quantized weights, a matrix [rows, columns], and a bias; frozen. Its state: `codes` int8, `scales` and `minimums`
    fp32, the name of the `format` as bytes, `table` where the format has one, `bias`."""

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None
    table: Tensor | None
    format: Tensor
    bias: nn.Parameter | None

    def __init__(self, q: QTensor, bias: Tensor | None = None) -> None:
        """q: of two dimensions, taken over without a copy. bias: [rows], taken over as a parameter without gradient."""
        super().__init__()
        self.format_name, self.code_range, self.tensor_scale = q.format, q.code_range, q.tensor_scale
        self.nested = q.nested  # how a file keeps the scales; it refuses one that a loaded state does not fit
        for name, values in (("codes", q.codes), ("scales", q.scales), ("minimums", q.minimums), ("table", q.table)):
            self.register_buffer(name, None if values is None else torch.from_numpy(np.array(values)))
        self.register_buffer("format", torch.tensor(list(q.format.encode()), dtype=torch.uint8))
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def matrix(self) -> Tensor:
        """The weights, fp32 [rows, columns], made anew: multiplied, then added, each rounded once, as QTensor does."""
        codes = self.codes if self.table is None else self.table[self.codes.long()]
        values = codes.float().view(*self.scales.shape, -1).mul_(self.scales[..., None])
        if self.minimums is not None:
            values.add_(self.minimums[..., None])
        return values.view(self.codes.shape)

    @property
    def weight(self) -> Tensor:
        """The weights in the shape of their product."""
        return self.matrix

    def forward(self, x: Tensor) -> Tensor:
        """The product and the bias, in the type of x."""
        return self._product(x, self.weight.to(x.dtype))

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def qtensor(self) -> QTensor:
        """The weights as backends and files take them."""
        minimums, table = (None if part is None else part.cpu().numpy() for part in (self.minimums, self.table))
        return QTensor(
            format=self.format_name,
            shape=tuple(self.codes.shape),
            codes=self.codes.cpu().numpy(),
            scales=self.scales.cpu().numpy(),
            minimums=minimums,
            group=self.codes.shape[1] // self.scales.shape[1],
            table=table,
            code_range=self.code_range,
            tensor_scale=self.tensor_scale,
            nested=self.nested,
        )

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        found = state.get(prefix + "format")
        if found is not None and (name := bytes(found.tolist()).decode("utf-8", "replace")) != self.format_name:
            raise ModelFileError(
                f"the state of {prefix.removesuffix('.') or 'this layer'} is of another weight format",
                found=name,
                needed=self.format_name,
                do="apply the policy that the state was saved with, then load it",
            )
        super()._load_from_state_dict(state, prefix, *rest)


class QuantLinear(Quantized):
    """A Linear layer of quantized weights [out, in]: x [..., in] to [..., out]."""

    def __init__(self, q: QTensor, bias: Tensor | None = None) -> None:
        super().__init__(q, bias)
        self.out_features, self.in_features = q.shape

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.format_name}"


class FakeQuantized(_Fp32Ranges):
    """Weights that train, rounded to a format's grid in every forward pass. `weight` and `bias` are the parameters of
    the layer that it was made of: an optimizer that has them goes on. Weights that were pruned (quant/pruning.py) stay
    zero. enabled: False computes with the weights as they are, to compare times and losses."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    scales: Tensor | None
    minimums: Tensor | None

    def __init__(self, layer: nn.Linear | nn.Conv2d, form: WeightFormat, ranges: QTensor | None = None) -> None:
        """ranges: a quantized form of the weights whose scales and minimums stay as they are; None: those that the
        weights give, in every pass. Raises ParameterError as fake_quantize does."""
        super().__init__()
        self.weight, self.bias, self.form = parameter_of(layer), cast(nn.Parameter | None, layer.bias), form
        self.enabled = True
        self.tensor_scale = 1.0 if ranges is None else ranges.tensor_scale
        for name in KEPT_FP32:
            values = None if ranges is None else getattr(ranges, name)
            self.register_buffer(name, None if values is None else torch.from_numpy(np.array(values)))
        if (zeros := zeros_of(layer)) is not None:
            parametrize.register_parametrization(self, "weight", zeros)

    def rounded(self) -> Tensor:
        """The weights on the grid, fp32, in their own shape, differentiable in `weight`."""
        weight = self.weight
        return fake_quantize(weight.flatten(1), self.form, self.scales, self.minimums).view(weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        """The product and the bias, in the type of x."""
        weight = self.rounded() if self.enabled else self.weight
        return self._product(x, weight.to(x.dtype))

    def converted(self, name: str = "a matrix") -> Quantized:
        """What is kept of it. Raises ModelFileError, with the name, for weights that are not finite."""
        matrix = self.weight.flatten(1)
        q = quantize(matrix, self.form, self.scales, self.minimums, name=name, tensor_scale=self.tensor_scale)
        return self._kept(q).to(matrix.device)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def _kept(self, q: QTensor) -> Quantized:
        raise NotImplementedError

    @property
    def grid_name(self) -> str:
        """The format, and whether its scales stay as they are."""
        return self.form.name + (", fixed scales" if self.scales is not None else "")


class FakeQuantLinear(FakeQuantized):
    """A Linear layer whose weights train on a grid: x [..., in] to [..., out]."""

    def __init__(self, layer: nn.Linear, form: WeightFormat, ranges: QTensor | None = None) -> None:
        super().__init__(layer, form, ranges)
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, self.bias)

    def _kept(self, q: QTensor) -> QuantLinear:
        return QuantLinear(q, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.grid_name}"


def format_of(layer: nn.Module) -> WeightFormat | None:
    """The format of a layer's weights, None for a plain one. Raises ParameterError for a file's own format that nothing
    can be quantized to."""
    if isinstance(layer, FakeQuantized):
        return layer.form
    if isinstance(layer, Quantized):
        try:
            return weight_format(layer.format_name)
        except ParameterError as error:
            raise ParameterError(
                f"weights cannot be rounded to {layer.format_name} here", found=error.found, needed=error.needed
            ) from error
    return None
