"""Model files and folders that are not what they should be: refused by name, with the tensor, key or file at fault."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from handmade_gguf import gguf_bytes, pair, text
from safetensors.torch import load_file, save_file
from tiny import save_tiny, save_tiny_gguf, tiny_model

from nanokit.errors import ModelFileError
from nanokit.model.load import open_model
from nanokit.model.transformer import OpenedModel, Transformer

Change = Callable[[dict[str, torch.Tensor]], object]


def read(path: Path) -> None:
    source = open_model(path)
    Transformer(OpenedModel(source, source.config))


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        read(path)
    error = caught.value
    assert error.found is not None, error
    assert error.needed is not None, error
    assert path.name in error.what or path.resolve().name in error.what or not path.exists(), error
    return str(error)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("pristine")
    made = {name: save_tiny(root / name, tiny_model(name)) for name in ("llama", "qwen2", "qwen3")}
    made["tied"] = save_tiny(root / "tied", tiny_model("llama", tied=True))
    made["sharded"] = save_tiny(root / "sharded", tiny_model("llama"), max_shard_size="100KB")
    return made


@pytest.fixture
def folder(pristine: Mapping[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a sound checkpoint with its tensors or its config.json changed."""

    def make(kind: str = "llama", tensors: Change | None = None, **config: Any) -> Path:
        path = tmp_path / "m"
        shutil.copytree(pristine[kind], path)
        if tensors is not None:
            found = load_file(path / "model.safetensors")
            tensors(found)
            save_file(found, path / "model.safetensors")
        if config:
            stated = json.loads((path / "config.json").read_text()) | config
            (path / "config.json").write_text(json.dumps(stated))
        return path

    return make


# --- what is no model at all ---


@pytest.mark.parametrize(
    "source",
    ["", "nowhere", "no/such/model.gguf", "./org/name", "~/nothing", "a" * 5000, "/dev/null", "nul\0"],
)
def test_names_that_lead_nowhere(source: str) -> None:
    with pytest.raises(ModelFileError):
        open_model(source)


def test_a_folder_without_weights(folder: Callable[..., Path]) -> None:
    path = folder()
    (path / "model.safetensors").unlink()
    assert "no weight file" in refusal(path)
    (path / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n")
    assert "a pickle runs code" in refusal(path)


def test_a_folder_of_gguf_files_says_which_to_name(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert f"{tmp_path / 'a.gguf'}" in refusal(tmp_path)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'{"a": "\xff"}', b'{"a":' + b"[" * 99999, None])
def test_a_broken_config(folder: Callable[..., Path], raw: bytes | None) -> None:
    path = folder()
    (path / "config.json").unlink()
    if raw is not None:
        (path / "config.json").write_bytes(raw)
    assert "config.json" in refusal(path)


def test_a_model_is_called_as_its_folder(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is opened as `.`."""
    monkeypatch.chdir(folder())
    assert open_model(".").name == "m"


# --- safetensors files ---


@pytest.mark.parametrize("size", [0, 4, 8, 100, -1])
def test_a_truncated_safetensors_file(folder: Callable[..., Path], size: int) -> None:
    path = folder() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert "model.safetensors cannot be read" in refusal(path.parent)


def test_a_git_lfs_pointer(folder: Callable[..., Path]) -> None:
    path = folder() / "model.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    assert "Git LFS" in refusal(path.parent)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float64])
def test_weights_of_another_type(folder: Callable[..., Path], dtype: torch.dtype) -> None:
    """Quantized weights without a quantization_config, as AWQ, FP8 and NVFP4 exports have been seen."""
    name = "model.layers.1.mlp.up_proj.weight"
    path = folder(tensors=lambda t: t.update({name: t[name].to(dtype)}))
    assert name in refusal(path)


@pytest.mark.parametrize("method", ["gptq", "awq", "modelopt", "compressed-tensors"])
def test_quantized_checkpoints_are_refused_by_method(folder: Callable[..., Path], method: str) -> None:
    refused = refusal(folder(quantization_config={"quant_method": method, "bits": 4}))
    assert method in refused
    assert "GGUF" in refused


# --- the index of a sharded checkpoint ---


@pytest.mark.parametrize(
    ("index", "word"),
    [
        ("{", "index.json cannot be read"),
        ("{}", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": ["model.safetensors"]}', "weight_map"),
        ('{"weight_map": {"a": 1}}', "weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "beside it"),
        ('{"weight_map": {"a": "/etc/x.safetensors"}}', "beside it"),
        ('{"weight_map": {"a": ".."}}', "beside it"),
        ('{"weight_map": {"a": "model.bin"}}', "beside it"),
        ('{"weight_map": {"a": "model-9.safetensors"}}', "model-9.safetensors"),
        ('{"weight_map": {"a": "nul\\u0000.safetensors"}}', "missing"),
    ],
)
def test_a_broken_index(folder: Callable[..., Path], index: str, word: str) -> None:
    path = folder()
    (path / "model.bin").write_bytes(b"a pickle")
    (path / "model.safetensors.index.json").write_text(index)
    assert word in refusal(path)


def test_a_shard_is_missing_or_there_twice(folder: Callable[..., Path]) -> None:
    path = folder("sharded")
    shards = sorted(path.glob("*.safetensors"))
    kept = shards[0].read_bytes()
    shards[0].unlink()
    assert shards[0].name in refusal(path)
    shards[0].write_bytes(shards[1].read_bytes())
    assert "stands in two files" in refusal(path)
    shards[0].write_bytes(kept)
    read(path)


# --- tensors against the configuration ---


@pytest.mark.parametrize(
    ("kind", "change", "name"),
    [
        ("llama", lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        ("llama", lambda t: t.pop("model.layers.1.mlp.down_proj.weight"), "layers.1.mlp.down_proj.weight is missing"),
        ("qwen2", lambda t: t.pop("model.layers.0.self_attn.k_proj.bias"), "k_proj.bias is missing"),
        ("qwen3", lambda t: t.pop("model.layers.0.self_attn.q_norm.weight"), "q_norm.weight is missing"),
        ("llama", lambda t: t.update({"model.norm.weight": torch.ones(59)}), "model.norm.weight has the wrong shape"),
        ("llama", lambda t: t.update({"model.norm.weight": torch.ones(1, 60)}), "the wrong shape"),
        ("llama", lambda t: t.update({"model.embed_tokens.weight": torch.ones(60, 320)}), "the wrong shape"),
        ("llama", lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}), "layers.2.mlp.up_proj"),
        ("llama", lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(10)}), "q_norm"),
        ("llama", lambda t: t["model.norm.weight"].fill_(float("nan")), "60 of 60 values are not finite"),
        ("llama", lambda t: t["lm_head.weight"][5].fill_(float("inf")), "60 of 19200 values are not finite"),
        ("tied", lambda t: t.update({"lm_head.weight": torch.ones(320, 60)}), "is not the embedding"),
        ("tied", lambda t: t.update({"lm_head.bias": torch.ones(320)}), "lm_head.bias"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(folder: Callable[..., Path], kind: str, change: Change, name: str) -> None:
    assert name in refusal(folder(kind, change))


def test_large_finite_weights_are_not_taken_for_infinite_ones(folder: Callable[..., Path]) -> None:
    """Their sum overflows; the weights do not."""
    read(folder(tensors=lambda t: t["model.norm.weight"].fill_(3e38)))


def test_a_tied_head_that_is_stored_as_well_loads_when_it_is_the_embedding(
    folder: Callable[..., Path],
) -> None:
    read(folder("tied", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})))


# --- GGUF files ---


def rewritten(path: Path, change: Callable[[dict[str, np.ndarray]], object]) -> Path:
    """A GGUF file with its tensors changed and everything else copied, by the library's reader and writer."""
    reader = gguf.GGUFReader(path)
    tensors = {t.name: np.array(t.data) for t in reader.tensors}
    change(tensors)
    target = path.with_name("changed.gguf")
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        kind, part = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=part)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.pop("token_embd.weight"), "no token embedding"),
        (lambda t: t.pop("blk.1.ffn_up.weight"), "blk.1.ffn_up.weight is missing"),
        (lambda t: t.update({"blk.0.ffn_gate_inp.weight": np.ones((2, 60), np.float32)}), "ffn_gate_inp"),
        (lambda t: t.update({"output_norm.weight": np.ones(61, np.float32)}), "output_norm.weight has the wrong shape"),
        (lambda t: t["output_norm.weight"].__setitem__(3, np.nan), "'output_norm.weight'"),
        (lambda t: t.update({"token_embd.weight": np.ones((100, 60), np.float32)}), "320 tokens, 100 rows"),
        (lambda t: t.update({"rope_freqs.weight": np.ones(4, np.float32)}), "rope_freqs.weight"),
        (lambda t: t.update({"rope_freqs.weight": np.ones((2, 4), np.float32)}), "rope_freqs.weight"),
    ],
)  # fmt: skip
def test_gguf_tensors_that_do_not_fit(tmp_path: Path, change: Any, word: str) -> None:
    assert word in refusal(rewritten(save_tiny_gguf(tmp_path / "m.gguf", tiny_model("llama")), change))


def test_parts_of_a_model_are_not_a_model(tmp_path: Path) -> None:
    """A vision projector and a vocabulary alone lie beside models and have their ending."""
    projector = tmp_path / "mmproj.gguf"
    projector.write_bytes(gguf_bytes([pair("general.architecture", 8, text("clip"))]))
    assert "without weights" in refusal(projector)


def test_no_rope_base_is_an_error_in_a_file_too(tmp_path: Path) -> None:
    path = save_tiny_gguf(tmp_path / "m.gguf", tiny_model("llama"), **{"llama.rope.freq_base": None})
    assert "llama.rope.freq_base is missing" in refusal(path)
