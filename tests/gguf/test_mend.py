"""What a file proves of its own structure is put right, and what it does not prove is refused."""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from handmade_gguf import gguf_bytes, info, pair, small_file, text, u32, u64
from hypothesis import given, settings
from hypothesis import strategies as st

from nanokit.errors import ModelFileError
from nanokit.gguf.cursor import ALIGNMENT, PLACES, SIZE, HeaderError
from nanokit.gguf.mend import mend
from nanokit.gguf.reader import GGUFFile
from nanokit.gguf.write import write_gguf

ARCHITECTURE = pair("general.architecture", 8, text("llama"))


def filled(
    sizes: list[int],
    *,
    alignment: int = 32,
    stated: bytes | None = None,
    offsets: list[int] | None = None,
    padded: bool = True,
    surplus: int = 0,
) -> tuple[bytes, list[bytes]]:
    """A file of F32 vectors of so many numbers, laid out at `alignment`, and the data of each; stated: the pair that
    says so, or something else; offsets: in place of the true ones."""
    rng, data, true, vectors = np.random.default_rng(len(sizes)), b"", [], []
    for size in sizes:
        true.append(len(data))
        vectors.append(rng.standard_normal(size).astype(np.float32).tobytes())
        data += vectors[-1] + b"\0" * (-4 * size % alignment)
    if not padded:
        data = data[: true[-1] + 4 * sizes[-1]]
    infos = [info(f"t{i}", [size], 0, at) for i, (size, at) in enumerate(zip(sizes, offsets or true, strict=True))]
    pairs = [ARCHITECTURE, *([stated] if stated else [])]
    return gguf_bytes(pairs, infos, data + b"\xff" * surplus, alignment=alignment), vectors


def mended(tmp_path: Path, raw: bytes) -> tuple[tuple[str, ...], gguf.GGUFReader]:
    """What was said, and the mended file as the gguf library reads it."""
    own = tmp_path / "own.gguf"
    own.write_bytes(raw)
    found = mend(own)
    write_gguf(tmp_path / "new.gguf", found.keys, found.entries)
    assert own.read_bytes() == raw
    assert list(GGUFFile.open(tmp_path / "new.gguf").tensors) == [each.name for each in found.entries]
    return found.said, gguf.GGUFReader(tmp_path / "new.gguf")


def data_of(reader: gguf.GGUFReader) -> list[bytes]:
    return [each.data.tobytes() for each in reader.tensors]


def refusal(tmp_path: Path, raw: bytes) -> ModelFileError:
    (tmp_path / "own.gguf").write_bytes(raw)
    with pytest.raises(ModelFileError) as caught:
        mend(tmp_path / "own.gguf")
    return caught.value


def alignment(kind: int, raw: bytes) -> bytes:
    return pair("general.alignment", kind, raw)


@pytest.mark.parametrize(
    ("stated", "true", "new"),
    [
        (alignment(4, u32(0)), 32, 32),
        (alignment(4, u32(13)), 32, 32),
        (alignment(4, u32(1 << 31)), 32, 32),
        (alignment(10, u64(32)), 32, 32),
        (alignment(5, u32(64)), 64, 64),
        (alignment(8, text("64")), 64, 64),
        (alignment(6, struct.pack("<f", 64)), 64, 64),
        (alignment(4, u32(0)), 16, 16),
        (alignment(4, u32(32)), 64, 64),
        (None, 64, 64),
    ],
    ids=["0", "13", "2^31", "u64", "i32", "text", "float", "0 of 16", "32 of 64", "none of 64"],
)
def test_an_alignment_is_the_one_by_which_the_tensors_lie(
    tmp_path: Path, stated: bytes | None, true: int, new: int
) -> None:
    """Whatever is stated. Another one would begin the data elsewhere, and every weight would be another."""
    raw, vectors = filled([5, 3, 17, 9], alignment=true, stated=stated)
    said, reader = mended(tmp_path, raw)
    assert data_of(reader) == vectors
    field = reader.fields["general.alignment"]
    assert (field.types[0].name, int(field.contents())) == ("UINT32", new)
    assert len(said) == 1
    assert f"general.alignment is {new}" in said[0]


@pytest.mark.parametrize("name", range(0, 64, 8))
def test_an_alignment_that_is_stated_is_kept_where_several_fit(tmp_path: Path, name: int) -> None:
    """Of data that lie on 64 and so on 32 as well, only the kind of the key was wrong. (The length of the architecture
    decides where the data begin.)"""
    pairs = [pair("general.architecture", 8, text("x" * (1 + name))), alignment(10, u64(64))]
    raw = gguf_bytes(pairs, [info("a", [16]), info("b", [16], 0, 64)], bytes(range(128)), alignment=64)
    said, reader = mended(tmp_path, raw)
    assert b"".join(data_of(reader)) == bytes(range(128))
    assert "general.alignment is 64, in place of 64 of type UINT64" in said[0]


def test_one_tensor_is_enough(tmp_path: Path) -> None:
    """Its offset is 0 on any alignment; the end of the file is what tells them apart."""
    raw, vectors = filled([5], stated=alignment(4, u32(1 << 31)))
    said, reader = mended(tmp_path, raw)
    assert data_of(reader) == vectors
    assert "in place of 2147483648" in said[0]


@pytest.mark.parametrize("offsets", [[0, 35, 64, 160], [0, 0, 64, 160], [0, 20, 32, 100], [7, 7, 7, 7]])
@pytest.mark.parametrize("padded", [True, False])
def test_offsets_are_counted_anew_where_the_tensors_fill_the_file(
    tmp_path: Path, offsets: list[int], padded: bool
) -> None:
    """One that is misaligned, one on another tensor, all counted without padding, and all wrong."""
    raw, vectors = filled([5, 3, 17, 9], offsets=offsets, padded=padded)
    said, reader = mended(tmp_path, raw)
    assert data_of(reader) == vectors
    assert "t1 from" in said[0]


@pytest.mark.parametrize("surplus", [1, 32, 1000])
def test_bytes_of_no_tensor_are_dropped(tmp_path: Path, surplus: int) -> None:
    """And nothing else; how many is said."""
    raw, vectors = filled([5, 3], surplus=surplus)
    said, reader = mended(tmp_path, raw)
    assert data_of(reader) == vectors
    assert said == (f"{surplus} bytes after the last tensor are gone: no tensor is named that they belong to",)
    assert len((tmp_path / "new.gguf").read_bytes()) == len(raw) - surplus


def test_a_missing_last_padding_is_written(tmp_path: Path) -> None:
    """Programs that map whole pages of tensors read past the end without it."""
    raw, vectors = filled([5, 3], padded=False)
    said, reader = mended(tmp_path, raw)
    assert data_of(reader) == vectors
    assert said == ("the file is padded after its last tensor, by 20 bytes",)
    assert (tmp_path / "new.gguf").read_bytes() == filled([5, 3])[0]


def test_a_sound_file_is_left_alone(tmp_path: Path) -> None:
    """Also one with an alignment of its own, and one without tensors."""
    for raw in (
        filled([5, 3])[0],
        filled([8, 1], alignment=64, stated=alignment(4, u32(64)))[0],
        gguf_bytes([ARCHITECTURE]),
    ):
        (tmp_path / "own.gguf").write_bytes(raw)
        assert mend(tmp_path / "own.gguf").said == ()


WRONG = [0, 35, 64, 160]
UNPROVED: dict[str, tuple[Callable[[], bytes], str]] = {
    "offsets and surplus": (lambda: filled([5, 3, 17, 9], offsets=WRONG, surplus=32)[0], PLACES),
    "offsets and cut short": (lambda: filled([5, 3, 17, 9], offsets=WRONG)[0][:-33], PLACES),
    "alignment and surplus": (lambda: filled([5, 3], stated=alignment(4, u32(0)), surplus=32)[0], ALIGNMENT),
    "alignment and offsets": (lambda: filled([5, 3], stated=alignment(4, u32(0)), offsets=[0, 35])[0], ALIGNMENT),
    "alignment and cut short": (lambda: filled([5, 3], stated=alignment(4, u32(13)))[0][:-40], ALIGNMENT),
    "an order of its own": (lambda: filled([8, 8, 8], offsets=[0, 64, 32])[0], PLACES),
    "cut short": (lambda: filled([5, 3])[0][:-30], SIZE),
}


@pytest.mark.parametrize("name", UNPROVED)
def test_what_nothing_proves_is_refused(tmp_path: Path, name: str) -> None:
    """Two faults at once leave several places for a tensor: one of them would be a guess."""
    make, part = UNPROVED[name]
    error = refusal(tmp_path, make())
    assert isinstance(error, HeaderError)
    assert error.part == part
    assert {PLACES: "tensor", SIZE: "'t1'", ALIGNMENT: "general.alignment"}[part] in error.what


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 4000), new=st.binary(min_size=1, max_size=8), cut=st.integers(-40, 40))
def test_any_bytes_are_refused_or_become_a_sound_file(
    tmp_path_factory: pytest.TempPathFactory, at: int, new: bytes, cut: int
) -> None:
    """A few bytes written over a file with every kind of entry, and its end cut or drawn out: no other error, and what
    is mended is mended for good."""
    raw = small_file()
    at %= len(raw)
    raw = (raw[:at] + new + raw[at + len(new) :] + bytes(max(cut, 0)))[: cut if cut < 0 else None]
    folder = tmp_path_factory.getbasetemp()
    (folder / "own.gguf").write_bytes(raw)
    try:
        found = mend(folder / "own.gguf")
        write_gguf(folder / "new.gguf", found.keys, found.entries)
    except ModelFileError:
        return
    assert mend(folder / "new.gguf").said == ()
    assert list(GGUFFile.open(folder / "new.gguf").tensors) == [each.name for each in found.entries]


def test_a_shard_is_refused(tmp_path: Path) -> None:
    """Of a set, one file alone does not say what is right."""
    raw = gguf_bytes([ARCHITECTURE, pair("split.count", 2, b"\x03\0")], [info("a", [4])], bytes(32))
    assert "shard" in refusal(tmp_path, raw).what


@given(
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    true=st.sampled_from([8, 16, 32, 64, 128]),
    other=st.sampled_from([8, 16, 32, 64, 128]),
    padded=st.booleans(),
    name=st.integers(0, 40),
)
def test_exact_ends_leave_one_layout(sizes: list[int], true: int, other: int, padded: bool, name: int) -> None:
    """What the module rests on: a file that ends where its tensors do by two alignments has them in the same places."""

    def layout(alignment: int) -> tuple[list[int], set[int]]:
        begin = -(-(200 + name) // alignment) * alignment
        places, at, end = [], begin, begin
        for size in sizes:
            places.append(at)
            end = at + 4 * size
            at = -(-end // alignment) * alignment
        return places, {end, at}

    (places, ends), (others, also) = layout(true), layout(other)
    end = max(ends) if padded else min(ends)
    if end in also:
        assert places == others
