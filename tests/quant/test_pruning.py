"""Magnitude pruning: the smallest weights are zero, and nothing that trains, rounds or casts them brings
them back."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from nanokit import quant
from nanokit.errors import ParameterError

X = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(1))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3), nn.Flatten(), nn.Linear(64, 10))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 3) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.999])
def test_the_smallest_of_each_layer(share: float) -> None:
    """So many, and no larger one before a smaller; the others keep their bits; one weight is always left."""
    before, model = net(), quant.prune(net(), share)
    for index in (0, 2, 4):
        old, new = before[index].weight, model[index].weight
        gone = new == 0
        assert int(gone.sum()) == min(round(share * old.numel()), old.numel() - 1)
        assert torch.equal(new[~gone], old[~gone])
        if gone.any():
            assert old[gone].abs().max() <= old[~gone].abs().min()


@pytest.mark.parametrize("policy", ["int4-sym-channel", "int4-sym-tensor", "int8-sym-tensor+search", "nf4;0=keep"])
def test_zeros_stay_while_it_trains_and_is_rounded(policy: str) -> None:
    """Momentum from before the pruning and weight decay move the parameters beneath, in plain and prepared layers; the
    layers, what is converted and the codes never see it."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    steps(model, optimizer)
    if "nf4" in policy:  # blocks of 64
        model, policy = nn.Sequential(model[4]), "nf4"
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    else:
        inputs = X
    quant.prune(model, 0.6)
    layers = [each for each in model if hasattr(each, "weight")]
    gone = [layer.weight == 0 for layer in layers]
    parameters = [layer.parametrizations.weight.original for layer in layers]
    assert {id(each) for each in parameters} <= {id(each) for each in optimizer.param_groups[0]["params"]}

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    train()
    assert any(bool(p[g].abs().max() > 0) for p, g in zip(parameters, gone, strict=True))
    assert all(torch.equal(layer.weight == 0, g) for layer, g in zip(layers, gone, strict=True))
    quant.prepare(model, policy)
    layers = [each for each in model if hasattr(each, "weight")]
    assert [layer.parametrizations.weight.original for layer in layers] == parameters
    train()
    out = model(inputs)
    assert all(bool((layer.rounded()[g] == 0).all()) for layer, g in zip(layers, gone, strict=True))
    quant.convert(model)
    assert torch.equal(model(inputs), out)
    for layer, g in zip([each for each in model if hasattr(each, "weight")], gone, strict=True):
        assert np.count_nonzero(layer.qtensor().dequantize()[g.flatten(1).numpy()]) == 0


def test_gradually_and_for_good() -> None:
    """A larger share keeps the zeros that there are, a smaller one brings none back; the mask goes through files, casts
    and copies; removing it leaves the zeros."""
    model = quant.prune(net(), 0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    first = model[2].weight == 0
    steps(model, optimizer)
    quant.prune(model, 0.6)
    second = model[2].weight == 0
    assert bool(second[first].all())
    assert int(second.sum()) == round(0.6 * second.numel())
    quant.prune(model, 0.1)
    assert torch.equal(model[2].weight == 0, second)
    other = quant.prune(net(), 0.0)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other[2].weight, model[2].weight)
    other = copy.deepcopy(model).bfloat16()
    assert torch.equal(other[2].weight == 0, second)
    parametrize.remove_parametrizations(model[2], "weight")
    assert type(model[2]) is nn.Conv2d
    assert torch.equal(model[2].weight == 0, second)


def test_what_is_refused() -> None:
    """Before any layer is pruned; a head that is an embedding as well would take the words with it."""
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(ParameterError, match=r"(?s)not a share.*less than 1"):
            quant.prune(net(), share)
    with pytest.raises(ParameterError, match="nothing to prune"):
        quant.prune(quant.prepare(net(), "int4-sym-tensor"), 0.5)
    model = net()
    with torch.no_grad():
        model[4].weight[0, 0] = torch.nan
    with pytest.raises(ParameterError, match=r"(?s)not finite cannot be pruned.*4"):
        quant.prune(model, 0.5)
    assert not parametrize.is_parametrized(model[0])
    tied = nn.ModuleDict({"words": nn.Embedding(10, 8), "head": nn.Linear(8, 10), "body": nn.Linear(8, 8)})
    tied["head"].weight = tied["words"].weight
    quant.prune(tied, 0.5)
    assert not parametrize.is_parametrized(tied["head"])
    assert parametrize.is_parametrized(tied["body"])


@pytest.mark.parametrize("how", [quant.apply, quant.prepare])
@pytest.mark.parametrize("name", ["int4-asym-channel", "int8-asym-tensor", "q4_1;0=keep"])
def test_a_grid_without_zero_is_refused(how: object, name: str) -> None:
    """A format with a minimum rounds pruned weights to something beside zero: half of the model would come back."""
    model = nn.Sequential(nn.Linear(64, 64)) if "q4_1" in name else net()
    name = name.partition(";")[0]
    quant.prune(model, 0.5)
    with pytest.raises(ParameterError, match=r"pruned, and .* holds no exact zero"):
        how(model, name)  # type: ignore[operator]
    assert all(parametrize.is_parametrized(each) for each in model if hasattr(each, "weight"))


def test_an_adapter_on_pruned_weights_is_refused() -> None:
    """Its sum with them has no zeros, and merging would write that into the codes."""
    model = quant.prune(nn.Sequential(nn.Linear(32, 32)), 0.5)
    with pytest.raises(ParameterError, match="bring pruned weights back"):
        quant.add_lora(quant.prepare(model, "int4-sym-channel"), 2, 4.0)
