"""Models written in several files: as the gguf library splits them, complete or absent."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from nanokit.errors import ParameterError
from nanokit.gguf.header import ValueKind
from nanokit.gguf.reader import GGUFFile
from nanokit.gguf.split import files_named, replacing_set, write_split
from nanokit.gguf.write import Entry, Key

TEXT, U32 = ValueKind("STRING"), ValueKind("UINT32")
SIZES = (8, 3, 40, 5, 5, 5)  # numbers; 32, 12, 160, 20, 20, 20 bytes
KEYS = {"general.architecture": Key(TEXT, "llama"), "llama.block_count": Key(U32, 2)}
SET = ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]


def entries(seed: int = 0, broken: int | None = None) -> list[Entry]:
    """Vectors of F32; one of them may be impossible to make."""
    rng = np.random.default_rng(seed)
    made = [rng.standard_normal(size).astype(np.float32) for size in SIZES]

    def make(index: int) -> np.ndarray:
        if index == broken:
            raise ZeroDivisionError
        return made[index]

    return [Entry(f"t{i}", "F32", (size,), lambda i=i: make(i)) for i, size in enumerate(SIZES)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def bytes_of(path: Path) -> Mapping[str, bytes]:
    file = GGUFFile.open(path)
    return {name: file.raw(name).tobytes() for name in file.tensors}


def test_files_are_those_of_the_gguf_library(tmp_path: Path) -> None:
    """Its names, tensors, counts and kinds of value; only the architecture is in every file of ours."""
    (tmp_path / "theirs").mkdir()
    writer = gguf.GGUFWriter(tmp_path / "theirs" / "m.gguf", "llama", split_max_size=60)
    writer.add_uint32("llama.block_count", 2)
    for each in entries():
        writer.add_tensor(each.name, each.make())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "ours").mkdir()
    files = write_split(tmp_path / "ours" / "m.gguf", KEYS, entries(), 60)
    assert [each.name for each in files] == SET == names(tmp_path / "ours") == names(tmp_path / "theirs")
    for i, name in enumerate(SET):
        ours, theirs = (gguf.GGUFReader(tmp_path / where / name) for where in ("ours", "theirs"))
        assert [(t.name, t.data.tobytes()) for t in ours.tensors] == [
            (t.name, t.data.tobytes()) for t in theirs.tensors
        ]
        fields: list[dict[str, Any]] = [
            {key: (field.types, field.contents()) for key, field in each.fields.items() if key != "GGUF.kv_count"}
            for each in (ours, theirs)
        ]
        if i:
            assert fields[0].pop("general.architecture")[1] == "llama"
        assert fields[0] == fields[1]


@pytest.mark.parametrize("alignment", [32, 64, 8])
@pytest.mark.parametrize(("size", "count"), [(1, 6), (60, 3), (160, 3), (224, 2), (264, 1), (1 << 40, 1)])
def test_every_shard_leads_to_all_tensors(tmp_path: Path, alignment: int, size: int, count: int) -> None:
    """Whatever the size, and on any alignment: a shard without the key would be read on 32."""
    keys = KEYS | {"general.alignment": Key(U32, alignment)}
    single, *_ = write_split(tmp_path / "single.gguf", keys, entries())
    files = write_split(tmp_path / "m.gguf", keys, entries(), size)
    assert len(files) == count
    assert files[0].name == ("m.gguf" if count == 1 else f"m-00001-of-{count:05d}.gguf")
    for path in files:
        assert bytes_of(path) == bytes_of(single)
        assert GGUFFile.open(path).metadata["llama.block_count"] == 2
        held = gguf.GGUFReader(path).tensors
        assert sum(int(each.n_bytes) for each in held) <= size or len(held) == 1
        assert all(int(each.data_offset) % alignment == 0 for each in held)
    assert names(tmp_path) == sorted(["single.gguf", *(path.name for path in files)])


@pytest.mark.parametrize("broken", [0, 3, 5])
def test_a_failure_leaves_nothing_or_the_old_set(tmp_path: Path, broken: int) -> None:
    """In the first file, in the middle, and at the last tensor."""
    with pytest.raises(ZeroDivisionError):
        write_split(tmp_path / "m.gguf", KEYS, entries(broken=broken), 60)
    assert names(tmp_path) == []
    write_split(tmp_path / "m.gguf", KEYS, entries(seed=1), 60)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ZeroDivisionError):
        write_split(tmp_path / "m.gguf", KEYS, entries(broken=broken), 60)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6])
def test_a_failure_while_files_take_their_places_brings_the_old_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Half of an old set beside half of a new one would load, and be neither."""
    write_split(tmp_path / "m.gguf", KEYS, entries(seed=1), 60)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    rename, moved = Path.rename, []

    def failing(self: Path, target: Path) -> Path:
        moved.append(self)
        if len(moved) == at:
            raise OSError("no more")
        return rename(self, target)

    replacing = replacing_set(tmp_path / "m.gguf")
    scratch = replacing.__enter__()
    for name in SET:
        (scratch.parent / name).write_bytes(b"new")
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no more"):
        replacing.__exit__(None, None, None)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_first_file_goes_first_and_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stops the program between two files: a set without its first one is not taken for a model."""
    write_split(tmp_path / "m.gguf", KEYS, entries(seed=1), 60)
    rename, seen = Path.rename, []

    def watched(self: Path, target: Path) -> Path:
        place = rename(self, target)
        present = [path for path in tmp_path.iterdir() if path.is_file()]
        seen.append((tmp_path / SET[0]).exists())
        mixed = {path.read_bytes() for path in present} & {b"new"} and len(present) != 3
        assert not (mixed and seen[-1])
        return place

    with replacing_set(tmp_path / "m.gguf") as scratch:
        for name in SET:
            (scratch.parent / name).write_bytes(b"new")
        monkeypatch.setattr(Path, "rename", watched)
    assert seen == [False] * 5 + [True]


def test_an_old_set_of_another_number_and_an_old_file_are_replaced(tmp_path: Path) -> None:
    """Two models under one name: nobody could tell which is meant. Models of other names stay."""
    write_split(tmp_path / "m.gguf", KEYS, entries(), 1)
    (tmp_path / "m.gguf").write_bytes(b"old")
    others = ["m-00001-of-00003.txt", "mm-00001-of-00002.gguf", "m-1-of-3.gguf", "m-x-00001-of-00001.gguf"]
    for name in others:
        (tmp_path / name).write_bytes(b"other")
    assert len(files_named(tmp_path / "m.gguf")) == 7
    write_split(tmp_path / "m.gguf", KEYS, entries(), 60)
    assert names(tmp_path) == sorted([*SET, *others])
    assert files_named(tmp_path / "nowhere" / "m.gguf") == []


def test_too_many_files_are_refused(tmp_path: Path) -> None:
    """The number of files is stored in 16 bits; found by the library, at the end, that is a struct.error."""
    many = [Entry(f"t{i}", "F32", (1,), lambda: np.zeros(1, np.float32)) for i in range(1 << 16)]
    with pytest.raises(ParameterError, match="65536 files"):
        write_split(tmp_path / "m.gguf", KEYS, many, 4)
    assert names(tmp_path) == []
