"""Accounts of model files: every byte has one address, and the addresses are right."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from stored import random_blocks
from tiny import compiled_model, save_tiny, save_tiny_gguf

from nanokit.cli import main
from nanokit.errors import ModelFileError
from nanokit.model.account import KINDS, account, block_parts, role_of
from nanokit.quant.formats import FORMATS

# By hand, from the layouts as ggml defines them: codes, scales, minimums of one block.
BLOCKS = {
    "Q4_0": (16, 2, 0), "Q4_1": (16, 2, 2), "Q5_0": (20, 2, 0), "Q5_1": (20, 2, 2), "Q8_0": (32, 2, 0),
    "MXFP4": (16, 1, 0), "IQ4_NL": (16, 2, 0), "Q2_K": (64, 10, 10), "Q3_K": (96, 14, 0), "Q4_K": (128, 8, 8),
    "Q5_K": (160, 8, 8), "Q6_K": (192, 18, 0), "IQ4_XS": (128, 8, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_falls_into_its_parts(name: str) -> None:
    """A minimum that is counted as a scale, or a fifth bit as neither, makes formats look alike."""
    parts = block_parts(FORMATS[name])
    assert (parts["codes"], parts["scales"], parts["minimums"]) == BLOCKS[name]


@pytest.mark.parametrize("name", FORMATS)
def test_no_byte_of_a_block_is_lost(name: str) -> None:
    """Q3_K and NVFP4 have odd rests: a division that drops one would make files smaller than they are."""
    assert sum(block_parts(FORMATS[name]).values()) == FORMATS[name].block_bytes


@pytest.mark.parametrize("alignment", [32, 128])
def test_a_gguf_file_is_accounted_for_to_the_byte(tmp_path: Path, alignment: int) -> None:
    """Padding between tensors is what Q8 blames; the library that writes the file says where the data begins."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    writer.add_block_count(1)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(5, np.float32))
    for name, kind in (("blk.0.attn_q.weight", "Q4_0"), ("blk.0.ffn_up.weight", "Q4_1"), ("token_embd.weight", "Q8_0")):
        writer.add_tensor(name, random_blocks(kind, 3, 32), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = account(path)
    assert found.nbytes == path.stat().st_size
    assert found.header == gguf.GGUFReader(path).data_offset
    by_name = {tensor.name: tensor for tensor in found.tensors}
    sizes = {
        "blk.0.attn_norm.weight": 20,
        "blk.0.attn_q.weight": 54,
        "blk.0.ffn_up.weight": 60,
        "token_embd.weight": 102,
    }
    for name, size in sizes.items():
        assert by_name[name].nbytes - by_name[name].padding == size
        assert by_name[name].padding == -size % alignment
    assert by_name["blk.0.ffn_up.weight"].minimums == 6
    assert found.bits_per_weight == pytest.approx(8 * (found.nbytes - found.header) / (5 + 3 * 32 * 3))


def test_the_default_model_is_accounted_for(default_model: Path) -> None:
    """Against the gguf library, tensor by tensor."""
    found, theirs = account(default_model), gguf.GGUFReader(default_model)
    assert found.nbytes == default_model.stat().st_size
    assert found.header == theirs.data_offset
    assert {t.name: t.nbytes for t in found.tensors} == {t.name: t.n_bytes for t in theirs.tensors}
    assert found.weights == sum(int(t.n_elements) for t in theirs.tensors)


def test_a_folder_of_shards_is_accounted_for(tmp_path: Path) -> None:
    """Each shard has a header of its own, and a matrix in 16 bits is no quantized one."""
    save_tiny(tmp_path, compiled_model("llama").to(torch.bfloat16), max_shard_size="60KB")
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    found = account(tmp_path)
    assert found.nbytes == sum(file.stat().st_size for file in files)
    assert found.of("plain") == 2 * found.weights
    assert found.of("codes") == found.of("scales") == 0


def test_quantized_safetensors_fall_into_parts(tmp_path: Path) -> None:
    """As NVFP4, GPTQ and FP8 checkpoints spell their parts; a bias beside them stays a number."""
    path, at = tmp_path / "q.safetensors", "model.layers.0."
    save_file(
        {
            at + "self_attn.q_proj.weight_packed": torch.zeros(4, 32, dtype=torch.uint8),
            at + "self_attn.q_proj.weight_scale": torch.zeros(4, 4, dtype=torch.float8_e4m3fn),
            at + "self_attn.q_proj.weight_global_scale": torch.zeros(1),
            at + "mlp.up_proj.qweight": torch.zeros(8, 4, dtype=torch.int32),
            at + "mlp.up_proj.scales": torch.zeros(2, 4, dtype=torch.float16),
            at + "mlp.up_proj.qzeros": torch.zeros(2, 1, dtype=torch.int32),
            at + "mlp.down_proj.weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fn),
            at + "mlp.down_proj.weight_scale_inv": torch.zeros(1, 1),
            at + "mlp.down_proj.bias": torch.zeros(4),
            "positions": torch.zeros(3, dtype=torch.int64),
        },
        path,
    )
    found = account(path)
    assert found.nbytes == path.stat().st_size
    assert {kind: found.of(kind) for kind in KINDS} == {
        "codes": 128 + 128 + 16, "scales": 16 + 4 + 16 + 4, "minimums": 8, "plain": 16 + 24, "padding": 0,
    }  # fmt: skip
    assert found.role("attention").weights == 256
    assert found.role("feed-forward").weights == 256 + 16 + 4


@pytest.mark.parametrize("keep", [3, 9, 40, -1])
def test_a_damaged_file_is_refused(tmp_path: Path, keep: int) -> None:
    """A count past the end would be an account of bytes that are not there."""
    whole, path = tmp_path / "w.safetensors", tmp_path / "m.safetensors"
    save_file({"x": torch.zeros(64)}, whole)
    path.write_bytes(whole.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match=r"m\.safetensors"):
        account(path)


def test_a_gap_is_padding(tmp_path: Path) -> None:
    """Bytes that belong to no tensor, between two and after the last: the library writes none, other writers do."""
    entries = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F16", "shape": [2], "data_offsets": [24, 28]},
    }
    text, path = json.dumps(entries).encode(), tmp_path / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(28 + 4))
    found = account(path)
    assert found.nbytes == path.stat().st_size
    assert [tensor.padding for tensor in found.tensors] == [16, 4]
    assert found.of("plain") == 12


def test_files_of_the_kit_name_their_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that was just written has to say what it is, and to the byte."""
    model = save_tiny_gguf(tmp_path / "m.gguf", compiled_model("llama"), types="Q4_1")
    target = tmp_path / "q.safetensors"
    assert main(["quantize", str(model), str(target), "--policy", "nvfp4"]) == 0
    found = account(target)
    assert found.nbytes == target.stat().st_size
    assert found.role("feed-forward").bits_per_weight == pytest.approx(4.5, abs=0.02)
    assert found.weights == account(model).weights
    capsys.readouterr()
    assert main(["model", "info", str(model), "--compare", str(target)]) == 0
    assert "Q4_1 -> nvfp4" in capsys.readouterr().out
    assert main(["model", "info", str(target)]) == 0
    said = capsys.readouterr().out
    assert "policy" in said
    assert "rope base" in said


NONSENSE = (
    "[1]", '{"x": 3}', '{"x": {"dtype": "F32"}}', '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}',
)  # fmt: skip


@pytest.mark.parametrize("entry", NONSENSE)
def test_a_header_of_nonsense_is_refused(tmp_path: Path, entry: str) -> None:
    """Valid JSON is not yet a header."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(entry).to_bytes(8, "little") + entry.encode() + bytes(16))
    with pytest.raises(ModelFileError, match="complete safetensors"):
        account(path)


def test_names_say_what_tensors_are_for() -> None:
    """Both namings; the norms of attention are norms."""
    expected = {
        "token_embd.weight": "embedding", "model.embed_tokens.weight": "embedding", "output.weight": "head",
        "lm_head.weight": "head", "blk.3.attn_output.weight": "attention", "model.layers.3.self_attn.o_proj.weight":
        "attention", "blk.3.attn_q_norm.weight": "norms", "output_norm.weight": "norms", "blk.3.ffn_down.weight":
        "feed-forward", "model.layers.0.mlp.up_proj.weight": "feed-forward", "rope_freqs.weight": "other",
    }  # fmt: skip
    assert {name: role_of(name) for name in expected} == expected


def test_the_command_compares_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The difference has to be the files' own, and the JSON has to add up to them."""
    model = compiled_model("llama")
    a = save_tiny_gguf(tmp_path / "a.gguf", model, types="Q4_0")
    b = save_tiny_gguf(tmp_path / "b.gguf", model, types="Q8_0")
    target = tmp_path / "info.json"
    assert main(["model", "info", str(a), "--compare", str(b), "--json", str(target)]) == 0
    said = capsys.readouterr().out
    [line] = [line for line in said.splitlines() if line.startswith("all ")]
    assert line.split()[-1] == f"{(b.stat().st_size - a.stat().st_size) / 1e6:+.3f}"
    models = json.loads(target.read_text("utf-8"))["models"]
    for path, made in zip((a, b), models, strict=True):
        parts = [each[f"{kind}_bytes"] for each in made["tensors"] for kind in KINDS]
        assert made["header_bytes"] + sum(parts) == made["nbytes"] == path.stat().st_size
    assert models[0]["facts"]["rope base"]
    assert main(["model", "info", str(a)]) == 0
    assert "llama" in capsys.readouterr().out


def test_files_of_two_models_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their difference would be called a format's."""
    a = save_tiny_gguf(tmp_path / "a.gguf", compiled_model("llama"), types="Q4_0")
    b = save_tiny_gguf(tmp_path / "b.gguf", compiled_model("llama", columns=96), types="Q4_0")
    assert main(["model", "info", str(a), "--compare", str(b)]) == 1
    assert "not two files of one model" in capsys.readouterr().err
