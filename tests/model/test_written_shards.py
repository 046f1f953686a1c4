"""`--shard-size`: a set of files is the same model as one file, whatever is asked of it."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import pytest
from tiny import compiled_model, save_tiny

from nanokit.cli import main
from nanokit.errors import ParameterError
from nanokit.gguf.reader import GGUFFile
from nanokit.model import quantize as quantizing
from nanokit.model.convert import convert
from nanokit.model.load import open_model
from nanokit.model.quantize import quantize
from nanokit.model.verify.run import verify

MERGES = ("h e", "l l", "he ll")
SIZE = 90_000  # bytes: a third of the model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """An untied llama as a directory, in F16 as one file, and the same in three."""
    folder = tmp_path_factory.mktemp("models")
    directory = save_tiny(folder / "source", compiled_model("llama"), MERGES)
    single = convert(directory, folder / "single.gguf", "f16", alignment=64)
    done = convert(directory, folder / "set.gguf", "f16", alignment=64, shard_size=SIZE)
    assert done.nbytes == sum(path.stat().st_size for path in done.files)
    assert done.types == single.types
    return {"directory": directory, "single": single.path} | {f"{i}": path for i, path in enumerate(done.files)}


def bytes_of(path: Path) -> dict[str, bytes]:
    file = GGUFFile.open(path)
    return {name: file.raw(name).tobytes() for name in file.tensors}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_set_holds_the_tensors_of_the_single_file(made: Mapping[str, Path]) -> None:
    """Byte for byte from any shard, and each file for itself in the gguf library."""
    assert sorted(made) == ["0", "1", "2", "directory", "single"]
    assert made["2"].name == "set-00003-of-00003.gguf"
    wanted = bytes_of(made["single"])
    assert all(bytes_of(made[each]) == wanted for each in "012")
    held = [tensor for each in "012" for tensor in gguf.GGUFReader(made[each]).tensors]
    assert {tensor.name: tensor.data.tobytes() for tensor in held} == wanted


@pytest.mark.parametrize("shard", ["0", "2"])
def test_commands_take_any_shard(shard: str, made: Mapping[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """verify, against the directory too; info; generate says what the single file says."""
    assert verify(made[shard], open_model(made["directory"]), long=False).of("ok")
    assert main(["model", "verify", str(made[shard])]) == 0
    assert "3 shards" in capsys.readouterr().out
    assert main(["model", "info", str(made[shard])]) == 0
    assert "set-0000" in capsys.readouterr().out
    asked = ["hello", "--raw", "--max-tokens", "4", "--kv-memory", "1MiB", "--model"]
    assert main(["generate", *asked, str(made[shard])]) == 0
    answer = capsys.readouterr().out
    assert main(["generate", *asked, str(made["single"])]) == 0
    assert answer == capsys.readouterr().out


def test_quantize_joins_and_splits(made: Mapping[str, Path], tmp_path: Path) -> None:
    """Of a set one file, of that file a set, of a set another set: the same blocks, and nothing says of a file that it
    is part of a set which it is not."""
    joined = quantize(made["1"], tmp_path / "joined.gguf", "q8_0")
    assert joined.files == (tmp_path / "joined.gguf",)
    assert not [key for key in GGUFFile.open(joined.path).metadata if key.startswith("split.")]
    again = quantize(joined.path, tmp_path / "set.gguf", "keep", shard_size="40KB")
    resplit = quantize(made["0"], tmp_path / "other.gguf", "q8_0", shard_size=60_000)
    direct = quantize(made["directory"], tmp_path / "direct.gguf", "mix:all=q8_0,head=q8_0", shard_size="1KiB")
    assert [len(each.files) for each in (again, resplit)] == [4, 3]
    assert len(direct.files) > 10
    assert again.nbytes == sum(path.stat().st_size for path in again.files)
    assert bytes_of(again.files[1]) == bytes_of(resplit.path) == bytes_of(joined.path)
    whole = quantize(made["directory"], tmp_path / "whole.gguf", "mix:all=q8_0,head=q8_0")
    assert bytes_of(direct.files[3]) == bytes_of(whole.path)
    assert open_model(again.files[2]).config == open_model(joined.path).config


def test_a_model_that_fits_is_one_file(made: Mapping[str, Path], tmp_path: Path) -> None:
    """Under its own name."""
    done = convert(made["directory"], tmp_path / "m.gguf", "f16", alignment=64, shard_size="1GB")
    assert done.files == (tmp_path / "m.gguf",)
    assert done.path.read_bytes() == made["single"].read_bytes()


def test_old_files_of_the_name_need_force(made: Mapping[str, Path], tmp_path: Path) -> None:
    """A set beside the rests of another one is two models under one name."""
    old = convert(made["directory"], tmp_path / "m.gguf", "q8_0", shard_size="20KB").files
    with pytest.raises(ParameterError, match="m-00001-of-0"):
        convert(made["directory"], tmp_path / "m.gguf", "f16", shard_size=SIZE)
    with pytest.raises(ParameterError, match="m-00001-of-0"):
        quantize(made["0"], tmp_path / "m.gguf", "q8_0", shard_size=SIZE)
    assert names(tmp_path) == [path.name for path in old]
    new = convert(made["directory"], tmp_path / "m.gguf", "f16", alignment=64, shard_size=SIZE, force=True).files
    assert names(tmp_path) == [path.name for path in new]
    assert bytes_of(new[0]) == bytes_of(made["single"])
    with pytest.raises(ParameterError, match="a file of the model itself"):
        quantize(new[1], tmp_path / "m.gguf", "q8_0", shard_size=SIZE, force=True)
    assert bytes_of(new[0]) == bytes_of(made["single"])


def test_what_stops_in_the_middle_leaves_nothing(
    made: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix that cannot be read, and a set that does not pass its checks."""

    def stop(done: int, total: int, what: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(made["directory"], tmp_path / "m.gguf", "f16", shard_size=SIZE, progress=stop)
    assert names(tmp_path) == []
    monkeypatch.setattr(quantizing, "entry_of", None)
    with pytest.raises(TypeError):
        quantize(made["0"], tmp_path / "m.gguf", "q8_0", shard_size=SIZE)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("target", "size", "said"),
    [
        ("m.safetensors", "2GB", "m.safetensors"),
        ("m-00001-of-00003.gguf", "2GB", "without numbers"),
        ("m.gguf", "0", "need a size"),
        ("m.gguf", "much", "not a memory size"),
    ],
)
def test_what_cannot_be_a_set_is_refused(
    target: str, size: str, said: str, made: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is read, with exit code 2."""
    assert main(["quantize", str(made["0"]), str(tmp_path / target), "--policy", "q8_0", "--shard-size", size]) == 2
    assert said in capsys.readouterr().err
    assert names(tmp_path) == []


def test_the_command_names_the_first_file(
    made: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is printed can be opened."""
    convert_ = ["model", "convert", str(made["directory"]), str(tmp_path / "m.gguf"), "--type", "q8_0"]
    assert main([*convert_, "--shard-size", "60KB"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == str(tmp_path / "m-00001-of-00003.gguf")
    assert "in 3 files" in err
    assert main(["quantize", out.strip(), str(tmp_path / "q.gguf"), "--policy", "q4_0", "--shard-size", "40KB"]) == 0
    out, err = capsys.readouterr()
    assert out.strip().endswith(".gguf")
    assert bytes_of(Path(out.strip()))
