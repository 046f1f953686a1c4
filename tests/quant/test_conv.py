"""Conv2d layers quantized in place: torch's own convolution of the dequantized weights is the oracle, and one layer
before, while and after it trains."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.prune import l1_unstructured

from nanokit import quant
from nanokit.errors import ModelFileError, ParameterError
from nanokit.kernels.cpu import ops
from nanokit.quant.conv import FakeQuantConv2d, QuantConv2d
from nanokit.quant.weight_format import weight_format

SHAPES = {
    "plain": {"kernel_size": 3},
    "bias, stride, padding": {"kernel_size": (3, 1), "stride": (2, 1), "padding": (1, 2)},
    "dilation, no bias": {"kernel_size": (1, 3), "dilation": (1, 2), "padding": "same", "bias": False},
    "groups": {"kernel_size": 3, "groups": 2, "padding": 1},
    "reflect": {"kernel_size": (2, 3), "padding": (1, 2), "padding_mode": "reflect"},
    "circular, same": {"kernel_size": (2, 4), "padding": "same", "padding_mode": "circular", "dilation": (3, 1)},
    "replicate, valid": {"kernel_size": 2, "padding": "valid", "padding_mode": "replicate"},
}


class Net(nn.Module):
    """A grey picture to ten numbers: a stem of nine columns, a body of 288, a depthwise layer of nine, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(1, 32, 3, padding=1)
        self.body = nn.Conv2d(32, 18, 3, padding=1, stride=2, bias=False)
        self.depthwise = nn.Conv2d(18, 18, 3, groups=18)
        self.head = nn.Linear(18, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.head(self.depthwise(self.body(x).relu()).relu().mean(dim=(2, 3)))


X = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
POLICY = "int4-sym-channel"


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_torchs_convolution_of_the_weights_on_the_grid(name: str) -> None:
    """A stride, an uneven padding or a group that is lost on the way moves pictures without an error."""
    torch.manual_seed(0)
    plain = nn.Conv2d(32, 12, **SHAPES[name])  # type: ignore[arg-type]
    x = torch.randn(2, 32, 7, 9)
    q = weight_format("int4-sym-g16").quantize(plain.weight.detach().flatten(1).numpy())
    changed = quant.prepare(nn.Sequential(plain), "int4-sym-g16")
    prepared = changed(x).detach()
    layer = quant.convert(changed)[0]
    assert isinstance(layer, QuantConv2d)
    with torch.no_grad():
        plain.weight.copy_(torch.from_numpy(q.dequantize()).view(plain.weight.shape))
        expected = plain(x)
    assert torch.equal(prepared, expected)
    assert torch.equal(layer(x), expected)
    assert torch.allclose(layer(x[0]), expected[0], atol=1e-5)  # no batch
    assert torch.equal(layer.weight, plain.weight)


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [(name, torch.float32) for name in (POLICY, "int8-asym-channel", "int4-sym-tensor", "int4-sym-global",
                                        "int4-sym-g9", "int4-sym-tensor+search")] + [(POLICY, torch.bfloat16)],
)  # fmt: skip
def test_prepared_converted_applied_and_packed_are_one(policy: str, dtype: torch.dtype) -> None:
    """As for Linear layers: a difference anywhere trains weights that the model will not have."""
    applied, prepared = quant.apply(Net().to(dtype), policy), quant.prepare(Net().to(dtype), policy)
    x = X.to(dtype)
    before = prepared(x).detach()
    assert before.dtype is dtype
    trained = {n: m.rounded().detach() for n, m in prepared.named_modules() if isinstance(m, FakeQuantConv2d)}
    assert len(trained) == 3
    assert torch.equal(quant.convert(prepared)(x), before)
    for name, values in trained.items():
        layer = prepared.get_submodule(name)
        assert isinstance(layer, QuantConv2d)
        assert torch.equal(layer.weight, values)
        q = layer.qtensor()
        assert np.array_equal(q.dequantize(), values.flatten(1).numpy())
        if q.group % 32 == 0:  # what kernels take
            assert torch.equal(ops.Linear(q, threads=1).unpack(), values.flatten(1))
        if "search" not in policy:  # a search may break ties its own way
            assert torch.equal(applied.get_submodule(name).weight, values)


def test_training_moves_codes_and_parameters_stay_the_same_objects() -> None:
    """Steps of an optimizer from before `prepare`, in channels_last as vision models are trained."""
    net = Net().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    quant.prepare(net, POLICY)
    layer = net.body
    before = layer.rounded().detach()
    for _ in range(3):
        optimizer.zero_grad()
        net(X).square().mean().backward()
        optimizer.step()
    trained, out = layer.rounded().detach(), net(X)
    assert not torch.equal(before, trained)
    layer.enabled = False
    assert not torch.equal(net(X), out)
    quant.convert(net)
    assert torch.equal(net.body.weight, trained)
    assert torch.equal(net(X), out)


def test_state_and_casts_keep_the_grid() -> None:
    """Bit for bit into another module; a rounded scale would move all weights of its row; another format is named."""
    net, other = quant.apply(Net(), POLICY), quant.apply(Net(), POLICY)
    with torch.no_grad():
        for layer in (other.stem, other.body):
            layer.codes.zero_()
            layer.scales.zero_()
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(X), net(X))
    with pytest.raises(ModelFileError, match=r"(?s)stem is of another.*found: " + POLICY):
        quant.apply(Net(), "int8-sym-channel").load_state_dict(net.state_dict())
    scales = net.body.scales.clone()
    assert net.bfloat16()(X.bfloat16()).dtype is torch.bfloat16
    assert torch.equal(net.body.scales, scales)


class Own(nn.Conv2d):
    """Computes with its weights in a way of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def spoiled(kind: str) -> Net:
    net = Net()
    if kind == "inf":
        with torch.no_grad():
            net.depthwise.weight[0, 0, 0, 0] = torch.inf
    elif kind == "norm":
        weight_norm(net.body)
    elif kind == "prune":
        l1_unstructured(net.body, "weight", 0.5)
    elif kind == "own":
        net.body = Own(32, 18, 3, padding=1, stride=2)
    return net


@pytest.mark.parametrize("how", [quant.apply, quant.prepare])
@pytest.mark.parametrize(
    ("policy", "kind", "match"),
    [
        ("int4-sym-g16", "", r"(?s)3 layers, and nothing.*stem, depthwise: .*9 columns.*channel.*head: .*18 columns"),
        (POLICY, "inf", "(?s)1 layer, and nothing.*depthwise: weights are not all finite"),
        (POLICY, "norm", "(?s)weights of body are made by something else.*weight_norm"),
        (POLICY, "prune", "(?s)weights of body are made by something else.*remove"),
        (POLICY, "own", "(?s)1 layer, and nothing.*body: Own computes in a way of its own"),
    ],
)
def test_what_is_refused_changes_nothing(how: object, policy: str, kind: str, match: str) -> None:
    """Half a quantized model is neither. Weights that a hook makes would be trained beside the point, without a word;
    so would a layer be replaced that does more than its kind."""
    net = spoiled(kind)
    before = dict(net.named_modules())
    with pytest.raises(ParameterError, match=match):
        how(net, policy)  # type: ignore[operator]
    assert dict(net.named_modules()) == before
