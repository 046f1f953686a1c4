"""The module that trains against transformers' own reading: logits, gradients, and the names that policies look for."""

from pathlib import Path

import pytest
import torch
from tiny import save_tiny, tiny_model

from nanokit import quant
from nanokit.model.load import open_model
from nanokit.model.trainable import TrainableModel
from nanokit.model.weights import find_weights
from nanokit.quant.layers import FakeQuantLinear


@pytest.mark.parametrize(
    ("architecture", "tied"), [("llama", True), ("llama", False), ("qwen2", False), ("qwen3", True)]
)
def test_logits_and_gradients_are_transformers_own(architecture: str, tied: bool, tmp_path: Path) -> None:
    """A model that trains on another forward than the engine's learns to repair faults that nobody has."""
    oracle = tiny_model(architecture, tied=tied)
    source = open_model(save_tiny(tmp_path / "tiny", oracle))
    model = TrainableModel(source.config, find_weights(source.config, source))
    ids = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))
    hidden = model(ids)
    expected = oracle(ids)
    assert torch.allclose(hidden @ model.head.T, expected.logits, rtol=1e-4, atol=1e-4)
    assert torch.allclose(model.logits(ids[1].tolist()), expected.logits[1], rtol=1e-4, atol=1e-4)
    (hidden @ model.head.T).square().mean().backward()
    expected.logits.square().mean().backward()
    theirs = dict(oracle.named_parameters())
    trained = {name: each for name, each in model.named_parameters() if name.endswith("proj.weight")}
    assert len(trained) == 14
    for name, each in trained.items():
        found = theirs[f"model.{name}"].grad
        assert torch.allclose(each.grad, found, rtol=1e-3, atol=1e-5 * float(found.abs().max()) + 1e-7), name


def test_policies_find_its_layers(tmp_path: Path) -> None:
    """By the names that transformers gives them; the head and the embedding are no layers of it."""
    source = open_model(
        save_tiny(tmp_path / "tiny", tiny_model("llama", hidden=64, intermediate=96, head_dim=16, heads=4))
    )
    model = TrainableModel(source.config, find_weights(source.config, source))
    quant.prepare(model, "mix:attn=int8-sym-channel,ffn=int4-sym-g32;1.down=keep")
    found = {name: each.form.name for name, each in model.named_modules() if isinstance(each, FakeQuantLinear)}
    assert len(found) == 13
    assert found["layers.0.self_attn.q_proj"] == "int8-sym-channel"
    assert found["layers.1.mlp.up_proj"] == "int4-sym-g32"
