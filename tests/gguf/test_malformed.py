"""The GGUF reader against files that are wrong in one place, cut short, damaged at random, or foreign."""

import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from handmade_gguf import array, gguf_bytes, info, pair, small_file, text, u32, u64
from hypothesis import given, settings
from hypothesis import strategies as st

from nanokit.errors import ModelFileError
from nanokit.gguf.reader import GGUFFile

FOUR = struct.pack("<4f", 1, 2, 3, 4) + b"\0" * 16
TWICE_FOUR = FOUR * 2
ARCHITECTURE = pair("general.architecture", 8, text("llama"))


def opened(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return GGUFFile.open(path)


def refusal(tmp_path: Path, content: bytes) -> str:
    with pytest.raises(ModelFileError) as caught:
        opened(tmp_path, content)
    assert "model.gguf" in str(caught.value), "the error does not name the file"
    assert caught.value.found is not None
    assert caught.value.needed is not None
    return str(caught.value)


# ---- files that are wrong in one place

MALFORMED = {
    "bad magic": (gguf_bytes(magic=b"GGML"), "no GGUF file"),
    "swapped magic": (gguf_bytes(magic=b"FUGG"), "swapped"),
    "version 0": (gguf_bytes(version=0), "version"),
    "version 1": (gguf_bytes(version=1), "version"),
    "future version": (gguf_bytes(version=4), "version"),
    "big endian": (gguf_bytes(version=3 << 24), "big-endian"),
    "minus one tensors": (gguf_bytes(n_tensors=(1 << 64) - 1), "number of tensors"),
    "more tensors than fit": (gguf_bytes([ARCHITECTURE], n_tensors=50), "number of tensors"),
    "fewer infos than said": (gguf_bytes([ARCHITECTURE], n_tensors=1), "tensor 1 of 1"),
    "minus one pairs": (gguf_bytes(n_pairs=(1 << 64) - 1), "number of metadata keys"),
    "fewer pairs than said": (gguf_bytes([ARCHITECTURE], n_pairs=2), "key 2 of 2"),
    "key of length -1": (gguf_bytes([u64((1 << 64) - 1) + b"x" * 64]), "key 1 of 1"),
    "empty key": (gguf_bytes([pair("", 4, u32(1))]), "key 1 of 1"),
    "key not UTF-8": (gguf_bytes([pair(b"\xff\xfe", 4, u32(1))]), "UTF-8"),
    "duplicate key": (gguf_bytes([ARCHITECTURE, ARCHITECTURE]), "'general.architecture' is there twice"),
    "unknown value type": (gguf_bytes([pair("k", 13, u32(1))]), "'k' has an unknown type"),
    "value type -1": (gguf_bytes([pair("k", 0xFFFFFFFF, u32(1))]), "'k' has an unknown type"),
    "bool of 2": (gguf_bytes([pair("k", 7, b"\x02")]), "truth value"),
    "bool of 2 in a list": (gguf_bytes([pair("k", 9, array(7, 2, b"\x01\x02"))]), "truth value"),
    "string past the end": (gguf_bytes([pair("k", 8, u64(1 << 40) + b"x")]), "'k'"),
    "string of 2**64-1": (gguf_bytes([pair("k", 8, u64((1 << 64) - 1) + b"x")]), "'k'"),
    "string not UTF-8": (gguf_bytes([pair("k", 8, text(b"ab\xff"))]), "'k' is not UTF-8"),
    "token not UTF-8": (gguf_bytes([pair("k", 9, array(8, 2, text("a") + text(b"\xff")))]), "element 1"),
    "token past the end": (gguf_bytes([pair("k", 9, array(8, 2, text("a") + u64(999)))]), "element 1"),
    "token of 2**64-1": (gguf_bytes([pair("k", 9, array(8, 1, u64((1 << 64) - 1)))]), "element 0"),
    "array past the end": (gguf_bytes([pair("k", 9, array(12, 1 << 61, b"x" * 8))]), "past the end"),
    "strings past the end": (gguf_bytes([pair("k", 9, array(8, 1 << 61, b"x" * 8))]), "past the end"),
    "nested array": (gguf_bytes([pair("k", 9, array(9, 1, array(4, 1, u32(1))))]), "ARRAY"),
    "unknown element type": (gguf_bytes([pair("k", 9, array(77, 1, u32(1)))]), "type 77"),
    "alignment 0": (gguf_bytes([pair("general.alignment", 4, u32(0))]), "general.alignment"),
    "alignment 13": (gguf_bytes([pair("general.alignment", 4, u32(13))]), "general.alignment"),
    "alignment as INT32": (gguf_bytes([pair("general.alignment", 5, u32(32))]), "INT32"),
    "alignment as text": (gguf_bytes([pair("general.alignment", 8, text("32"))]), "STRING"),
    "alignment as list": (gguf_bytes([pair("general.alignment", 9, array(4, 1, u32(32)))]), "ARRAY"),
    "alignment 2**31": (
        gguf_bytes([pair("general.alignment", 4, u32(1 << 31))], [info("a", [4])], FOUR),
        "general.alignment is larger than the file",
    ),
    "alignment not kept": (
        gguf_bytes([pair("general.alignment", 4, u32(64))], [info("a", [4]), info("b", [4], 0, 32)], TWICE_FOUR * 4),
        "needed: offset 64",
    ),
    "name too long": (gguf_bytes([], [info("x" * 64, [4])], FOUR), "1 to 63"),
    "empty name": (gguf_bytes([], [info("", [4])], FOUR), "1 to 63"),
    "name not UTF-8": (gguf_bytes([], [info(b"\xff", [4])], FOUR), "UTF-8"),
    "duplicate tensor": (
        gguf_bytes([], [info("a", [4]), info("a", [4], 0, 32)], TWICE_FOUR),
        "'a' is there twice",
    ),
    "no dimensions": (gguf_bytes([], [info("a", [], n_dims=0)], FOUR), "number of dimensions"),
    "five dimensions": (gguf_bytes([], [info("a", [1] * 5)], FOUR), "number of dimensions"),
    "2**32-1 dimensions": (
        gguf_bytes([], [info("a", [4], n_dims=0xFFFFFFFF)], FOUR),
        "number of dimensions",
    ),
    "zero dimension": (gguf_bytes([], [info("a", [4, 0])], FOUR), "dimensions"),
    "dimension -1": (gguf_bytes([], [info("a", [(1 << 64) - 1])], FOUR), "dimensions"),
    "product wraps to 4": (gguf_bytes([], [info("a", [1 << 62, 4, 4, 4])], FOUR), "dimensions"),
    "bytes wrap to 0": (gguf_bytes([], [info("a", [1 << 62])], FOUR), "ends before tensor 'a'"),
    "unknown tensor type": (gguf_bytes([], [info("a", [4], 99)], FOUR), "type 99"),
    "retired tensor type": (gguf_bytes([], [info("a", [32], 31)], FOUR), "Q4_0_4_4"),
    "columns no whole block": (gguf_bytes([], [info("a", [33], 8)], FOUR * 2), "multiple of 32"),
    "first offset not 0": (gguf_bytes([], [info("a", [4], 0, 32)], TWICE_FOUR), "needed: offset 0"),
    "overlap": (gguf_bytes([], [info("a", [4]), info("b", [4], 0, 0)], TWICE_FOUR), "found: offset 0"),
    "misaligned": (gguf_bytes([], [info("a", [4]), info("b", [4], 0, 3)], TWICE_FOUR), "found: offset 3"),
    "gap": (gguf_bytes([], [info("a", [4]), info("b", [4], 0, 64)], TWICE_FOUR * 2), "needed: offset 32"),
    "offset wraps": (gguf_bytes([], [info("a", [4]), info("b", [4], 0, (1 << 64) - 32)], TWICE_FOUR), "'b'"),
    "data one byte short": (gguf_bytes([], [info("a", [4])], FOUR[:15]), "found: 15 of its bytes"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused_by_its_fault(tmp_path: Path, name: str) -> None:
    """Each of these has crashed, hung or silently misled some reader."""
    content, fragment = MALFORMED[name]
    assert fragment in refusal(tmp_path, content)


def test_every_cut_of_the_file_is_refused(tmp_path: Path) -> None:
    """A download that stopped anywhere, in the header or inside a tensor, must not load."""
    content = small_file()
    data_begin = opened(tmp_path, content).tensors["norm"].offset
    for length in range(1, len(content)):
        message = refusal(tmp_path, content[:length])
        if length >= data_begin + 64:  # the first tensor is whole
            assert "'head'" in message or "'blk.0.ffn'" in message
    assert f"needed: {40} bytes from byte {data_begin + 160} on" in refusal(tmp_path, content[:-1])


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_mutation_is_refused_or_loads_whole(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Random damage ends in a ModelFileError or in a model whose tensors lie in the file."""
    content = bytearray(small_file())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + 1] = data.draw(st.one_of(st.binary(min_size=1, max_size=1), st.binary(max_size=9)))
    content = content[: data.draw(st.integers(len(content) // 2, len(content)))]
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    try:
        model = GGUFFile.open(path)
    except ModelFileError:
        return
    for name, entry in model.tensors.items():
        assert model.raw(name).nbytes == entry.nbytes
        try:
            assert np.isfinite(model.tensor(name)).all()
        except ModelFileError:
            assert name in model.tensors


@pytest.mark.parametrize("name", ["minus one tensors", "array past the end", "strings past the end", "bytes wrap to 0"])
def test_a_header_that_lies_costs_no_memory(tmp_path: Path, name: str) -> None:
    """A count in the header must not become an allocation before it is compared with the file."""
    tracemalloc.start()
    try:
        refusal(tmp_path, MALFORMED[name][0])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


# ---- files that are something else

FOREIGN = {
    "safetensors": (u64(40) + b'{"a":{"dtype":"F32","shape":[1],"data_of' + b"\0" * 64, "safetensors"),
    "zip": (b"PK\x03\x04" + b"\0" * 60, "zip"),
    "web page": (b"\n<!DOCTYPE html><html><body>404</body></html>", "web page"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
    "old GGML": (b"tjgg" + b"\0" * 60, "before GGUF"),
    "short": (b"GG", "begins with b'GG'"),
    "noise": (bytes(range(200, 256)), "begins with"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_is_named(tmp_path: Path, name: str) -> None:
    """What people open by mistake is recognized, and the error says what to do."""
    content, fragment = FOREIGN[name]
    message = refusal(tmp_path, content)
    assert fragment in message
    assert "do: " in message


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """Nothing there, a directory, a pipe (which would wait for ever), an empty file, impossible names."""
    (tmp_path / "empty.gguf").touch()
    os.mkfifo(tmp_path / "pipe.gguf")
    cases = {
        tmp_path / "no.gguf": "no such file",
        tmp_path: "directory",
        tmp_path / "pipe.gguf": "no regular file",
        tmp_path / "empty.gguf": "is empty",
        tmp_path / ("x" * 5000): "cannot be read",
        Path("nul\0.gguf"): "cannot be read",
        tmp_path / "empty.gguf" / "x.gguf": "cannot be read",
    }
    for path, fragment in cases.items():
        with pytest.raises(ModelFileError, match=fragment) as caught:
            GGUFFile.open(path)
        assert caught.value.needed
