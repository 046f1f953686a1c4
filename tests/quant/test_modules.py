"""Quantizing torch modules in place: one layer before, while and after it trains, and what is refused before anything
changes. The C kernels unpack what they packed: an oracle for the bits of every format."""

import io

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from nanokit import quant
from nanokit.errors import ModelFileError, ParameterError
from nanokit.kernels.cpu import ops
from nanokit.quant.layers import FakeQuantLinear, QuantLinear
from nanokit.quant.weight_format import weight_format

FORMATS = (
    "int4-sym-g64", "int4-asym-g32", "int4-sym-channel", "int8-sym-channel", "int8-asym-g16", "int8-sym-tensor",
    "int8-sym-g32-reduced", "int4-sym-qkv", "int4-asym-global", "nvfp4", "mxfp4", "nf4", "q4_0", "q4_1", "q5_0", "q5_1",
    "q8_0",
)  # fmt: skip


class Block(nn.Module):
    """The names of a transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(192, 64), nn.Linear(192, 32, bias=False), nn.Linear(192, 32)
        self.o_proj = nn.Linear(64, 192, bias=False)
        self.gate_proj, self.up_proj = nn.Linear(192, 128, bias=False), nn.Linear(192, 128, bias=False)
        self.down_proj = nn.Linear(128, 192, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o_proj(self.q_proj(x)) + self.k_proj(x).mean() + self.v_proj(x).mean()
        return x + self.down_proj(self.gate_proj(x).relu() * self.up_proj(x))


class Model(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(50, 192)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(192, 50, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


IDS = torch.arange(24).view(2, 12)


def kinds(model: nn.Module) -> dict[str, str]:
    """Format of every quantized or prepared layer, by name."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLinear):
            found[name] = layer.format_name
        elif isinstance(layer, FakeQuantLinear):
            found[name] = layer.form.name
    return found


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [(name, torch.float32) for name in (*FORMATS, "int4-sym-g64+search", "nvfp4+search", "q4_1+search")]
    + [(name, torch.bfloat16) for name in ("int4-sym-g64", "int8-asym-g16", "nvfp4", "q4_0")],
)
def test_prepared_converted_applied_and_packed_are_one(policy: str, dtype: torch.dtype) -> None:
    """A difference anywhere would mean that a model was trained for weights that it will not have."""
    prepared = quant.prepare(Model().to(dtype), policy)
    applied = quant.apply(Model().to(dtype), policy)
    assert len(kinds(prepared)) == 14
    trained = {n: m.rounded().detach() for n, m in prepared.named_modules() if isinstance(m, FakeQuantLinear)}
    before = prepared(IDS)
    assert before.dtype is dtype
    converted = quant.convert(prepared)
    assert converted is prepared
    assert torch.equal(converted(IDS), before)
    assert kinds(converted) == kinds(applied)
    for name, values in trained.items():
        layer = converted.get_submodule(name)
        assert isinstance(layer, QuantLinear)
        assert torch.equal(layer.weight, values)
        assert np.array_equal(layer.qtensor().dequantize(), values.numpy())
        assert torch.equal(ops.Linear(layer.qtensor(), threads=1).unpack(), values)
        if "search" not in policy:  # a search may break ties its own way
            assert torch.equal(applied.get_submodule(name).weight, values)


def test_training_moves_the_grid_and_stays_one() -> None:
    """After steps of an optimizer that has the parameters from before `prepare`: same objects, other codes."""
    model = Model()
    optimizer = torch.optim.AdamW(model.layers.parameters(), lr=0.01)
    quant.prepare(model, "mix:attn=int8-sym-channel,ffn=int4-sym-g64")
    layer = model.layers[0].down_proj
    before = layer.rounded().detach()
    for _ in range(3):
        optimizer.zero_grad()
        model(IDS).square().mean().backward()
        optimizer.step()
    trained, out = layer.rounded().detach(), model(IDS)
    assert not torch.equal(before, trained)
    quant.convert(model)
    assert torch.equal(model.layers[0].down_proj.weight, trained)
    assert torch.equal(model(IDS), out)


def test_roles_layers_and_overrides() -> None:
    """Each layer its own format, by name and number; the tied head stays the embedding."""
    model = quant.apply(Model(), "mix:attn=int8-sym-channel,ffn=int4-sym-g64;1.down=q8_0;0.q=keep")
    found = kinds(model)
    assert "layers.0.q_proj" not in found
    assert found["layers.1.q_proj"] == "int8-sym-channel"
    assert found["layers.0.down_proj"] == "int4-sym-g64"
    assert found["layers.1.down_proj"] == "q8_0"
    assert model.lm_head.weight is model.embed_tokens.weight
    assert type(quant.apply(Model(tied=False), "keep;head=int8-sym-channel").lm_head) is QuantLinear
    plain = quant.apply(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)), "q8_0;2=int4-sym-g32")
    assert kinds(plain) == {"0": "q8_0", "2": "int4-sym-g32"}
    tied = nn.ModuleDict({"table": nn.Embedding(50, 64), "decoder": nn.Linear(64, 50), "between": nn.Linear(64, 64)})
    tied["decoder"].weight = tied["table"].weight
    assert kinds(quant.prepare(tied, "q8_0")) == {"between": "q8_0"}


def test_scales_of_a_layer_and_of_the_model() -> None:
    """One scale over q, k and v of a layer, or over everything: from the largest weight of them all."""
    model = Model()
    with torch.no_grad():
        model.layers[0].k_proj.weight[0, 0] = 7.0
    one = quant.apply(model, "int4-sym-qkv")
    assert {float(s) for n in ("q_proj", "k_proj", "v_proj") for s in one.layers[0].get_submodule(n).scales[:1, 0]} == {
        1.0
    }
    assert float(one.layers[1].q_proj.scales[0, 0]) < 0.1
    assert float(one.layers[0].down_proj.scales[0, 0]) < 0.1
    model = Model()
    with torch.no_grad():
        model.layers[0].k_proj.weight[0, 0] = 7.0
    everything = quant.prepare(model, "int4-sym-global;1.down=keep")
    scales = {float(m.scales[0, 0]) for m in everything.modules() if isinstance(m, FakeQuantLinear)}
    assert scales == {1.0}


def test_a_layer_in_two_places_stays_one() -> None:
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    quant.apply(model, "int4-sym-g64")
    assert model["a"] is model["b"][0]


@pytest.mark.parametrize(
    ("policy", "spoil", "match"),
    [
        ("int4-sym-g128", None, r"(?s)12 layers, and nothing.*layers.0.q_proj, layers.0.k_proj.*192 columns.*g64"),
        ("int4-sym-g96", None, r"(?s)4 layers, and nothing.*o_proj.*64 columns.*g16, g32, g64"),
        ("int4-sym-g64", "inf", r"(?s)1 layer, and nothing.*layers.1.v_proj: weights are not all finite"),
        ("int4-sym-g64+gptq", None, "needs a calibration text"),
        ("f16", None, "about floats"),
        ("auto:4.25", None, "resolved for a model first"),
        ("int4-sym-g64;down=nf4-dq+search", None, r"(?s)2 layers, and nothing.*down_proj.*nf4-dq"),
        ("int4-sym-g64;7.q=keep", None, "there is no layer 7"),
        ("keep", None, "changes no layer"),
        ("int4-sym-g64;head=q8_0", None, "lm_head is the embedding as well"),
        ("int5-sym-g64", None, "(?s)unknown weight format.*nvfp4"),
    ],
)
@pytest.mark.parametrize("how", [quant.apply, quant.prepare])
def test_what_is_refused_changes_nothing(how: object, policy: str, spoil: str | None, match: str) -> None:
    """Half a quantized model is neither; the layers and the groups that would fit are named."""
    model = Model()
    if spoil:
        with torch.no_grad():
            model.layers[1].v_proj.weight[0, 0] = float(spoil)
    before = dict(model.named_modules())
    with pytest.raises(ParameterError, match=match):
        how(model, policy)  # type: ignore[operator]
    assert dict(model.named_modules()) == before


def test_what_cannot_be_converted() -> None:
    with pytest.raises(ParameterError, match="no layer of this module is prepared"):
        quant.convert(Model())
    with pytest.raises(ParameterError, match="wrap it"):
        quant.apply(nn.Linear(64, 64), "int4-sym-g64")
    model = quant.prepare(Model(), "nf4")
    with torch.no_grad():
        model.layers[0].o_proj.weight[0, 0] = torch.nan
    with pytest.raises(ModelFileError, match=r"layers\.0\.o_proj holds weights"):
        quant.convert(model)
    assert len(kinds(model)) == 14
    assert all(not isinstance(layer, QuantLinear) for layer in model.modules())


@pytest.mark.parametrize("name", ["int4-asym-g64", "nvfp4", "q8_0"])
def test_state_goes_out_and_comes_back(name: str) -> None:
    """Through torch's own file and safetensors, into another module, bit for bit; a state of another format is named
    before it is taken for one of this."""
    model, other = quant.apply(Model(), name), quant.apply(Model(), name)
    with torch.no_grad():
        for layer in other.modules():
            if isinstance(layer, QuantLinear):
                layer.codes.zero_()
                layer.scales.zero_()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(IDS), model(IDS))
    state = {key: value for key, value in model.state_dict().items() if key != "lm_head.weight"}
    other.load_state_dict(load(save(state)), strict=False)
    assert torch.equal(other(IDS), model(IDS))
    with pytest.raises(ModelFileError, match=r"(?s)layers\.0\.q_proj is of another.*found: " + name):
        quant.apply(Model(), "int4-sym-g64").load_state_dict(model.state_dict())


@pytest.mark.parametrize("how", [quant.apply, quant.prepare])
def test_casting_a_model_keeps_its_scales(how: object) -> None:
    """`model.bfloat16()` casts every float it finds; a rounded scale moves all weights of its group."""
    model = how(Model(), "int4-sym-g64+search")  # type: ignore[operator]
    layer = model.layers[0].q_proj
    before = layer.scales.clone()
    model.bfloat16()
    assert layer.scales.dtype is torch.float32
    assert torch.equal(layer.scales, before)
    assert layer.bias.dtype is torch.bfloat16
    assert model(IDS).dtype is torch.bfloat16


def test_files_formats_are_layers_too() -> None:
    """A matrix of a GGUF file in a torch module: the codes are the file's, nothing is rounded again."""
    q = weight_format("q4_1").quantize(np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32))
    layer = QuantLinear(q, torch.ones(8))
    assert np.array_equal(layer.weight.numpy(), q.dequantize())
    assert torch.equal(layer(torch.zeros(1, 64)), torch.ones(1, 8))
