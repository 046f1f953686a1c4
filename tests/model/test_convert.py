"""Directories of safetensors converted into GGUF files: against transformers, the gguf library and the directory."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import compiled_model, save_tiny, tiny_model
from tokenizer_corpus import TEXTS
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import nanokit
from nanokit.cli import main
from nanokit.errors import ModelFileError, NanokitError, ParameterError
from nanokit.gguf.reader import GGUFFile
from nanokit.gguf.write import Key
from nanokit.lab.experiments.agreement import logits_of
from nanokit.model import convert as converting
from nanokit.model import export, export_model
from nanokit.model.config import ModelConfig
from nanokit.model.convert import convert
from nanokit.model.load import open_model

MERGES = ("h e", "l l", "he ll", "1 2", "Ċ Ċ", "Ġ t")
IDS = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(5)).tolist()
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


def model_of(architecture: str, tied: bool = False, **extra: Any) -> PreTrainedModel:
    """Two layers, grouped heads, columns of whole blocks. transformers takes a head of 128 for qwen3 whatever a GGUF
    file says, so that it has one."""
    heads, head_dim = (2, 128) if architecture == "qwen3" else (4, 16)
    return tiny_model(architecture, tied=tied, heads=heads, kv_heads=heads // 2, head_dim=head_dim, hidden=64, **extra)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("hf") / "tiny", model_of("llama", tied=True), MERGES)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.gguf"


def ours(path: Path) -> torch.Tensor:
    return logits_of(nanokit.load(path, activations="fp32", ctx=256, kv_format="fp32"), IDS)


def theirs(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(torch.tensor([IDS])).logits[0].float()


def from_gguf(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_three_readings_of_a_converted_file_compute_the_same(tmp_path: Path, architecture: str, tied: bool) -> None:
    """q or k in the wrong order, k by the wrong heads, gate for up, a bias, norm or head left out, a default rope base:
    each loads and talks nonsense. (The base is not the one that readers fall back to.)"""
    model = model_of(architecture, tied, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    folder, target = save_tiny(tmp_path / "hf", model, MERGES), tmp_path / "out.gguf"
    written = convert(folder, target, "f32")
    expected, found = theirs(model), ours(target)
    assert apart(found, expected) < 1e-3
    assert apart(found, theirs(from_gguf(target))) < 1e-3
    names = [each.name for each in gguf.GGUFReader(target).tensors]
    assert ("output.weight" in names) is not tied
    assert written.types == {"F32": len(names)}


def test_a_quantized_file_is_what_transformers_reads(tmp_path: Path) -> None:
    """Blocks permuted in another way than their rows, or codes that only our own reader understands."""
    model = compiled_model("llama")
    target = tmp_path / "out.gguf"
    written = convert(save_tiny(tmp_path / "hf", model, MERGES), target)
    assert apart(ours(target), theirs(from_gguf(target))) < 1e-3
    assert written.types == {"Q8_0": 2, "F32": 5, "Q4_1": 14}
    assert written.misfits == ()


@pytest.mark.parametrize("rope", [LINEAR, LLAMA3], ids=["linear", "llama3"])
def test_rope_scaling_is_kept(tmp_path: Path, rope: dict[str, Any]) -> None:
    """Scaling that gets lost costs nothing on a short text. transformers ignores it in GGUF files, in silence: so its
    own reading of the directory is what a converted file is compared with."""
    model = model_of("llama", rope_parameters=rope)
    target = tmp_path / "out.gguf"
    same = 0.25 if rope is LINEAR else 1.0  # what the directory says, as llama.cpp's scale: no override
    convert(save_tiny(tmp_path / "hf", model, MERGES), target, "f32", rope_scale=same)
    expected = theirs(model)
    assert apart(ours(target), expected) < 1e-3
    assert apart(theirs(from_gguf(target)), expected) > 1e-2, "transformers has learned to scale: compare with it"
    keys, tensors = GGUFFile.open(target).metadata, GGUFFile.open(target).tensors
    if rope is LINEAR:
        assert (keys["llama.rope.scaling.type"], keys["llama.rope.scaling.factor"]) == ("linear", 4.0)
    assert ("rope_freqs.weight" in tensors) is (rope is LLAMA3)


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 5e5}, LINEAR], ids=["plain", "linear"])
def test_both_spellings_of_rope_parameters_give_one_file(tmp_path: Path, rope: dict[str, Any]) -> None:
    """transformers 4 has rope_theta on top and rope_scaling beside it; who reads one spelling takes 10,000 for the
    other."""
    folder = save_tiny(tmp_path / "hf", model_of("llama", rope_parameters=rope), MERGES)
    convert(folder, tmp_path / "new.gguf", "f16")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    if rope is LINEAR:
        config["rope_scaling"] = {"type": "linear", "factor": rope["factor"]}
    (folder / "config.json").write_text(json.dumps(config))
    convert(folder, tmp_path / "old.gguf", "f16")
    assert (tmp_path / "old.gguf").read_bytes() == (tmp_path / "new.gguf").read_bytes()


@pytest.mark.parametrize("kind", ["bf16", "f32", "f16"])
def test_shards_of_bf16_are_not_rounded_where_they_need_not_be(tmp_path: Path, kind: str) -> None:
    """A way over fp16 loses bits of BF16 in silence; a shard may be forgotten."""
    model = model_of("qwen2").to(torch.bfloat16)
    folder = save_tiny(tmp_path / "hf", model, MERGES, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").is_file()
    target = tmp_path / "out.gguf"
    convert(folder, target, kind)
    file = GGUFFile.open(target)
    for name, theirs_name in (("blk.1.ffn_down", "model.layers.1.mlp.down_proj"), ("output", "lm_head")):
        assert file.tensors[f"{name}.weight"].type == kind.upper()
        weights = model.state_dict()[f"{theirs_name}.weight"].float()
        kept = weights if kind != "f16" else weights.half().float()
        assert np.array_equal(file.tensor(f"{name}.weight"), kept.numpy())


def test_keys_are_those_of_the_library(folder: Path, target: Path, tmp_path: Path) -> None:
    """A key of another spelling is never read, one of another type is refused or misread: compared with what the gguf
    library's own methods write."""
    convert(folder, target, "f16", alignment=64)
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    writer.add_type("model")
    writer.add_name("tiny")
    writer.add_custom_alignment(64)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(320)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["x"] * 320)
    writer.add_token_types([1] * 320)
    writer.add_token_merges(["x x"] * len(MERGES))
    writer.add_eos_token_id(258)
    writer.add_eot_token_id(257)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    found, expected = (gguf.GGUFReader(path).fields for path in (target, tmp_path / "theirs.gguf"))
    assert found.keys() == expected.keys()
    for name, field in expected.items():
        assert found[name].types == field.types, name
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            assert len(found[name].data) == len(field.data), name
        elif not name.startswith("GGUF."):
            assert found[name].contents() == field.contents(), name


def test_alignment_is_that_of_every_tensor(folder: Path, target: Path) -> None:
    """Written in the header only, it sends every reader to the wrong bytes; our own would follow."""
    convert(folder, target, alignment=1024)
    reader = gguf.GGUFReader(target)
    assert reader.alignment == 1024
    assert all(each.data_offset % 1024 == 0 for each in reader.tensors)
    assert any(each.n_bytes % 1024 for each in reader.tensors)
    weights = load_file(folder / "model.safetensors")["model.norm.weight"]
    (norm,) = (each for each in reader.tensors if each.name == "output_norm.weight")
    assert np.array_equal(norm.data, weights.numpy())


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda folder, target: convert(folder, target, "q4_k"), "q4_0"),
        (lambda folder, target: convert(folder, target, alignment=48), "power of two"),
        (lambda folder, target: convert(folder, target, alignment=4), "power of two"),
        (lambda folder, target: convert(folder, target, rope_base=1e6), "--force"),
        (lambda folder, target: convert(folder, target, rope_scale=0.5), "--force"),
        (lambda folder, target: convert(folder, target, rope_base=1e39, force=True), "rope-freq-base.*out of range"),
        (lambda folder, target: convert(folder, target, rope_scale=1e-45, force=True), "rope-freq-scale.*out of range"),
        (lambda folder, target: convert(folder, target.with_suffix(".bin")), "gguf"),
        (lambda folder, target: convert(folder / "model.safetensors", target), "folder"),
    ],
    ids=["type", "alignment 48", "alignment 4", "base", "scale", "no base", "no scale", "suffix", "a file"],
)
def test_refusals_come_before_any_weight(
    folder: Path, target: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, Path], object], names: str
) -> None:
    """Options that would make a wrong file, or lose one that is there: found after the work, they cost all of it."""
    monkeypatch.setattr(converting, "write_split", None)
    with pytest.raises(NanokitError, match=names):
        change(folder, target)
    assert not list(target.parent.iterdir())


def test_rope_options_may_repeat_the_source_or_be_forced(folder: Path, target: Path) -> None:
    """An option that names the source's own value is no override; with force, the file says what was asked for."""
    convert(folder, target, "f16", rope_base=10000.0, rope_scale=1.0)
    plain = target.read_bytes()
    with pytest.raises(ParameterError, match="exists"):
        convert(folder, target, "f16")
    convert(folder, target, "f16", force=True)
    assert target.read_bytes() == plain
    with pytest.warns(UserWarning, match="instead of the source's") as warned:
        convert(folder, target, "f16", rope_base=5e5, rope_scale=0.25, force=True)
    assert len(warned) == 2
    rope = open_model(target).config.rope
    assert (rope.base, rope.linear_factor) == (5e5, 4.0)


def test_a_base_that_nobody_states_is_vouched_for(tmp_path: Path, target: Path) -> None:
    """Taken from a default, it reads fine; with force the option is the statement."""
    folder = save_tiny(tmp_path / "hf", model_of("llama"), MERGES)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match="rope base is missing"):
        convert(folder, target, "f16", rope_base=3e4)
    convert(folder, target, "f16", rope_base=3e4, force=True)
    assert GGUFFile.open(target).metadata["llama.rope.freq_base"] == 3e4


def test_a_file_of_the_source_is_never_replaced(tmp_path: Path, target: Path) -> None:
    """With force, under a second name, the weights would be lost while they are read."""
    folder = save_tiny(tmp_path / "hf", model_of("llama"), MERGES)
    target.hardlink_to(folder / "model.safetensors")
    with pytest.raises(ParameterError, match="of the model itself"):
        convert(folder, target, force=True)


def test_a_gguf_file_is_sent_to_quantize(folder: Path, target: Path, tmp_path: Path) -> None:
    """The commands have like names; converted anew, a GGUF file would lose what only its metadata says."""
    convert(folder, target, "f16")
    with pytest.raises(ParameterError, match="nanokit quantize"):
        convert(target, tmp_path / "again.gguf")


def test_columns_that_no_block_divides_become_floats_by_name(tmp_path: Path, target: Path) -> None:
    """Padded or cut in silence, every row behind the first would be another one's."""
    model = tiny_model("llama")  # 60 columns
    written = convert(save_tiny(tmp_path / "hf", model, MERGES), target, "q8_0")
    assert "model.layers.0.self_attn.q_proj.weight" in written.misfits
    assert "model.layers.0.mlp.down_proj.weight" not in written.misfits  # 96 columns
    assert written.types == {"F32": 7, "F16": 12, "Q8_0": 2}
    assert apart(ours(target), theirs(from_gguf(target))) < 1e-3


def test_nothing_is_left_of_a_conversion_that_fails(tmp_path: Path) -> None:
    """A weight that is no number is found when it is read, in the middle of the file; what was there before stays."""
    folder = save_tiny(tmp_path / "hf", model_of("llama"), MERGES)
    out = tmp_path / "out"
    out.mkdir()
    (out / "old.gguf").write_bytes(b"old")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name in ("old.gguf", "new.gguf"):
        with pytest.raises(ModelFileError, match=r"lm_head\.weight"):
            convert(folder, out / name, force=True)
    assert [path.name for path in out.iterdir()] == ["old.gguf"]
    assert (out / "old.gguf").read_bytes() == b"old"


def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's gate under the name of up, and up under that of gate."""
    names = export_model.gguf_names
    other = {"blk.0.ffn_gate.weight": "blk.0.ffn_up.weight", "blk.0.ffn_up.weight": "blk.0.ffn_gate.weight"}
    monkeypatch.setattr(export_model, "gguf_names", lambda w: ((a, other.get(b, b)) for a, b in names(w)))


def not_permuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """q and k in the order of the directory."""
    monkeypatch.setattr(export, "interleaved_heads", lambda *_: 0)


def default_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rope base that readers fall back to."""
    keys = export_model.model_keys

    def changed(config: ModelConfig, *rest: Any, **more: Any) -> dict[str, Key]:
        return keys(replace(config, rope=replace(config.rope, base=10000.0)), *rest, **more)

    monkeypatch.setattr(export_model, "model_keys", changed)


@pytest.mark.parametrize(
    ("fault", "named"),
    [(swapped, r"blk\.0\.ffn_gate"), (not_permuted, r"blk\.0\.attn_q"), (default_base, "freq_base")],
)
def test_a_converter_that_errs_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], named: str
) -> None:
    """The next mistake of ours: the file is looked at before anybody can load it."""
    model = model_of("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    folder = save_tiny(tmp_path / "hf", model, MERGES)
    out = tmp_path / "out"
    out.mkdir()
    fault(monkeypatch)
    with pytest.raises(ModelFileError, match=named):
        convert(folder, out / "m.gguf", "q8_0")
    assert not list(out.iterdir())


def test_transformers_reads_the_same_tokenizer(tmp_path: Path, target: Path) -> None:
    """Types of tokens, merges and special ids that only our own reader understands. (This splitting is one of those
    that transformers knows in a GGUF file.)"""
    folder = save_tiny(tmp_path / "hf", model_of("llama"), MERGES)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "<|end|>", "added_tokens_decoder": {}})
    )
    convert(folder, target, "f16")
    oracle, tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=target.name), open_model(folder).tokenizer
    for text in [*TEXTS, "hello 12", "<s>hello</s>h<|end|> x"]:
        assert oracle(text)["input_ids"] == tokenizer.encode(text), repr(text)
    assert (oracle.bos_token_id, oracle.eos_token_id) == (256, 258)


def test_more_tokens_than_rows_are_refused(tmp_path: Path, target: Path) -> None:
    """Such a token has no embedding: its id reads past the matrix."""
    folder = save_tiny(tmp_path / "hf", model_of("llama", vocab=264), MERGES)
    with pytest.raises(ModelFileError, match="tokens"):
        convert(folder, target)


def test_the_command_prints_the_path_and_what_is_in_it(
    folder: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path alone on standard output, for a pipe; a refusal exits with 2."""
    assert main(["model", "convert", str(folder), str(target), "--type", "Q8_0", "--align", "64"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{target}\n"
    assert "Q8_0" in err
    assert GGUFFile.open(target).metadata["general.alignment"] == 64
    assert main(["model", "convert", str(folder), str(target)]) == 2
    assert "--force" in capsys.readouterr().err
