"""Policies that make floats of a model's matrices: a quantization undone, or a checkpoint halved."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import compiled_model, save_tiny, save_tiny_gguf

import nanokit
from nanokit.errors import ParameterError
from nanokit.lab.experiments.agreement import logits_of
from nanokit.model.load import open_model
from nanokit.model.quantize import quantize
from nanokit.model.requantize import requantized

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return save_tiny_gguf(path, compiled_model("llama", tied=True), types="Q8_0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), compiled_model("llama"))


@pytest.mark.parametrize("policy", DTYPES)
def test_weights_are_those_that_the_type_keeps(policy: str, gguf: Path) -> None:
    """Handed out unrounded, floats at loading would be better than the file that is written of them; handed out as
    codes, they would not be floats."""
    base = open_model(gguf)
    found = requantized(base, policy)
    for name, stored in base.stored.items():
        values = base.tensor(name)
        if len(stored.shape) == 2:
            assert (found.stored[name].type, found.stored[name].coding) == (policy.upper(), None)
            assert found.stored[name].nbytes == values.numel() * DTYPES[policy].itemsize
            assert found.quantized(name, 0, stored.shape[0]) is None
            values = values.to(DTYPES[policy]).float()
        assert torch.equal(found.tensor(name), values)


@pytest.mark.parametrize("policy", ["f16", "int4-sym-g32;down=bf16;0.q=f32;head=f16"])
@pytest.mark.parametrize("ending", ["gguf", "safetensors"])
def test_a_file_is_the_policy_loaded(policy: str, ending: str, gguf: Path, tmp_path: Path) -> None:
    """Measured with `policy=`, run from the file: the same numbers, and floats beside codes."""
    policy = policy if ending == "safetensors" else policy.replace("int4-sym-g32", "q4_0")
    written = quantize(gguf, tmp_path / f"out.{ending}", policy)
    loaded = [
        nanokit.load(path, policy=how, activations="fp32", ctx=64, kv_format="fp32")
        for path, how in ((gguf, policy), (written.path, None))
    ]
    ids = list(range(1, 60))
    assert torch.equal(*(logits_of(engine, ids) for engine in loaded))
    promised, kept = (engine.model.footprint.matrix_bits for engine in loaded)
    assert promised == pytest.approx(kept)
    assert (kept == 16) == (policy == "f16")


def test_a_checkpoint_is_halved(folder: Path, tmp_path: Path) -> None:
    """A plain reader of safetensors finds plain tensors of the type; vectors keep theirs."""
    written = quantize(folder, tmp_path / "half.safetensors", "bf16")
    assert (written.bits_before, written.bits_after) == (32, 16)
    plain = load_file(folder / "model.safetensors")
    with safe_open(written.path, "pt") as handle:
        for name in handle.keys():  # noqa: SIM118
            wanted = plain[name] if plain[name].ndim == 1 else plain[name].bfloat16()
            assert torch.equal(handle.get_tensor(name), wanted)


def test_a_weight_beyond_half_precision_is_named(folder: Path, tmp_path: Path) -> None:
    """An infinity in the file would be found by whoever loads it, if at all."""
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = -7e4
    large = tmp_path / "large"
    large.mkdir()
    for each in folder.iterdir():
        (large / each.name).write_bytes(each.read_bytes())
    save_file(tensors, large / "model.safetensors", {"format": "pt"})
    with pytest.raises(ParameterError, match=f"{name} holds a weight beyond the range of f16"):
        quantize(large, tmp_path / "out.safetensors", "f16")
    assert not (tmp_path / "out.safetensors").exists()
    quantize(large, tmp_path / "out.safetensors", "f16;1.up=bf16")
    kept = open_model(tmp_path / "out.safetensors").tensor(name)[3, 5]
    assert np.isclose(kept, -7e4, rtol=2**-8)


def test_a_head_of_floats_is_not_given_codes_for_floats_alone(folder: Path) -> None:
    """It becomes codes so that the kernels run a model of codes, and these run none where layers are floats."""
    head = "lm_head.weight"
    assert requantized(open_model(folder), "mix:attn=f16,ffn=bf16").stored[head].type == "F32"
    assert requantized(open_model(folder), "mix:attn=f16,ffn=q8_0").stored[head].type == "int8-sym-g32"


def test_floats_beside_a_text(folder: Path) -> None:
    """A float matrix has no grid to be folded for: gptq's neighbours are rounded, it is not."""
    found = requantized(open_model(folder), "int4-sym-g32+awq;v=f16;1.o=bf16", calibration=[list(range(1, 60))])
    plain = open_model(folder)
    name = "model.layers.0.self_attn.v_proj.weight"
    assert torch.equal(found.tensor(name), plain.tensor(name).half().float())
    assert found.stored["model.layers.1.self_attn.o_proj.weight"].type == "BF16"
    other = "model.layers.0.self_attn.o_proj.weight"
    assert not torch.equal(found.tensor(other), plain.tensor(other))
