"""Linear layers of quantized weights: `QuantLinear` keeps codes, `FakeQuantLinear` trains the weights they are made of.

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

from nanokit.errors import ModelFileError, ParameterError
from nanokit.kernels.fake_quant import fake_quantize, quantize
from nanokit.quant.qtensor import QTensor
from nanokit.quant.weight_format import WeightFormat, weight_format

KEPT_FP32 = ("scales", "minimums")


class _Fp32Ranges(nn.Module):
    """A layer whose scales and minimums keep their bits when it is cast, and move when it is moved."""

    in_features: int
    out_features: int

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: self._buffers.get(name) for name in KEPT_FP32}
        super()._apply(fn, recurse)
        for name, kept in before.items():
            now = self._buffers.get(name)
            if kept is not None and now is not None and now.dtype != kept.dtype:
                self._buffers[name] = kept.to(now.device)
        return self


class QuantLinear(_Fp32Ranges):
    """Quantized weights [out, in] and a bias; frozen. Its state: `codes` int8, `scales` and `minimums` fp32, the name
    of the `format` as bytes, `table` where the format has one, `bias`."""

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None
    table: Tensor | None
    format: Tensor

    def __init__(self, q: QTensor, bias: Tensor | None = None) -> None:
        """q: of two dimensions, taken over without a copy. bias: [out], taken over as a parameter without gradient."""
        super().__init__()
        self.out_features, self.in_features = q.shape
        self.format_name, self.code_range, self.tensor_scale = q.format, q.code_range, q.tensor_scale
        for name, values in (("codes", q.codes), ("scales", q.scales), ("minimums", q.minimums), ("table", q.table)):
            self.register_buffer(name, None if values is None else torch.from_numpy(np.array(values)))
        self.register_buffer("format", torch.tensor(list(q.format.encode()), dtype=torch.uint8))
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The weights, fp32 [out, in], made anew: multiplied, then added, each rounded once, as QTensor does."""
        codes = self.codes if self.table is None else self.table[self.codes.long()]
        values = codes.float().view(*self.scales.shape, -1).mul_(self.scales[..., None])
        if self.minimums is not None:
            values.add_(self.minimums[..., None])
        return values.view(self.codes.shape)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out], in the type of x."""
        return linear(x, self.weight.to(x.dtype), self.bias)

    def qtensor(self) -> QTensor:
        """The weights as backends and files take them."""
        minimums, table = (None if part is None else part.cpu().numpy() for part in (self.minimums, self.table))
        return QTensor(
            format=self.format_name,
            shape=(self.out_features, self.in_features),
            codes=self.codes.cpu().numpy(),
            scales=self.scales.cpu().numpy(),
            minimums=minimums,
            group=self.in_features // self.scales.shape[1],
            table=table,
            code_range=self.code_range,
            tensor_scale=self.tensor_scale,
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

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.format_name}"


class FakeQuantLinear(_Fp32Ranges):
    """Weights that train, rounded to a format's grid in every forward pass. `weight` and `bias` are the parameters of
    the layer that it was made of: an optimizer that has them goes on. enabled: False computes with the weights as they
    are, to compare times and losses."""

    weight: nn.Parameter
    scales: Tensor | None
    minimums: Tensor | None

    def __init__(self, layer: nn.Linear, form: WeightFormat, ranges: QTensor | None = None) -> None:
        """ranges: a quantized form of the weights whose scales and minimums stay as they are; None: those that the
        weights give, in every pass. Raises ParameterError as fake_quantize does."""
        super().__init__()
        self.out_features, self.in_features = layer.weight.shape
        self.weight, self.bias, self.form = cast(nn.Parameter, layer.weight), layer.bias, form
        self.enabled = True
        self.tensor_scale = 1.0 if ranges is None else ranges.tensor_scale
        for name in KEPT_FP32:
            values = None if ranges is None else getattr(ranges, name)
            self.register_buffer(name, None if values is None else torch.from_numpy(np.array(values)))

    def rounded(self) -> Tensor:
        """The weights on the grid, fp32 [out, in], differentiable in `weight`."""
        return fake_quantize(self.weight, self.form, self.scales, self.minimums)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out], in the type of x."""
        weight = self.rounded() if self.enabled else self.weight
        return linear(x, weight.to(x.dtype), self.bias)

    def converted(self, name: str = "a matrix") -> QuantLinear:
        """What is kept of it. Raises ModelFileError, with the name, for weights that are not finite."""
        q = quantize(self.weight, self.form, self.scales, self.minimums, name=name, tensor_scale=self.tensor_scale)
        return QuantLinear(q, self.bias).to(self.weight.device)

    def extra_repr(self) -> str:
        fixed = ", fixed scales" if self.scales is not None else ""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.form.name}{fixed}"


def format_of(layer: nn.Module) -> WeightFormat | None:
    """The format of a layer's weights, None for a plain one. Raises ParameterError for a file's own format that nothing
    can be quantized to."""
    if isinstance(layer, FakeQuantLinear):
        return layer.form
    if isinstance(layer, QuantLinear):
        try:
            return weight_format(layer.format_name)
        except ParameterError as error:
            raise ParameterError(
                f"weights cannot be rounded to {layer.format_name} here", found=error.found, needed=error.needed
            ) from error
    return None
