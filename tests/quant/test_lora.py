"""LoRA: peft's arithmetic by hand, what a merge into a grid loses, and what it keeps when the sum was trained on it."""

import math

import pytest
import torch
from torch import nn

from nanokit import quant
from nanokit.errors import ParameterError
from nanokit.quant.layers import QuantLinear
from nanokit.quant.lora import LoraLinear

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))


def test_conventions_of_peft() -> None:
    """B zero: training starts from the model as it is. A: kaiming-uniform with a = 5 ** .5, that is ±1 / sqrt(in).
    The adapter counts alpha / r."""
    net = quant.apply(model(), "int4-sym-g32")
    before = net(X)
    parameters = quant.add_lora(net, r=4, alpha=8.0)
    assert [tuple(p.shape) for p in parameters] == [(4, 64), (96, 4), (4, 96), (32, 4)]
    assert torch.equal(net(X), before)
    a = parameters[0].detach()
    assert a.abs().max() <= 1 / math.sqrt(64)
    assert a.abs().max() > 0.95 / math.sqrt(64)
    assert [p for p in net.parameters() if p.requires_grad] == parameters
    with torch.no_grad():
        parameters[1].fill_(0.5)
    layer = net[0]
    expected = layer.base.weight + 2.0 * parameters[1] @ parameters[0]
    assert torch.allclose(layer(X), X @ expected.T + layer.base.bias, atol=1e-5)


def trained(on_grid: bool, policy: str = "int4-sym-g32", rate: float = 2e-3) -> nn.Sequential:
    """A few steps towards the unquantized model."""
    target = model()(X).detach()
    net = quant.apply(model(), policy)
    optimizer = torch.optim.Adam(quant.add_lora(net, r=4, on_grid=on_grid), lr=rate)
    for _ in range(40):
        optimizer.zero_grad()
        (net(X) - target).square().mean().backward()
        optimizer.step()
    return net


@pytest.mark.parametrize("policy", ["int4-sym-g32", "nvfp4", "nf4;2=q4_0"])
def test_on_the_grid_merging_changes_nothing(policy: str) -> None:
    """The sum was rounded in every pass: what is merged is what was trained, in every bit; and back."""
    net = trained(True, policy)
    before = net(X)
    assert torch.equal(quant.merge(net)(X), before)
    assert all(isinstance(layer.merged, QuantLinear) for layer in net if isinstance(layer, LoraLinear))
    assert torch.equal(quant.unmerge(net)(X), before)


@pytest.mark.parametrize("policy", ["int4-sym-g32", "int4-asym-g32+search", "nvfp4+search"])
def test_around_a_prepared_layer_it_trains_on_the_grid(policy: str) -> None:
    """It begins as the rounded model, fixed scales and all; trained on, it merges into what was trained."""
    net = quant.prepare(model(), policy)
    before = net(X)
    parameters = quant.add_lora(net, r=4)
    assert torch.equal(net(X), before)
    assert torch.equal(quant.merge(net)(X), before)
    quant.unmerge(net)
    with torch.no_grad():
        parameters[1].normal_(0, 0.05)
    trained = net(X)
    assert not torch.equal(trained, before)
    assert torch.equal(quant.merge(net)(X), trained)


def test_off_the_grid_merging_loses_what_was_learned() -> None:
    """The failure that people meet: unmerged it is better than before, merged it is not what was trained. Unmerging is
    exact, since nothing was subtracted."""
    net = trained(False)
    target = model()(X)

    def error(net: nn.Module) -> float:
        return (net(X) - target).detach().square().mean().item()

    unmerged, before = error(net), net(X)
    assert unmerged < 0.5 * error(quant.apply(model(), "int4-sym-g32"))
    assert error(quant.merge(net)) > 1.5 * unmerged
    quant.unmerge(net)
    assert torch.equal(net(X), before)


def test_into_plain_layers_merging_is_a_sum() -> None:
    net = model()
    parameters = quant.add_lora(net, r=2, targets=["2"])
    with torch.no_grad():
        parameters[1].normal_()
    before = net(X)
    assert isinstance(net[0], nn.Linear)
    assert torch.allclose(quant.merge(net)(X), before, atol=1e-5)


def test_what_is_refused() -> None:
    with pytest.raises(ParameterError, match="no layer for an adapter"):
        quant.add_lora(model(), targets=["q_proj"])
    with pytest.raises(ParameterError, match="1 to 32"):
        quant.add_lora(model(), r=33)
    with pytest.raises(ParameterError, match="no grid to train on"):
        quant.add_lora(model(), on_grid=True)
    with pytest.raises(ParameterError, match="a scale that other layers share"):
        quant.add_lora(quant.apply(model(), "int8-sym-global"))
    with pytest.raises(ParameterError, match="has no adapters"):
        quant.merge(model())
    net = model()
    quant.add_lora(net)
    with pytest.raises(ParameterError, match="has adapters already"):
        quant.add_lora(net)
