"""`nanokit quantize` into GGUF files, judged by the gguf library and by transformers."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, LlamaFileType
from tiny import compiled_model, save_tiny, save_tiny_gguf, tiny_model
from transformers import AutoModelForCausalLM

import nanokit
from nanokit.errors import ParameterError
from nanokit.gguf.header import ValueKind
from nanokit.gguf.reader import GGUFFile
from nanokit.gguf.write import Key, copied, rewrite, write_gguf
from nanokit.lab.experiments.agreement import logits_of
from nanokit.model.convert import convert
from nanokit.model.quantize import quantize

WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0", "F32", "F16", "BF16")
FACTORS = torch.linspace(1, 2, 8)


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied llama in F32, with a tensor that no layer has, and an alignment of its own."""
    folder = tmp_path_factory.mktemp("floats")
    model, extra = compiled_model("llama", tied=True, columns=256), {"rope_freqs.weight": FACTORS}
    plain = save_tiny_gguf(folder / "plain.gguf", model, extra, **{"general.file_type": 0})
    rewrite(plain, folder / "tiny.gguf", {}, {"general.alignment": Key(ValueKind("UINT32"), 128)})
    return folder / "tiny.gguf"


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_file_is_byte_for_byte_the_gguf_librarys(kind: str, floats: Path, tmp_path: Path) -> None:
    """A file that differs from the owner's is another format under its name. Rows of q and k out of order, a vector
    rounded, tensors sorted or an alignment forgotten: all of it is seen here."""
    quantize(floats, tmp_path / "out.gguf", f"mix:all={kind.lower()},head={kind.lower()}")
    before, after = GGUFReader(floats), GGUFReader(tmp_path / "out.gguf")
    assert [each.name for each in after.tensors] == [each.name for each in before.tensors]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        wanted = old.data if len(old.shape) == 1 else gguf.quants.quantize(old.data, GGMLQuantizationType[kind])
        assert new.tensor_type == (GGMLQuantizationType[kind] if len(old.shape) == 2 else old.tensor_type)
        assert new.data.tobytes() == wanted.tobytes(), new.name
        assert new.data_offset % 128 == 0
    wrong = {"general.file_type", "general.quantization_version", "GGUF.kv_count"}
    for name, field in before.fields.items():
        assert name in wrong or after.fields[name].contents() == field.contents()
    assert set(after.fields) == {*before.fields, "general.quantization_version"}
    names = {"MXFP4": "MOSTLY_MXFP4_MOE", "F32": "ALL_F32"}
    assert after.fields["general.file_type"].contents() == LlamaFileType[names.get(kind, f"MOSTLY_{kind}")]


@pytest.mark.parametrize(("architecture", "head_dim"), [("llama", 16), ("qwen2", 16), ("qwen3", 128)])
def test_transformers_reads_the_same_model(architecture: str, head_dim: int, tmp_path: Path) -> None:
    """The file's own numbers are one thing, what others make of it another: q and k rows, tied heads, biases. (It takes
    heads for hidden size / heads wide, and Qwen 3's for 128, whatever the file says.)"""
    model = tiny_model(architecture, tied=architecture != "qwen2", heads=4, hidden=64, head_dim=head_dim, vocab=331)
    source = save_tiny_gguf(tmp_path / "in.gguf", model)
    quantize(source, tmp_path / "out.gguf", "q8_0;0.down=q4_0;head=f16")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="out.gguf", dtype=torch.float32)
    ids = list(range(1, 60))
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    engine = nanokit.load(tmp_path / "out.gguf", activations="fp32", ctx=64, kv_format="fp32")
    assert (logits_of(engine, ids) - expected).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("architecture", "tied", "policy"),
    [
        ("llama", True, "q4_1+awq"),
        ("qwen2", False, "q4_0;0.down=q8_0"),
        ("qwen3", True, "bf16"),
        ("llama", False, "keep"),
    ],
)
def test_a_folder_is_converted_on_the_way(architecture: str, tied: bool, policy: str, tmp_path: Path) -> None:
    """In one step or in two, with a file of floats between: a conversion of its own would be a second one to keep
    right. Norms that awq folds into are among what is written."""
    text = tmp_path / "text.txt"
    text.write_text("Water boils earlier on a mountain. " * 4)
    calibration = text if "+" in policy else None
    folder = save_tiny(tmp_path / "tiny", compiled_model(architecture, tied=tied), ["a b"])
    floats = convert(folder, tmp_path / "floats.gguf", "f32").path
    at_once = quantize(folder, tmp_path / "out.gguf", policy, calibration=calibration)
    in_two = quantize(floats, tmp_path / "two.gguf", policy, calibration=calibration)
    assert at_once.path.read_bytes() == in_two.path.read_bytes()
    assert (at_once.bits_before, at_once.bits_after) == (in_two.bits_before, in_two.bits_after)
    nanokit.load(at_once.path, ctx=64)


def test_one_tensor_and_the_head(floats: Path, tmp_path: Path) -> None:
    """An override that reaches its neighbours, or that the file's own type follows, is not one."""
    written = quantize(floats, tmp_path / "out.gguf", "q4_0;1.down=q8_0;head=bf16")
    tensors = GGUFFile.open(tmp_path / "out.gguf").tensors
    found = {name: info.type for name, info in tensors.items() if len(info.shape) == 2}
    assert found.pop("blk.1.ffn_down.weight") == "Q8_0"
    assert found.pop("token_embd.weight") == "BF16"
    assert set(found.values()) == {"Q4_0"}
    assert (written.before, written.after) == (("F32",), ("BF16", "Q4_0", "Q8_0"))
    alone = quantize(tmp_path / "out.gguf", tmp_path / "again.gguf", "keep;0.q=f32")
    assert GGUFReader(alone.path).fields["general.file_type"].contents() == LlamaFileType.MOSTLY_Q4_0


@pytest.mark.parametrize("policy", ["q4_0", "mxfp4+search"])
def test_rows_that_no_block_divides_become_halves_and_are_named(policy: str, tmp_path: Path) -> None:
    """llama.cpp does so; done in silence, the file is larger than asked for and nobody knows why."""
    source = save_tiny_gguf(tmp_path / "in.gguf", tiny_model("llama", tied=True))  # 60 columns, but 96 of `down`
    written = quantize(source, tmp_path / "out.gguf", policy)
    types = {name: info.type for name, info in GGUFFile.open(written.path).tensors.items() if len(info.shape) == 2}
    assert set(written.misfits) == {name for name, kind in types.items() if kind == "F16"}
    assert len(written.misfits) == 2 * 6
    assert types["blk.0.ffn_down.weight"] == policy.split("+")[0].upper()
    assert types["token_embd.weight"] == "F32", "nobody named the head"
    nanokit.load(written.path, ctx=64)
    with pytest.raises(ParameterError, match="does not fit"):
        quantize(source, tmp_path / "out.safetensors", policy)


def test_shards_become_one_file(floats: Path, tmp_path: Path) -> None:
    """Keys that call it a shard would make every reader look for its siblings."""
    keys, entries = copied(GGUFFile.open(floats))
    names = list(entries)
    for at in range(2):
        split = {"split.no": at, "split.count": 2, "split.tensors.count": len(names)}
        own = {name: keys["general.file_type"]._replace(value=value) for name, value in split.items()}
        part = names[: len(names) // 2] if at == 0 else names[len(names) // 2 :]
        write_gguf(tmp_path / f"m-0000{at + 1}-of-00002.gguf", keys | own, [entries[name] for name in part])
    quantize(floats, tmp_path / "one.gguf", "q5_0")
    quantize(tmp_path / "m-00002-of-00002.gguf", tmp_path / "joined.gguf", "q5_0")
    assert (tmp_path / "joined.gguf").read_bytes() == (tmp_path / "one.gguf").read_bytes()


def test_metadata_alone_leaves_the_files_type(floats: Path, tmp_path: Path) -> None:
    """A repaired rope base says nothing about types, and a type that has no number of ours stays what it was called."""
    kind = copied(GGUFFile.open(floats))[0]["general.file_type"]
    rewrite(floats, tmp_path / "out.gguf", {}, {"general.file_type": kind._replace(value=15)})
    rewrite(tmp_path / "out.gguf", tmp_path / "again.gguf", {}, {"llama.context_length": kind._replace(value=64)})
    again = GGUFFile.open(tmp_path / "again.gguf")
    assert (again.metadata["general.file_type"], again.metadata["llama.context_length"]) == (15, 64)
    assert np.array_equal(again.tensor("rope_freqs.weight"), FACTORS.numpy())
