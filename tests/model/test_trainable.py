"""The module that trains against transformers' own reading: logits, gradients, and the names that policies look for."""

from pathlib import Path

import pytest
import torch
from tiny import save_tiny, tiny_model

from nanokit import quant
from nanokit.errors import ParameterError
from nanokit.model.load import open_model
from nanokit.model.trainable import TrainableModel
from nanokit.model.trained import save_trained
from nanokit.model.weights import find_weights
from nanokit.quant.layers import FakeQuantLinear
from nanokit.quant.policy import parse_policy


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


@pytest.mark.parametrize("policy", ["int4-sym-g32;1.down=keep", "nf4-dq;0.attn=nvfp4"])
def test_what_was_trained_is_what_a_file_gives_back(policy: str, tmp_path: Path) -> None:
    """Bit for bit, the layers that were left alone too; nested scales have to be kept as they were made."""
    base = open_model(
        save_tiny(tmp_path / "tiny", tiny_model("llama", hidden=64, intermediate=128, head_dim=16, heads=4))
    )
    model = TrainableModel(base.config, find_weights(base.config, base))
    quant.prepare(model, policy)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, FakeQuantLinear):
                layer.weight.mul_(1.01)
    save_trained(model, base, parse_policy(policy), tmp_path / "trained.safetensors")
    again = open_model(tmp_path / "trained.safetensors")
    found = TrainableModel(again.config, find_weights(again.config, again))
    ids = list(range(24))
    quant.convert(model)
    assert torch.equal(found.logits(ids), model.logits(ids))
    assert again.policy == policy


def test_training_that_a_file_could_not_hold_is_refused(tmp_path: Path) -> None:
    """No layer on a grid, or one off it that has moved: a file would say that it is the trained model."""
    base = open_model(save_tiny(tmp_path / "tiny", tiny_model("llama")))
    model = TrainableModel(base.config, find_weights(base.config, base))
    with pytest.raises(ParameterError, match="prepare"):
        save_trained(model, base, parse_policy("nf4"), tmp_path / "trained.safetensors")
    quant.prepare(model, "int8-sym-channel;1.down=keep")
    with torch.no_grad():
        model.layers[1].mlp.down_proj.weight[0, 0] += 1
    with pytest.raises(ParameterError, match=r"layers\.1\.mlp\.down_proj\.weight is not as"):
        save_trained(model, base, parse_policy("int8-sym-channel;1.down=keep"), tmp_path / "trained.safetensors")
    with torch.no_grad():
        model.layers[1].mlp.down_proj.weight[0, 0] -= 1
        model.final_norm[0] += 1
    with pytest.raises(ParameterError, match="final_norm is not as"):
        save_trained(model, base, parse_policy("int8-sym-channel;1.down=keep"), tmp_path / "trained.safetensors")
    with pytest.raises(ParameterError, match="is not what the policy nf4 makes of it"):
        save_trained(model, base, parse_policy("nf4"), tmp_path / "trained.safetensors")
    adapted = TrainableModel(base.config, find_weights(base.config, base))
    quant.prepare(adapted, "int8-sym-channel;1.down=keep")
    quant.add_lora(adapted, 2, 4.0)
    with pytest.raises(ParameterError, match=r"quantized|adapters"):
        save_trained(adapted, base, parse_policy("int8-sym-channel;1.down=keep"), tmp_path / "trained.safetensors")
    assert not (tmp_path / "trained.safetensors").exists()
