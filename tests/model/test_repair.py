"""What is wrong in a file is put right from its source, and nothing else is touched."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from tiny import compiled_model, save_tiny, save_tiny_gguf, tiny_model

from nanokit.cli import main
from nanokit.errors import ModelFileError, ParameterError
from nanokit.gguf.faults import inject
from nanokit.gguf.header import ValueKind
from nanokit.gguf.reader import GGUFFile
from nanokit.gguf.write import Key, rewrite
from nanokit.model.convert import convert
from nanokit.model.repair import repair

MERGES = ("h e", "l l", "he ll")
BASE = {"llama.rope.freq_base": 5e4}
LINEAR = {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A tied llama in Q8_0 beside its directory."""
    folder = tmp_path_factory.mktemp("models")
    rope = {"rope_type": "default", "rope_theta": 5e4}
    model = tiny_model("llama", tied=True, heads=4, hidden=64, head_dim=16, rope_parameters=rope)
    directory = save_tiny(folder / "source", model, MERGES)
    return {"directory": directory, "good": convert(directory, folder / "good.gguf", "q8_0").path}


@pytest.mark.parametrize(
    "fault", ["rope-base-10000", "rope-base-missing", "rope-base-text", "frequency-scale-half", "head-count-32"]
)
def test_wrong_keys_are_the_sources_again(fault: str, made: Mapping[str, Path], tmp_path: Path) -> None:
    """Keys alone were wrong: the repaired file is the sound one, but for the place of a key that was missing."""
    injected = inject(fault, made["good"], tmp_path / "bad.gguf")
    before = (tmp_path / "bad.gguf").read_bytes()
    done = repair(tmp_path / "bad.gguf", tmp_path / "good.gguf", made["directory"])
    good, new = GGUFFile.open(made["good"]), GGUFFile.open(done.path)
    assert (new.metadata, new.kinds) == (good.metadata, good.kinds)
    assert all(bytes(new.raw(name)) == bytes(good.raw(name)) for name in good.tensors)
    assert list(new.tensors) == list(good.tensors)
    assert all(any(key in said for said in done.keys) for key in injected.keys)
    assert (tmp_path / "bad.gguf").read_bytes() == before
    assert not done.report.failed


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("gate-up-swapped-one", ["blk.1.ffn_gate.weight", "blk.1.ffn_up.weight"]),
        ("gate-up-fused", ["blk.*.ffn_gate.weight", "blk.*.ffn_up.weight"]),
        ("q-k-permuted", ["blk.*.attn_[qk].weight"]),
        ("k-wrong-heads", ["blk.*.attn_k.weight"]),
        ("nan-scale", ["blk.*.weight"]),
        ("tied-head-dropped", ["token_embd.weight"]),
    ],
)
def test_tensors_that_are_named_are_the_sources_again(
    fault: str, names: list[str], made: Mapping[str, Path], tmp_path: Path
) -> None:
    """Rounded anew from the directory to the type that they had, rows in llama's order."""
    inject(fault, made["good"], tmp_path / "bad.gguf")
    done = repair(tmp_path / "bad.gguf", tmp_path / "good.gguf", made["directory"], inject=names)
    good, new = GGUFFile.open(made["good"]), GGUFFile.open(done.path)
    assert {name: bytes(new.raw(name)) for name in new.tensors} == {
        name: bytes(good.raw(name)) for name in good.tensors
    }
    assert not done.keys


def test_a_repair_that_does_not_suffice_writes_nothing(made: Mapping[str, Path], tmp_path: Path) -> None:
    """A file called repaired that is still wrong is worse than none."""
    inject("gate-up-swapped-all", made["good"], tmp_path / "bad.gguf")
    with pytest.raises(ModelFileError, match="gate and up") as caught:
        repair(tmp_path / "bad.gguf", tmp_path / "new.gguf", made["directory"], inject=["blk.0.ffn_gate.weight"])
    assert "blk.1.ffn_up.weight" in str(caught.value)
    assert "nothing was written" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


@pytest.mark.parametrize("rope", [LINEAR, LLAMA3], ids=["linear", "llama3"])
def test_scaling_that_was_lost_comes_back(rope: dict[str, float], tmp_path: Path) -> None:
    """Linear scaling is two keys, the llama3 rule a tensor."""
    scaled = save_tiny(tmp_path / "scaled", tiny_model("llama", rope_parameters=rope), MERGES)
    plain = save_tiny(
        tmp_path / "plain", tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e4}), MERGES
    )
    lost = convert(plain, tmp_path / "lost.gguf", "f32").path
    done = repair(lost, tmp_path / "new.gguf", scaled)
    assert ("rope_freqs.weight" in done.tensors) == (rope is LLAMA3)
    back = repair(done.path, tmp_path / "back.gguf", plain)
    assert set(GGUFFile.open(back.path).tensors) == set(GGUFFile.open(lost).tensors)
    assert GGUFFile.open(back.path).metadata == GGUFFile.open(lost).metadata


def test_a_type_that_cannot_be_written_is_taken_from_a_gguf_source_as_it_is(tmp_path: Path) -> None:
    """K types are read here and not written: from a good file of the same type the codes come as they are."""
    good = save_tiny_gguf(tmp_path / "good.gguf", compiled_model("llama", tied=True, columns=256), types="Q4_K", **BASE)
    inject("gate-up-swapped-one", good, tmp_path / "bad.gguf")
    done = repair(tmp_path / "bad.gguf", tmp_path / "new.gguf", good, inject=["blk.1.ffn_*.weight"])
    assert set(done.tensors.values()) == {"Q4_K", "F32"}
    assert done.path.read_bytes() == good.read_bytes()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.head_count", Key(ValueKind("FLOAT32"), 4.0)),
        ("llama.rope.freq_base", Key(ValueKind("FLOAT64"), 5e4)),
        ("llama.embedding_length", None),
        ("llama.rope.scaling.alpha", Key(ValueKind("FLOAT32"), 2.0)),
    ],
)
def test_kinds_and_missing_keys_are_the_sources_again(
    key: str, value: Key | None, made: Mapping[str, Path], tmp_path: Path
) -> None:
    """A number of the wrong kind is one that other readers refuse, though its value is right."""
    rewrite(made["good"], tmp_path / "bad.gguf", {}, {key: value})
    done = repair(tmp_path / "bad.gguf", tmp_path / "new.gguf", made["directory"])
    good, new = GGUFFile.open(made["good"]), GGUFFile.open(done.path)
    assert (new.metadata, new.kinds) == (good.metadata, good.kinds)


@pytest.mark.parametrize("rope", [LINEAR, LLAMA3], ids=["linear", "llama3"])
def test_what_agrees_is_left_alone(rope: dict[str, float], tmp_path: Path) -> None:
    """A sound file of a scaled rope, and one that says outright that it has no scaling."""
    directory = save_tiny(tmp_path / "scaled", tiny_model("llama", rope_parameters=rope), MERGES)
    sound = convert(directory, tmp_path / "sound.gguf", "f32").path
    with pytest.raises(ParameterError, match="is to be changed"):
        repair(sound, tmp_path / "new.gguf", directory)


def test_no_scaling_may_be_said_aloud(made: Mapping[str, Path], tmp_path: Path) -> None:
    """rope.scaling.type = none contradicts nothing."""
    rewrite(made["good"], tmp_path / "said.gguf", {}, {"llama.rope.scaling.type": Key(ValueKind("STRING"), "none")})
    with pytest.raises(ParameterError, match="is to be changed"):
        repair(tmp_path / "said.gguf", tmp_path / "new.gguf", made["directory"])


def test_neither_the_file_nor_its_source_is_overwritten(made: Mapping[str, Path], tmp_path: Path) -> None:
    """With --force as well: what is read while it is replaced is lost."""
    inject("rope-base-10000", made["good"], tmp_path / "bad.gguf")
    shutil.copyfile(made["good"], tmp_path / "source.gguf")
    for target in ("bad.gguf", "source.gguf"):
        with pytest.raises(ParameterError, match="file of the model itself"):
            repair(tmp_path / "bad.gguf", tmp_path / target, tmp_path / "source.gguf", force=True)
    assert (tmp_path / "source.gguf").read_bytes() == made["good"].read_bytes()


def test_what_cannot_be_compared_is_not_called_repaired(made: Mapping[str, Path], tmp_path: Path) -> None:
    """Experts are not run here: nothing would have been verified."""
    keys = {"llama.expert_count": Key(ValueKind("UINT32"), 8), "llama.rope.freq_base": Key(ValueKind("FLOAT32"), 1e4)}
    rewrite(made["good"], tmp_path / "bad.gguf", {}, keys)
    with pytest.raises(ModelFileError, match="cannot be compared"):
        repair(tmp_path / "bad.gguf", tmp_path / "new.gguf", made["directory"])
    assert not (tmp_path / "new.gguf").exists()


def test_what_cannot_be_repaired_is_refused(made: Mapping[str, Path], tmp_path: Path) -> None:
    """Each before anything is written."""
    inject("truncated-middle", made["good"], tmp_path / "cut.gguf")
    inject("rope-base-10000", made["good"], tmp_path / "bad.gguf")
    with pytest.raises(ModelFileError, match="the file ends before tensor"):
        repair(tmp_path / "cut.gguf", tmp_path / "new.gguf", made["directory"])
    with pytest.raises(ParameterError, match="no such tensor"):
        repair(tmp_path / "bad.gguf", tmp_path / "new.gguf", made["directory"], inject=["blk.9.ffn_up.weight"])
    with pytest.raises(ParameterError, match="is to be changed"):
        repair(made["good"], tmp_path / "new.gguf", made["directory"])
    with pytest.raises(ParameterError, match="exists already"):
        repair(tmp_path / "bad.gguf", tmp_path / "cut.gguf", made["directory"])
    other = save_tiny(tmp_path / "qwen", tiny_model("qwen2"), MERGES)
    with pytest.raises(ModelFileError, match="is not what"):
        repair(tmp_path / "bad.gguf", tmp_path / "new.gguf", other)
    assert not (tmp_path / "new.gguf").exists()


def test_the_commands(made: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """verify exits with 1 for a file that fails; repair prints the path of one that no longer does."""
    bad, new, source = tmp_path / "bad.gguf", tmp_path / "new.gguf", str(made["directory"])
    inject("rope-base-10000", made["good"], bad)
    assert main(["model", "verify", str(bad), "--against", source, "--json", str(tmp_path / "report.json")]) == 1
    assert "llama.rope.freq_base is 10000" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text("utf-8"))["failed"] > 0
    assert main(["model", "repair", str(bad), str(new), "--from", source]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == str(new)
    assert "llama.rope.freq_base: 10000.0 -> 50000.0" in err
    assert main(["model", "verify", str(new), "--against", source]) == 0
    assert main(["model", "repair", str(bad), str(new), "--from", source]) == 2
