"""Writing: what a copy keeps, what is replaced, and that a file is complete or absent; read by the gguf library."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from handmade_gguf import array, gguf_bytes, info, pair, small_file, text
from hypothesis import given, settings
from hypothesis import strategies as st

from nanokit.errors import ModelFileError
from nanokit.gguf import types
from nanokit.gguf.header import ValueKind
from nanokit.gguf.reader import GGUFFile
from nanokit.gguf.write import Entry, Key, copied, rewrite, write_gguf

ARCHITECTURE = pair("general.architecture", 8, text("llama"))
Stored = tuple[int, int, Any, bytes]  # type, element type, value, bytes


def number(kind: int) -> st.SearchStrategy[Any]:
    if kind == types.BOOL:
        return st.booleans()
    layout = types.SCALARS[kind][1]
    if layout.format in ("<f", "<d"):
        return st.floats(width=8 * layout.size, allow_nan=False)  # type: ignore[arg-type]
    bits, signed = 8 * layout.size, layout.format[1].islower()
    return st.integers(-(2 ** (bits - 1)) if signed else 0, 2 ** (bits - signed) - 1)


def packed(kind: int, value: Any) -> bytes:
    return text(value) if kind == types.STRING else types.SCALARS[kind][1].pack(value)


@st.composite
def stored(draw: st.DrawFn) -> Stored:
    """A value of any kind that a file can hold."""
    kind = draw(st.sampled_from([*types.SCALARS, types.STRING]))
    one = st.text(max_size=9) if kind == types.STRING else number(kind)
    if draw(st.booleans()):
        value = draw(one)
        return kind, -1, value, packed(kind, value)
    many = draw(st.lists(one, min_size=1, max_size=5))
    return types.ARRAY, kind, many, array(kind, len(many), b"".join(packed(kind, each) for each in many))


@settings(max_examples=150, deadline=None)
@given(values=st.lists(stored(), max_size=5))
def test_metadata_survives_a_copy(tmp_path_factory: pytest.TempPathFactory, values: list[Stored]) -> None:
    """A whole number that comes back as another kind, or a text that lost a character, is another model."""
    folder = tmp_path_factory.getbasetemp()
    pairs = [pair(f"key.{i}", kind, raw) for i, (kind, _, _, raw) in enumerate(values)]
    (folder / "own.gguf").write_bytes(gguf_bytes([ARCHITECTURE, *pairs], [info("norm", [4])], bytes(32)))
    rewrite(folder / "own.gguf", folder / "copy.gguf", {})
    fields = gguf.GGUFReader(folder / "copy.gguf").fields
    assert [name for name in fields if not name.startswith("GGUF.")] == [
        "general.architecture", *(f"key.{i}" for i in range(len(values)))
    ]  # fmt: skip
    for i, (kind, element, value, _) in enumerate(values):
        field = fields[f"key.{i}"]
        assert [int(each) for each in field.types] == ([kind] if element < 0 else [kind, element])
        assert field.contents() == value


def test_a_copy_keeps_every_tensor_byte_for_byte(tmp_path: Path) -> None:
    """Also of types that the library cannot quantize to, and of shapes of one dimension."""
    (tmp_path / "own.gguf").write_bytes(small_file())
    rewrite(tmp_path / "own.gguf", tmp_path / "copy.gguf", {})
    own, copy = GGUFFile.open(tmp_path / "own.gguf"), gguf.GGUFReader(tmp_path / "copy.gguf")
    assert [each.name for each in copy.tensors] == list(own.tensors)
    for each in copy.tensors:
        kept = own.tensors[each.name]
        assert each.data.tobytes() == own.raw(each.name).tobytes()
        assert (each.tensor_type.name, tuple(map(int, each.shape))) == (kept.type, kept.shape[::-1])
    assert "an.empty.list" not in copy.fields, "what the library cannot write is left out"


def test_replaced_left_out_and_new_ones(tmp_path: Path) -> None:
    """None leaves a key or tensor out, a replaced one keeps its place, a new one comes last."""
    (tmp_path / "own.gguf").write_bytes(small_file())
    new = np.arange(6, dtype=np.float32).reshape(2, 3)
    keys = {
        "a.bool": None,
        "a.double": Key(ValueKind("UINT8"), 7),
        "b.new": Key(ValueKind("ARRAY", "STRING"), ["x", "é"]),
    }
    tensors = {
        "norm": None,
        "head": Entry("head", "F32", (2, 3), lambda: new),
        "z": Entry("z", "F32", (3,), lambda: new[1]),
    }
    rewrite(tmp_path / "own.gguf", tmp_path / "copy.gguf", tensors, keys)
    copy = gguf.GGUFReader(tmp_path / "copy.gguf")
    fields = {name: each for name, each in copy.fields.items() if not name.startswith("GGUF.")}
    assert "a.bool" not in fields
    assert (fields["a.double"].types[0].name, fields["a.double"].contents()) == ("UINT8", 7)
    assert fields["b.new"].contents() == ["x", "é"]
    assert list(fields).index("b.new") > list(fields).index("a.bools")
    assert list(fields).index("a.double") > list(fields).index("a.bools")
    assert [each.name for each in copy.tensors] == ["head", "blk.0.ffn", "z"]
    assert np.array_equal(copy.tensors[0].data, new)
    assert np.array_equal(copy.tensors[2].data, new[1])


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_tensors_lie_on_the_files_own_alignment(tmp_path: Path, alignment: int) -> None:
    """A copy that falls back to 32 bytes is one that nobody can map as the file was made for."""
    (tmp_path / "own.gguf").write_bytes(small_file())
    keys = {"general.alignment": Key(ValueKind("UINT32"), alignment)}
    rewrite(tmp_path / "own.gguf", tmp_path / "copy.gguf", {}, keys)
    rewrite(tmp_path / "copy.gguf", tmp_path / "again.gguf", {})
    for name in ("copy.gguf", "again.gguf"):
        copy = gguf.GGUFReader(tmp_path / name)
        assert copy.alignment == alignment
        assert all(int(each.data_offset) % alignment == 0 for each in copy.tensors)
        assert GGUFFile.open(tmp_path / name).raw("head").tobytes() == copy.tensors[1].data.tobytes()
    assert (tmp_path / "copy.gguf").read_bytes() == (tmp_path / "again.gguf").read_bytes()


def fails() -> np.ndarray:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("make", "error"),
    [(fails, ZeroDivisionError), (lambda: np.zeros(3, np.float32), ModelFileError)],
)
def test_what_stops_in_the_middle_leaves_the_old_file(tmp_path: Path, make: Any, error: type[Exception]) -> None:
    """A tensor that cannot be made, or comes with another number of bytes: no half of a file, and nothing beside it."""
    own, target = tmp_path / "own.gguf", tmp_path / "copy.gguf"
    own.write_bytes(small_file())
    target.write_bytes(b"before")
    with pytest.raises(error, match="'head'" if error is ModelFileError else None):
        rewrite(own, target, {"head": Entry("head", "F32", (2, 2), make)})
    assert target.read_bytes() == b"before"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["copy.gguf", "own.gguf"]


def test_a_source_without_an_architecture_is_refused(tmp_path: Path) -> None:
    """The library asks for one; a KeyError would tell nobody what is missing."""
    (tmp_path / "own.gguf").write_bytes(gguf_bytes([], [info("norm", [4])], bytes(32)))
    with pytest.raises(ModelFileError, match=r"general\.architecture"):
        rewrite(tmp_path / "own.gguf", tmp_path / "copy.gguf", {})
    assert [each.name for each in tmp_path.iterdir()] == ["own.gguf"]


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (ValueKind("FLOAT32"), 1e39, "3.4e"),
        (ValueKind("FLOAT32"), -1e-60, "1.4e-45"),
        (ValueKind("UINT32"), 1 << 33, "4294967295"),
        (ValueKind("INT8"), -129, "-128"),
        (ValueKind("STRING"), "\ud800", "Unicode"),
        (ValueKind("ARRAY", "FLOAT32"), [0.0, 1e39], "1e.39"),
    ],
)
def test_what_a_kind_cannot_hold_is_refused_by_name(tmp_path: Path, kind: ValueKind, value: Any, says: str) -> None:
    """The library stops with an OverflowError or struct.error that names no key, and writes a zero for what is small.
    Found behind the tensors it would cost the whole work."""
    keys = {"general.architecture": Key(ValueKind("STRING"), "llama"), "a.key": Key(kind, value)}
    with pytest.raises(ModelFileError, match=rf"(?s)a\.key cannot be stored.*{says}"):
        write_gguf(tmp_path / "m.gguf", keys, [Entry("t", "F32", (1,), fails)])
    assert not list(tmp_path.iterdir())


def test_tensors_are_made_one_at_a_time(tmp_path: Path) -> None:
    """When the third is made, the first two are in the file: a large model is never in memory as a whole."""
    sizes = []

    def make() -> np.ndarray:
        sizes.append(sum(each.stat().st_size for each in tmp_path.iterdir()))
        return np.zeros(1 << 16, np.float32)

    entries = [Entry(f"t{i}", "F32", (1 << 16,), make) for i in range(3)]
    write_gguf(tmp_path / "m.gguf", {"general.architecture": Key(ValueKind("STRING"), "llama")}, entries)
    assert all(later - earlier >= 4 << 16 for earlier, later in pairwise(sizes))
    assert len(sizes) == 3


def test_a_model_is_written_over_itself(tmp_path: Path) -> None:
    """The source is still mapped while the copy is written, and is replaced only then."""
    path = tmp_path / "own.gguf"
    path.write_bytes(small_file())
    _, before = copied(GGUFFile.open(path))
    rewrite(path, path, {"norm": None})
    after = GGUFFile.open(path)
    assert list(after.tensors) == ["head", "blk.0.ffn"]
    assert all(after.raw(name).tobytes() == before[name].make().tobytes() for name in after.tensors)
