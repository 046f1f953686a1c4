"""Magnitude pruning: the smallest weights of each layer become zero, and stay zero while it trains and is rounded.

    quant.prune(model, 0.5)            half of the weights of every Linear and Conv2d layer are zero from now on
    quant.prepare(model, "int4-sym-channel")    …and while it trains on a grid
    quant.convert(model)               …and in the codes

A pruned layer computes with `where(pruned, 0, weight)`, by torch's own parametrization: whatever an optimizer does to
the parameter beneath (stale momentum, weight decay), the layer never sees it, nor does who reads `layer.weight`. The
parameter stays the same object. `torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")` ends it, zeros
written into the weights.

A grid has to hold zero, else pruned weights would come back as something else: formats with a minimum (int4-asym-…,
q4_1, q5_1) are refused for pruned layers. All others map 0 to 0 exactly.

Zeros save no byte and no time here: codes of four bits are as long for a zero, and the kernels multiply by it. What is
shown is what they cost in points.

Rejected: setting weights to zero once (the next step of training moves them), masks on gradients (momentum from before
moves them still), torch.nn.utils.prune (its mask hangs on the layer that `prepare` replaces), and one threshold for all
layers, which empties those whose weights are small as such (Han et al. 2015 prune layer by layer as well).
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from nanokit.errors import ParameterError

Prunable = nn.Linear | nn.Conv2d


class Zeros(nn.Module):
    """Which weights of a layer are zero, whatever their parameter says."""

    pruned: Tensor

    def __init__(self, pruned: Tensor) -> None:
        """pruned: bool, of the shape of the weights."""
        super().__init__()
        self.register_buffer("pruned", pruned)

    def forward(self, weight: Tensor) -> Tensor:
        return weight.masked_fill(self.pruned, 0.0)


def prune(module: nn.Module, share: float) -> nn.Module:
    """Make this share of the weights of every Linear and Conv2d layer zero, the smallest first; returns `module`.

    Each layer keeps at least one weight; one that is tied to an embedding stays as it is. Called again with a larger
    share it goes on from the zeros that there are. Raises ParameterError, before anything changes, for a share outside
    0 … 1 (without 1), where there is no such layer, and for weights that are not finite or not the layer's own.
    """
    if not 0 <= share < 1:
        raise ParameterError("not a share of the weights", found=share, needed="at least 0 and less than 1")
    tied = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    found = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, Prunable) and id(parameter_of(layer, name)) not in tied
    }
    if not found:
        raise ParameterError(
            "nothing to prune",
            found="no Linear or Conv2d layer that is neither quantized, prepared nor an embedding as well",
            do="prune first, then call prepare or apply",
        )
    if strange := [name or "this layer" for name, layer in found.items() if not bool(layer.weight.isfinite().all())]:
        raise ParameterError("weights that are not finite cannot be pruned", found=", ".join(strange))
    for layer in found.values():
        zeros = zeros_of(layer)
        smallest = _smallest(layer.weight.detach(), share)
        if zeros is None:
            parametrize.register_parametrization(layer, "weight", Zeros(smallest))
        else:
            zeros.pruned |= smallest
    return module


def zeros_of(layer: nn.Module) -> Zeros | None:
    """The zeros of a pruned layer, None of any other."""
    if not parametrize.is_parametrized(layer, "weight"):
        return None
    found = layer.parametrizations["weight"]  # type: ignore[index]
    return found[0] if len(found) == 1 and isinstance(found[0], Zeros) else None


def parameter_of(layer: nn.Module, name: str = "this layer") -> nn.Parameter:
    """What trains of a layer's weights. Raises ParameterError for a layer whose weights something else makes."""
    if zeros_of(layer) is not None:
        return layer.parametrizations["weight"].original  # type: ignore[union-attr,index]
    weight = layer._parameters.get("weight")
    if weight is None:
        raise ParameterError(
            f"the weights of {name or 'this layer'} are made by something else in every pass",
            found="a parametrization, or torch.nn.utils.prune or weight_norm",
            needed="weights that are a parameter, or pruned by nanokit.quant.prune",
            do="make them permanent first, with the remove function of what made them",
        )
    return weight


def _smallest(weight: Tensor, share: float) -> Tensor:
    """bool, true for so many of the smallest; of equal ones for the first."""
    count = min(round(share * weight.numel()), weight.numel() - 1)
    order = weight.abs().flatten().sort(stable=True).indices
    pruned = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
    pruned[order[:count]] = True
    return pruned.view(weight.shape)
