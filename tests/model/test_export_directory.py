"""GGUF files turned back into transformers folders: transformers, safetensors and the first folder are the oracles."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB, save_tiny, save_tiny_gguf, tiny_model
from tokenizer_corpus import CHATS, TEXTS
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

import nanokit
from nanokit.cli import main
from nanokit.errors import ModelFileError, NanokitError, ParameterError
from nanokit.gguf.reader import GGUFFile
from nanokit.lab.experiments.agreement import logits_of
from nanokit.model import export_directory as exporting
from nanokit.model import write_safetensors
from nanokit.model.convert import convert
from nanokit.model.export_directory import export_directory
from nanokit.model.load import open_model
from nanokit.model.rope import Rope
from nanokit.model.tokenizer import Tokenizer
from nanokit.model.tokenizer_gguf import PRE_TOKENIZERS, split_as
from nanokit.model.write_safetensors import Planned

MERGES = ("h e", "l l", "he ll", "1 2", "Ċ Ċ", "Ġ t")
IDS = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(5)).tolist()
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>\n{{ m.content }}{{ eos_token }}{% endfor %}"
# What the types of a folder and the versions of transformers differ in.
OWN = ("dtype", "transformers_version", "_name_or_path", "initializer_range")


def model_of(architecture: str, tied: bool = False, **extra: Any) -> PreTrainedModel:
    """Two layers, grouped heads, columns of whole blocks. Heads of 24 are no quotient of anything."""
    extra = {"rope_parameters": PLAIN, **extra}
    return tiny_model(architecture, tied=tied, heads=4, kv_heads=2, head_dim=24, hidden=64, **extra)


def directory(path: Path, model: PreTrainedModel) -> Path:
    """A folder as the hub has it, with a tokenizer that splits as its architecture's do."""
    save_tiny(path, model, MERGES)
    named = {"bos_token": "<s>", "eos_token": "<|end|>", "chat_template": TEMPLATE, "added_tokens_decoder": {}}
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    backend = Tokenizer.from_directory(path).parts.backend
    split_as(backend, PRE_TOKENIZERS["qwen2" if model.config.model_type.startswith("qwen") else "smollm"])
    backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file, and the folder that it was made from beside it."""
    place = tmp_path_factory.mktemp("made")
    convert(directory(place / "hf", model_of("llama")), place / "m.gguf", "f32")
    return place / "m.gguf"


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A place of its own, so that what is left beside a folder is seen."""
    (tmp_path / "out").mkdir()
    yield tmp_path / "out" / "back"
    left = [each.name for each in (tmp_path / "out").iterdir() if each.name.startswith(".")]
    assert not left


def theirs(folder: Path) -> torch.Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), "weights that transformers made up, or did not use"
    with torch.inference_mode():
        logits: torch.Tensor = model.eval()(torch.tensor([IDS])).logits[0]
    return logits


def configured(folder: Path) -> dict[str, Any]:
    return {key: value for key, value in AutoConfig.from_pretrained(folder).to_dict().items() if key not in OWN}


@pytest.mark.parametrize(
    ("architecture", "tied", "extra"),
    [
        ("llama", False, {"rope_parameters": LLAMA3}),
        ("llama", True, {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", False, {}),
        ("qwen2", True, {"rms_norm_eps": 1e-5}),
        ("qwen3", False, {}),
        ("qwen3", True, {"rope_parameters": LINEAR, "attention_bias": True}),
    ],
)
def test_a_folder_comes_back_out_of_its_file(
    tmp_path: Path, out: Path, architecture: str, tied: bool, extra: dict[str, Any]
) -> None:
    """q or k left in the file's order, a head stored twice or not at all, a bias or norm forgotten, a default instead
    of a stated size or rope base, a rule of scaling taken for another: each loads and talks nonsense."""
    first = directory(tmp_path / "hf", model_of(architecture, tied, **extra))
    convert(first, tmp_path / "m.gguf", "f32")
    written = export_directory(tmp_path / "m.gguf", out, "f32")
    before, after = load_file(first / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert written.types == {"F32": len(before)}
    assert configured(out) == configured(first)
    assert torch.equal(theirs(out), theirs(first))
    oracle, tokenizer = AutoTokenizer.from_pretrained(out), open_model(first).tokenizer
    for text in [*TEXTS, "hello 12", "<s>hello</s>h<|end|> x"]:
        assert oracle(text)["input_ids"] == tokenizer.encode(text), repr(text)
    for chat in CHATS:
        assert oracle.apply_chat_template(chat, tokenize=False) == tokenizer.chat_text(chat)
    assert open_model(out).tokenizer.eos_ids == tokenizer.eos_ids == (258, 257)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [258, 257]


def test_transformers_4_finds_its_own_spelling(made: Path, out: Path, tmp_path: Path) -> None:
    """It reads the base on top and rope_scaling, and takes 10,000 and none where they are missing."""
    export_directory(made, out)
    config = json.loads((out / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"], config["torch_dtype"]) == (5e5, None, "float16")
    linear = save_tiny_gguf(tmp_path / "l.gguf", tiny_model("llama"),
                            **{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0})  # fmt: skip
    export_directory(linear, out.with_name("linear"))
    config = json.loads((out.with_name("linear") / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == (1e4, {"rope_type": "linear", "factor": 2.0})


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_a_quantized_file_computes_the_same_as_a_folder(tmp_path: Path, out: Path, kind: str) -> None:
    """Codes expanded in another way than the kernels do, or rounded more than the type asks for."""
    model = tiny_model("llama", heads=4, kv_heads=2, head_dim=16, hidden=64)
    file = save_tiny_gguf(tmp_path / "m.gguf", model, types="Q8_0")
    written = export_directory(file, out, kind)
    assert written.types == ({"F32": 21} if kind == "f32" else {kind.upper(): 16, "F32": 5})
    ours = logits_of(nanokit.load(file, activations="fp32", ctx=256, kv_format="fp32"), IDS)
    bound = {"f32": 1e-3, "f16": 2.0**-9, "bf16": 2.0**-6}[kind] * (1 if kind == "f32" else float(ours.abs().max()))
    assert float((theirs(out) - ours).abs().max()) < bound
    norm = GGUFFile.open(file).tensor("blk.1.ffn_norm.weight")
    assert np.array_equal(load_file(out / "model.safetensors")["model.layers.1.post_attention_layernorm.weight"], norm)


def test_shards_hold_every_tensor_once(made: Path, out: Path) -> None:
    """A tensor lost at a cut, or an index that points to the wrong file; one that is larger than a shard."""
    limit = 30_000
    export_directory(made, out, "f16", shard_bytes=limit)
    files = sorted(out.glob("*.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    numbers = range(1, len(files) + 1)
    assert [each.name for each in files] == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in numbers]
    held = {each.name: load_file(each) for each in files}
    assert {name: file for file, tensors in held.items() for name in tensors} == index["weight_map"]
    assert sum(map(len, held.values())) == len(load_file(made.parent / "hf" / "model.safetensors"))
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in held.values()]
    assert sum(sizes) == index["metadata"]["total_size"]
    beyond = [held[file.name].keys() for size, file in zip(sizes, files, strict=True) if size > limit]
    assert beyond == [{"model.embed_tokens.weight"}, {"lm_head.weight"}]
    assert not (out / "model.safetensors").exists()
    whole = out.with_name("whole")
    export_directory(made, whole, "f16")
    assert torch.equal(theirs(out), theirs(whole))


def test_a_splitting_that_transformers_ignores_is_told(tmp_path: Path, out: Path) -> None:
    """Its AutoTokenizer knows better than a folder of qwen2: digits, line ends and contractions get other ids."""
    file = save_tiny_gguf(tmp_path / "m.gguf", tiny_model("qwen2"))
    with pytest.warns(UserWarning, match="PreTrainedTokenizerFast"):
        export_directory(file, out)
    tokenizer, text = open_model(file).tokenizer, "I'LL say\n\n1234"
    assert PreTrainedTokenizerFast.from_pretrained(out)(text)["input_ids"] == tokenizer.encode(text)
    pieces = AutoTokenizer.from_pretrained(out).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert pieces != tokenizer.parts.backend.pre_tokenizer.pre_tokenize_str(text), "no warning is needed any more"


def test_every_tensor_lies_at_a_multiple_of_its_size(tmp_path: Path) -> None:
    """Behind an odd number of half floats, a reader that maps the file has floats that begin in the middle."""
    tensors = {"a": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16), "b": torch.tensor([[4.0], [5.0]])}
    types = {"a": "F16", "b": "F32"}
    planned = [Planned(name, types[name], tuple(t.shape), lambda t=t: t) for name, t in tensors.items()]
    write_safetensors.write_file(tmp_path / "t.safetensors", planned, "a mark")
    read = load_file(tmp_path / "t.safetensors")
    assert all(torch.equal(read[name], t) for name, t in tensors.items())
    data = (tmp_path / "t.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    assert end % 8 == 0
    assert all(header[name]["data_offsets"][0] % t.itemsize == 0 for name, t in tensors.items())


def some_biases(folder: Path, part: str) -> Path:
    """A GGUF file in which one layer's `part` has a bias."""
    model = tiny_model("llama")
    bias = torch.ones(model.state_dict()[f"model.layers.1.{part}.weight"].shape[0])
    names = {"mlp.up_proj": "blk.1.ffn_up.bias", "self_attn.q_proj": "blk.1.attn_q.bias"}
    return save_tiny_gguf(folder / "m.gguf", model, {names[part]: bias})


@pytest.mark.parametrize("part", ["mlp.up_proj", "self_attn.q_proj"])
def test_biases_that_transformers_would_complete_are_refused(tmp_path: Path, out: Path, part: str) -> None:
    """It makes the missing ones up, with a warning among many."""
    with pytest.raises(ModelFileError, match="layer 0 has none"):
        export_directory(some_biases(tmp_path, part), out)
    assert not out.exists()


def holding(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_text("{}")
    return path


@pytest.mark.parametrize(
    ("attempt", "names"),
    [
        (lambda file, out: export_directory(file, out, "q4_0"), "f32, f16, bf16"),
        (lambda file, out: export_directory(file, out, shard_bytes=0), "size"),
        (lambda file, out: export_directory(file.parent / "hf", out), "no GGUF file"),
        (lambda file, out: export_directory(file, holding(out, "mine.txt"), force=True), r"mine\.txt"),
        (lambda file, out: export_directory(file, holding(out, "config.json", "model.gguf"), force=True), "gguf"),
        (lambda file, out: export_directory(file, holding(out, "config.json")), "--force"),
        (lambda file, out: export_directory(file, file, force=True), "no folder"),
        (lambda file, out: export_directory(file, file.parent / "hf", force=True), r"model\.safetensors"),
        (lambda file, out: export_directory(file, out / "deeper"), "cannot be written"),
    ],
    ids=["type", "shards", "a folder", "foreign", "model", "exists", "a file", "the source", "no place"],
)
def test_refusals_come_before_any_weight(
    made: Path, out: Path, monkeypatch: pytest.MonkeyPatch, attempt: Callable[[Path, Path], object], names: str
) -> None:
    """Found after the work, they cost all of it; with force, a person's own files must not go: not even a folder from
    the hub, whose files have the same names."""
    monkeypatch.setattr(exporting, "write_checkpoint", None)
    before = {each: each.stat().st_mtime_ns for each in made.parent.rglob("*")}
    with pytest.raises(NanokitError, match=names):
        attempt(made, out)
    assert {each: each.stat().st_mtime_ns for each in made.parent.rglob("*")} == before


def test_force_replaces_an_export_as_a_whole(made: Path, out: Path) -> None:
    """A shard that is left of the former one would be read with the new ones. An empty folder needs no force."""
    out.mkdir()
    export_directory(made, out, shard_bytes=50_000)
    with pytest.raises(ParameterError, match="exists"):
        export_directory(made, out)
    export_directory(made, out, "f32", force=True)
    assert [each.name for each in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert open_model(out).stored["lm_head.weight"].type == "F32"
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ParameterError, match=r"notes\.txt"):
        export_directory(made, out, force=True)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_weight_beyond_fp16_is_named(tmp_path: Path, out: Path, name: str) -> None:
    """It becomes an infinity, and every answer NaN: in a vector too, which is fp32 until transformers loads it."""
    first = directory(tmp_path / "hf", model_of("llama", tied=True))
    tensors = load_file(first / "model.safetensors")
    tensors[name].view(-1)[5] = 1e5
    save_file(tensors, first / "model.safetensors", {"format": "pt"})
    convert(first, tmp_path / "m.gguf", "f32")
    own = {"model.norm.weight": "output_norm"}.get(name, "blk.1.ffn_up")
    with pytest.raises(ParameterError, match=rf"{own}\.weight holds a weight beyond"):
        export_directory(tmp_path / "m.gguf", out)
    assert not out.exists()
    export_directory(tmp_path / "m.gguf", out, "bf16")
    assert float(load_file(out / "model.safetensors")[name].float().max()) == pytest.approx(1e5, rel=4e-3)


def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's gate under the name of up, and up under that of gate."""
    names = exporting.transformers_names
    gate, up = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
    other = {gate: up, up: gate}
    monkeypatch.setattr(exporting, "transformers_names", lambda w: [(a, other.get(b, b)) for a, b in names(w)])


def default_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rope base that readers fall back to."""
    wrong, described = Rope(10000.0), exporting.config_json
    monkeypatch.setattr(exporting, "config_json", lambda c, *rest: described(replace(c, rope=wrong), *rest))


def shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor's data a little further on than the header says."""
    write = write_safetensors.write_file

    def wrong(path: Path, tensors: list[write_safetensors.Planned], mark: str) -> None:
        write(path, tensors, mark)
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        path.write_bytes(data[:end] + data[-512:] + data[end:-512])

    monkeypatch.setattr(write_safetensors, "write_file", wrong)


def disk_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for the second shard."""
    write = write_safetensors.write_file

    def full(path: Path, *rest: Any) -> None:
        if "00002" in path.name:
            raise OSError(28, "No space left on device")
        write(path, *rest)

    monkeypatch.setattr(write_safetensors, "write_file", full)


def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place cannot be taken when the folder is done."""
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise OSError(16, "Device or resource busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (swapped, r"blk\.0\.ffn_gate"),
        (default_base, "freq_base"),
        (shifted, "weights as in"),
        (disk_full, "No space"),
        (busy, "busy"),
    ],
)
def test_an_export_that_fails_leaves_what_was_there(
    made: Path, out: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], named: str
) -> None:
    """Half a folder loads, or looks as if it were finished; and the former one is the only one."""
    export_directory(made, out, "f32", shard_bytes=90_000)
    before = {each.name: each.read_bytes() for each in out.iterdir()}
    fault(monkeypatch)
    for target in (out, out.with_name("another")):
        with pytest.raises(NanokitError, match=named):
            export_directory(made, target, "f32", shard_bytes=90_000, force=True)
    assert {each.name: each.read_bytes() for each in out.iterdir()} == before
    assert [each.name for each in out.parent.iterdir()] == [out.name]


def test_files_that_come_meanwhile_are_kept(made: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder was free when the work began."""
    verify = exporting.verify

    def slow(*args: Any, **how: Any) -> object:
        holding(out, "mine.txt")
        return verify(*args, **how)

    monkeypatch.setattr(exporting, "verify", slow)
    with pytest.raises(ParameterError, match=r"mine\.txt"):
        export_directory(made, out)
    assert [each.name for each in out.iterdir()] == ["mine.txt"]


def test_the_command_tells_a_folder_by_its_name(made: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The path alone on standard output; options of files are refused, not ignored."""
    assert main(["model", "convert", str(made), str(out)]) == 0
    printed, said = capsys.readouterr()
    assert printed == f"{out}\n"
    assert "F16" in said
    assert AutoConfig.from_pretrained(out).vocab_size == VOCAB
    for option in (["--align", "64"], ["--rope-freq-base", "10000"], ["--rope-freq-scale", "1"]):
        assert main(["model", "convert", str(made), str(out), *option, "--force"]) == 2
        assert option[0] in capsys.readouterr().err
    assert main(["model", "convert", str(made), str(out.with_suffix(".GGUF"))]) == 2
    assert main(["model", "convert", str(out), str(out.with_suffix(".gguf"))]) == 0, "as q4_1"
    assert GGUFFile.open(out.with_suffix(".gguf")).tensors["blk.0.ffn_up.weight"].type == "Q4_1"
