"""LoRA on frozen weights, quantized or not, and what becomes of it when it is merged.

    y = W x + alpha / r · B A x          A [r, in], B [out, r] train; W does not          (Hu et al. 2021)

in peft's conventions: A kaiming-uniform with a = √5, B zero, so that training starts from the model as it is.

Merging is where it fails. A quantized W lies on its grid, a trained difference is mostly smaller than half a step, and
W + difference rounded to the grid again is W where it was: the adapter is gone, or what is left of it is noise. `merge`
does that rounding, so that it can be measured; the unmerged layers are kept, and `unmerge` goes back exactly. `on_grid`
is the remedy: the sum is rounded in every pass of training, with the straight-through estimator, and what is merged is
bit for bit what was trained. It learns soonest around a *prepared* layer, whose weights are still the unrounded ones: a
weight that lies on the grid has half a step to go before its code changes, one in between has less.

Rejected: subtracting the difference again to unmerge, as one does with floats: after a rounding it does not go back.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from nanokit.errors import ParameterError
from nanokit.kernels.fake_quant import fake_quantize, quantize
from nanokit.quant.layers import FakeQuantLinear, QuantLinear, format_of
from nanokit.quant.modules import located
from nanokit.quant.pruning import zeros_of


class LoraLinear(nn.Module):
    """A frozen layer and an adapter. base: nn.Linear, QuantLinear or FakeQuantLinear; merged: what stands in for both,
    or None."""

    def __init__(
        self,
        base: nn.Linear | QuantLinear | FakeQuantLinear,
        r: int,
        alpha: float,
        *,
        on_grid: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        """r: rank, 1 to the smaller side; alpha: the adapter counts alpha / r; on_grid: train the rounded sum, for a
        QuantLinear; around a FakeQuantLinear it is always that. Raises ParameterError."""
        super().__init__()
        self.out_features, self.in_features = base.out_features, base.in_features
        if not 1 <= r <= min(self.out_features, self.in_features):
            raise ParameterError(
                "not a rank of this layer", found=r, needed=f"1 to {min(self.out_features, self.in_features)}"
            )
        if zeros_of(base) is not None:
            raise ParameterError(
                "an adapter would bring pruned weights back",
                found="a pruned layer",
                needed="one whose weights may all change",
                do="train the pruned weights themselves, or end the pruning first",
            )
        self.form = format_of(base)
        if self.form is not None and self.form.scope in ("qkv", "global"):
            raise ParameterError(
                f"an adapter cannot be merged into {self.form.name}", found="a scale that other layers share"
            )
        if on_grid and self.form is None:
            raise ParameterError("a plain layer has no grid to train on", do="quantize it first, or leave out on_grid")
        self.base, self.scaling = base.requires_grad_(False), alpha / r
        self.on_grid = on_grid or isinstance(base, FakeQuantLinear)
        device = base.weight.device
        bound = math.sqrt(3) * math.sqrt(2 / (1 + 5)) / math.sqrt(self.in_features)  # kaiming-uniform, a = √5
        uniform = torch.rand(r, self.in_features, generator=generator).mul_(2).sub_(1).mul_(bound)
        self.lora_A = nn.Parameter(uniform.to(device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, r, device=device))
        self.merged: nn.Module | None = None

    def difference(self) -> Tensor:
        """What the adapter adds to the weights, fp32 [out, in]."""
        return self.scaling * (self.lora_B @ self.lora_A)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        if self.merged is not None:
            return self.merged(x)
        if self.on_grid:
            assert self.form is not None
            weight = fake_quantize(self.base.weight + self.difference(), self.form, *self._ranges())
            return linear(x, weight.to(x.dtype), self.base.bias)
        low = linear(linear(x, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype))
        return self.base(x) + self.scaling * low

    @torch.no_grad()
    def sum(self, name: str = "a matrix") -> nn.Linear | QuantLinear:
        """Weights and adapter in one layer, rounded to the base's format if it has one. Raises ModelFileError, with the
        name, for weights that are not finite."""
        weight = self.base.weight.float() + self.difference()
        if self.form is not None:
            tensor_scale = self.base.tensor_scale if isinstance(self.base, FakeQuantLinear) else 1.0
            q = quantize(weight, self.form, *self._ranges(), name=name, tensor_scale=tensor_scale)
            return QuantLinear(q, self.base.bias).to(weight.device)
        made = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        made.weight = nn.Parameter(weight.to(self.base.weight.dtype), requires_grad=False)
        made.register_parameter("bias", self.base.bias)
        return made

    def _ranges(self) -> tuple[Tensor | None, Tensor | None]:
        """Scales and minimums that a prepared base keeps fixed; None: those of the sum."""
        base = self.base
        return (base.scales, base.minimums) if isinstance(base, FakeQuantLinear) else (None, None)

    def extra_repr(self) -> str:
        return f"r={self.lora_A.shape[0]}, scaling={self.scaling:g}, on_grid={self.on_grid}"


def add_lora(
    module: nn.Module,
    r: int = 8,
    alpha: float = 16.0,
    *,
    targets: Sequence[str] = (),
    on_grid: bool = False,
    seed: int = 0,
) -> list[nn.Parameter]:
    """Freeze a module and put adapters around its quantized or prepared layers, or around its Linear ones where it has
    none; returns the parameters that train, A and B of each layer in turn.

    targets: last parts of names ("q_proj", "down_proj"); empty is every layer. seed: of A. Raises ParameterError where
    no layer is found, and as LoraLinear does; nothing is changed then.
    """
    if any(isinstance(layer, LoraLinear) for layer in module.modules()):
        raise ParameterError("this module has adapters already", do="add them once, with all targets")
    found: list[Any] = [*located(module, QuantLinear), *located(module, FakeQuantLinear)]
    found = found or [*located(module, nn.Linear)]
    chosen = [each for each in found if not targets or each[0].rpartition(".")[2] in targets]
    if not chosen:
        raise ParameterError(
            "no layer for an adapter", found=", ".join(targets) or "no linear layers", needed="names of linear layers"
        )
    generator = torch.Generator().manual_seed(seed)
    made = [LoraLinear(layer, r, alpha, on_grid=on_grid, generator=generator) for _, layer, _ in chosen]
    module.requires_grad_(False)
    for layer, (_, _, holders) in zip(made, chosen, strict=True):
        for parent, attribute in holders:
            setattr(parent, attribute, layer)
    return [parameter for layer in made for parameter in (layer.lora_A, layer.lora_B)]


def merge(module: nn.Module) -> nn.Module:
    """Compute with the sums of weights and adapters from now on, rounded where the weights are; returns `module`.
    Raises ParameterError where there is no adapter, ModelFileError where one is not finite."""
    made = [(layer, layer.sum(name)) for name, layer in _adapters(module)]
    for layer, together in made:
        layer.merged = together
    return module


def unmerge(module: nn.Module) -> nn.Module:
    """Undo `merge`, exactly; returns `module`. Raises ParameterError where there is no adapter."""
    for _, layer in _adapters(module):
        layer.merged = None
    return module


def _adapters(module: nn.Module) -> list[tuple[str, LoraLinear]]:
    found = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, LoraLinear)]
    if not found:
        raise ParameterError("this module has no adapters", do="call add_lora first")
    return found
