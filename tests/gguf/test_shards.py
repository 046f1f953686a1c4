"""Models in several files: joined when they agree, refused by name when they do not."""

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from handmade_gguf import gguf_bytes, info, pair, text, u32

from nanokit.errors import ModelFileError
from nanokit.gguf.reader import GGUFFile

WEIGHTS = {f"blk.{i}.w": np.full((2, 32), i, np.float32) for i in range(5)}


def split_model(directory: Path, small_first: bool = False) -> list[Path]:
    """Five tensors, two to a file, as gguf-py splits a model."""
    writer = gguf.GGUFWriter(directory / "m.gguf", "llama", split_max_tensors=2, small_first_shard=small_first)
    writer.add_uint32("llama.block_count", 5)
    for name, values in WEIGHTS.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(directory.glob("m-*.gguf"))


def shard(path: Path, no: int, count: int, total: int, tensor: str, *, extra: tuple[bytes, ...] = ()) -> Path:
    """One handmade shard with one tensor of four zeros."""
    pairs = [
        pair("split.no", 2, no.to_bytes(2, "little")),
        pair("split.count", 2, count.to_bytes(2, "little")),
        pair("split.tensors.count", 5, u32(total)),
        *extra,
    ]
    path.write_bytes(gguf_bytes(pairs, [info(tensor, [4])], bytes(32)))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        GGUFFile.open(path)
    return str(caught.value)


@pytest.mark.parametrize("small_first", [False, True])
def test_shards_are_joined_from_any_of_them(tmp_path: Path, small_first: bool) -> None:
    """Every tensor from its own file, the metadata from the first, also when that one holds no tensors."""
    files = split_model(tmp_path, small_first)
    assert len(files) == 3 + small_first
    for path in files:
        model = GGUFFile.open(path)
        assert (model.path, model.files) == (path, tuple(files))
        assert model.metadata["llama.block_count"] == 5
        assert list(model.tensors) == list(WEIGHTS)
        for name, values in WEIGHTS.items():
            assert np.array_equal(model.tensor(name), values)
    assert len({entry.file for entry in model.tensors.values()}) == 3


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """Without this, the first sign is a layer that is not there."""
    files = split_model(tmp_path)
    files[1].unlink()
    message = refusal(files[0])
    assert files[1].name in message
    assert "shard 2 of 3 is missing" in message


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    """The fault of another file than the one that was opened."""
    files = split_model(tmp_path)
    files[2].write_bytes(files[2].read_bytes()[:-150])
    message = refusal(files[0])
    assert files[2].name in message
    assert "'blk.4.w'" in message


def test_a_renamed_shard_is_refused_with_its_true_name(tmp_path: Path) -> None:
    files = split_model(tmp_path)
    renamed = files[1].rename(tmp_path / "part2.gguf")
    assert "-00002-of-00003.gguf" in refusal(renamed)


def test_a_shard_under_anothers_name_is_refused(tmp_path: Path) -> None:
    """A copy of shard 2 in place of shard 3, opened by shard 1 and by the copy."""
    files = split_model(tmp_path)
    shutil.copy(files[1], files[2])
    assert files[2].name in refusal(files[0])
    assert "split.no does not fit" in refusal(files[0])
    assert "does not say so" in refusal(files[2])


def test_shards_of_two_sets_are_refused(tmp_path: Path) -> None:
    """Equal names and numbers, another total or another count: two conversions of one model got mixed."""
    first = shard(tmp_path / "m-00001-of-00002.gguf", 0, 2, 2, "a")
    other = shard(tmp_path / "m-00002-of-00002.gguf", 1, 2, 7, "b")
    assert "split.tensors.count does not fit" in refusal(first)
    shard(other, 1, 3, 2, "b")
    assert "split.count does not fit" in refusal(first)
    assert other.name in refusal(first)


def test_shards_of_two_models_are_refused(tmp_path: Path) -> None:
    """Metadata that both carry must agree."""
    first = shard(tmp_path / "m-00001-of-00002.gguf", 0, 2, 2, "a", extra=(pair("general.name", 8, text("one")),))
    shard(tmp_path / "m-00002-of-00002.gguf", 1, 2, 2, "b", extra=(pair("general.name", 8, text("two")),))
    message = refusal(first)
    assert "general.name differs" in message
    assert "'two'" in message


def test_a_tensor_in_two_shards_and_a_wrong_total_are_refused(tmp_path: Path) -> None:
    """Which of two would be loaded, and a set that lacks some, must not be left to chance."""
    first = shard(tmp_path / "m-00001-of-00002.gguf", 0, 2, 2, "a")
    second = shard(tmp_path / "m-00002-of-00002.gguf", 1, 2, 2, "a")
    assert "'a' is also in another shard" in refusal(first)
    shard(first, 0, 2, 9, "a")
    shard(second, 1, 2, 9, "b")
    assert "do not hold all tensors" in refusal(first)


@pytest.mark.parametrize("value", [pair("split.count", 8, text("3")), pair("split.count", 6, b"\0\0@@")])
def test_a_count_that_is_no_number_is_refused(tmp_path: Path, value: bytes) -> None:
    path = tmp_path / "m-00001-of-00003.gguf"
    path.write_bytes(gguf_bytes([value]))
    assert "no usable split.count" in refusal(path)


def test_a_set_without_a_total_is_refused(tmp_path: Path) -> None:
    """split.no missing, split.tensors.count missing: no guess is made."""
    for i in (1, 2):
        keys = [pair("split.count", 2, b"\x02\x00"), pair("split.no", 2, bytes([i - 1, 0]))]
        (tmp_path / f"m-{i:05d}-of-00002.gguf").write_bytes(gguf_bytes(keys, [info(f"t{i}", [4])], bytes(32)))
    assert "split.tensors.count" in refusal(tmp_path / "m-00001-of-00002.gguf")
